"""The names of objects: numbers of 128 bits in hex, 48 bits of time and 80 random ones. So they sort by time.

    PREFIX/packs/<name>           a pack
    PREFIX/packs/<name>.dead      a tombstone: what was stored under its keys up to the time in its name is deleted
    PREFIX/index/<name>           a snapshot of the index

No part of a name comes from a user. The times in a writer's names never go back, and are later than those in all names
that it has seen of others. So its tombstones are later than every pack that it knows, and what it stores after a
deletion is later than the tombstone.
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
    """Return True if ``text`` is a name of the form that ``NameClock`` gives."""
    return _NAME.fullmatch(text) is not None


def stamp_of(name: str) -> int:
    """Return the time in a name, in milliseconds since 1970."""
    return int(name[:_STAMP_DIGITS], 16)


def first_name(stamp: int) -> str:
    """Return a text that sorts before all names with the time ``stamp`` and after all with an earlier one."""
    return f"{max(0, stamp):0{_STAMP_DIGITS}x}"


def name_at(stamp: int) -> str:
    """Return a new name with the time ``stamp``."""
    return f"{first_name(stamp)}{secrets.token_hex(10)}"


class NameClock:
    """Gives new names. ``now`` returns the time in seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self._last = 0

    def seen(self, stamp: int) -> None:
        """Note the time in a name of another writer, so that later names from here come after it. A time that is more
        than a day ahead is taken for an error and ignored."""
        if self._last < stamp < self.now() * 1000 + _WILD:
            self._last = stamp

    def name(self) -> str:
        """Return a new name, which is later than all that were given or seen."""
        self._last = max(int(self.now() * 1000), self._last + 1)
        return name_at(self._last)
