"""Options that the URLs of several stores have."""

from __future__ import annotations

from typing import NamedTuple

from asynccache.errors import ConfigError


class HostPort(NamedTuple):
    """A host and a port. An IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def whole_number(name: str, text: str, least: int, most: int = 999_999) -> int:
    """Return the number in ``text``. Raises ConfigError if it is none, or not one from ``least`` to ``most``; ``name``
    is the option's."""
    if not text.isascii() or not text.isdecimal() or len(text) > 6 or not least <= int(text) <= most:
        raise ConfigError(f"storage option {name}={text!r}: expected a whole number from {least} to {most}")
    return int(text)
