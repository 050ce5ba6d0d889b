"""Names of devices: one grammar for configuration, command line and ``open_device``."""

from __future__ import annotations

import pytest

from asynccache.cli.options import parsed_device
from asynccache.errors import ConfigError
from asynccache.memory.cuda.settings import CudaSettings, settings_from
from asynccache.memory.device import OPTIONS, DeviceName, parse_device


@pytest.mark.parametrize(("text", "name", "shown"), [
    ("cpu", DeviceName("cpu"), "cpu"),
    ("cuda", DeviceName("cuda"), "cuda:0"),
    ("cuda:3", DeviceName("cuda", 3), "cuda:3"),
    ("cuda:1?kernel_loads_below=0&blocks=4", DeviceName("cuda", 1, {"kernel_loads_below": "0", "blocks": "4"}),
     "cuda:1"),
])  # fmt: skip
def test_a_name_is_taken_apart(text: str, name: DeviceName, shown: str) -> None:
    assert parse_device(text) == name
    assert str(parse_device(text)) == shown
    assert parsed_device("--device", text) == text


@pytest.mark.parametrize(("text", "said"), [
    ("gpu", "unknown device 'gpu'; one of cpu, cuda, cuda:N"),
    ("cuda:", "unknown device 'cuda:'"),
    ("cuda:-1", "unknown device"),
    ("cuda:x", "unknown device"),
    pytest.param("cuda:" + "9" * 5000, "unknown device", id="huge"),
    ("cpu:0", "unknown device"),
    ("cpu?blocks=4", "device=cpu: unknown option 'blocks'; one of none"),
    ("cuda:0?block=4", "unknown option 'block'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?out=staged&blocks=16", "unknown option 'out'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?numa_node=0", "unknown option 'numa_node'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?blocks", "options are name=value"),
])  # fmt: skip
def test_what_is_no_name_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_device(text)


def test_options_are_the_settings() -> None:
    assert set(OPTIONS) == set(CudaSettings.__struct_fields__)
    text = "cuda:0?blocks=16&kernel_loads_below=65536"
    assert settings_from(parse_device(text).options) == CudaSettings(blocks=16, kernel_loads_below=1 << 16)
    assert settings_from({}) == CudaSettings()


@pytest.mark.parametrize(("name", "value", "said"), [
    ("blocks", "many", "device option blocks='many' must be a number"),
    ("kernel_loads_below", "32KiB", "device option kernel_loads_below='32KiB' must be a number"),
    ("blocks", "0", "blocks=0 must lie between 1 and 1024"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_told(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_from({name: value})
