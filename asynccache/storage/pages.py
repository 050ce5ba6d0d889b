"""The stores without a cache, for programs that are not asynchronous: pages of memory go to the stores and come back.

What always holds:
* An unusable argument raises ``ConfigError``, which names it, before anything has changed or begun.
* A store's failure is a result and never an error: every key has a result of its own.
* A call uses the memory only until its future is done. From then on nothing here refers to any of its pages.
* A page is found again only under the namespace, pool and page size that it was stored with.

The only mutable state is in ``StoreThread`` and belongs to its thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

from asynccache import checks
from asynccache.errors import BackendError, ConfigError, Unavailable, forget_frames
from asynccache.storage.checked import RECORD_SCHEMA
from asynccache.storage.contract import Hint, Hintable, PageKey, Result, StorageBackend, StoreLayout, named_key
from asynccache.storage.loop_thread import PendingCall, Rows, StoreThread, StoreVerb

if TYPE_CHECKING:
    from asynccache.storage.loop_thread import Memory

POOL = "pages"
"""The name of the pool if ``memory`` is one buffer and not a mapping of buffers."""

CLOSE_TIMEOUT = 10.0
LETTING_GO = 5.0
"""Seconds that ``close`` waits after its deadline for the stores to let go of the memory."""


class Closed(NamedTuple):
    """The result of ``Pages.close``."""

    abandoned: int
    """Pages of calls that the deadline cut short. Each has the result FAILED unless a store had answered."""
    held: int
    """Pages whose memory a store had not let go of when ``close`` returned. The futures of their calls are not done;
    until they are, the memory must not be used for anything else."""
    over: bool
    """Whether every store is closed and the thread has ended. If it is false, the thread goes on closing by itself, and
    ``close`` can be called again to wait for it."""


NameBlock = Callable[[str, bytes], int | None]
"""Called with a pool and a key; see ``Pages.open``."""


class _StoredPool(NamedTuple):
    rows: Rows
    digest: bytes
    blocks: NameBlock | None


class Pages:
    """Stores of pages, opened by ``Pages.open`` and used from any number of threads.

    Each of ``exists``, ``put``, ``get`` and ``hint`` takes many keys at a time and returns a
    ``concurrent.futures.Future`` at once. Its result is a list with one ``Result`` for each key, in their order: HIT,
    MISS, CORRUPT (the stored page did not verify; it was deleted, and is a MISS from then on) or FAILED (a store could
    not do it, or not in time). A future can be cancelled until its call begins; after that ``cancel()`` returns False
    and changes nothing. Callbacks of a future run in the thread that serves the stores. They should return soon; they
    may begin calls and must not wait for any.

    In a process that was forked from this one an instance has no thread, so each of its calls raises ``Unavailable``.
    """

    def __init__(self, serving: StoreThread, pools: Mapping[str, _StoredPool]) -> None:
        """Not for users: call ``Pages.open``."""
        self._serving = checks.instance("serving", serving, StoreThread)
        self._pools = pools
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Pages({', '.join(self.stores)}: {', '.join(map(repr, (pool.rows for pool in self._pools.values())))})"

    @classmethod
    def open(
        cls, storage: str | StorageBackend | Sequence[str | StorageBackend],
        memory: Memory | Mapping[str, Memory], page_bytes: int | Mapping[str, int],
        namespace: str | bytes, *, options: Mapping[str, str] | None = None, blocks: NameBlock | None = None,
    ) -> Self:  # fmt: skip
        """Open the stores and return when they are ready. If that fails, no store is left open and no thread running.

        Args:
            storage: a URL, or several, the nearest store first. A backend that the caller has made may stand in the
                place of a URL; it is used only in the thread of this instance, and is not closed by it. Its store is
                called after its class, as in ``MemoryBackend``; a second one is ``MemoryBackend-2``.
            memory: where the pages lie: a writable, contiguous buffer (an ``mmap``, a ``bytearray``, a ``memoryview``,
                a NumPy array) of whole pages; or a mapping from each pool's name to its buffer. A page is named by its
                slot: slot 2 of 4096-byte pages is the bytes from 8192 to 12287.
            page_bytes: the bytes of a page; or a mapping from each pool's name to the bytes of its pages.
            namespace: everything that must be equal for a stored page to be the right one and that the keys do not
                say: the model and its weights, dtype, layout, block size, the part of this rank. Any text or bytes.
            options: added to the options in each URL.
            blocks: called with a pool's name and a key; returns the hash that the engine's own KV events give the block
                under this key, from -2**63 to 2**64 - 1, or None. Stores then have that name in their keys, and a host
                process tells routers of the block by it (``asynccache serve --events``). It must return the same for
                the same key always, or pages are not found again.

        Raises:
            ConfigError: an argument, a URL or an option of one is unusable. Calls raise it, too, if ``blocks`` raises,
                or returns anything else.
            Unavailable: a store cannot be opened now.
        """
        try:
            storages, space, more = _storages(storage), _namespace(namespace), _options(options)
            if blocks is not None and not callable(blocks):
                raise ConfigError(f"blocks={checks.shown(blocks)} cannot be called")
            pools = _pools(memory, page_bytes, space, blocks)
            layout = StoreLayout({name: pool.rows.page_bytes for name, pool in pools.items()}, RECORD_SCHEMA)
            serving = StoreThread("asynccache-pages")
            serving.start(storages, layout, more, [pool.rows for pool in pools.values()])
        except BaseException as error:
            forget_frames(error)  # its frames refer to the memory, which a caller who keeps the error could not close
            raise
        return cls(serving, pools)

    # calls

    def exists(
        self, keys: Iterable[bytes], *, pool: str | None = None, timeout: float | None = None
    ) -> Future[list[Result]]:
        """Ask whether the stores have these pages: HIT, MISS, or FAILED where no store can tell.

        ``timeout``: seconds from now, after which the future is done whatever the stores do; keys that no store has
        answered by then are FAILED. ``pool`` need not be named if there is only one.

        Raises:
            ConfigError: an argument is unusable.
            Unavailable: the stores were closed, or this process was forked.
        """
        until = self._until(timeout)
        chosen = self._pool(pool)
        return self._serving.submit(PendingCall("exists", _page_keys(keys, chosen), chosen.rows, (), until))

    def put(
        self, keys: Iterable[bytes], slots: Iterable[SupportsIndex], *, pool: str | None = None,
        timeout: float | None = None,
    ) -> Future[list[Result]]:  # fmt: skip
        """Store the page in ``slots[i]`` under ``keys[i]``: HIT where a later ``get`` may find it. A key that is stored
        already keeps its page. The pages must not change before the future is done.

        ``timeout``: seconds from now, after which the stores are told to give up. The future is done when they have let
        go of the memory, which may be later. A page whose result is FAILED may have been stored all the same. Raises as
        ``exists`` does.
        """
        until = self._until(timeout)
        chosen = self._pool(pool)
        return self._serving.submit(self._page_call("put", keys, slots, chosen, until))

    def get(
        self, keys: Iterable[bytes], slots: Iterable[SupportsIndex], *, pool: str | None = None,
        timeout: float | None = None,
    ) -> Future[list[Result]]:  # fmt: skip
        """Read the page under ``keys[i]`` into ``slots[i]``. No slot may be named twice. HIT means that the slot holds
        the page that was stored; after any other result the slot's content is undefined.

        ``timeout``: as for ``put``; pages that were read by then are HIT. Raises as ``exists`` does.
        """
        until = self._until(timeout)
        chosen = self._pool(pool)
        call = self._page_call("get", keys, slots, chosen, until)
        if len(set(call.slots)) < len(call.slots):
            twice = next(slot for slot in call.slots if call.slots.count(slot) > 1)
            raise ConfigError(f"slots: {twice} is named more than once: each page is read into a slot of its own")
        return self._serving.submit(call)

    def hint(
        self, verb: Hint, keys: Iterable[bytes], seconds: float = 0.0, *, pool: str | None = None,
        timeout: float | None = None,
    ) -> Future[list[Result]]:  # fmt: skip
        """Tell the stores what is known of these pages, those of a conversation in its order. HIT for each page that is
        now as the hint wants it; MISS where it is not, as in stores that take no hints. ``seconds``: for how long, for
        ``Hint.KEEP``. ``timeout`` and errors: as for ``exists``.
        """
        until = self._until(timeout)
        chosen = self._pool(pool)
        verb, seconds = checks.instance("verb", verb, Hint), checks.number("seconds", seconds, 0)
        call = PendingCall("hint", _page_keys(keys, chosen), chosen.rows, (), until, hint=(verb, seconds))
        return self._serving.submit(call)

    # the whole

    def clear(self, *, timeout: float | None = None) -> Future[None]:
        """Delete every page of every store, including pages of other namespaces and pools and those that other
        processes have stored there. Pages that are being put meanwhile may be there afterwards.

        ``timeout``: seconds from now, after which the stores are told to give up. If a store fails, the future's
        exception is ``BackendError`` (``Timeout``, ``Unavailable``), and the others were cleared. Cancelling the future
        may leave any of the stores cleared. So may ``close``; the future's exception is ``Unavailable`` then. Raises as
        ``exists`` does.
        """
        left = None if timeout is None else checks.number("timeout", timeout, above=0)
        self._check_process()
        return self._serving.clear(left)

    @property
    def stores(self) -> tuple[str, ...]:
        """The names of the stores, nearest first; empty after ``close``."""
        return self._serving.tiers.names

    @property
    def hintable(self) -> tuple[str, ...]:
        """The names of the stores that take hints."""
        attached = self._serving.tiers.attached
        return tuple(one.options.name for one in attached if isinstance(one.store.backend, Hintable))

    @property
    def last_errors(self) -> Mapping[str, Exception]:
        """The errors of the stores: for each store's name the error of its last call that failed as a whole (see
        ``CheckedStore.last_error``). Stores without such a call are left out."""
        errors = {one.options.name: one.store.last_error for one in self._serving.tiers.attached}
        return {name: error for name, error in errors.items() if error is not None}

    def stats(self) -> Mapping[str, int | float]:
        """Return the sums of the stores' counters, and three of this instance.

        ``calls_in_flight``: calls that have begun and have not ended. ``late_calls``: calls that reached their
        ``timeout``. ``kept_pages``: pages of calls after which a store went on referring to the memory, against its
        contract, so that the memory cannot be closed. Raises ``Unavailable`` as ``exists`` does.
        """
        self._check_process()
        return self._serving.ask(self._serving.stats)

    def store_stats(self) -> Mapping[str, Mapping[str, int | float]]:
        """Return each store's counters by the store's name, nearest first. Raises ``Unavailable`` as ``exists``
        does."""
        self._check_process()
        return self._serving.ask(self._serving.tiers.store_stats)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> Closed:
        """Refuse new calls, let those under way go on for ``timeout`` seconds, cut short what is left, and close the
        stores.

        Returns as soon as all that is done, and at the latest ``LETTING_GO`` (5) seconds later. A store
        that hangs may use the memory even then; see ``Closed``. It can be called from any thread and any number of
        times; of several calls the one that is over first counts.

        Raises:
            ConfigError: ``timeout`` is no number of seconds, or ``close`` was called in a future's callback.
            BackendError: a store could not be closed cleanly; all of them were closed.
            Unavailable: this process was forked.
        """
        self._check_process()
        timeout = checks.number("timeout", timeout, 0)
        serving = self._serving
        over = serving.close(timeout, LETTING_GO)
        if over and serving.error is not None:
            raise BackendError(f"closing the stores failed: {serving.error!r}")
        return Closed(serving.counts["abandoned_pages"], serving.held(), over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # arguments

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Unavailable(
                f"these Pages were opened in process {self._pid} and do not work in process {os.getpid()}, which was "
                f"forked from it: the thread that serves the stores is not here. Open others after the fork"
            )

    def _until(self, timeout: float | None) -> float | None:
        self._check_process()
        if timeout is None:
            return None
        return time.monotonic() + checks.number("timeout", timeout, above=0)

    def _pool(self, name: str | None) -> _StoredPool:
        if name is None and len(self._pools) == 1:
            return next(iter(self._pools.values()))
        found = self._pools.get(name) if isinstance(name, str) else None
        if found is None:
            raise ConfigError(f"pool={checks.shown(name)}: name one of {', '.join(map(repr, self._pools))}")
        return found

    def _page_call(
        self, verb: StoreVerb, keys: Iterable[bytes], slots: Iterable[SupportsIndex], pool: _StoredPool,
        until: float | None,
    ) -> PendingCall:  # fmt: skip
        page_keys, rows = _page_keys(keys, pool), _slots(slots, pool.rows)
        if len(page_keys) != len(rows):
            raise ConfigError(f"slots: {len(rows)} for {len(page_keys)} keys: give one slot for each key")
        return PendingCall(verb, page_keys, pool.rows, rows, until)


def page_digest(namespace: bytes, pool: str, page_bytes: int) -> bytes:
    """Return a digest of all that must be equal for two instances to exchange pages, except the keys."""
    digest = hashlib.sha256(RECORD_SCHEMA)
    for field in (b"pages without a cache", namespace, pool.encode(), str(page_bytes).encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def _page_keys(keys: Iterable[bytes], pool: _StoredPool) -> list[PageKey]:
    """Return the storage keys of the caller's ``keys``. Each is made of the SHA-256 of the key and the
    pool's digest, so a key may have any length, and equal keys of two pools have different storage keys."""
    keys = keys if isinstance(keys, (list, tuple)) else _listed("keys", keys)
    name, digest, sha256 = pool.rows.pool, pool.digest, hashlib.sha256
    if not set(map(type, keys)) <= {bytes} or not all(keys):
        for at, key in enumerate(keys):
            if not isinstance(key, bytes) or not key:
                raise ConfigError(f"keys[{at}]={checks.shown(key)}: a key is one or more bytes")
    return [PageKey(name, named_key(sha256(key + digest).digest(), _block(pool, key))) for key in keys]


