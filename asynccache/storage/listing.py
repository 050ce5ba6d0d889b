"""What a backend has beside the contract if somebody may look through it: its pages listed, and its waste collected.

For people and tools (``asynccache store ls|stat|verify|gc``), never for the hot path. Both are optional.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Stored(NamedTuple):
    """One stored page. ``size``: header and payload, in bytes. ``written``: unix time, 0.0 where nobody knows."""

    key: bytes
    size: int
    written: float


class Collected(NamedTuple):
    """What a collection did. ``pages``: gone because they were too old. ``waste``: of no use to anybody and
    removed (orphans, half-written objects). ``size``: bytes that both freed."""

    pages: int = 0
    waste: int = 0
    size: int = 0


@runtime_checkable
class Listable(Protocol):
    """A backend whose pages can be listed."""

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """All that is stored, in batches; what is put or deleted meanwhile may or may not be there.

        Raises:
            BackendError: it cannot be listed now. Cancelling it changes nothing.
        """
        ...


@runtime_checkable
class Collectable(Protocol):
    """A backend that can be rid of waste."""

    async def collect(self, older_than: float | None) -> Collected:
        """Remove what nobody can use; and, if ``older_than`` is given, pages written more than so many seconds ago.

        Pages that are read or written meanwhile are never damaged. Cancelling it leaves the rest for the next time.
        """
        ...
