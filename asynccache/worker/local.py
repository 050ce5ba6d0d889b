"""The worker that has this process's pools and stores: every call is a plain call, and nothing is sent. A cache without
``workers`` uses it directly. Of a group each rank has one, behind a ``RankServer``; its remote methods (``@remote``)
are then called by messages, and ``WorkerGroup`` has the same methods for all ranks at once.

What always holds:
* Work is handed over in the order in which the core decided it, with no await in between; each operation in it gets
  exactly one outcome, when every buffer of it is let go.
* Pages are named by pool, prefix hash and slot. A worker adds what only it knows: bytes, its own part of every page,
  storage keys.
* A batch of the engine's work is a number to the head. The event that the number stands for stays with the worker.
* A failure to look up or read a page is an answer (``Result``), and not an exception.
* Several workers may hold the same pages. One of them writes these to the stores that they share, and each writes to a
  store of its own.
* Auxiliary components and sidecars are written before FULL (``PoolMap.written``), so that a reader who finds FULL
  mostly finds the rest; the order is no proof of that. Of an operation that has failed, nothing more is written. The
  head decides which backups are written as one batch, and when a batch is given up.
* Opening is all or nothing: if it fails or is cancelled, no device, no pool and no store stays behind.
* Closing goes in the reverse order: stores, then copies that are under way, then the device, if the worker opened it.
* A store is told where the host's pages lie before its first read or write.

This module imports torch only to open a worker: a head without a rank of its own knows these methods, too, and has no
device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from asynccache import checks
from asynccache.config import CacheConfig, PoolSpec
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import SLOT_BYTES
from asynccache.errors import ConfigError, CopyFailed
from asynccache.extras import without_torch
from asynccache.memory.device import Device as Device
from asynccache.memory.device import Event, parse_device
from asynccache.settle import completed, completed_in_thread
from asynccache.storage import PageKey
from asynccache.storage.attachment import close_unattached, open_all, open_attached
from asynccache.storage.call_guard import BreakerState as BreakerState
from asynccache.storage.checked import CheckedStore, store_layout
from asynccache.storage.contract import Result as Result
from asynccache.storage.contract import StorageBackend, StoreLayout
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.url import StoreOptions as StoreOptions
from asynccache.storage.wrapper import watch
from asynccache.worker import folds
from asynccache.worker.messages import remote
from asynccache.worker.pool_layout import PoolMap
from asynccache.worker.stages import BackupHostStage, LoadBackStage, StageMeter
from asynccache.worker.work import (
    BatchInFlight,
    CopyKind,
    DamagedPage,
    Inspected,
    PageBytes,
    PageQuestion,
    ReadOrder,
    Reports,
    StoredBatch,
    StoreQuestion,
    Work,
    WriteOrder,
)

if TYPE_CHECKING:
    from asynccache.memory.mover import Mover
    from asynccache.memory.poison import Poison
    from asynccache.memory.pools import BlockTable as BlockTable
    from asynccache.memory.pools import DevicePool as DevicePool
    from asynccache.worker.stages import Copying

Storage = str | StorageBackend | CheckedStore
"""A store as a caller names it: a URL, or a backend that the caller has made and closes."""

MOMENT = 1.0
"""Seconds that a closing cache waits for copies on the embedder's device, at least, whatever the deadline."""
LATE = 3.0
"""Seconds beyond its deadline that a closing cache still waits for its worker, or for the workers of all ranks."""
BATCH_PAGES = 128
"""The most pages of one call of a store, and of one step of the loop. A store that knows its index, or has its pages in
memory, answers without suspending, so reading and writing give the loop a turn after each call."""
DELETE_PAGES = 32
SWEEP = 64
"""A sweep forgets the batches that are over. The next sweep is made once there are ``2 * kept + SWEEP``, where ``kept``
is how many the last sweep has kept."""


class StoreEntry(NamedTuple):
    """A store that is open."""

    number: int
    """What head and worker call the store; no later store gets the same number."""
    options: StoreOptions
    shared: bool
    """``asynccache.storage.contract.is_shared``; in a group, whether any rank says so."""


