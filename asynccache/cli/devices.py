"""The device that a run is on: ``cpu``, or a GPU by its name. torch and cupy come when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from asynccache.errors import ConfigError
from asynccache.memory.device import Device
from asynccache.memory.naming import parse_device

if TYPE_CHECKING:
    from asynccache.cli.engine import Gate
    from asynccache.memory.faults import Faults


class GatedDevice(Device, Protocol):
    """A device with events that the stand-in engine fires by hand."""

    def gate(self) -> Gate: ...


def check_device(text: str) -> str:
    """``text``, if it can be the name of a device.

    Raises:
        ConfigError: it cannot.
    """
    parse_device(text)
    return text


def gpu(text: str) -> str:
    """For argparse: the name of a GPU.

    Raises:
        ConfigError: it is none; argparse says so, since it is a ValueError.
    """
    if parse_device(text).kind != "cuda":
        raise ConfigError(f"{text} is no GPU")
    return text


def make_device(name: str, faults: Faults) -> GatedDevice:
    """A new one, which the caller closes.

    Raises:
        ConfigError: there is no such GPU, or what it needs is not installed.
    """
    if parse_device(name).kind == "cpu":
        from asynccache.memory.cpu import CpuDevice

        return CpuDevice(faults=faults)
    from asynccache.memory.cuda.device import open_device

    return open_device(name, faults=faults)
