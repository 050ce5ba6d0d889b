"""``AsyncCache``, the public face of a cache. It checks arguments, forwards calls and closes the cache; other modules
decide what happens.

One cache belongs to one event loop and its thread. From any other thread its requests raise ``RuntimeError``. Calls
that are awaited take their tokens when they are made, not when they are awaited.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache import checks
from asynccache.config import POOL_NAME, CacheConfig, wasted
from asynccache.core.cache import CacheCore, Match, ShelfStatistics, Statistics, Unsaved
from asynccache.core.eviction import Learned
from asynccache.errors import CacheClosed, ConfigError
from asynccache.runtime.announcer import StartSpan, no_span
from asynccache.runtime.core_calls import holding
from asynccache.runtime.explain import Explained, explain
from asynccache.runtime.forget import forget, forget_all
from asynccache.runtime.head import LOG, CloseReport, Head, OnEvent, SavingLimit
from asynccache.runtime.kept import Kept, keep
from asynccache.runtime.lease import Lease, ask_for
from asynccache.runtime.lookups import LookupStats
from asynccache.runtime.prefetch import PrefetchHandle
from asynccache.runtime.sanitizer import SLOW
from asynccache.runtime.save import drain
from asynccache.runtime.tokens import Tokens, as_key
from asynccache.settle import completed
from asynccache.worker.local import (
    LATE,
    MOMENT,
    BreakerState,
    Device,
    EmbedderParts,
    Storage,
    StoreOptions,
    check_device,
    check_storage,
    import_torch,
    open_local,
)
from asynccache.worker.ranks import Workers
from asynccache.worker.stages import Histogram, StageStats

if TYPE_CHECKING:
    from asynccache.worker.local import BlockTable, DevicePool, LocalWorker
    from asynccache.worker.rank_server import RankWorker

Namespace = str | bytes | None

MOST_PAYLOAD = 8 << 20
"""The most bytes that a batch's payload may have."""
_CLOSED_EARLY = "the cache was closed while it was being opened"


class CacheStatistics(NamedTuple):
    """The counters of a cache at one moment."""

    device: Mapping[str, ShelfStatistics]
    host: Mapping[str, ShelfStatistics]
    """Slots by component name, as in ``device``."""
    stages: Mapping[str, StageStats]
    """What each transfer stage did."""
    prefetches: Mapping[str, int]
    """How many prefetches ended in each way."""
    leases: int
    """How many leases are held, kept prefixes among them."""
    waiting: int
    """How many leases are in line."""
    kept_tokens: int
    """How many tokens ``keep`` pins."""
    tasks: int
    """How many tasks the cache runs."""
    storage: Mapping[str, int | float]
    """The sums of the stores' counters."""
    stores: Mapping[str, Mapping[str, int | float]]
    """The counters of each store by its name, nearest first."""
    core: Statistics
    """The core's own counters."""
    lookups: LookupStats
    """What leases found and missed."""
    queues: Mapping[str, int]
    """How much waits in each queue."""
    histograms: Mapping[str, Histogram]
    """Latencies by stage."""
    dropped_backups: int
    """Operations to storage that gave way to later ones."""

    def __str__(self) -> str:
        """The most looked-at figures, as a table of at most 80 columns."""
        found, wanted = self.lookups.hits, self.lookups.tokens or 1
        shares = ", ".join(f"{name} {tokens / wanted:.1%}" for name, tokens in found.items())
        rows = [f"requests {self.lookups.requests:,}, tokens {self.lookups.tokens:,}: {self.lookups.hit_ratio:.1%} "
                f"cached ({shares})",
                f"no cache of any size would have had more than about {self.lookups.ceiling:.1%}",
                f"leases {self.leases:,}, waiting {self.waiting:,}, kept tokens {self.kept_tokens:,}", "",
                f"{'slots used':<16}{'device':>22}{'host':>22}"]
        for name, device in self.device.items():
            tiers = (one for one in (device, self.host.get(name)) if one is not None and one.capacity)
            used = (f"{one.capacity - one.free:,} of {one.capacity:,}" for one in tiers)
            rows.append(f"{name:<16}" + "".join(f"{text:>22}" for text in used))
        rows += ["", f"{'stage':<16}{'operations':>12}{'pages':>12}{'MiB':>12}{'errors':>8}"]
        rows += [f"{name:<16}{one.ops:>12,}{one.pages:>12,}{one.bytes / (1 << 20):>12,.1f}{one.errors:>8,}"
                 for name, one in self.stages.items()]
        if self.stores:
            rows += ["", f"{'store':<16}{'pages':>12}{'breaker':>12}{'failed calls':>14}"]
            for name, one in self.stores.items():
                breaker = BreakerState(int(one.get("breaker", 0))).name.lower().replace("_", " ")
                rows.append(f"{name:<16}{one.get('pages', '-'):>12}{breaker:>12}{one.get('failed_calls', 0):>14,}")
        return "\n".join(rows)