@dataclass(slots=True)
class EmbedderParts:
    """The embedder's ``device`` and ``storage``; None: what the configuration names is used. The embedder closes what
    the embedder made.
    """

    device: Device | None = None
    storage: Storage | None = None
    locate: Callable[[str], Storage] = lambda url: url
    """Returns what to open for a store's URL; by default the URL itself."""


def check_storage(name: str, storage: object) -> None:
    """Raise ``ConfigError`` if ``storage``, the value of the argument ``name``, cannot be a store."""
    if isinstance(storage, str):
        checks.text(name, storage)
    elif not isinstance(storage, CheckedStore):
        checks.provider(name, storage, StorageBackend)  # type: ignore[type-abstract]


def check_device(name: str, device: object) -> None:
    """Raise ``ConfigError`` if ``device``, the value of the argument ``name``, is no device."""
    checks.provider(name, device, Device)  # type: ignore[type-abstract]


async def close_all(
    tiers: TieredStore, mover: Mover | None, device: Device | None, patience: float, *, own: bool
) -> None:
    """Close the stores, the pools and, if the worker has opened it (``own``), the device. A device that the worker has
    opened waits for its copies as long as they take. On the embedder's device they are waited for ``patience``
    seconds. If it is cancelled while a store still has calls, pools and device stay as they are, for the store may use
    them. Raises ``BackendError``: a store could not close cleanly; all the rest is closed."""
    failure: BaseException | None = None
    try:
        await tiers.aclose()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        failure = error
    try:
        if mover is not None and not own:
            await mover.drain(patience)
    finally:
        if mover is not None:
            mover.close()
        if device is not None and own:
            await device.aclose()
    if failure is not None:
        raise failure


