"""What passes between a cache's head and its worker: values of integers and bytes, and the calls that carry them.

Laws:
* Work is handed over in the order in which the core decided it, with no await in between; each operation in it gets
  exactly one outcome, when every buffer of it is let go.
* Pages are named by pool, prefix hash and slot. A worker adds what only it knows: bytes, its own part of every page,
  storage keys.
* A batch of the engine's work is a number here. What it stands for, an event, stays with the worker.
* What fails while pages are asked for or read is an answer (``Result``) and no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asynccache import checks
from asynccache.core.plan import BackupStorage, Copy, Outcome
from asynccache.memory.device import Device
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import Result, StorageBackend
from asynccache.storage.options import StoreOptions
from asynccache.worker.stats import Meter

if TYPE_CHECKING:
    from asynccache.memory.pools import DevicePool as DevicePool

Storage = str | StorageBackend | CheckedStore
"""What can be a store: a URL, or what somebody else has made and closes."""


class Work(NamedTuple):
    """An effect of the core. ``after``: the batches, by number, that the device must see the end of first."""

    effect: Copy
    after: tuple[int, ...] = ()


class Asked(NamedTuple):
    """A question: which pages of ``pool``, 32 bytes of hash each, do the stores have?"""

    pool: str
    hashes: bytes


class Read(NamedTuple):
    """Pages of ``pool`` that the stores are to fill the host's ``slots`` (int32) with."""

    pool: str
    hashes: bytes
    slots: bytes


class Stored(NamedTuple):
    """What came of a batch of backups. ``failed``: the operations of which a page was not stored. ``pages``,
    ``full_pages``, ``bytes``: what was, in all pools; of FULL's own; and its size."""

    failed: frozenset[int]
    pages: int
    full_pages: int
    bytes: int


class StoreEntry(NamedTuple):
    """A store that is open. ``number``: what it is called between head and worker, never used again."""

    number: int
    options: StoreOptions


class Reports(NamedTuple):
    """Where a worker reports. ``ended``: an operation of its work has let go. ``failed``: it cannot go on, and with it
    the cache. ``keys``: a store that is watched has these storage keys from now on, or has them no more."""

    ended: Callable[[Outcome], None]
    failed: Callable[[BaseException], None]
    keys: Callable[[int, bool, Sequence[bytes]], None]


class Batch(Protocol):
    """A piece of the engine's work, from the moment that the head knows of it."""

    number: int

    def done(self) -> bool:
        """Whether it is over, well or not. Never blocks."""
        ...

    async def wait(self) -> None:
        """Return when it is over, well or not. Cancelling it stops the waiting."""
        ...


