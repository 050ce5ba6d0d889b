"""The contract between a cache's head and its worker: values of integers and bytes, and the calls that carry them.

Laws:
* Work is handed over in the order in which the core decided it, with no await in between; each operation in it gets
  exactly one outcome, when every buffer of it is let go.
* Pages are named by pool, prefix hash and slot. A worker adds what only it knows: bytes, its own part of every page,
  storage keys.
* A batch of the engine's work is a number here. The event that the number stands for stays with the worker.
* A failure to look up or read a page is an answer (``Result``), and not an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.plan import BackupStorage, Status
from asynccache.memory.device import Device
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import Result, StorageBackend
from asynccache.storage.url import StoreOptions
from asynccache.worker.stats import StageMeter
from asynccache.worker.work import CopyKind, Work

if TYPE_CHECKING:
    from asynccache.memory.pools import DevicePool as DevicePool

Storage = str | StorageBackend | CheckedStore
"""A store as a caller names it: a URL, or a backend that the caller has made and closes."""


class StoreQuestion(NamedTuple):
    """A question: which pages of ``pool`` do the stores have? ``hashes``: 32 bytes for each page, joined."""

    pool: str
    hashes: bytes


class ReadOrder(NamedTuple):
    """An order to read pages of ``pool`` into host slots. For each page ``hashes`` has 32 bytes, and ``slots`` an
    int32."""

    pool: str
    hashes: bytes
    slots: bytes


class StoredBatch(NamedTuple):
    """The outcome of a batch of backups. ``failed``: the operations of which at least one page was not stored.
    ``pages``: how many pages were stored, of all pools; ``bytes``: their size. ``full_pages``: how many of them count
    as pages of FULL (``PoolLayout.counts``)."""

    failed: frozenset[int]
    pages: int
    full_pages: int
    bytes: int


class StoreEntry(NamedTuple):
    """A store that is open. ``number``: what head and worker call it; no later store gets the same number."""

    number: int
    options: StoreOptions


class Reports(NamedTuple):
    """The functions that a worker calls to report to the head. ``ended(status, ops)``: the operations of one ``Work``
    have ended, all with this status, and their buffers are let go. ``failed(error)``: the worker cannot go on, and so
    the cache cannot either. ``keys(store, there, keys)``: the watched store of this number has these storage keys from
    now on or, if ``there`` is False, has them no more."""

    ended: Callable[[Status, Sequence[int]], None]
    failed: Callable[[BaseException], None]
    keys: Callable[[int, bool, Sequence[bytes]], None]


class BatchInFlight(Protocol):
    """A piece of the engine's work, from the moment that the head knows of it. It is *over* when the engine uses no
    page for it any more, whether it ran or failed."""

    number: int

    @property
    def failed(self) -> bool:
        """True once it is known that the batch failed, perhaps on one worker while others are not over yet. Final once
        ``done`` says True."""
        ...

    def done(self) -> bool:
        """Return True once the batch is over. Never blocks."""
        ...

    async def wait(self) -> None:
        """Return when the batch is over. Cancelling it stops the waiting."""
        ...

    async def settled(self) -> None:
        """Return when the batch is over, or has failed. Cancelling it stops the waiting."""
        ...


class WorkerStores(Protocol):
    """The stores of a worker: each is opened, used, left and closed, and may be watched meanwhile."""

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        """The stores that are used, nearest first."""
        ...

    def find(self, name: str | None) -> StoreEntry:
        """Return the store that is called ``name``; with None, the only store. Raises ``ConfigError``: there is no such
        store, or there are several and no name was given."""
        ...

    async def open(self, storage: Storage, options: Mapping[str, str], position: int | None) -> StoreEntry:
        """Open a store, for ``use`` or ``drop``. Cancelling it leaves nothing open.

        Raises:
            ConfigError: the store cannot be attached at ``position``, the URL is wrong, or the store is for other
                pools.
            Unavailable: the store cannot be opened now.
        """
        ...

    def use(self, number: int, position: int | None) -> None:
        """Use an open store from now on, at ``position`` (0: the nearest; None: the farthest). Raises ``ConfigError``:
        its name was taken meanwhile, or there is no such position any more."""
        ...

    async def drop(self, number: int) -> None:
        """Close a store that was opened and is not used."""
        ...

    def leave(self, number: int) -> None:
        """Give the store no more calls from now on. ``close`` must follow. A second call does nothing."""
        ...

    async def close(self, number: int) -> None:
        """Close a store that was left, when no call of it is under way any more. Raises ``BackendError``: the store
        could not close cleanly."""
        ...

    async def watch(self, number: int) -> None:
        """Tell ``Reports.keys`` from now on which keys the store has. Returns when it was told of all that the store
        has by now, which takes a turn of the loop for every few thousand. Cancelling it leaves some of them untold;
        ``unwatch`` must follow."""
        ...

    def unwatch(self, number: int) -> None:
        """Watch the store no more. A second call does nothing."""
        ...


class Worker(Protocol):
    """Performs what the head decides: one worker, or several that act as one. Its calls belong to the thread of the
    head's loop, except ``engine_event``. An event that an engine names is an event of the device or, with several
    workers, the number of a batch."""

    @property
    def layers(self) -> int:
        """The number of the model's layers, up to the last one that the worker has. For several workers: the last one
        that the head's own worker has; without an own worker, the last one that any of them has."""
        ...

    @property
    def has_stores(self) -> bool:
        """True while any store is used. Every lease asks this, so the answer must be cheap."""
        ...

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Take work from now on. Returns names and coroutines: the caller makes a task of each, and cancels it in the
        end."""
        ...

    def close_by(self, seconds: float) -> None:
        """Tell the worker that the cache is closing, and that saving what is unsaved may take ``seconds``. A worker of
        another process that has not answered a few seconds after that is given up. Of several calls, the earliest end
        counts."""
        ...

    async def aclose(self, patience: float) -> None:
        """Close stores, pools and devices. ``patience``: how many seconds to wait for copies on a device that outlives
        the cache. Cancelling it may leave some of it open.

        Raises:
            BackendError: a store could not close cleanly; all the rest is closed.
        """
        ...

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools of this process by name: where the engine reads and writes KV."""
        ...

    # the engine's work, and copies beside it

    def engine_event(self, event: object) -> object:
        """Return ``event``, which an engine names, in the form that ``batch`` takes. From any thread.

        Raises:
            ConfigError: copies cannot wait for ``event``.
        """
        ...

    def batch(self, event: object) -> BatchInFlight:
        """Return the batch that ends with ``event``, which ``engine_event`` returned. As long as the batch is not over,
        the same event gives the same batch."""
        ...

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """Tell every worker of a batch of the engine's work that needs the operations ``loads``. Returns the batch's
        number. Raises ``ConfigError``: the only worker is in this process, where batches are events."""
        ...

    async def batch_ended(self, number: int) -> None:
        """Return when batch ``number`` is over on every worker. Cancelling it stops the waiting.

        Raises:
            BatchFailed: an engine could not run the batch.
            ConfigError: the only worker is in this process, where batches are events.
            RankFailure: a worker is gone.
            CacheClosed: the cache was closed before the batch was over.
        """
        ...

    def perform(self, plan: Sequence[Work]) -> None:
        """Begin all works of one plan of the core. ``Reports.ended`` is called once for each of them."""
        ...

    async def layer(self, op: int, i: int) -> None:
        """Return when layer ``i`` of the load ``op`` is on the device, or the load has ended. Cancelling it stops the
        waiting.

        Raises:
            CopyFailed: the load failed.
        """
        ...

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of these loads is there.

        Raises:
            ConfigError: ``stream`` is no stream.
        """
        ...

    # pages and stores

    async def store(self, batch: Sequence[BackupStorage]) -> StoredBatch:
        """Write the host pages of ``batch`` to the stores, and return what was stored. Cancelling it returns after the
        stores have let go of the pages."""
        ...

    def give_up(self, op: int) -> None:
        """Write nothing more of the batch that begins with operation ``op``, after what is under way."""
        ...

    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """Ask the stores which pages they have. Returns bytes for each question: a ``Result`` for each page. Cancelling
        it changes nothing."""
        ...

    async def read(self, reads: Sequence[ReadOrder], *, run: bool) -> list[bytes]:
        """Read pages from the stores. Returns bytes for each of ``reads``: a ``Result`` for each page.

        ``run``: ``reads`` name the same pages in several pools, and the pages are wanted up to the first one that is
        missing in any pool. If a pool lacks a page, this page and those behind it are not read from the later pools,
        which have no results for them. Cancelling it returns after the stores have let go of the host's pages.
        """
        ...

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """Delete these pages of every pool from the stores. Cancelling it may leave some of them."""
        ...

    async def clear(self) -> None:
        """Delete everything that is stored. Raises ``BackendError``: a store could not."""
        ...

    async def flush(self) -> None:
        """Return when what is stored would survive a power loss. Raises ``BackendError``: a store could not."""
        ...

    def is_away(self, page_hash: bytes) -> bool:
        """Return True if there are stores and all of them refuse calls now; of several workers, if this is so on any of
        them. Stores may be probed with the key of this page."""
        ...

    @property
    def shut(self) -> bool:
        """True under the same condition as ``is_away``. Reading it probes no store."""
        ...

    @property
    def busy(self) -> Sequence[str]:
        """The names of the stores that have calls under way, as far as the worker is in this process."""
        ...

    @property
    def takes_stores(self) -> bool:
        """True if there is a host tier, which stores need."""
        ...

    @property
    def stores(self) -> WorkerStores:
        """The stores of this worker."""
        ...

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """A function from a page's hash to the storage key of the last part of its FULL data; None if FULL has no
        stored object."""
        ...

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """The counters of the copies between device and host, by stage."""
        ...

    def queues(self) -> Mapping[str, int]:
        """The number of operations that wait, by stage."""
        ...

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """The stores' counters: first their sums, in which ``breaker`` is the best state of any store; then those of
        each store by its name, nearest first. Of several workers, ``breaker`` is the worst worker's."""
        ...


