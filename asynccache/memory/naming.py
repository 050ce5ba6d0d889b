"""What a device is called, parsed once at the edge: ``cpu``, ``cuda``, ``cuda:N``, and with options, as a store's URL
has them, ``cuda:0?blocks=16``. Pure, and without torch: a command line is checked before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from asynccache.errors import ConfigError

OPTIONS = ("blocks", "kernel_below")
"""Of a GPU; what they mean: ``memory.cuda.settings.Settings``."""


class DeviceName(NamedTuple):
    """``kind``: cpu or cuda; ``number``: CUDA's number of a GPU."""

    kind: str
    number: int = 0
    options: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"


def parse_device(text: str) -> DeviceName:
    """Take ``text`` apart.

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
