"""The names of objects: 128-bit numbers in hex, 48 bits of time and 80 of chance, so that they sort by time.

    PREFIX/packs/<name>           a pack
    PREFIX/packs/<name>.dead      a tombstone: what was stored under its keys until then is gone
    PREFIX/index/<name>           a snapshot of the index

No part of a name comes from a user. A writer's times never go back and never stay behind what it has seen of others, so
its tombstones are later than every pack it knows, and what it writes after a deletion is later than that.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

PACKS = "packs"
INDEX = "index"
DEAD = ".dead"

_NAME = re.compile(r"[0-9a-f]{32}")
_STAMP_DIGITS = 12
_WILD = 24 * 3600 * 1000


def is_name(text: str) -> bool:
    """Whether ``text`` is a name that ``Clock`` could have given."""
    return _NAME.fullmatch(text) is not None


def stamp_of(name: str) -> int:
    """The time in a name, in ms since 1970."""
    return int(name[:_STAMP_DIGITS], 16)


def first_name(stamp: int) -> str:
    """What sorts before every name of that time, and after every earlier one."""
    return f"{max(0, stamp):0{_STAMP_DIGITS}x}"


def name_at(stamp: int) -> str:
    """A new name of that time."""
    return f"{first_name(stamp)}{secrets.token_hex(10)}"


class Clock:
    """Gives names. ``now`` is the time in seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self._last = 0

    def seen(self, stamp: int) -> None:
        """Somebody else's name: later ones of ours come after it. One that is a day ahead is not believed."""
        if self._last < stamp < self.now() * 1000 + _WILD:
            self._last = stamp

    def name(self) -> str:
        """A new name, later than all that were given or seen."""
        self._last = max(int(self.now() * 1000), self._last + 1)
        return name_at(self._last)