def check_storage(name: str, storage: object) -> None:
    """Raise ``ConfigError`` if ``storage``, the value of the argument ``name``, cannot be a store."""
    if isinstance(storage, str):
        checks.text(name, storage)
    elif not isinstance(storage, CheckedStore):
        checks.provider(name, storage, StorageBackend)  # type: ignore[type-abstract]


def check_device(name: str, device: object) -> None:
    """Raise ``ConfigError`` if ``device``, the value of the argument ``name``, is no device."""
    checks.provider(name, device, Device)  # type: ignore[type-abstract]


__all__ = [
    "BatchInFlight", "CopyKind", "Device", "ReadOrder", "Reports", "Result", "Storage", "StoreEntry", "StoreOptions",
    "StoreQuestion", "StoredBatch", "Work", "Worker", "WorkerStores", "check_device", "check_storage",
]  # fmt: skip


MOMENT = 1.0
"""Seconds that a closing cache waits for copies on the embedder's device, at least, whatever the deadline."""
LATE = 3.0
"""Seconds beyond its deadline that a closing cache still waits for its worker, or for the workers of all ranks."""


class EmbedderParts:
    """The embedder's ``device`` and ``storage``; None: what the configuration names is used. The embedder closes what
    the embedder made. ``locate``: returns what to open for a store's URL; by default the URL itself."""

    def __init__(
        self, device: Device | None = None, storage: Storage | None = None,
        locate: Callable[[str], Storage] = lambda url: url,
    ) -> None:  # fmt: skip
        self.device = device
        self.storage = storage
        self.locate = locate

    def stores(self, config: CacheConfig) -> tuple[Storage, ...]:
        """Return the stores to open when the cache opens."""
        return tuple(map(self.locate, config.stores)) if self.storage is None else (self.storage,)

    def options(self, config: CacheConfig) -> Mapping[str, str]:
        """Return the options that are added to the URL of each of ``stores``."""
        return config.storage_options if self.storage is None else {}