class AsyncCache:
    """A hierarchical KV cache over device, host memory and storage.

    ``device`` and ``storage`` replace what the configuration names; the caller closes what the caller made.
    ``workers``: the workers of an engine of several ranks, from ``asynccache.worker.listen``. Then every page has a
    part on each rank, events are the numbers of batches (``send_batch``), stores are URLs, and ``device`` is for the
    head's own rank. ``on_event`` is called in the loop with everything that ``asynccache.events`` publishes, in order;
    it must be quick.

    ``span``: starts a span of tracing, as OpenTelemetry's ``tracer.start_as_current_span`` does: called with a name and
    ``attributes=``, it returns a context manager. There is a span for each lease that is not granted at once
    (``asynccache.lease``), each wait for a lease's loads (``asynccache.load``), each prefetch (``asynccache.prefetch``)
    and each call that writes to stores (``asynccache.backup_storage``). Spans of a request's own calls are children of
    the span in which they are made. ``span`` must not raise.

    ``debug``: True to look for a program's mistakes in the bytes of its pages, which is slow; they raise
    ``WrongPages``. None: as the environment variable ``ASYNCCACHE_DEBUG`` says, 1 or 0.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        device: Device | None = None,
        storage: Storage | None = None,
        workers: Workers | None = None,
        on_event: OnEvent | None = None,
        span: StartSpan | None = None,
        debug: bool | None = None,
    ) -> None:
        self.config = checks.instance("config", config, CacheConfig)
        if device is not None:
            check_device("device", device)
        if storage is not None:
            check_storage("storage", storage)
        if on_event is not None:
            checks.function("on_event", on_event)
        if span is not None:
            checks.function("span", span)
        if workers is not None:
            checks.instance("workers", workers, Workers)
        variable = os.environ.get("ASYNCCACHE_DEBUG", "0") not in ("", "0")
        self._debug = variable if debug is None else checks.flag("debug", debug)
        self._workers = workers
        if workers is None or workers.own is not None:
            import_torch()  # not before there is a cache
        locate = () if workers is None else (workers.locate,)
        self._given = EmbedderParts(device, storage, *locate)
        self._on_event = on_event
        self._span = no_span if span is None else span
        self._worker: LocalWorker | None = None
        self._head: Head | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closer: asyncio.Task[CloseReport] | None = None
        self._limit: SavingLimit

    def __repr__(self) -> str:
        if self._head is None:
            return f"AsyncCache({self.config.model!r}, not open)"
        return f"AsyncCache({self.config.model!r}, {len(self._head.holders)} leases; {'; '.join(self.config.rooms)})"

    # opening and closing

    async def __aenter__(self) -> AsyncCache:
        """Allocate the pools, open the stores and start the cache's tasks. With ``workers``, wait for all of them, and
        open everything on all of them or on none. Cancelling it leaves nothing open.

        Raises:
            ConfigError: the pools do not fit in memory, or the device or a backend is unknown; on any rank.
            Unavailable: a store cannot be opened now; on any rank.
            RankFailure: a rank has not come, is gone or silent, or could not open for another reason.
            CacheClosed: another task called ``aclose`` meanwhile.
        """
        if self._head is not None or self._opening is not None:
            raise RuntimeError("a cache is opened once")
        opener = asyncio.current_task()
        assert opener is not None
        before = opener.cancelling()
        self._opening = opener.get_loop().create_task(self._open_or_leave_nothing(), name="asynccache-open")
        try:
            await self._opening  # a cancellation of this task cancels the opening, and is raised when that has ended
        except asyncio.CancelledError as error:
            if self._head is not None:  # cancelled after the opening had ended well, before this task went on
                await completed(self.aclose(0.0))
                self._head = self._worker = self._closer = None
            if opener.cancelling() > before:
                raise
            raise CacheClosed(_CLOSED_EARLY) from error
        finally:
            self._opening = None
        if self._closer is not None:  # another task has called aclose since the opening ended
            await self.aclose()
            raise CacheClosed(_CLOSED_EARLY)
        return self

    async def _open_or_leave_nothing(self) -> None:
        try:
            await self._open()
        except BaseException:
            await completed(self._abandon())
            raise

    async def _abandon(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            await head.abandon()
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.aclose(MOMENT)

    async def _open(self) -> None:
        worker: LocalWorker
        if self._workers is None:
            worker = await open_local(self.config, self.config.pools(), self._given, debug=self._debug)
        else:
            from asynccache.worker.group import open_group

            worker = await open_group(self.config, self._given, self._workers, debug=self._debug)
        self._worker = worker
        self._head = head = Head(self.config, worker, self._on_event, self._span, debug=self._debug)
        await head.start()
        stores = head.worker.store_statistics()[1]
        found = (f"{name} ({stats['pages']:,} pages)" if "pages" in stats else name for name, stats in stores.items())
        LOG.info("open: %s; stores: %s", "; ".join(self.config.rooms), ", ".join(found) or "none")
        if self._debug:
            LOG.warning(SLOW)
        for sentence in wasted(self.core.config):
            LOG.warning(sentence)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call ``aclose()``. If the cache had closed itself and nothing else is being raised, raise why:
        ``RankFailure`` if a rank was lost, else ``CacheClosed``. With ``debug``: raise ``WrongPages`` if a mistake was
        found that nobody was told of."""
        head, wrong = self._head, None
        if head is not None and head.sanitizer is not None and head.driver.closed is None:
            wrong = await head.sanitizer.closing()
        report = await self.aclose()
        if wrong is not None and error is None:
            raise wrong
        if report.error is None or error is not None:
            return
        raise self._opened().driver.closed_error()

    async def aclose(self, timeout: float | None = None) -> CloseReport:
        """Refuse new requests, save what is not saved yet, and stop. It may be called from any task and any number of
        times, also at the same time: all calls return the same report, or raise the same error. A call that comes while
        the cache is being opened ends the opening.

        ``timeout``: seconds that saving may take; if not given, the configuration's ``close_timeout``. With 0 or less
        nothing that is to be saved is waited for. Copies on a device that outlives the cache are waited for as
        long, and for a second at least. Of several calls, the ``timeout`` that is over first counts. Cancelling
        it stops the waiting; closing goes on.

        Raises:
            ConfigError: ``timeout`` is no number of seconds; the cache stays open.
            BackendError: a store could not close cleanly, or a rank was lost while it closed; all the rest is closed.
                Or a store had not let go of the host's memory three seconds later: that memory is left
                behind, and a task closes it if the store lets go after all. The process can end all the same.
        """
        if timeout is not None:
            timeout = checks.number("timeout", timeout)
        opening = self._opening
        if opening is not None and not opening.done():
            if asyncio.get_running_loop() is not opening.get_loop():
                raise RuntimeError("the cache is being opened on another loop, and belongs to that one's thread")
            if not opening.cancelling():
                opening.cancel()
            await asyncio.wait([opening])
        head = self._head
        if head is None:
            return CloseReport()
        head.driver.check_thread()
        if self._closer is None:
            self._limit = SavingLimit(self.config.close_timeout if timeout is None else timeout)
        elif timeout is not None:
            self._limit.shorten(timeout)
        if self._closer is None or timeout is not None:
            head.worker.close_by(self._limit.left())
        while True:
            closer = self._closer
            if closer is None or closer.cancelled():
                late = LATE if self._workers is None else 2 * LATE  # a group gives up the one that is late by itself
                closer = self._closer = head.loop.create_task(head.aclose(self._limit, late), name="asynccache-close")
            await asyncio.wait([closer])
            if not closer.cancelled():
                return closer.result()
            self._limit.shorten(0.0)  # somebody cancels tasks, perhaps all there are: close again at once

    def _opened(self) -> Head:
        if self._head is None:
            raise RuntimeError("the cache is not open: use it in 'async with'")
        return self._head

    def _ready(self) -> Head:
        head = self._opened()
        head.driver.check_ready()
        return head

    # requests

    def match(self, tokens: Tokens, namespace: Namespace = None) -> Coroutine[Any, Any, Match]:
        """Return how far ``tokens`` are cached on device and host. To be awaited. Nothing is pinned or loaded;
        cancelling it does nothing.

        Raises:
            ConfigError: the tokens are unusable.
        """
        return self._match(as_key(tokens), namespace)

    async def _match(self, key: bytes, namespace: Namespace) -> Match:
        head = self._ready()
        async with holding(head.driver.lock):
            head.driver.apply_outcomes()
            return head.driver.call_unlocked(head.core.match, head.namespaces.space(namespace), key)

    def prefetch(self, tokens: Tokens, namespace: Namespace = None) -> PrefetchHandle:
        """Begin to fetch from storage what device and host do not have of ``tokens``, and return a handle for one lease
        of the same tokens. If ``tokens`` are whole pages, the last one is left out where there are windows or states.
        Call it when a request arrives.

        What is fetched, and what the host had of ``tokens``, stays on the host until the lease that takes the handle is
        granted, the handle is cancelled or dropped, 30 seconds have passed without a lease that waits with the handle,
        or requests need its room to go on.

        Raises:
            ConfigError: the tokens are unusable.
        """
        head, key = self._ready(), as_key(tokens)
        prefetch = head.prefetches.begin(head.namespaces.space(namespace), key)
        if prefetch.done():
            prefetch.claim()
        return PrefetchHandle(prefetch, key, namespace)

    def lease(
        self,
        tokens: Tokens,
        *,
        new_tokens: int = 0,
        namespace: Namespace = None,
        prefetch: PrefetchHandle | None = None,
        wait: bool = True,
        timeout: float | None = None,
        states: int | None = None,
        chunk: int | None = None,
        swa_chunk: int | None = None,
        shorter: bool = True,
        shared_tokens: int | None = None,
    ) -> Lease:
        """Return a lease of a request's pages, for ``async with cache.lease(tokens) as lease``. Entering the lease
        matches ``tokens``, waits in line for room, reserves pages for the prompt and ``new_tokens`` more, and starts
        loads; it does all of this or nothing.

        ``prefetch``: a handle for the same tokens, or for the first of them, or for a text that begins with them;
        nothing more is fetched then. Without one, a lease that may wait prefetches by itself. A handle that was
        cancelled, or that another lease was granted with, counts as none.
        ``wait`` False: ``CacheFull`` instead of waiting. ``timeout``: seconds of waiting, then ``TimeoutError``.
        ``states``: MAMBA slots, one working copy and checkpoints (default: 1 + 2). ``chunk``: reserve no more than so
        many tokens beyond what is cached, the rest comes by ``extend``; ``swa_chunk``: the same for the sliding
        window's pool (default: ``chunk``). Prompt and ``new_tokens`` must fit the device in any case. ``shorter``
        False: the lease is never granted with less than all that is cached, not even where that does not fit now.
        ``shared_tokens``: how many tokens at the start of the prompt other conversations have, too (system prompt,
        tools). ``release(ended=True)`` leaves those as they are, and what comes after them is evicted first.

        A lease that was entered and is dropped without being released gives its pages back when Python finds it, with a
        ``ResourceWarning`` that says where this was called.

        Raises:
            ConfigError: an argument is unusable.
            CacheFull: prompt and ``new_tokens``, or ``states``, are more than the device has room for.
        """
        head = self._opened()
        wait = checks.flag("wait", wait)
        if timeout is not None:
            timeout = checks.number("timeout", timeout, 0)
        ask = ask_for(head, tokens, new_tokens, namespace, states, chunk, swa_chunk, shorter, shared_tokens)
        handle = None if prefetch is None else head.prefetches.of(prefetch, ask.key, namespace)
        caller = sys._getframe(1)
        return Lease(head, ask, namespace, handle, wait, timeout, (caller.f_code, caller.f_lasti))

    def keep(self, tokens: Tokens, ttl: float = 60.0, namespace: Namespace = None) -> Coroutine[Any, Any, Kept]:
        """Pin what is cached of ``tokens`` for ``ttl`` seconds, as far as ``kept_fraction`` allows. To be awaited.
        Returns a ``Kept``, whose ``tokens`` says how many are pinned. Never waits for pages. Cancelling it keeps
        nothing.

        Raises:
            ConfigError: the tokens are unusable, or ``ttl`` is no number of seconds above 0.
        """
        return self._keep(as_key(tokens), checks.number("ttl", ttl, above=0), namespace)

    async def _keep(self, key: bytes, ttl: float, namespace: Namespace) -> Kept:
        head = self._ready()
        full = head.core.config.components[0]
        cap = int(full.device * self.config.kept_fraction) * self.config.page_size
        return await keep(head.driver, head.holders, head.namespaces.space(namespace), key, ttl, cap)

    # the engine's batches, where there are several workers

    def send_batch(self, payload: bytes = b"", leases: Sequence[Lease] = ()) -> int:
        """Tell every worker of a batch of the engine's work, behind all that the cache has decided by now. Returns the
        batch's number, for ``after`` of the leases' calls. A batch is over when the engine has ended it
        on every worker (``RankWorker``, ``EngineBatch.end``) and its events there have fired.

        ``payload``: whatever the engine wants to tell its workers. ``leases``: those whose pages the batch reads. Those
        of their loads that have not ended are sent with the batch, for ``wait_layers``.

        Raises:
            ConfigError: ``payload`` is not bytes, or has more than 8 MiB; or there are no ``workers``.
            RuntimeError: a lease is not held.
        """
        head = self._ready()
        payload = checks.instance("payload", payload, bytes)
        if len(payload) > MOST_PAYLOAD:
            raise ConfigError(f"payload: {len(payload)} bytes are more than {MOST_PAYLOAD}")
        held = [checks.instance("leases", lease, Lease)._held() for lease in leases]
        loads = dict.fromkeys(op for core in held for op in core.loads if op in head.driver.ops)
        number = head.worker.send_batch(payload, tuple(loads))
        for lease in leases:
            lease._asked += 1  # by the ranks, which have the loads with the batch
        return number

    async def batch_ended(self, number: int) -> None:
        """Return when batch ``number`` is over on every worker. Cancelling it stops the waiting.

        Raises:
            BatchFailed: an engine could not run the batch.
            ConfigError: ``number`` was not sent, or there are no ``workers``.
            RankFailure: a worker is gone; the cache is closed.
            CacheClosed: the cache was closed before the batch was over.
        """
        head = self._opened()
        head.worker.engine_event(number)
        await head.worker.batch_ended(number)

    # the whole cache

    async def flush(self, timeout: float | None = None) -> Unsaved:
        """Return when everything published is on the host and in storage, and durable as far as the stores promise.
        Returns how many pages could not be saved.

        Cancelling it stops the waiting; backups that began go on.

        Raises:
            TimeoutError: ``timeout`` seconds went by.
            BackendError: a store could not make its pages durable.
            ConfigError: ``timeout`` is no number of seconds.
        """
        head = self._ready()
        if timeout is not None:
            timeout = checks.number("timeout", timeout, 0)
        async with asyncio.timeout(timeout):
            left = await drain(head.driver)
            if head.worker.has_stores:
                await head.worker.flush()
            return left

    async def attach_storage(
        self, storage: Storage, *, options: Mapping[str, str] | None = None,
        name: str | None = None, position: int | None = None, backfill: bool = True,
    ) -> str:  # fmt: skip
        """Open a store and use it from now on, while requests go on. Returns its name: ``name``, or the URL's
        ``name=``, or its scheme. A backend may be given for a URL; its store is called after its class, with a number
        if that name is taken, and its caller closes it.

        ``options`` are added to the URL's. ``position``: 0 is the nearest of the stores, asked first; None: the
        farthest. ``backfill``: pages that are on the host already are written to the new store, too, a few at a time.

        If it is cancelled or fails, everything is as it was, and nothing stays open.

        Raises:
            ConfigError: the URL or an option is wrong, the name is taken, or there is no host tier.
            Unavailable: the store cannot be opened now.
        """
        head = self._ready()
        check_storage("storage", storage)
        wanted = {} if options is None else checks.texts("options", options)
        if name is not None:
            wanted["name"] = checks.text("name", name)
        if position is not None:
            position = checks.integer("position", position, 0)
        return await head.stores.attach(storage, wanted, position, backfill=checks.flag("backfill", backfill))

    async def detach_storage(self, name: str | None = None, *, timeout: float | None = None) -> Unsaved:
        """Use a store no more, and close it unless the caller made its backend. Requests go on, and compute what the
        store cannot give them any more. ``name``: may be left out if there is one store only. Returns how many pages
        were not saved when the store was detached.

        ``timeout``: for how many seconds, at most, to store first what is not stored yet; None: ``close_timeout``
        seconds; 0: the store is detached at once. The call returns when the store is closed, which is after the store's
        calls that are under way. If one of them hangs, it is cancelled after the store's own ``timeout``. A store that
        does not let go of the host's memory even then is waited for as long as ``invalidate`` waits, and is closed when
        it does. Cancelling it while pages are stored leaves the store attached. Cancelling it later stops the waiting,
        and the store is closed all the same.

        Raises:
            ConfigError: there is no such store, or several and no name was given; or ``timeout`` is no number of
                seconds.
            BackendError: the store is gone, but its backend could not close cleanly, or not yet.
        """
        head = self._ready()
        if name is not None:
            name = checks.text("name", name)
        seconds = self.config.close_timeout if timeout is None else checks.number("timeout", timeout, 0)
        return await head.stores.detach(name, seconds)

    async def invalidate(self, namespace: Namespace = None) -> None:
        """Forget the pages of ``namespace``. From the moment of the call none of its pages are matched or fetched.
        Leases that hold some of them finish undisturbed and publish nothing.

        Device and host forget the namespace. In storage, the pages that the tree knows are deleted. Pages that the tree
        had evicted stay in storage, out of reach of this cache, but a later process may find them: where that matters,
        change ``namespace`` or call ``reset``. What this cache stores of the namespace from now on it stores under new
        keys, which no later process looks for: to a process that opens the cache anew, these pages are dead bytes until
        the store evicts them.

        Writes of other namespaces are not waited for. Writes of its own pages are, for twice the longest ``timeout`` of
        a store and a second at most; a page that is written later stays, like those that were evicted. Cancelling it
        may leave pages on every tier, out of reach of this cache.

        Raises:
            ConfigError: ``namespace`` is neither text nor bytes nor None.
        """
        head = self._ready()
        space = head.namespaces.outdate(namespace)
        await forget(head.driver, head.worker, head.prefetches, head.backups, space)

    async def reset(self) -> None:
        """Forget everything on every tier, storage included; leases finish undisturbed and publish nothing.

        Writes that are under way are waited for, for twice the longest ``timeout`` of a store and a second at most, and
        the clearing of a store for as long again.

        If it is cancelled while it waits for other calls that change the cache, no page is forgotten. Cancelling it
        later leaves nothing of device and host in reach, and may leave storage as it was.

        Raises:
            BackendError: storage could not be cleared, or a store still writes pages from before: they may be found in
                it, and ``reset`` is to be called again.
        """
        head = self._ready()
        head.namespaces.reset()
        await forget_all(head.driver, head.worker, head.prefetches, head.backups)

    # looking at it

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools of this process by name, where the engine reads and writes KV. Empty if the process is a
        head without a rank of its own."""
        return self._opened().worker.pools

    @property
    def device(self) -> Device | None:
        """The device of these pools. ``device.gate()`` makes an event that the engine fires, for ``after`` of a
        lease's calls. None if the process is a head without a rank of its own."""
        return self._opened().worker.device

    def block_table(self, leases: Sequence[Lease], lengths: Sequence[int], pool: str = "full") -> BlockTable:
        """Return the page tables of one step's requests on the device, as ``DevicePool.block_table`` does, for
        ``lengths`` tokens of each lease.

        Raises:
            ConfigError: there is no such pool here, a lease has no room for its length, or the pool's pages are bytes.
            RuntimeError: a lease is not held.
        """
        found = self.pools.get(checks.text("pool", pool))
        if found is None:
            raise ConfigError(f"pool={pool!r} is no pool{checks.nearest(pool, self.pools)}")
        table = POOL_NAME[found.spec.component]
        tables = [checks.instance("leases", lease, Lease).page_table(table) for lease in leases]
        return found.block_table(tables, lengths)

    @property
    def worker(self) -> RankWorker | None:
        """The head's own rank among ``workers``: its pools and batches, for the engine in this process. None if the
        head has no rank, or there are no ``workers``."""
        from asynccache.worker.group import WorkerGroup

        worker = self._opened().worker
        return worker.face if isinstance(worker, WorkerGroup) else None

    @property
    def core(self) -> CacheCore:
        """The state machine behind the cache, for audits and tools. They may look at it, but must not change it."""
        return self._opened().core

    @property
    def closed(self) -> str | None:
        """The reason why no requests are taken now; None if they are taken."""
        if self._head is None:
            return "the cache is not open"
        driver = self._head.driver
        if driver.closed is not None:
            return str(driver.closed)
        return "the cache is closing" if driver.draining else None

    @property
    def in_flight(self) -> bool:
        """True while there are operations that have not ended."""
        return len(self._opened().driver.ops) > 0

    @property
    def stores(self) -> Mapping[str, StoreOptions]:
        """The stores that are attached, by name, nearest first, and how each of them is used."""
        entries = self._head.worker.stores if self._head is not None else ()
        return {entry.options.name: entry.options for entry in entries}

    def explain(self, tokens: Tokens, namespace: Namespace = None) -> Coroutine[Any, Any, Explained]:
        """Return where each page of ``tokens`` is, what would be loaded from where, and what ends the match and why. To
        be awaited. It only reads, and changes no recency. Cancelling it does nothing.

        Raises:
            ConfigError: the tokens are unusable.
        """
        return self._explain(as_key(tokens), namespace)

    async def _explain(self, key: bytes, namespace: Namespace) -> Explained:
        head = self._ready()
        space = head.namespaces.space(namespace)
        head.core.at(head.driver.clock())
        return await explain(head.core, head.worker, head.pools, space, key)

    def learned(self) -> Learned | None:
        """Return what the eviction policy has learned so far; None if it learns nothing, like ``lru``. It takes some
        tenths of a millisecond of the loop's time, and may be called after closing, too."""
        head = self._opened()
        return head.core.learned(head.driver.clock())

    def statistics(self) -> CacheStatistics:
        """Return everything that is counted, as of now. Cheap. It may be called after closing, too."""
        head = self._opened()
        core = head.core.statistics()
        names = [POOL_NAME[component.kind] for component in head.core.config.components]
        meters = head.meters()
        storage, stores = head.worker.store_statistics()
        return CacheStatistics(
            device=dict(zip(names, core.device, strict=True)),
            host=dict(zip(names, core.host, strict=True)),
            stages={name: meter.read() for name, meter in meters.items()},
            prefetches=head.prefetches.outcomes(),
            leases=core.leases,
            waiting=len(head.driver.line),
            kept_tokens=sum(kept.tokens for kept in head.kept()),
            tasks=len(head.supervisor),
            storage=dict(storage),
            stores=stores,
            core=core,
            lookups=head.lookups.read(),
            queues=dict(head.queues()),
            histograms={name: meter.histogram() for name, meter in meters.items()},
            dropped_backups=head.backups.dropped,
        )
