"""Two optional parts of a backend: listing its pages (``Listable``) and removing its waste (``Collectable``).

They are for people and tools (``asynccache store ls|stat|verify|gc``). The cache itself never calls them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Stored(NamedTuple):
    """One stored page. ``size`` is the bytes of header and payload together. ``written`` is the unix time at which it
    was stored, or 0.0 if the backend does not know."""

    key: bytes
    size: int
    written: float


class Collected(NamedTuple):
    """The things that one call of ``collect`` has removed. ``pages``: pages that were stored too long ago. ``waste``:
    objects that are no pages and of no use, such as orphans and half-written objects. ``size``: the bytes of both
    together."""

    pages: int = 0
    waste: int = 0
    size: int = 0


@runtime_checkable
class Listable(Protocol):
    """A backend whose pages can be listed."""

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all stored pages, in batches. Pages that are put or deleted meanwhile may or may not be among them.

        Raises:
            BackendError: the store cannot be listed now. Cancelling it changes nothing.
        """
        ...


@runtime_checkable
class Collectable(Protocol):
    """A backend from which waste can be removed."""

    async def collect(self, older_than: float | None) -> Collected:
        """Remove waste. If ``older_than`` is given, also remove pages that were written more than so many seconds ago.

        Pages that are read or written meanwhile are never damaged. Cancelling it leaves the rest for the next call.
        """
        ...
