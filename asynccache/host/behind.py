"""The stores behind a host process: pages are written to them after they were published, and read from them when the
memory has lost them. The stores' buffers are the shared memory itself, so nothing is copied.

Records pass through as clients have sealed them, headers and all: the stores are used raw, each behind its own
``CallGuard``, without a ``CheckedStore``.

What always holds:
* A store that hangs harms nobody. No look-up or read waits for it longer than ``LATE`` seconds, and while one of its
  calls is that late it is not asked: its pages count as FAILED. What it holds pinned is bounded (``WRITERS`` batches,
  and its reads).
* A store that fails or is slow loses writes and delays none: each store has a queue and tasks of its own. A page that
  is evicted before its turn is not written.
* What is deleted stays deleted: a write of it that is under way is waited for, and a read of it is not published.
* A page that was read by a client and did not verify is dropped from memory. The copy in a store may be good, so it is
  read again, and verified once here; only if it is bad, too, it is deleted there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from asynccache.errors import BackendError
from asynccache.host.changes import HeldChanges, HeldKeys
from asynccache.host.memory import UNIT, HostMemory
from asynccache.host.pages import HostLabel, PageTable, Writer
from asynccache.storage import (
    RECORD_SCHEMA,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    StoreOptions,
    backend_class,
    check_store,
    parse_url,
    take_options,
)
from asynccache.storage.attachment import no_store
from asynccache.storage.call_guard import Breaker, CallGuard
from asynccache.storage.checked import verify
from asynccache.storage.contract import probe
from asynccache.storage.url import check_name
from asynccache.storage.wrapper import watch

LATE = 1.0
WRITERS = 4
BATCH_PAGES = 64
BATCH_BYTES, BATCH_SHARE = 16 << 20, 32
MOST_WAITING = 1 << 20
MOST_SUSPECTS = 1 << 14
DRAIN, LET_GO = 30.0, 5.0
POOL = "host"

MISS, HIT, CORRUPT, FAILED = map(int, Result)  # codes of the wire

LOG = logging.getLogger("asynccache.host")


class StoreBehind:
    """One store. ``waiting``: the pages that are still to be written to it. ``refuses``: it did not take all of the
    last batch, as when its disk is full."""

    def __init__(self, url: ParsedUrl, options: StoreOptions) -> None:
        self.url = url
        self.options = options
        self.backend: StorageBackend
        self.guard: CallGuard
        self.waiting: deque[bytes] = deque()
        self.writing = 0
        self.refuses = False
        self.counts: Counter[str] = Counter()
        self.news = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.held: HeldKeys | None = None
        self._unwatch: Callable[[], object] | None = None
        self._begun: dict[object, float] = {}
        self._batches: dict[asyncio.Future[None], frozenset[bytes]] = {}

    async def open(self, layout: StoreLayout, memory: memoryview | None) -> None:
        """Open it. Raises as ``open_store`` does; cancelling it leaves nothing open."""
        self.backend = await backend_class(self.url.scheme).open(self.url, layout)
        self.guard = CallGuard(
            self.backend, lambda keys: probe(self.backend, keys), Breaker(), timeout=self.options.timeout,
            slow=self.options.slow, concurrency=self.options.concurrency, clock=time.monotonic,
        )  # fmt: skip
        if memory is not None:
            self.backend.register(POOL, memory)

    async def watch(self, changes: HeldChanges) -> None:
        """Note from now on which keys it holds. Of a store that cannot tell, that is what its answers show."""
        self.held = self.held or changes.place("STORAGE")
        watched = watch(self.backend, self.held.note)
        self.backend, self._unwatch = watched.backend, watched.end
        await changes.list(self.held, watched.parts)

    async def aclose(self) -> None:
        """Close the store; from now on it counts as holding nothing. Raises what the backend's ``aclose`` raises, and
        lasts as long: for ever, if the store hangs."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self.held is not None:
            self.held.note(False, list(self.held.keys))
        await self.guard.aclose()
        await self.backend.aclose()

    @property
    def late(self) -> bool:
        """True while a question or a read has been under way for longer than ``LATE``."""
        now = time.monotonic()
        return any(now - begun > LATE for begun in self._begun.values())

    async def asks(self, kind: Any, keys: Sequence[PageKey], act: Any) -> list[Result]:
        """Make a call that somebody waits for; FAILED for each key at once while the store is late."""
        if self.late:
            self.counts["late_calls"] += 1
            return [Result.FAILED] * len(keys)
        token = object()
        self._begun[token] = time.monotonic()
        try:
            return await self.guard.answers(kind, keys, act)
        finally:
            del self._begun[token]

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Write pages. ``has_written`` waits for it."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batches[ended] = frozenset(key.key for key in keys)
        self.writing += len(keys)
        try:
            return await self.guard.answers("put", keys, lambda keys: self.backend.put(keys, records))
        finally:
            self.writing -= len(keys)
            del self._batches[ended]
            ended.set_result(None)

    async def has_written(self, keys: Sequence[bytes] | None, patience: float) -> bool:
        """Wait until no write of one of ``keys`` (None: of any page) is under way, for ``patience`` seconds at most.
        Return whether there is none."""
        batches = [ended for ended, among in self._batches.items() if keys is None or not among.isdisjoint(keys)]
        return not batches or not (await asyncio.wait(batches, timeout=patience))[1]


