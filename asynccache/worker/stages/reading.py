"""A worker's part of prefetch: it looks up which pages the stores have, and reads them into host slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asynccache.core.keys import HASH_BYTES
from asynccache.core.slots import SLOT_BYTES
from asynccache.storage import PageKey, Result
from asynccache.worker.contract import ReadOrder, StoreQuestion
from asynccache.worker.pool_layout import PoolMap

BATCH_PAGES = 128


class ReadableStore(Protocol):
    """The part of ``TieredStore`` that this stage uses."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]: ...
    async def get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class ReadingStage:
    """Looks up and reads pages, at most ``BATCH_PAGES`` pages of a pool in one call of the store."""

    def __init__(self, store: ReadableStore, pools: PoolMap) -> None:
        self._store = store
        self._pools = pools

    def __repr__(self) -> str:
        return f"ReadingStage({self._pools!r})"

    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """See ``Worker.ask``."""
        return [await self._ask(question) for question in asked]

    async def _ask(self, asked: StoreQuestion) -> bytes:
        if not self._pools.has(asked.pool):
            return _nothing_lacks(asked.hashes)
        answers = bytearray()
        keys = self._pools.keys(*asked)
        for at in range(0, len(keys), BATCH_PAGES):
            answers += bytes(await self._store.exists(keys[at : at + BATCH_PAGES]))
        return bytes(answers)

    async def read(self, reads: Sequence[ReadOrder], *, run: bool) -> list[bytes]:
        """See ``Worker.read``."""
        answers: list[bytes] = []
        for pool, hashes, slots in reads:
            pages = _run(answers[-1]) if run and answers else len(hashes) // HASH_BYTES
            answers.append(await self._read(pool, hashes[: pages * HASH_BYTES], slots[: pages * SLOT_BYTES]))
        return answers

    async def _read(self, pool: str, hashes: bytes, slots: bytes) -> bytes:
        if not self._pools.has(pool):
            return _nothing_lacks(hashes)
        answers = bytearray()
        entries = list(self._pools.entries(pool, hashes, slots))
        for at in range(0, len(entries), BATCH_PAGES):
            part = entries[at : at + BATCH_PAGES]
            answers += bytes(await self._store.get([key for key, _ in part], [payload for _, payload in part]))
        return bytes(answers)


def _nothing_lacks(hashes: bytes) -> bytes:
    """The answer for a pool of which this worker has no bytes: a HIT for each page, since other workers' answers
    decide."""
    return bytes([Result.HIT]) * (len(hashes) // HASH_BYTES)


def _run(answer: bytes) -> int:
    """Return how many pages of ``answer`` come before the first that is not a HIT."""
    return len(answer) - len(answer.lstrip(bytes([Result.HIT])))