def _slots(slots: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(slots, np.int32)


class LocalBatch:
    """One batch that ends with ``event``, and has failed if that carries an error; see ``BatchInFlight``."""

    __slots__ = ("done", "event", "number")

    def __init__(self, number: int, event: Event) -> None:
        self.number = number
        self.event = event
        self.done = event.done

    def __repr__(self) -> str:
        return f"LocalBatch({self.number}, {'over' if self.done() else 'not over'})"

    async def wait(self) -> None:
        try:
            await self.event.wait()
        except CopyFailed:
            return

    settled = wait

    @property
    def failed(self) -> bool:
        return self.event.failed()


class LocalBatches:
    """The batches that may not be over, by number. An event that is named again is the same batch."""

    def __init__(self) -> None:
        self._batches: dict[int, LocalBatch] = {}
        self._by_event: dict[int, LocalBatch] = {}
        self._last = 0
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"LocalBatches({len(self)} may not be over)"

    def __len__(self) -> int:
        return len(self._batches)

    def of(self, event: Event) -> LocalBatch:
        """Return the batch that ends with ``event``."""
        known = self._by_event.get(id(event))  # the batch keeps its event alive, so nothing else has that id
        if known is not None:
            return known
        if len(self._batches) >= self._sweep_at:
            self._batches = {number: batch for number, batch in self._batches.items() if not batch.done()}
            self._by_event = {id(batch.event): batch for batch in self._batches.values()}
            self._sweep_at = 2 * len(self._batches) + SWEEP
        self._last += 1
        batch = self._batches[self._last] = self._by_event[id(event)] = LocalBatch(self._last, event)
        return batch

    def events(self, numbers: Sequence[int]) -> list[Event]:
        """Return the events of those batches that are not over."""
        batches = (self._batches.get(number) for number in numbers)
        return [batch.event for batch in batches if batch is not None and not batch.done()]


class WriteRun(NamedTuple):
    """Neighbouring pages of one operation in one pool, which are written together."""

    op: int
    ours: bool
    """True if this worker writes the pages to the stores that workers share."""
    keys: list[PageKey]
    payloads: list[memoryview]
    full: bool
    """True if the pages count as pages of FULL."""


class BatchWrite:
    """One batch while it is written."""

    def __init__(self, tiers: TieredStore, pools: PoolMap, batch: Sequence[WriteOrder]) -> None:
        self._tiers = tiers
        self._pools = pools
        self._batch = batch
        self.left = {
            op: sum(len(slots) // SLOT_BYTES * len(pools.of.get(component, ())) for component, _, slots in pages)
            for op, pages in batch
        }
        """For each operation, how many pages are not stored yet."""
        self.failed: set[int] = set()
        """The operations of which a page could not be stored."""
        self.pages = self.full_pages = self.bytes = 0
        """As in ``StoredBatch``."""

    def parts(self, step: int) -> Iterator[list[WriteRun]]:
        """Yield the pages of the pools of one step (``PoolMap.written``), at most ``BATCH_PAGES`` at a time, without
        those of operations that have failed by then."""
        pools, written = self._pools, self._pools.written[step]
        part: list[WriteRun] = []
        room = BATCH_PAGES
        for op, lists in self._batch:
            for component, hashes, slots in lists:
                for spec in written.get(component, ()):
                    begin, count = 0, len(slots) // SLOT_BYTES
                    while begin < count and op not in self.failed:
                        end = min(count, begin + room)
                        keys = pools.keys(spec.name, hashes[begin * HASH_BYTES : end * HASH_BYTES])
                        payloads = pools.payloads(spec.name, slots[begin * SLOT_BYTES : end * SLOT_BYTES])
                        part.append(WriteRun(op, spec.writes, keys, payloads, pools.counts(spec.name)))
                        room -= end - begin
                        begin = end
                        if not room:
                            yield part
                            part, room = [], BATCH_PAGES
        if part:
            yield part

    async def put(self, part: Sequence[WriteRun]) -> None:
        """Write ``part``: to the shared stores what is ours, and all of it to stores of our own."""
        ours, theirs = [run for run in part if run.ours], [run for run in part if not run.ours]
        if ours:
            await self._put_in(ours, shared=True)
        if theirs and (self._tiers.writers(shared=False) or not self._tiers.writers()):
            await self._put_in(theirs, shared=False)
        else:  # all stores are shared: another worker writes them
            for run in theirs:
                self.left[run.op] -= len(run.keys)

    async def _put_in(self, part: Sequence[WriteRun], *, shared: bool) -> None:
        keys = [key for run in part for key in run.keys]
        payloads = [payload for run in part for payload in run.payloads]
        results = await self._tiers.put(keys, payloads, shared=shared)
        begin = 0
        for run in part:
            count = len(run.keys)
            hits = results[begin : begin + count].count(Result.HIT)
            begin += count
            self.left[run.op] -= hits
            self.pages += hits
            self.full_pages += hits * run.full
            self.bytes += hits * run.payloads[0].nbytes
            if hits < count:
                self.failed.add(run.op)


class LocalWorker:
    """Performs what the head decides. Its calls belong to the thread of the head's loop, except ``engine_event`` and
    ``hold``. ``poison``: what fresh and free pages are filled with in a cache that is debugged; None: they are left as
    they are. Mutable state: the engine's batches, the stores that are open, by number, and for each that is watched the
    function that ends the watching.
    """

    def __init__(
        self, mover: Mover, pools: PoolMap, tiers: TieredStore, layout: StoreLayout, *, takes_stores: bool,
        own_device: bool, poison: Poison | None = None,
    ) -> None:  # fmt: skip
        self.mover = mover
        """The pools and streams."""
        self._poison = poison
        self.layers = mover.layers
        """The number of the model's layers, up to the last one that this worker has."""
        self.takes_stores = takes_stores
        """True if there is a host tier, which stores need."""
        self._own_device = own_device
        self._map = pools
        self._tiers = tiers
        self._layout = layout
        self._batches = LocalBatches()
        self._given_up: set[int] = set()
        self._stores: dict[int, AttachedStore] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._last_store = 0
        self._reports = Reports()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mover!r}, {self._tiers!r})"

    # opening and closing

    async def open_first(self, storages: Sequence[Storage], options: Mapping[str, str]) -> None:
        """Open and use the stores that the cache begins with. If it fails or is cancelled, the stores that were opened
        by then stay open until the worker is closed."""
        await open_all(self._tiers, storages, self._layout, options)
        for attached in self._tiers.attached:
            self._take_in(attached)

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Take work from now on. Returns names and coroutines: the caller makes a task of each, and cancels it in the
        end."""
        self._reports = reports
        for attached in self._stores.values():
            attached.store.breaker.changed = reports.health
        self.backup_host = BackupHostStage(self.mover, self._map, reports)
        self.load_back = LoadBackStage(self.mover, self._map, reports)
        return [
            ("backup-host", self.backup_host.run()),
            ("load-back", self.load_back.run()),
            ("clones", self.load_back.run_clones()),
        ]

    def close_by(self, seconds: float) -> None:
        """Tell the worker that the cache is closing, and that saving what is unsaved may take ``seconds``. A worker of
        another process that has not answered a few seconds after that is given up; the cache itself leaves one of its
        own process behind. Of several calls, the earliest end counts."""

    async def aclose(self, patience: float) -> None:
        """Close stores, pools and the device. ``patience``: how many seconds to wait for copies on a device that
        outlives the cache. Cancelling it may leave some of it open.

        Raises:
            BackendError: a store could not close cleanly; all the rest is closed.
        """
        await close_all(self._tiers, self.mover, self.mover.device, patience, own=self._own_device)

    # the engine's work, and copies beside it. An event that an engine names is an event of the device or, with several
    # workers, the number of a batch.

    @property
    def device(self) -> Device | None:
        """The device of this process's pools."""
        return self.mover.device

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools of this process by name: where the engine reads and writes KV."""
        return self.mover.device_pools

    def engine_event(self, event: object) -> object:
        """Return ``event``, which an engine names, in the form that ``batch`` takes. From any thread.

        Raises:
            ConfigError: copies cannot wait for ``event``.
        """
        return self.mover.engine_event(event)

    def batch(self, event: object) -> BatchInFlight:
        """Return the batch that ends with ``event``, which ``engine_event`` returned. As long as the batch is not over,
        the same event gives the same batch."""
        return self._batches.of(cast("Event", event))

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """Tell every worker of a batch of the engine's work that needs the operations ``loads``. Returns the batch's
        number. Raises ``ConfigError``: the only worker is in this process, where batches are events."""
        raise ConfigError("send_batch: a cache without workers= has one worker, in this process: name events instead")

    async def batch_ended(self, number: int) -> None:
        """Return when batch ``number`` is over on every worker.

        Raises:
            BatchFailed: an engine could not run the batch.
            ConfigError: the only worker is in this process, where batches are events.
            RankFailure: a worker is gone.
            CacheClosed: the cache was closed before the batch was over.
        """
        raise ConfigError("batch_ended: a cache without workers= has one worker, in this process: wait for its events")

    def perform(self, plan: Sequence[Work]) -> None:
        """Begin all works of one plan of the core. ``Reports.ended`` is called once for each of them."""
        for work in plan:
            self.copy(work, self._batches.events(work.after) if work.after else ())

    def copy(self, work: Work, after: Sequence[Event]) -> None:
        """Begin ``work``, which waits on the device for the events ``after``."""
        if self._poison is not None and work.kind is not CopyKind.BACKUP:
            for move in work.moves:
                self._poison.forget(move.component, _slots(move.dst))
        (self.backup_host if work.kind is CopyKind.BACKUP else self.load_back).put(work, after)

    async def layer(self, op: int, i: int) -> None:
        """Return when layer ``i`` of the load ``op`` is on the device, or the load has ended.

        Raises:
            CopyFailed: the load failed.
        """
        copying = self.load_back.copying(op)
        if copying is not None:
            await copying.layer(i).wait()

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of these loads is there.

        Raises:
            ConfigError: ``stream`` is no stream.
        """
        self.hold(stream, self.arriving(ops), i)

    def arriving(self, ops: Sequence[int]) -> list[Copying]:
        """Submit the loads ``ops`` to the device, and return the copies of those that have not ended."""
        found = map(self.load_back.copying, ops)
        return [copying for copying in found if copying is not None]

    def hold(self, stream: object, arriving: Sequence[Copying], i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of all of ``arriving`` is there.
        From any thread.

        Raises:
            ConfigError: ``stream`` is no stream.
        """
        own = self.mover.engine_stream(stream)
        for copying in arriving:
            own.wait_event(copying.layer(i))

    # the bytes of device pages, for ``AsyncCache(debug=True)``

    @remote()
    def fill(self, component: int, slots: bytes, fresh: bool) -> None:
        """Fill device pages with poison: they are ``fresh``, or free."""
        if self._poison is not None:
            self._poison.fill(component, _slots(slots), fresh=fresh)

    @remote()
    def forget_fill(self, component: int, slots: bytes) -> None:
        """Note that device pages are free, and hold what they held: a batch may still use them."""
        if self._poison is not None:
            self._poison.forget(component, _slots(slots))

    @remote(fold=folds.inspected, at_once=True)
    async def inspect(self, asked: Sequence[PageQuestion], free: bool) -> Inspected:
        """Return what device pages hold, and which free pages somebody wrote: of all that are free, with ``free``, else
        of those taken since the last answer. It looks before anybody else can run."""
        poison = self._poison
        if poison is None:
            raise ConfigError("inspect: the cache was not opened with debug=True")
        if free:
            poison.check_free()
        pages = [PageBytes(*poison.look(component, _slots(slots))) for component, slots in asked]
        return Inspected(pages, [DamagedPage(*damaged) for damaged in poison.take_damaged()])

    # pages

    @remote(fold=folds.stored)
    async def store(self, batch: Sequence[WriteOrder]) -> StoredBatch:
        """Write the host pages of ``batch`` to the stores, and return what was stored. Cancelling it returns after the
        stores have let go of the pages."""
        first, writing = batch[0].op, BatchWrite(self._tiers, self._map, batch)
        try:
            for step in range(len(self._map.written)):
                for part in writing.parts(step):
                    await writing.put(part)
                    await asyncio.sleep(0)
                    if first in self._given_up:
                        writing.failed.update(op for op, left in writing.left.items() if left)
        finally:
            self._given_up.discard(first)
        return StoredBatch(frozenset(writing.failed), writing.pages, writing.full_pages, writing.bytes)

    @remote()
    def give_up(self, op: int) -> None:
        """Write nothing more of the batch that begins with operation ``op``, after the call of the store that is under
        way. To be called before or while ``store`` writes this batch, and not later."""
        self._given_up.add(op)

    @remote(fold=folds.found)
    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """Ask the stores which pages they have. Returns bytes for each question: a ``Result`` for each page."""
        return [await self._results(pool, hashes) for pool, hashes in asked]

    @remote(fold=folds.read)
    async def read(self, reads: Sequence[ReadOrder], run: bool) -> list[bytes]:
        """Read pages from the stores. Returns bytes for each of ``reads``: a ``Result`` for each page.

        ``run``: ``reads`` name the same pages in several pools, and the pages are wanted up to the first one that is
        missing in any pool. If a pool lacks a page, this page and those behind it are not read from the later pools,
        which have no results for them. Cancelling it returns after the stores have let go of the host's pages.
        """
        answers: list[bytes] = []
        for pool, hashes, slots in reads:
            if run and answers:
                hits = len(answers[-1]) - len(answers[-1].lstrip(bytes([Result.HIT])))
                hashes = hashes[: hits * HASH_BYTES]
            answers.append(await self._results(pool, hashes, slots))
        return answers

    async def _results(self, pool: str, hashes: bytes, slots: bytes | None = None) -> bytes:
        """Return a result for each page. With ``slots`` the pages are read, and else only looked up. Of a pool without
        bytes here all pages are HIT, since other workers' answers decide."""
        if not self._map.has(pool):
            return bytes([Result.HIT]) * (len(hashes) // HASH_BYTES)
        answers = bytearray()
        for at in range(0, len(hashes) // HASH_BYTES, BATCH_PAGES):
            keys = self._map.keys(pool, hashes[at * HASH_BYTES : (at + BATCH_PAGES) * HASH_BYTES])
            if slots is None:
                answers += bytes(await self._tiers.exists(keys))
            else:
                own = slots[at * SLOT_BYTES : (at + len(keys)) * SLOT_BYTES]
                answers += bytes(await self._tiers.get(keys, self._map.payloads(pool, own)))
            await asyncio.sleep(0)
        return bytes(answers)

    @remote()
    async def delete(self, hashes: Sequence[bytes]) -> None:
        """Delete these pages of every pool from the stores. Cancelling it may leave some of them."""
        for at in range(0, len(hashes), DELETE_PAGES):
            pages = hashes[at : at + DELETE_PAGES]
            await self._tiers.delete([self._map.key(pool, page) for page in pages for pool, _ in self._map.named()])
            await asyncio.sleep(0)

    @remote()
    async def clear(self) -> None:
        """Delete everything that is stored. Raises ``BackendError``: a store could not."""
        await self._tiers.clear()

    @remote()
    async def flush(self) -> None:
        """Return when what is stored would survive a power loss. Raises ``BackendError``: a store could not."""
        await self._tiers.flush()

    @remote()
    def is_away(self, page_hash: bytes) -> bool:
        """Return True if there are stores and all of them refuse calls now; of several workers, if this is so on any of
        them. Stores may be probed with the key of this page."""
        lead = self._map.lead
        return bool(lead) and self._tiers.is_away(self._map.key(lead[-1].name, page_hash))

    @property
    def shut(self) -> bool:
        """True under the same condition as ``is_away``. Reading it probes no store."""
        return self._tiers.shut

    @property
    def busy(self) -> Sequence[str]:
        """The names of the stores that have calls under way, as far as the worker is in this process."""
        return self._tiers.busy

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """A function from a page's hash to the storage key of the last part of its FULL data; None if FULL has no
        stored object."""
        return self._map.key_of

    @property
    def digest(self) -> bytes:
        return self._map.digest

    # stores: each is opened, used, left and closed, and may be watched meanwhile

    @property
    def has_stores(self) -> bool:
        """True while any store is used. Every lease asks this, so the answer must be cheap."""
        return bool(self._tiers)

    @property
    def stores(self) -> tuple[StoreEntry, ...]:
        """The stores that are used, nearest first."""
        return tuple(map(self._entry, self._tiers.attached))

    def find_store(self, name: str | None) -> StoreEntry:
        """Return the store that is called ``name``; with None, the only store. Raises ``ConfigError``: there is no such
        store, or there are several and no name was given."""
        return self._entry(self._tiers.find(name))

    async def open_store(
        self, storage: Storage, options: Mapping[str, str], position: int | None, *, number: int | None = None
    ) -> StoreEntry:
        """Open a store, for ``use_store`` or ``drop_store``. ``number``: the number that the head of a group has
        chosen; None: the next one. Cancelling it leaves nothing open.

        Raises:
            ConfigError: the store cannot be attached at ``position``, the URL is wrong, or the store is for other
                pools.
            Unavailable: the store cannot be opened now.
        """
        names = [attached.options.name for attached in self._stores.values()]  # some are not in ``_tiers`` yet
        attached = await open_attached(storage, self._layout, options, self._tiers, position, names)
        try:
            self._take_in(attached, number)
        except BaseException:
            await close_unattached(attached)
            raise
        return self._entry(attached)

    @remote()
    def use_store(self, number: int, position: int | None) -> None:
        """Use an open store from now on, at ``position`` (0: the nearest; None: the farthest). Raises ``ConfigError``:
        its name was taken meanwhile, or there is no such position any more."""
        self._tiers.attach(self._stores[number], position)
        self._reports.health()

    @remote()
    async def drop_store(self, number: int) -> None:
        """Close a store that is not used, if it was opened."""
        attached = self._stores.pop(number, None)
        if attached is not None:
            await close_unattached(attached)

    @remote()
    def leave_store(self, number: int) -> None:
        """Give the store no more calls from now on. ``close_store`` must follow. A second call does nothing."""
        self._tiers.detach(self._stores[number])
        self._reports.health()

    @remote()
    async def close_store(self, number: int) -> None:
        """Close a store that was left, when no call of it is under way any more. Raises ``BackendError``: the store
        could not close cleanly."""
        await self._tiers.aclose_detached(self._stores.pop(number))

    @remote()
    async def watch_store(self, number: int) -> None:
        """Tell ``Reports.keys`` from now on which keys the store has. Returns when it was told of all that the store
        has by now, which takes a turn of the loop for every few thousand. Cancelling it leaves some of them untold;
        ``unwatch_store`` must follow."""
        store, tell = self._stores[number].store, self._reports.keys
        own = store.backend
        watched = watch(own, partial(tell, number))
        store.backend = watched.backend

        def give_back() -> None:
            watched.end()
            store.backend = own

        self._watched[number] = give_back
        for keys in watched.parts:
            if number not in self._watched:
                return
            tell(number, True, keys)
            await asyncio.sleep(0)

    @remote()
    def unwatch_store(self, number: int) -> None:
        """Watch the store no more. A second call does nothing."""
        end = self._watched.pop(number, None)
        if end is not None:
            end()

    def _entry(self, attached: AttachedStore) -> StoreEntry:
        number = next(number for number, opened in self._stores.items() if opened is attached)
        return StoreEntry(number, attached.options, attached.shared)

    def _take_in(self, attached: AttachedStore, number: int | None = None) -> None:
        """Tell a store where the host's pages lie, and give it its number."""
        for name, pool in self.mover.host_pools.items():
            attached.store.register(name, pool.memory)
        self._last_store = number or self._last_store + 1
        self._stores[self._last_store] = attached
        attached.store.breaker.changed = self._reports.health

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """The counters of the copies between device and host, by stage."""
        return {"backup_host": self.backup_host.meter, "load_back": self.load_back.meter}

    def queues(self) -> Mapping[str, int]:
        """The number of operations that wait, by stage."""
        return {"backup_host": len(self.backup_host), "load_back": len(self.load_back)}

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """The stores' counters: first their sums, in which ``breaker`` is the best state of any store; then those of
        each store by its name, nearest first. Of several workers, ``breaker`` is the worst worker's."""
        return self._tiers.stats(), self._tiers.store_stats()


# opening


def import_torch() -> None:
    """Import all that ``open_local`` needs. The first time this takes seconds, which are better spent before a loop
    runs.

    Raises:
        ModuleNotFoundError: torch is not installed; the message says how to install it.
    """
    try:
        import asynccache.memory.cpu
        import asynccache.memory.pools  # noqa: F401  so that they are there
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(without_torch(error), name=error.name) from None


def open_device(name: str) -> Device:
    """Open the device that a configuration names."""
    if parse_device(name).kind == "cpu":
        from asynccache.memory.cpu import CpuDevice

        return CpuDevice()
    from asynccache.memory.cuda.device import open_device

    return open_device(name)


async def open_local(
    config: CacheConfig, specs: Sequence[PoolSpec], given: EmbedderParts, *, debug: bool = False
) -> LocalWorker:
    """Allocate the pools of ``specs`` and open the stores. ``debug``: fresh and free pages are to be filled with
    poison. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the pools do not fit in memory, or the device or a backend is unknown.
        Unavailable: a store cannot be opened now.
    """
    from asynccache.memory.mover import Mover
    from asynccache.memory.poison import Poison

    device, tiers, own = given.device, TieredStore(), given.device is None
    mover: Mover | None = None

    def allocate() -> Mover:
        nonlocal device, mover
        if device is None:
            device = open_device(config.device)
        mover = Mover(device, specs)
        return mover

    takes_stores = config.pools()[0].host_pages > 0
    try:
        # Pools first: they may be refused, and a store leaves traces. In a thread: a GPU is measured, and to pin
        # 100 GiB takes half a minute.
        made = await completed_in_thread(allocate)
        if given.storage is not None and not takes_stores:
            raise ConfigError("storage: it needs a host tier, and host_tokens is 0")
        pools = PoolMap(specs, config.page_size, made.host_pools)
        layout = store_layout(config.pools())
        poison = Poison(made.device_pools.values(), config.page_size) if debug else None
        worker = LocalWorker(made, pools, tiers, layout, takes_stores=takes_stores, own_device=own, poison=poison)
        if given.storage is None:
            await worker.open_first(list(map(given.locate, config.stores)), config.storage_options)
        else:
            await worker.open_first([given.storage], {})
    except BaseException:
        await completed(close_all(tiers, mover, device, MOMENT, own=own))
        raise
    return worker
