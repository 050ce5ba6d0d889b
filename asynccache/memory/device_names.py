"""The names of devices: ``cpu``, ``cuda``, ``cuda:N``, and with options behind it, as in a store's URL,
``cuda:0?blocks=16``. This module needs no torch, so a command line can be checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from asynccache.errors import ConfigError

OPTIONS = ("blocks", "kernel_below")
"""Options of a GPU. ``memory.cuda.settings.CudaSettings`` says what they mean."""


class DeviceName(NamedTuple):
    """A device's name, taken apart. ``kind``: "cpu" or "cuda". ``number``: CUDA's number of a GPU. ``options``: by
    name, as text."""

    kind: str
    number: int = 0
    options: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"


def parse_device(text: str) -> DeviceName:
    """Return the parts of the name ``text``.

    Raises:
        ConfigError: it is no name of a device, or an option is unknown; the message says which there are.
    """
    place, _, query = text.partition("?")
    kind, colon, number = place.partition(":")
    if place != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ConfigError(f"unknown device {place!r}; one of cpu, cuda, cuda:N")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"device={place}: options are name=value with & between them") from None
    known = OPTIONS if kind == "cuda" else ()
    for name in options:
        if name not in known:
            raise ConfigError(f"device={place}: unknown option {name!r}; one of {', '.join(known) or 'none'}")
    return DeviceName(kind, int(number or 0), options)
