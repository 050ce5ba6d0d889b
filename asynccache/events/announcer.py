"""Turns the notices of a cache into the events that subscribers get. Pure: no clock, no socket, no thread.

The core knows which pages are on device and host, and the hashes of all pages. Only the store knows which keys it
holds, and a key does not tell the page's hash. So a page on STORAGE is announced when the core names its hash and the
store has reported its key by then. It is announced once. When the store reports that the key has gone, the page is
announced as removed. A page that an earlier process has stored is announced when a prefetch first reads it, since only
then does the core name its hash.

The notices are what a cache passes to ``on_event``, in order: that it was opened, the core's events, and reports of
which keys its stores hold.

A host process knows keys and nothing of tokens. It tells which keys each of its places holds (``HeldReport``), and the
keys name their blocks. Several keys may name one: each rank's part of a page, each group of layers, the same page in
two stores. A block is there from the first of them until the last has gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, assert_never

from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES, Adapter
from asynccache.core.plan import Cleared, Medium, Publish
from asynccache.events.wire import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from asynccache.storage.contract import block_in


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


class HeldReport(NamedTuple):
    """A report of a host process: one of its places, on ``medium``, holds these keys from now on (``there``), or holds
    them no more. A place reports a key once each time that it comes or goes."""

    medium: Medium
    there: bool
    keys: Sequence[bytes]


Notice = Publish | Cleared | StorageReport | Opened | HeldReport


_LOW = 8


def block_hash(page_hash: bytes) -> int:
    """Return the last 8 bytes of a page's hash as a big-endian number: the hash of the block in events."""
    return int.from_bytes(page_hash[-_LOW:], "big")


def block_hashes(hashes: bytes) -> list[int]:
    """Return the block hashes of several pages, whose hashes stand one after another in ``hashes``."""
    return [block_hash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]


class Announcer:
    """Turns notices into block events. Mutable state: the keys that the store holds, and, by key, the block hashes that
    were announced on STORAGE; and how many keys of a host process name each block, by medium."""

    def __init__(self) -> None:
        self._cache: Opened | None = None
        self._stored_keys: set[bytes] = set()
        self._announced: dict[bytes, int] = {}
        self._held: dict[Medium, dict[int, int]] = {medium: {} for medium in Medium}

    def __repr__(self) -> str:
        return f"Announcer({len(self._announced)} of {len(self._stored_keys)} stored keys announced)"

    @property
    def page_size(self) -> int:
        """Tokens of a block; 0: not known, as in a host process."""
        return 0 if self._cache is None else self._cache.page_size

    def forget(self) -> AllBlocksCleared:
        """Forget all that was announced, because events were lost or the cache is empty now. Return the event that
        tells subscribers so: for them every page has gone until it is announced again."""
        self._announced.clear()
        for held in self._held.values():
            held.clear()
        return AllBlocksCleared()

    def announce(self, notices: Iterable[Notice]) -> list[BlockEvent]:
        """Return the events for ``notices``, in their order. Removals from the same medium that follow each other
        become one event."""
        events: list[BlockEvent] = []
        for notice in notices:
            for event in self._events(notice):
                last = events[-1] if events else None
                if isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and last.medium == event.medium:
                    last.block_hashes += event.block_hashes
                else:
                    events.append(event)
        return events

    def _events(self, notice: Notice) -> Iterator[BlockEvent]:
        match notice:
            case Publish(medium=Medium.STORAGE):
                for start, stop in self._new_runs(notice.hashes):
                    yield self._block_stored(notice, start, stop)
            case Publish(stored=True):
                yield self._block_stored(notice, 0, len(notice.hashes) // HASH_BYTES)
            case Publish():
                yield BlockRemoved(block_hashes(notice.hashes), notice.medium.value)
            case StorageReport(there=True):
                self._stored_keys.update(notice.keys)
            case StorageReport():
                self._stored_keys.difference_update(notice.keys)
                gone = [self._announced.pop(key) for key in notice.keys if key in self._announced]
                if gone:
                    yield BlockRemoved(gone, Medium.STORAGE.value)
            case HeldReport(there=True):
                if fresh := self._come(notice):
                    yield BlockStored(fresh, None, [], 0, None, notice.medium.value, None)
            case HeldReport():
                if gone := self._gone(notice):
                    yield BlockRemoved(gone, notice.medium.value)
            case Cleared():
                yield self.forget()
            case Opened():
                self._cache = notice
                self._stored_keys.clear()
                yield self.forget()
            case _:
                assert_never(notice)

    def _come(self, report: HeldReport) -> list[int]:
        """Count the blocks that the keys name, and return those that were not there."""
        held, fresh = self._held[report.medium], []
        for block in map(block_in, report.keys):
            if block is not None:
                count = held[block] = held.get(block, 0) + 1
                if count == 1:
                    fresh.append(block)
        return fresh

    def _gone(self, report: HeldReport) -> list[int]:
        """Count the blocks that the keys name down, and return those that are not there any more."""
        held, gone = self._held[report.medium], []
        for block in map(block_in, report.keys):
            if block is not None and block in held:
                held[block] -= 1
                if not held[block]:
                    del held[block]
                    gone.append(block)
        return gone

    def _new_runs(self, hashes: bytes) -> Iterator[tuple[int, int]]:
        """Yield the runs of pages that are to be announced on STORAGE: for each the index of its first page, and the
        index after its last."""
        start, count = 0, len(hashes) // HASH_BYTES
        for page in range(count):
            if not self._is_news(hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]):
                if start < page:
                    yield start, page
                start = page + 1
        if start < count:
            yield start, count

    def _is_news(self, page_hash: bytes) -> bool:
        """Return True if this page is to be announced on STORAGE: the store holds it, and it was not announced before.
        The page counts as announced from then on."""
        assert self._cache is not None
        if self._cache.key_of is None:
            return False
        key = self._cache.key_of(page_hash)
        if key not in self._stored_keys or key in self._announced:
            return False
        self._announced[key] = block_hash(page_hash)
        return True

    def _block_stored(self, event: Publish, start: int, stop: int) -> BlockStored:
        assert self._cache is not None
        size = self._cache.page_size
        parent = event.hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else event.parent
        tokens = array("i", event.tokens[start * size * TOKEN_BYTES : stop * size * TOKEN_BYTES])
        extra = self._cache.namespace_of(event.space)
        return BlockStored(
            block_hashes=block_hashes(event.hashes[start * HASH_BYTES : stop * HASH_BYTES]),
            parent_block_hash=block_hash(parent) if parent else None,
            token_ids=tokens.tolist(), block_size=size, medium=event.medium.value,
            lora_id=extra.lora_id if isinstance(extra, Adapter) else None,
            lora_name=extra.lora_name if isinstance(extra, Adapter) else None,
            extra_keys=None if extra is None else [_block_key(extra)] * (stop - start),
        )  # fmt: skip


def _block_key(namespace: str | bytes) -> tuple[str, ...]:
    """Return the ``extra_keys`` of one block, by which it differs from blocks with the same tokens: the adapter's name
    first, as routers expect it, then the namespace itself (in hex if it is bytes)."""
    if isinstance(namespace, bytes):
        return (namespace.hex(),)
    key = str(namespace)
    return (namespace.lora_name, key) if isinstance(namespace, Adapter) and namespace.lora_name != key else (key,)
