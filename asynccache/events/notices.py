"""The notices that a cache passes to ``on_event``, in order: that it was opened, the core's events, and reports of
which keys its stores hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from asynccache.core.plan import Cleared, Publish


class Opened(NamedTuple):
    """A cache was opened and is empty.

    ``page_size`` is in tokens. ``key_of`` returns the storage key of the FULL page with a given page hash; it is None
    if there is no storage. ``namespace_of`` returns the ``namespace`` with a given digest.
    """

    page_size: int
    key_of: Callable[[bytes], bytes] | None
    namespace_of: Callable[[bytes], str | bytes | None]


class StorageReport(NamedTuple):
    """A report of storage keys. ``there``: True if the stores hold them from now on, False if no store holds them any
    more."""

    there: bool
    keys: Sequence[bytes]


Notice = Publish | Cleared | StorageReport | Opened
