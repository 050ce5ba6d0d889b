"""Names of devices: one grammar for configuration, command line and ``open_device``."""

from __future__ import annotations

import dataclasses

import pytest

from asynccache.cli.devices import check_device
from asynccache.errors import ConfigError
from asynccache.memory.cuda.paths import Path, Settings, settings_from
from asynccache.memory.naming import OPTIONS, DeviceName, parse_device


@pytest.mark.parametrize(("text", "name", "shown"), [
    ("cpu", DeviceName("cpu"), "cpu"),
    ("cuda", DeviceName("cuda"), "cuda:0"),
    ("cuda:3", DeviceName("cuda", 3), "cuda:3"),
    ("cuda:1?out=dma&blocks=4", DeviceName("cuda", 1, {"out": "dma", "blocks": "4"}), "cuda:1"),
])  # fmt: skip
def test_a_name_is_taken_apart(text: str, name: DeviceName, shown: str) -> None:
    assert parse_device(text) == name
    assert str(parse_device(text)) == shown
    assert check_device(text) == text


@pytest.mark.parametrize(("text", "said"), [
    ("gpu", "unknown device 'gpu'; one of cpu, cuda, cuda:N"),
    ("cuda:", "unknown device 'cuda:'"),
    ("cuda:-1", "unknown device"),
    ("cuda:x", "unknown device"),
    ("cpu:0", "unknown device"),
    ("cpu?blocks=4", "device=cpu: unknown option 'blocks'; one of none"),
    ("cuda:0?block=4", "device=cuda:0: unknown option 'block'; one of blocks, calibrate"),
    ("cuda:0?blocks", "options are name=value"),
])  # fmt: skip
def test_what_is_no_name_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_device(text)


def test_options_are_the_settings() -> None:
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(Settings)}
    text = "cuda:0?out=staged&inward=kernel&within=dma&blocks=16&calibrate=no&huge_pages=no&numa_node=1"
    assert settings_from(parse_device(text).options) == Settings(
        out=Path.STAGED, inward=Path.KERNEL, within=Path.DMA, blocks=16, calibrate=False, huge_pages=False, numa_node=1
    )
    assert settings_from({}) == Settings()


@pytest.mark.parametrize(("name", "value", "said"), [
    ("out", "fast", "device option out: unknown value 'fast'; one of dma, pitched, kernel, staged"),
    ("inward", "staged", "inward=staged: there is no such path host to device"),
    ("blocks", "many", "device option blocks='many' must be a number"),
    ("blocks", "0", "blocks=0 must lie between 1 and 1024"),
    ("calibrate", "maybe", "device option calibrate='maybe' must be yes or no"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_told(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_from({name: value})