class Worker(Protocol):
    """Performs what the head decides: one worker, or several as one. Belongs to the head's loop, but for
    ``engine_event``. An event that an engine names is one of the device, or, with several workers, a batch's number."""

    @property
    def layers(self) -> int:
        """How many the model has."""
        ...

    @property
    def has_stores(self) -> bool:
        """Whether any store is used. It is asked for every lease."""
        ...

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Take work from now on. Returns what its tasks are to run, by name, until they are cancelled."""
        ...

    def close_by(self, seconds: float) -> None:
        """The cache is closing, and saving what is unsaved may take so many seconds. A worker of another process that
        has not answered some seconds later is given up. It may be called again; the earliest end counts."""
        ...

    async def aclose(self, patience: float) -> None:
        """Close stores, pools and devices. ``patience``: seconds that copies on a device that outlives the cache are
        waited for. Cancelling it may leave some of it open.

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
        """``event``, which an engine names, as something that ``batch`` takes. From any thread.

        Raises:
            ConfigError: copies cannot wait for it.
        """
        ...

    def batch(self, event: object) -> Batch:
        """The batch that ``event``, from ``engine_event``, is the end of; the same one as long as it is not over."""
        ...

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """Tell every worker of a batch of the engine's work that needs ``loads``; its number. Raises ``ConfigError``:
        the only worker is in this process, where batches are events."""
        ...

    async def batch_ended(self, number: int) -> None:
        """Return when it is over everywhere. Cancelling it stops the waiting.

        Raises:
            BatchFailed: an engine could not run it.
            CacheClosed: the cache was closed before it was over.
        """
        ...

    def perform(self, plan: Sequence[Work]) -> None:
        """Begin all of it, which one plan of the core has; ``Reports.ended`` hears of the end of each."""
        ...

    async def layer(self, op: int, i: int) -> None:
        """Return when layer ``i`` of the load ``op`` is on the device, or the load has ended. Cancelling it stops the
        waiting.

        Raises:
            CopyFailed: it failed.
        """
        ...

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of these loads is there.

        Raises:
            ConfigError: ``stream`` is no stream.
        """
        ...

    # pages and stores

    async def store(self, batch: Sequence[BackupStorage]) -> Stored:
        """Write these host pages to the stores. Cancelling it returns after the stores have let go of them."""
        ...

    def give_up(self, op: int) -> None:
        """Write no more of the batch that begins with ``op`` than what is under way."""
        ...

    async def ask(self, asked: Sequence[Asked]) -> list[bytes]:
        """For each question a ``Result`` a page, as bytes. Cancelling it changes nothing."""
        ...

    async def read(self, reads: Sequence[Read], *, run: bool) -> list[bytes]:
        """For each of ``reads`` a ``Result`` a page, as bytes. ``run``: they are the same pages of several pools,
        wanted up to the first one that is missing in any of them; what is beyond that is left out.

        Cancelling it returns after the stores have let go of the host's pages.
        """
        ...

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """Forget these pages of every pool. Cancelling it may leave some of them."""
        ...

    async def clear(self) -> None:
        """Forget everything that is stored. Raises ``BackendError``: a store could not."""
        ...

    async def flush(self) -> None:
        """Return when what is stored would survive a power loss. Raises ``BackendError``: a store could not."""
        ...

    def is_away(self, page_hash: bytes) -> bool:
        """Whether all stores refuse calls now. Probes of them may be begun, with the key of this page."""
        ...

    @property
    def shut(self) -> bool:
        """The same, and nothing is begun. Not so without a store."""
        ...

    # which stores there are

    @property
    def takes_stores(self) -> bool:
        """Whether there is a host tier, which stores need."""
        ...

    @property
    def stores(self) -> tuple[StoreEntry, ...]:
        """Those that are used, nearest first."""
        ...

    def find_store(self, name: str | None) -> StoreEntry:
        """The one of this name; None: the only one. Raises ``ConfigError``: there is none of this name, or several and
        no name was given."""
        ...

    async def open_store(self, storage: Storage, options: Mapping[str, str], position: int | None) -> StoreEntry:
        """Open one, for ``use_store`` or ``drop_store``. Cancelling it leaves nothing open.

        Raises:
            ConfigError: it cannot be attached there, the URL is wrong, or it is a store for other pools.
            Unavailable: it cannot be opened now.
        """
        ...

    def use_store(self, number: int, position: int | None) -> None:
        """From now on it is asked, at ``position`` (0: the nearest; None: the farthest). Raises ``ConfigError`` if its
        name or place was taken meanwhile."""
        ...

    async def drop_store(self, number: int) -> None:
        """Close one that was opened and is not used."""
        ...

    def leave_store(self, number: int) -> None:
        """From now on it is asked nothing more. ``close_store`` must follow. Twice is once."""
        ...

    async def close_store(self, number: int) -> None:
        """Close one that was left, when nobody is inside any more. Raises ``BackendError``: it could not close
        cleanly."""
        ...

    def watch_store(self, number: int) -> None:
        """From now on ``Reports.keys`` hears what it holds."""
        ...

    def unwatch_store(self, number: int) -> None:
        """It is watched no more. Twice is once."""
        ...

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """Where the last part of a page's FULL data is stored, from its hash; None if FULL has no stored object."""
        ...

    # looking at it

    def meters(self) -> Mapping[str, Meter]:
        """What the copies between device and host have done, by stage."""
        ...

    def queues(self) -> Mapping[str, int]:
        """How much work waits, by stage."""
        ...

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """What the stores count, in sum; and each of them by its name, nearest first."""
        ...


def check_storage(name: str, storage: object) -> None:
    """Raises ``ConfigError`` if ``storage``, which an argument called ``name`` gave, is nothing that can be a store."""
    if isinstance(storage, str):
        checks.text(name, storage)
    elif not isinstance(storage, CheckedStore):
        checks.provider(name, storage, StorageBackend)  # type: ignore[type-abstract]


def check_device(name: str, device: object) -> None:
    """Raises ``ConfigError`` if ``device``, which an argument called ``name`` gave, is none."""
    checks.provider(name, device, Device)  # type: ignore[type-abstract]


__all__ = [
    "Asked", "Batch", "Device", "Read", "Reports", "Result", "Storage", "StoreEntry", "StoreOptions", "Stored", "Work",
    "Worker", "check_device", "check_storage",
]  # fmt: skip