def _block(pool: _StoredPool, key: bytes) -> int | None:
    if pool.blocks is None:
        return None
    try:
        block = pool.blocks(pool.rows.pool, key)
    except Exception as error:
        raise ConfigError(f"blocks: it raises for the key {checks.shown(key)}: {error!r}") from error
    if block is not None and (type(block) is not int or not -1 << 63 <= block < 1 << 64):
        raise ConfigError(f"blocks: {checks.shown(block)} for the key {checks.shown(key)} is no hash of 64 bits")
    return block


def _slots(slots: Iterable[SupportsIndex], rows: Rows) -> list[int]:
    try:
        given = _listed("slots", slots)  # a copy: the caller may change its own
        found = given if set(map(type, given)) <= {int} else [checks.integer("slots", slot) for slot in given]
    except ConfigError as error:
        raise ConfigError(f"slots={checks.shown(slots)}: give a whole number for each key") from error
    if found and not 0 <= min(found) <= max(found) < rows.count:
        bad = next(slot for slot in found if not 0 <= slot < rows.count)
        raise ConfigError(f"slots: {bad} is none of pool {rows.pool!r}, which has the slots 0 to {rows.count - 1}")
    return found


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except Exception as error:  # the caller's object may raise anything while it is iterated
        raise ConfigError(f"{name}={checks.shown(values)}: give a sequence, with one for each page") from error


