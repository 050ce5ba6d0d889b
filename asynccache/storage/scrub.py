"""Reading all that is stored, to find what has rotted before somebody asks for it.

A backend that can do it deals out what it has in parts of a few MiB and reads them one at a time; whether the records
are good is not for it to say, so it is handed a ``Verify``. What is not good it forgets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asynccache.storage.contract import PageKey, Record

Verify = Callable[[Sequence[PageKey], Sequence[Record]], Awaitable[list[bool]]]
"""Whether each record is whole and is its key's. The pool's name in a key may be empty: a backend need not know it."""


class Part(NamedTuple):
    """``pages`` stored pages of ``page_bytes`` each; ``place`` is the backend's own."""

    page_bytes: int
    pages: int
    place: Any


class Scrubbed(NamedTuple):
    """What a scrub has read. ``bad``: did not verify, and are forgotten. ``unread``: the disk gave an error, and they
    are left alone."""

    pages: int = 0
    bytes: int = 0
    bad: int = 0
    unread: int = 0

    def plus(self, other: Scrubbed) -> Scrubbed:
        """Both together."""
        return Scrubbed(*map(sum, zip(self, other, strict=True)))


@runtime_checkable
class Scrubbable(Protocol):
    """What a backend has beside the contract if its pages can be read through."""

    def parts(self) -> list[Part]:
        """All that is stored now, in parts small enough to be read into memory one by one."""
        ...

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read what is still there of ``part`` and forget what does not verify. Cancelling it forgets nothing more."""
        ...


def pause(done: int, rate: float, elapsed: float) -> float:
    """How long to wait after ``done`` bytes in ``elapsed`` seconds, so as not to exceed ``rate`` bytes a second."""
    return max(0.0, done / rate - elapsed)
