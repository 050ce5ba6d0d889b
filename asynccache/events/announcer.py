"""From what a cache tells to what its subscribers are told. Pure: no clock, no socket, no thread.

The core knows which pages are on device and host, and what they are called; the store alone knows which of them it
holds. So STORAGE is the meeting of two: a page that the core has named and that the store has reported is announced,
once; one that the store has lost is announced as gone. What lies in a store from an earlier life has no name until a
request comes for it, and is announced then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import assert_never

from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES, Adapter
from asynccache.core.plan import Cleared, Medium, Publish
from asynccache.events.notices import Notice, Opened, StorageReport
from asynccache.events.wire import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored

_LOW = 8


def block_hash(page_hash: bytes) -> int:
    """The lower 64 bits of a page's hash, read as one big-endian number."""
    return int.from_bytes(page_hash[-_LOW:], "big")


def block_hashes(hashes: bytes) -> list[int]:
    """The same for pages in a row."""
    return [block_hash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]


class Announcer:
    """Turns notices into block events. Mutable state: which keys the store holds, and which of them were announced."""

    def __init__(self) -> None:
        self._cache: Opened | None = None
        self._there: set[bytes] = set()
        self._named: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"Announcer({len(self._named)} of {len(self._there)} stored keys announced)"

    def forget(self) -> AllBlocksCleared:
        """Events were lost: subscribers know nothing from here on but what they are told anew."""
        self._named.clear()
        return AllBlocksCleared()

    def announce(self, notices: Iterable[Notice]) -> list[BlockEvent]:
        """What subscribers are told of ``notices``, in order; removals from one medium in a row are one event."""
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
            case Publish():
                yield from self._published(notice)
            case StorageReport():
                yield from self._reported(notice)
            case Cleared():
                yield self.forget()
            case Opened():
                self._cache = notice
                self._there.clear()
                yield self.forget()
            case _:
                assert_never(notice)

    def _published(self, event: Publish) -> Iterator[BlockEvent]:
        if event.medium is Medium.STORAGE:
            for start, stop in self._new_runs(event.hashes):
                yield self._stored(event, start, stop)
        elif event.stored:
            yield self._stored(event, 0, len(event.hashes) // HASH_BYTES)
        else:
            yield BlockRemoved(block_hashes(event.hashes), event.medium.value)

    def _reported(self, report: StorageReport) -> Iterator[BlockEvent]:
        if report.there:
            self._there.update(report.keys)
            return
        self._there.difference_update(report.keys)
        named = self._named
        gone = [named.pop(key) for key in report.keys if key in named]
        if gone:
            yield BlockRemoved(gone, Medium.STORAGE.value)

    def _new_runs(self, hashes: bytes) -> Iterator[tuple[int, int]]:
        """Pages in a row that the store holds and that were not announced: (first, past the last)."""
        start, count = 0, len(hashes) // HASH_BYTES
        for page in range(count):
            if not self._name(hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]):
                if start < page:
                    yield start, page
                start = page + 1
        if start < count:
            yield start, count

    def _name(self, page_hash: bytes) -> bool:
        """Whether this page is to be announced: it is there, and was not announced before."""
        assert self._cache is not None
        if self._cache.key_of is None:
            return False
        key = self._cache.key_of(page_hash)
        if key not in self._there or key in self._named:
            return False
        self._named[key] = block_hash(page_hash)
        return True

    def _stored(self, event: Publish, start: int, stop: int) -> BlockStored:
        assert self._cache is not None
        size = self._cache.page_size
        parent = event.hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else event.parent
        tokens = array("i", event.tokens[start * size * TOKEN_BYTES : stop * size * TOKEN_BYTES])
        extra = self._cache.extra_key_of(event.space)
        return BlockStored(
            block_hashes=block_hashes(event.hashes[start * HASH_BYTES : stop * HASH_BYTES]),
            parent_block_hash=block_hash(parent) if parent else None,
            token_ids=tokens.tolist(), block_size=size, medium=event.medium.value,
            lora_id=extra.lora_id if isinstance(extra, Adapter) else None,
            lora_name=extra.lora_name if isinstance(extra, Adapter) else None,
            extra_keys=None if extra is None else [_tells_apart(extra)] * (stop - start),
        )  # fmt: skip


def _tells_apart(extra_key: str | bytes) -> tuple[str, ...]:
    """What beside its tokens a block is known by: the adapter's name first, as routers have it, then the key."""
    if isinstance(extra_key, bytes):
        return (extra_key.hex(),)
    key = str(extra_key)
    return (extra_key.lora_name, key) if isinstance(extra_key, Adapter) and extra_key.lora_name != key else (key,)
