"""The seeded worlds of ``tests/worlds`` have sidecars in half of them. What breaks a sidecar must be noticed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asynccache.config import PoolSpec
from asynccache.memory import pools
from asynccache.runtime.prefetch import Fetch
from tests.simulated.world import WrongBytes, draw_climate, play

WORLDS = 60


def hanging() -> list[int]:
    """Seeds of worlds with pools that hang on others."""
    return [seed for seed in range(WORLDS) if draw_climate(seed).config.sidecars]


def notice() -> int | None:
    """The first world in which a wrong byte is read."""
    for seed in hanging():
        try:
            play(seed)
        except WrongBytes:
            return seed
    return None


def test_worlds_have_sidecars_of_every_component_chains_and_a_logical_full() -> None:
    configs = [draw_climate(seed).config for seed in hanging()]
    assert len(configs) > WORLDS // 4
    sources = {sidecar.indices_from for config in configs for sidecar in config.sidecars}
    assert {"full", "swa", "mamba"} < sources
    assert any(source.startswith("side") for source in sources)
    assert any(config.pools()[0].bytes_per_page == 0 for config in configs)


@pytest.mark.slow(3)
def test_sidecars_that_are_not_read_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Fetch._read_run

    async def nothing(fetch: Fetch, specs: Sequence[PoolSpec], page: int, last: int) -> int:
        return last if specs is fetch._pools.follow else await usual(fetch, specs, page, last)

    monkeypatch.setattr(Fetch, "_read_run", nothing)
    assert notice() is not None


def test_a_sidecar_that_is_not_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_component = pools._by_component

    def without(pools: Any) -> Any:
        return {c: [s for s in specs if s.name != "side0"] for c, specs in by_component(pools).items()}

    monkeypatch.setattr(pools, "_by_component", without)
    assert notice() is not None