class StoresBehind:
    """All stores behind one host process, nearest first. For one event loop. ``longest``: bytes of the longest payload.

    Raises:
        ConfigError: a URL is wrong, or two stores have one name.
    """

    def __init__(self, urls: Sequence[str], longest: int) -> None:
        self.layout = StoreLayout({}, RECORD_SCHEMA, longest)
        self.stores: list[StoreBehind] = []
        for text in urls:
            if check_store(text, self.layout) is None:
                raise no_store(text)
            options, own = take_options(parse_url(text))
            check_name(options.name, [store.options.name for store in self.stores])
            self.stores.append(StoreBehind(own, options))
        self._table: PageTable
        self._memory: HostMemory | None = None
        self.own = Writer(f"host process {os.getpid()}")
        """Who has reserved what is being read into, and pinned what is being written from."""
        self._reads: dict[bytes, asyncio.Task[dict[bytes, int]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._suspects: dict[bytes, None] = {}
        self._deleted: set[bytes] = set()  # of those that are being read
        self._writers: list[asyncio.Task[None]] = []
        self._left: list[asyncio.Task[Any]] = []
        self._changes: HeldChanges | None = None
        self._now = time.time

    def use(self, table: PageTable, memory: HostMemory) -> None:
        """Work for this table and this memory from now on."""
        self._table, self._memory = table, memory
        for store in self.stores:
            store.backend.register(POOL, memory.view)

    async def open(self) -> None:
        """Open all stores, or none. Raises as ``open_store`` does. Cancelling it leaves nothing open."""
        opened: list[StoreBehind] = []
        try:
            for store in self.stores:
                await store.open(self.layout, None if self._memory is None else self._memory.view)
                opened.append(store)
        except BaseException:
            for store in opened:
                await store.backend.aclose()
            raise
        for store in self.stores:
            self._writers += [self._begin(self._write_on(store)) for _ in range(WRITERS)]
            if self._changes is not None:
                self._begin(store.watch(self._changes))

    def watch(self, changes: HeldChanges) -> None:
        """Note from now on which keys each store holds."""
        self._changes = changes
        for store in self.stores:
            self._begin(store.watch(changes))

    @property
    def hangs(self) -> bool:
        """True while anything that ``close`` has waited for goes on."""
        return not all(task.done() for task in self._left)

    def counts(self) -> dict[str, float]:
        """Return the counters of all stores, by the store's name and the counter's."""
        return {
            f"{store.options.name}.{name}": value
            for store in self.stores
            for name, value in (("waiting", len(store.waiting)), ("writing", store.writing), *store.counts.items(),
                                ("breaker", int(store.guard.breaker.state)))
        }  # fmt: skip

    def stats(self) -> Mapping[str, Mapping[str, int | float]]:
        """Return the counters of each store, its guard's among them, by the store's name."""
        return {store.options.name: {**store.backend.stats(), **store.guard.stats()} for store in self.stores}

    # writing

    def write(self, keys: Sequence[bytes]) -> None:
        """Write these pages to the stores, soon."""
        for store in self.stores:
            if store.options.write and keys:
                store.waiting.extend(keys)
                while len(store.waiting) > min(MOST_WAITING, self._table.layout.slots):  # more are evicted by now
                    store.waiting.popleft()
                    store.counts["dropped"] += 1
                store.quiet.clear()
                store.news.set()

    async def _write_on(self, store: StoreBehind) -> None:
        while True:
            while not store.waiting:
                store.news.clear()
                if not store.writing:
                    store.quiet.set()
                await store.news.wait()
            batch, size, table = list[int](), 0, self._table
            most = min(BATCH_BYTES, table.layout.units * UNIT // BATCH_SHARE)  # a batch that hangs is pinned
            while store.waiting and len(batch) < BATCH_PAGES and size < most:
                slot = table.index.get(store.waiting.popleft())
                if slot is None:
                    store.counts["evicted"] += 1
                else:
                    table.pin(self.own, slot)
                    batch.append(slot)
                    size += table.lengths[slot]
            if batch:
                await self._write(store, batch)

    async def _write(self, store: StoreBehind, batch: Sequence[int]) -> None:
        table = self._table
        keys, records = [PageKey(table.pools[slot], table.key(slot)) for slot in batch], self._records(batch)
        try:
            answers = await store.put(keys, records)
            hits = answers.count(Result.HIT)
            store.counts["written"] += hits
            store.counts["dropped"] += len(answers) - hits
            if hits < len(answers) and not store.refuses:
                LOG.warning("store %r does not take all pages; memory goes on", store.options.name)
            store.refuses = hits < len(answers)
        finally:
            for slot in batch:
                table.unpin(self.own, slot)

    def _records(self, slots: Sequence[int]) -> list[Record]:
        memory, table = self._memory, self._table
        assert memory is not None
        return [Record(memory.header(slot), memory.payload(table.starts[slot], table.lengths[slot])) for slot in slots]

    # reading

    async def exist(self, keys: Sequence[bytes], pools: Sequence[str], codes: bytearray) -> None:
        """Ask the stores for the keys whose code is not HIT, and write their answers into ``codes``."""
        for store in self.stores:
            at = [i for i, code in enumerate(codes) if code != HIT]
            if not at:
                return
            wanted = [_page_key(keys, pools, i) for i in at]
            answers = await self._in_time(store.asks("ask", wanted, store.backend.exists))
            _take_over(codes, at, answers)

    async def read(
        self, keys: Sequence[bytes], pools: Sequence[str], sizes: Sequence[int], codes: bytearray, label: HostLabel
    ) -> None:
        """Read the pages whose code is MISS into the memory, and write into ``codes`` how that went: HIT, it is in the
        table. What takes longer than ``LATE`` is FAILED, and goes on by itself."""
        missing = {keys[i]: i for i, code in enumerate(codes) if code == MISS}
        fresh = [i for key, i in missing.items() if key not in self._reads]
        if fresh:
            wanted = [_page_key(keys, pools, i) for i in fresh]
            task = self._begin(self._bring(wanted, [sizes[i] for i in fresh], label))
            for key in wanted:
                self._reads[key.key] = task
            task.add_done_callback(lambda task: self._brought([key.key for key in wanted]))
        tasks = {self._reads[key] for key in missing}
        await asyncio.wait(tasks, timeout=LATE)
        found: dict[bytes, int] = {}
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                found |= task.result()
        for name, i in missing.items():
            codes[i] = found.get(name, FAILED)
        for i, code in enumerate(codes):  # a key that came twice
            if code == MISS and keys[i] in missing:
                codes[i] = codes[missing[keys[i]]]

    def _brought(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._reads.pop(key, None)
            self._deleted.discard(key)

    async def _bring(self, keys: Sequence[PageKey], sizes: Sequence[int], label: HostLabel) -> dict[bytes, int]:
        """Read pages from the nearest store that has them. Returns the code of each key."""
        codes = bytearray(len(keys))
        for store in self.stores:
            at = [i for i, code in enumerate(codes) if code != HIT]
            asked = await store.asks("ask", [keys[i] for i in at], store.backend.exists)
            _take_over(codes, at, [Result.MISS if answer is Result.HIT else answer for answer in asked])
            there = [i for i, answer in zip(at, asked, strict=True) if answer is Result.HIT]
            places = [(i, self._table.reserve(self.own, keys[i].key, keys[i].pool, sizes[i], label)) for i in there]
            reads = [(i, slot) for i, slot in places if slot is not None]
            _take_over(codes, [i for i, slot in places if slot is None], None)
            if reads:
                await self._read_from(store, keys, reads, codes)
        return {key.key: code for key, code in zip(keys, codes, strict=True)}

    async def _read_from(
        self, store: StoreBehind, keys: Sequence[PageKey], reads: Sequence[tuple[int, int]], codes: bytearray
    ) -> None:
        wanted, records = [keys[i] for i, _ in reads], self._records([slot for _, slot in reads])
        table, bad = self._table, list[PageKey]()
        try:
            answers = await store.asks("get", wanted, lambda keys: store.backend.get(keys, records))
            doubted = [n for n, key in enumerate(wanted) if key.key in self._suspects and answers[n] is Result.HIT]
            if doubted:
                good = await asyncio.to_thread(verify, [wanted[n] for n in doubted], [records[n] for n in doubted])
                for n, is_good in zip(doubted, good, strict=True):
                    self._suspects.pop(wanted[n].key, None)
                    if not is_good:
                        answers[n] = Result.CORRUPT
                        bad.append(wanted[n])
            for (i, slot), answer in list(zip(reads, answers, strict=True))[::-1]:
                if keys[i].key in self._deleted:
                    continue
                codes[i] = int(answer)
                if answer is Result.HIT:
                    table.publish(self.own, slot, self._now())
            store.counts["read"] += answers.count(Result.HIT)
        finally:
            table.give_back(self.own, [slot for _, slot in reads])
        if bad:
            store.counts["corrupt"] += len(bad)
            await store.guard.answers("drop", bad, store.backend.delete)

    def suspect(self, key: bytes) -> None:
        """Verify this page here, once, before it is served from a store again."""
        self._suspects[key] = None
        if len(self._suspects) > MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    # the rest

    async def delete(self, keys: Sequence[bytes], pools: Sequence[str], codes: bytearray) -> None:
        """Delete these pages from all stores; ``codes`` gets what they answer: FAILED where one could not."""
        wanted, at = [_page_key(keys, pools, i) for i in range(len(keys))], list(range(len(keys)))
        self._deleted.update(key for key in keys if key in self._reads)
        for store in self.stores:
            written = await store.has_written(keys, LATE)
            answers = await self._in_time(store.guard.answers("put", wanted, store.backend.delete)) if written else None
            for i, answer in zip(at, answers or [Result.FAILED] * len(keys), strict=True):
                if answer is Result.FAILED or codes[i] == MISS:
                    codes[i] = int(answer)
        self._deleted.update(key for key in keys if key in self._reads)  # they may have read it before it was deleted

    async def clear(self) -> str:
        """Delete all pages of all stores. Returns what went wrong, if anything did."""
        self._deleted.update(self._reads)
        for store in self.stores:
            store.waiting.clear()
            if not await store.has_written(None, DRAIN):
                return f"{store.options.name}: a write does not end"
        try:
            return await self._each("clear")
        finally:
            self._deleted.update(self._reads)

    async def flush(self) -> str:
        """Write what waits, and make it as safe as the stores can. Returns what went wrong, if anything did."""
        for store in self.stores:
            with suppress(TimeoutError):
                await asyncio.wait_for(store.quiet.wait(), DRAIN)
        return await self._each("flush")

    async def _each(self, verb: str) -> str:
        wrong = []
        for store in self.stores:
            try:
                await store.guard.on_request(verb, getattr(store.backend, verb))
            except BackendError as error:
                wrong.append(f"{store.options.name}: {error}")
        return "; ".join(wrong)

    async def close(self) -> None:
        """Write what waits, for ``DRAIN`` seconds at most, and close all stores. They can be opened again. A store that
        hangs is left behind, some seconds later: it keeps what it has pinned."""
        if not self._writers:
            return
        flushing = asyncio.create_task(self.flush())
        self._left = [flushing, *self._tasks]
        await asyncio.wait([flushing], timeout=DRAIN)
        self._left += [task for task in self._tasks if task not in self._left]
        if why := flushing.result() if flushing.done() else f"they have not taken all in {DRAIN:g} s":
            LOG.warning("not everything is in the stores: %s", why)
        for task in self._left:
            task.cancel()
        await asyncio.wait(self._left, timeout=LET_GO)
        self._writers.clear()
        closing = {asyncio.create_task(store.aclose()): store.options.name for store in self.stores}
        self._left += closing
        await asyncio.wait(closing, timeout=LET_GO)
        for task, name in closing.items():
            error = task.exception() if task.done() else "it hangs"
            if error is not None:
                LOG.warning("store %s could not be closed: %r", name, error)

    async def _in_time(self, work: Coroutine[Any, Any, list[Result]]) -> list[Result] | None:
        """Return what ``work`` returns; None if that takes longer than ``LATE``. Then it goes on by itself."""
        task = self._begin(work)
        await asyncio.wait([task], timeout=LATE)
        return task.result() if task.done() and not task.cancelled() else None

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name="asynccache-host-store")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _page_key(keys: Sequence[bytes], pools: Sequence[str], at: int) -> PageKey:
    return PageKey(pools[at] if at < len(pools) else "", keys[at])


def _take_over(codes: bytearray, at: Sequence[int], answers: Sequence[Result] | None) -> None:
    """Note a store's answers for the keys at these positions; None: it gave none. What it lacks changes nothing."""
    for i, answer in zip(at, answers or [Result.FAILED] * len(at), strict=True):
        if answer is not Result.MISS:
            codes[i] = int(answer)
