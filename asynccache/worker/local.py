"""The worker that has this process's pools and stores: every call is a plain call, and nothing is sent. A cache without
``workers`` uses it directly. In a group each rank has one, behind a ``Performer``.

Laws:
* Opening is all or nothing: if it fails or is cancelled, no device, no pool and no store stays behind.
* Closing goes in the reverse order: stores, then copies that are under way, then the device, if the worker opened it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from asynccache.config import CacheConfig, PoolSpec
from asynccache.errors import ConfigError, CopyFailed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import Event, parse_device
from asynccache.memory.pools import Mover
from asynccache.settle import completed, completed_in_thread
from asynccache.storage.checked import store_layout
from asynccache.storage.tiers import TieredStore
from asynccache.worker.contract import MOMENT, CopyKind, EmbedderParts, Reports, Work
from asynccache.worker.pool_layout import PoolMap
from asynccache.worker.stages import BackupHostStage, LoadBackStage, ReadingStage, WritingStage
from asynccache.worker.stores import OpenStores

if TYPE_CHECKING:
    from asynccache.memory.device import Device, Event
    from asynccache.memory.pools import DevicePool
    from asynccache.worker.stages import Copying
    from asynccache.worker.stats import StageMeter

DELETE_PAGES = 32


async def open_local(config: CacheConfig, pools: Sequence[PoolSpec], given: EmbedderParts) -> LocalWorker:
    """Allocate ``pools`` and open the stores. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the pools do not fit in memory, or the device or a backend is unknown.
        Unavailable: a store cannot be opened now.
    """
    opened = _OpenParts(given.device)

    def allocate() -> None:
        if opened.device is None:
            opened.device = open_device(config.device)
        opened.mover = Mover(opened.device, pools)

    takes_stores = config.pools()[0].host_pages > 0
    try:
        # Pools first: they may be refused, and a store leaves traces. In a thread: a GPU is measured, and to pin
        # 100 GiB takes half a minute.
        await completed_in_thread(allocate)
        if given.storage is not None and not takes_stores:
            raise ConfigError("storage: it needs a host tier, and host_tokens is 0")
        device, mover, tiers = opened.device, opened.mover, opened.tiers
        assert device is not None
        assert mover is not None
        stores = OpenStores(tiers, store_layout(config.pools()), mover.host_pools)
        await stores.open_first(given.stores(config), given.options(config))
    except BaseException:
        await completed(close_all(opened.tiers, opened.mover, opened.device, MOMENT, own=given.device is None))
        raise
    of_worker = PoolMap(pools, config.page_size, mover.host_pools)
    return LocalWorker(device, mover, of_worker, stores, takes_stores=takes_stores, own_device=given.device is None)


class _OpenParts:
    """The parts of a worker that are open by now. If the opening fails, these are closed."""

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self.mover: Mover | None = None
        self.tiers = TieredStore()


def open_device(name: str) -> Device:
    """Open the device that a configuration names."""
    if parse_device(name).kind == "cpu":
        return CpuDevice()
    from asynccache.memory.cuda.device import open_device

    return open_device(name)


async def close_all(
    tiers: TieredStore, mover: Mover | None, device: Device | None, patience: float, *, own: bool
) -> None:
    """Close the stores, the pools and, if the worker has opened it (``own``), the device. A device that the worker has
    opened waits for its copies as long as they take. On the embedder's device they are waited for ``patience``
    seconds. If it is cancelled while a store still has calls, pools and device stay as they are, for the store may use
    them. Raises ``BackendError``: a store could not close cleanly; all the rest is closed."""
    try:
        await tiers.aclose()
    except asyncio.CancelledError:
        raise
    except BaseException:
        await _close_memory(mover, device, patience, own=own)
        raise
    await _close_memory(mover, device, patience, own=own)


async def _close_memory(mover: Mover | None, device: Device | None, patience: float, *, own: bool) -> None:
    try:
        if mover is not None and not own:
            await mover.drain(patience)
    finally:
        if mover is not None:
            mover.close()
        if device is not None and own:
            await device.aclose()


SWEEP = 64
"""A sweep forgets the batches that are over. The next sweep is made once there are ``2 * kept + SWEEP``, where ``kept``
is how many the last sweep has kept."""


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
        """See ``BatchInFlight``."""
        try:
            await self.event.wait()
        except CopyFailed:
            return

    settled = wait

    @property
    def failed(self) -> bool:
        """See ``BatchInFlight``."""
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
            self._sweep()
        self._last += 1
        batch = self._batches[self._last] = self._by_event[id(event)] = LocalBatch(self._last, event)
        return batch

    def events(self, numbers: Sequence[int]) -> list[Event]:
        """Return the events of those batches that are not over."""
        batches = (self._batches.get(number) for number in numbers)
        return [batch.event for batch in batches if batch is not None and not batch.done()]

    def _sweep(self) -> None:
        self._batches = {number: batch for number, batch in self._batches.items() if not batch.done()}
        self._by_event = {id(batch.event): batch for batch in self._batches.values()}
        self._sweep_at = 2 * len(self._batches) + SWEEP


class LocalWorker:
    """The ``Worker`` of this process. ``mover``: the pools and streams. ``put``: for each kind of work, the
    function that queues it at its stage, with the events that it waits for on the device; set by ``start``."""

    put: Mapping[CopyKind, Callable[[Work, Sequence[Event]], None]]

    def __init__(
        self, device: Device, mover: Mover, pools: PoolMap, stores: OpenStores, *, takes_stores: bool, own_device: bool
    ) -> None:  # fmt: skip
        self.mover = mover
        self.layers = mover.layers
        self.takes_stores = takes_stores
        self._device = device
        self._own_device = own_device
        self._map = pools
        self.stores = stores
        self._tiers = stores.tiers
        self._batches = LocalBatches()
        self._writing = WritingStage(stores.tiers, pools)
        self._reading = ReadingStage(stores.tiers, pools)
        self.store = self._writing.store
        self.give_up = self._writing.give_up
        self.ask = self._reading.ask
        self.read = self._reading.read
        self.clear = stores.tiers.clear
        self.flush = stores.tiers.flush

    def __repr__(self) -> str:
        return f"LocalWorker({self.mover!r}, {self.stores!r})"

    @property
    def has_stores(self) -> bool:
        """See ``Worker``."""
        return self.stores.used

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """See ``Worker``."""
        post, size_of, clock = reports.ended, self._map.size_of, time.perf_counter  # uvloop's clock counts milliseconds
        self.stores.tell = reports.keys
        self.backup_host = BackupHostStage(self.mover, post, size_of, clock)
        self.load_back = LoadBackStage(self.mover, post, size_of, clock, reports.failed)
        self.put = {
            CopyKind.BACKUP: self.backup_host.put, CopyKind.LOAD: self.load_back.put,
            CopyKind.CLONE: self.load_back.put,
        }  # fmt: skip
        return [
            ("backup-host", self.backup_host.run()),
            ("load-back", self.load_back.run()),
            ("clones", self.load_back.run_clones()),
        ]

    def close_by(self, seconds: float) -> None:
        """See ``Worker``. Does nothing: the cache itself leaves a worker of its own process behind."""

    async def aclose(self, patience: float) -> None:
        """Close stores, pools and the device. ``patience``: how many seconds to wait for copies on a device that
        outlives this worker. Cancelling it may leave some of it open.

        Raises:
            BackendError: a store could not close cleanly; all the rest is closed.
        """
        await close_all(self._tiers, self.mover, self._device, patience, own=self._own_device)

    # the engine's work, and copies beside it

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools by name."""
        return self.mover.device_pools

    def engine_event(self, event: object) -> Event:
        """See ``Worker``."""
        return self.mover.engine_event(event)

    def batch(self, event: object) -> LocalBatch:
        """See ``Worker``."""
        return self._batches.of(cast("Event", event))

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """See ``Worker``."""
        raise ConfigError("send_batch: a cache without workers= has one worker, in this process: name events instead")

    async def batch_ended(self, number: int) -> None:
        """See ``Worker``."""
        raise ConfigError("batch_ended: a cache without workers= has one worker, in this process: wait for its events")

    def perform(self, plan: Sequence[Work]) -> None:
        """See ``Worker``."""
        for work in plan:
            self.put[work.kind](work, self._batches.events(work.after) if work.after else ())

    async def layer(self, op: int, i: int) -> None:
        """See ``Worker``."""
        copying = self.load_back.copying(op)
        if copying is not None:
            await copying.layer(i).wait()

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """See ``Worker``."""
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

    # pages and stores; see ``Worker``

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """See ``Worker``."""
        for at in range(0, len(hashes), DELETE_PAGES):
            pages = hashes[at : at + DELETE_PAGES]
            await self._tiers.delete([self._map.key(pool, page) for page in pages for pool, _ in self._map.named()])
            await asyncio.sleep(0)

    def is_away(self, page_hash: bytes) -> bool:
        """See ``Worker``."""
        lead = self._map.lead
        return bool(lead) and self._tiers.is_away(self._map.key(lead[-1].name, page_hash))

    @property
    def shut(self) -> bool:
        """See ``Worker``."""
        return self._tiers.shut

    @property
    def busy(self) -> Sequence[str]:
        """See ``Worker``."""
        return self._tiers.busy

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """See ``Worker``."""
        return self._map.key_of

    @property
    def digest(self) -> bytes:
        """See ``PoolMap.digest``."""
        return self._map.digest

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """See ``Worker``."""
        return {"backup_host": self.backup_host.meter, "load_back": self.load_back.meter}

    def queues(self) -> Mapping[str, int]:
        """See ``Worker``."""
        return {"backup_host": len(self.backup_host), "load_back": len(self.load_back)}

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """See ``Worker``."""
        return self._tiers.stats(), self._tiers.store_stats()
