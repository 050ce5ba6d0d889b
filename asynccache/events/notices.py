"""What a cache tells ``on_event``, in order: the core's events, and which keys its store holds. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from asynccache.core.plan import Cleared, Publish


class Opened(NamedTuple):
    """A cache begins, empty. ``key_of``: page hash to the storage key of its FULL page, None without storage.
    ``extra_key_of``: the ``extra_key`` of a namespace's digest."""

    page_size: int
    key_of: Callable[[bytes], bytes] | None
    extra_key_of: Callable[[bytes], str | bytes | None]


class StorageReport(NamedTuple):
    """These storage keys are in the store from now on, or have left it."""

    there: bool
    keys: Sequence[bytes]


Notice = Publish | Cleared | StorageReport | Opened
