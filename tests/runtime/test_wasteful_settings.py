"""Settings that waste room are told of, in a sentence each, when the cache is opened; others are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asynccache.config import wasted
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig, WritePolicy
from tests.runtime.runtime_kit import opened, settings


def config(
    swa: tuple[int, int] | None = None, host: int = 50, window: int = 64, states: int | None = None, **more: Any
) -> CoreConfig:
    slots = [ComponentSlots(ComponentKind.FULL, 100, host)]
    if swa is not None:
        slots.append(ComponentSlots(ComponentKind.SWA, *swa, window=window))
    if states is not None:
        slots.append(ComponentSlots(ComponentKind.MAMBA, 8, states))
    return CoreConfig(page_size=16, components=tuple(slots), **more)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (config(write_back_watermark=0.9), "write_back_watermark=0.9: up to 45 pages"),
        (config(swa=(50, 3)), "swa: the host has room for 3 of its pages, a match that ends there needs 4"),
        (config(states=0), "mamba: the host has room for 0 of its pages, a match that ends there needs 1"),
        (config(host=501, states=5), "mamba: the host has room for 5 states and for 501 pages of full."),
    ],
)
def test_a_setting_that_wastes_room_is_told_of(settings: CoreConfig, says: str) -> None:
    (sentence,) = wasted(settings)
    assert says in sentence


@pytest.mark.parametrize(
    "settings",
    [
        config(), config(states=1), config(host=500, states=5),
        config(host=0, write_back_watermark=1.0), config(swa=(50, 4)), config(swa=(50, 3), host=3),
        *(config(host=host, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE) for host in (10, 100, 200)),
    ],
)  # fmt: skip
def test_others_are_not(settings: CoreConfig) -> None:
    assert wasted(settings) == ()


async def test_it_is_said_when_the_cache_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccache"):
        async with opened(settings(device=16, host=8, write_back_watermark=1.0)):
            pass
    assert [record.message for record in caplog.records if "write_back_watermark" in record.message]
