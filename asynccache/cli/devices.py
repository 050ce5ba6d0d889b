"""The device of a run: ``cpu``, or a GPU by its name. torch and cupy are only imported when a device is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from asynccache.errors import ConfigError
from asynccache.memory.device import Device
from asynccache.memory.device_names import parse_device

if TYPE_CHECKING:
    from asynccache.cli.engine import Gate
    from asynccache.memory.faults import Faults


class GatedDevice(Device, Protocol):
    """A device that also makes events which the stand-in engine fires itself."""

    def gate(self) -> Gate:
        """A new event of this kind."""
        ...


def check_device(text: str) -> str:
    """``text``, if it can be the name of a device; whether there is such a device is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    parse_device(text)
    return text


def gpu(text: str) -> str:
    """``text``, if it can be the name of a GPU; whether there is such a GPU is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    if parse_device(text).kind != "cuda":
        raise ConfigError(f"{text} is no GPU")
    return text


def make_device(name: str, faults: Faults) -> GatedDevice:
    """A new device with these faults, which the caller closes.

    Raises:
        ConfigError: there is no such GPU, or what it needs is not installed.
    """
    if parse_device(name).kind == "cpu":
        from asynccache.memory.cpu import CpuDevice

        return CpuDevice(faults=faults)
    from asynccache.memory.cuda.device import open_device

    return open_device(name, faults=faults)