def _storages(storage: Any) -> list[str | StorageBackend]:
    storages = list(storage) if isinstance(storage, (list, tuple)) else [storage]
    if not storages:
        raise ConfigError("storage: no store is named; give a URL, as in file:/var/kv?capacity=10GiB")
    for one in storages:
        if isinstance(one, str):
            continue
        try:
            checks.provider("storage", one, StorageBackend)  # type: ignore[type-abstract]
        except ConfigError as error:
            raise ConfigError(
                f"storage={checks.shown(one)}: give a URL, as in file:/var/kv?capacity=10GiB"
            ) from error
    return storages


def _options(options: Any) -> dict[str, str]:
    given = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ConfigError(f"options={checks.shown(options)}: give names and texts, as in {{'timeout': '2.5'}}")
    return dict(given)


def _namespace(namespace: Any) -> bytes:
    data = checks.text("namespace", namespace).encode() if isinstance(namespace, str) else namespace
    if not isinstance(data, bytes) or not data:
        raise ConfigError(
            f"namespace={checks.shown(namespace)}: give text or bytes that name the model, its weights, the layout and "
            f"all else that must match"
        )
    return data


def _pools(memory: Any, page_bytes: Any, namespace: bytes, blocks: NameBlock | None) -> dict[str, _StoredPool]:
    buffers = dict(memory) if isinstance(memory, Mapping) else {POOL: memory}
    if not buffers:
        raise ConfigError("memory: no pool is named; give a buffer, or a buffer for each pool")
    sizes = dict(page_bytes) if isinstance(page_bytes, Mapping) else dict.fromkeys(buffers, page_bytes)
    if sizes.keys() != buffers.keys():
        raise ConfigError(f"page_bytes names the pools {list(sizes)}, and memory {list(buffers)}: name both alike")
    pools = {}
    for name, buffer in buffers.items():
        if not isinstance(name, str) or not name or name.startswith("#"):
            called = checks.shown(name)
            raise ConfigError(f"memory: a pool cannot be called {called}: give it a name that does not begin with '#'")
        checks.text("memory: the name of a pool", name)
        try:
            size = checks.integer("page_bytes", sizes[name], 1)
        except ConfigError as error:
            raise ConfigError(
                f"page_bytes={checks.shown(sizes[name])} of pool {name!r} must be a whole number of bytes, 1 or more"
            ) from error
        pools[name] = _StoredPool(Rows(name, buffer, size), page_digest(namespace, name, size), blocks)
    return pools
