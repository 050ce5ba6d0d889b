"""Several workers as one: what the head says goes to all of them, and what they say is folded into one answer.

Laws:
* Each message is for all workers, and is put on every link in the core call's turn. The head's own worker takes it in
  that turn, too.
* An operation has one outcome, when all workers have let go of it: DONE if it was DONE everywhere.
* A call has one answer, when all workers have answered. That of a question is the worst result of each page.
* A batch is over when it is over on every worker.
* A worker that is gone, is silent, cannot go on, or says what makes no sense is the end of the group: everybody who
  waits is told its rank and the reason, and so are the other workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import SLOT_BYTES, BackupStorage, Move, Status, StoredPages
from asynccache.errors import BackendError, BatchFailed, CacheClosed, ConfigError, RankFailure
from asynccache.worker import combined_answers
from asynccache.worker import messages as m
from asynccache.worker.contract import (
    LATE,
    CopyKind,
    ReadOrder,
    Reports,
    StoredBatch,
    StoreQuestion,
    Work,
)
from asynccache.worker.group_stores import GroupStores, completed_quietly
from asynccache.worker.inbox import ChangeSignal
from asynccache.worker.link import Wire, slices
from asynccache.worker.pool_layout import FULL
from asynccache.worker.rank_performer import Performer
from asynccache.worker.rank_worker import RankWorker
from asynccache.worker.stats import StageMeter
from asynccache.worker.watched_keys import WatchedKeys

if TYPE_CHECKING:
    from asynccache.worker.admitting_ranks import Workers
    from asynccache.worker.contract import DevicePool, EmbedderParts
    from asynccache.worker.link import RankLink

T = TypeVar("T")

OPENING = 600.0
"""Seconds that an opening which was cancelled may take to end: memory that is being pinned is pinned first."""
PINNING = 30.0
"""Seconds of silence that are a failure while pools or stores are opened, or the group's time-out if that is longer: a
chunk of memory (4 GiB) that is being pinned may keep an interpreter from answering."""
UNABLE = 1024
"""The most batches that are remembered as not run by their engine, for questions after they are over."""
DELETED = 4096
"""The most pages that one message tells to delete."""

_STAGES = {CopyKind.BACKUP: "backup_host", CopyKind.LOAD: "load_back", CopyKind.CLONE: "load_back"}


class RankReports:
    """The answers of all ranks about one thing; each gives one. ``left``: the ranks that have not answered yet.
    ``said``: the answers of the others, by rank."""

    __slots__ = ("left", "said")

    def __init__(self, ranks: Iterable[int]) -> None:
        self.left = set(ranks)
        self.said: dict[int, Any] = {}

    def hear(self, rank: int, message: object) -> bool:
        """Note what ``rank`` says. Returns False, and notes nothing, if it was not expected to say anything more."""
        if rank not in self.left:
            return False
        self.left.discard(rank)
        self.said[rank] = message
        return True


class WorkInFlight(RankReports):
    """A work in flight, with the status that each rank reports. ``at``: when it began, in seconds of
    ``perf_counter``."""

    __slots__ = ("at", "work")

    def __init__(self, work: Work, ranks: Iterable[int]) -> None:
        super().__init__(ranks)
        self.work = work
        self.at = perf_counter()


class AwaitedAnswers(RankReports):
    """The answers to a call; and, as ``GroupBatch``, the ends of a batch."""

    __slots__ = ("_changed", "_failed", "number")

    def __init__(self, number: int, ranks: Iterable[int]) -> None:
        super().__init__(ranks)
        self.number = number
        self._changed = ChangeSignal()
        self._failed: Callable[[], BaseException] | None = None

    def __repr__(self) -> str:
        return f"AwaitedAnswers({self.number}, {f'not over on {sorted(self.left)}' if self.left else 'over'})"

    def done(self) -> bool:
        """Return True once every rank has spoken."""
        return not self.left

    async def wait(self) -> None:
        """Return when every rank has spoken. Cancelling it stops the waiting.

        Raises:
            RankFailure: the group has failed.
            CacheClosed: the cache was closed before every rank has spoken.
        """
        while self.left:
            if self._failed is not None:
                raise self._failed()
            await self._changed.wait()

    def hear(self, rank: int, message: object) -> bool:
        """See ``RankReports``."""
        expected = super().hear(rank, message)
        if not self.left:
            self._changed.tell()
        return expected

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The ranks will not speak any more: whoever waits, now or later, gets an ``error()``."""
        self._failed = error
        self._changed.tell()


class GroupBatch(AwaitedAnswers):
    """A batch of the engine on all ranks; see ``BatchInFlight``. ``failed``: True once a rank has said so."""

    __slots__ = ("failed",)

    def __init__(self, number: int, ranks: Iterable[int], failed: bool = False) -> None:
        super().__init__(number, ranks)
        self.failed = failed

    def hear(self, rank: int, message: object) -> bool:
        """See ``RankReports``."""
        if isinstance(message, m.BatchOver) and message.error and rank in self.left:
            self.failed = True
            self._changed.tell()
        return super().hear(rank, message)

    async def settled(self) -> None:
        """See ``BatchInFlight``. Raises as ``wait``."""
        while self.left and not self.failed:
            if self._failed is not None:
                raise self._failed()
            await self._changed.wait()


async def open_group(config: CacheConfig, given: EmbedderParts, workers: Workers) -> WorkerGroup:
    """Wait for all workers, and have each open its pools and stores: all or none. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the pools do not fit in memory, or the device or a backend is unknown; the text names the rank.
        Unavailable: a store cannot be opened now; the text names the rank.
        RankFailure: a worker did not come, is gone, or is silent.
    """
    if given.storage is not None and workers.topology.ranks > 1:
        raise ConfigError("storage: workers of other processes take URLs")
    links = await workers.arrived()
    group = WorkerGroup(config, given, workers, links)
    try:
        await group.open()
    except BaseException as error:
        await completed_quietly(group.abandon(error))
        raise
    return group


class WorkerGroup:
    """The workers of all ranks as one ``Worker``. ``own``: the head's own worker; None: it has none. ``face``: what the
    engine in the head's process sees of it. ``failure``: why the group is over, once it is."""

    def __init__(
        self, config: CacheConfig, given: EmbedderParts, workers: Workers, links: Mapping[int, RankLink]
    ) -> None:
        self.layers = 0
        self.own: Performer | None = None
        self.takes_stores = config.pools()[0].host_pages > 0
        self.failure: RankFailure | None = None
        self._config = config
        self._timeout = workers.timeout
        self._ranks = frozenset(range(workers.topology.ranks))
        self._links = dict(links)
        self._wire = Wire(links.values(), self._unsendable)
        self._reports: Reports | None = None
        self._numbers = 0
        self._calls: dict[int, AwaitedAnswers] = {}
        self._copies: dict[int, WorkInFlight] = {}
        self._to_forget: list[m.Message] = []
        self._storing: dict[int, bool] = {}  # by the first operation of a batch: whether it was given up
        self._batches: dict[int, GroupBatch] = {}
        self._last_batch = 0
        self._unable: dict[int, Mapping[int, str]] = {}
        self._opening = 0
        self._shut: set[int] = set()
        self._counters: dict[int, m.StoreCounters] = {}
        self._leads = [spec.name for spec in config.pools() if int(spec.component) == FULL]
        self._meters = {"backup_host": StageMeter(), "load_back": StageMeter()}
        self._weights: dict[int, tuple[int, int]] = {}
        self.stores = GroupStores(self._call, self._put, self._be_patient, WatchedKeys(self._report_keys))
        self._closing = self._leaving = self._hurried = False
        self._stirred = ChangeSignal()
        self._timers: list[asyncio.TimerHandle] = []
        self._took: dict[type, Callable[[int, Any], None]] = {
            m.WorksEnded: self._ended, m.BatchOver: self._over, m.StoreKeys: self._keys, m.StoreHealth: self._health,
            m.StoreCounters: self._counted, m.WorkerDied: self._died,
        }  # fmt: skip
        self.face: RankWorker | None = None
        if workers.own is not None:
            self.own = Performer(
                workers.own, workers.topology, given, workers.shard, partial(self._take, workers.own)
            )
            self.face = RankWorker(self.own)

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{len(self._calls)} calls"
        return f"WorkerGroup({len(self._ranks)} workers, {len(self._copies)} works, {state})"

    # opening and closing

    async def open(self) -> None:
        """Have all workers open. To be called once. Raises as ``open_group``."""
        self._be_patient(1)
        for rank, link in self._links.items():
            link.begin(partial(self._heard, rank), partial(self._lost, rank))
        opened = await self._call(lambda call: m.OpenWorker(call, self._config), m.WorkerOpened)
        first = next(iter(opened.values()))
        pools = {spec.name for spec in self._config.pools()}
        for rank, one in opened.items():
            right = one.layers >= 0 and len(one.digest) in (0, HASH_BYTES) and pools.issuperset(one.weights)
            if not right or min(one.weights.values(), default=1) < 1:
                raise self._nonsense(rank, "opened other pools")
            if [(options.name, options.write) for options, _ in one.stores] != [
                (options.name, options.write) for options, _ in first.stores
            ]:
                raise ConfigError(f"rank {rank}: its stores are others than those of rank {next(iter(opened))}")
        own = None if self.own is None else self.own.rank
        self.layers = max(one.layers for rank, one in opened.items() if own in (None, rank))
        for spec in self._config.pools():  # how many pools of a component all have, and the bytes of a page in all
            sizes = [one.weights[spec.name] for one in opened.values() if spec.name in one.weights]
            count, size = self._weights.get(int(spec.component), (0, 0))
            self._weights[int(spec.component)] = (count + len(sizes), size + sum(sizes))
        self.stores.keys.digests = {rank: one.digest for rank, one in opened.items() if one.digest}
        for at, (options, _) in enumerate(first.stores):
            self.stores.begin(options, shared=any(one.stores[at][1] for one in opened.values()))
        self._be_patient(-1)
        self._put(m.AllOpen())

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """See ``Worker``."""
        self._reports = reports
        if self.failure is not None:
            reports.failed(self.failure)
        return []

    async def aclose(self, patience: float) -> None:
        """Wait until all batches are over, for ``patience`` seconds or as ``close_by`` has said; then have every worker
        close its stores, pools and device, and end the links. ``patience`` also has the meaning that it has for
        ``LocalWorker.aclose``. Cancelling it may leave some of it open.

        Raises:
            BackendError: a store could not close cleanly, or a worker was lost meanwhile or did not say in time that it
                had closed; all the rest is closed.
        """
        reported = self.failure is not None  # and so it is known why the cache closes
        self._closing = True
        self.close_by(patience)
        latest = asyncio.get_running_loop().time() + patience + LATE
        while self._batches and self.failure is None and not self._hurried:
            await self._stirred.wait()
        self._leaving = True
        try:
            if self.failure is None:
                await self._call(lambda call: m.CloseWorker(call, patience), m.CallDone)
            elif not reported:
                raise self._again()
        except RankFailure as failure:
            raise BackendError(f"{failure}: it may have lost what it had stored last") from failure
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._let_go(patience, latest)

    def close_by(self, seconds: float) -> None:
        """See ``Worker``."""
        loop, seconds = asyncio.get_running_loop(), max(seconds, 0.0)
        self._timers += [loop.call_later(seconds, self._hurry), loop.call_later(seconds + LATE, self._give_up_late)]

    def _hurry(self) -> None:
        """Wait for batches no longer: an engine that still runs one loses its pages."""
        self._hurried = True
        self._stirred.tell()

    def _give_up_late(self) -> None:
        """End the group if a worker has not answered by now: its process may be stopped, which its link may take much
        longer to notice, or a store may hang."""
        late = sorted({rank for call in self._calls.values() for rank in call.left})
        if late:
            self._fail(RankFailure("had not answered when the cache was to be closed", late[0]))

    async def abandon(self, error: BaseException) -> None:
        """Close all that is open, on every worker: the cache could not be opened, because of ``error``."""
        reason = str(error) or type(error).__name__
        self._wire.put(m.GroupLost(self.own.rank if self.own else -1, f"the cache was not opened: {reason}"))
        self._closing = self._leaving = True
        await self._let_go(1.0, inf)

    async def _let_go(self, patience: float, latest: float) -> None:
        """Close the head's own worker and the links. ``patience``: as for ``LocalWorker.aclose``. ``latest``: until
        when, by the loop's clock, the own worker is waited for; after that it goes on closing by itself."""
        self._wire.flush()
        for batch in self._batches.values():
            batch.fail(self._again if self.failure is not None else _closed)
        try:
            if self.own is not None:
                await self._close_own(self.own, patience, latest)
        finally:
            if self.own is not None:
                self.own.finish(None)
            links, self._wire.links = self._wire.links, []
            await asyncio.gather(*(link.aclose() for link in links))

    async def _close_own(self, own: Performer, patience: float, latest: float) -> None:
        loop = asyncio.get_running_loop()
        closing = loop.create_task(own.aclose(patience), name="asynccache-close-own")
        await asyncio.wait([closing], timeout=None if latest == inf else max(latest - loop.time(), 0.0))
        if closing.done():
            closing.result()
        else:
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise BackendError(f"rank {own.rank}: had not closed when the cache was to be closed: it may have lost "
                               "what it had stored last")

    # both ways

    def _put(self, message: m.Message) -> None:
        if self.failure is None:
            self._wire.put(message)
            if self.own is not None:
                self.own.take(message)

    async def _call(self, make: Callable[[int], m.Message], kind: type[T]) -> dict[int, T]:
        """Send all workers the message that ``make`` returns for a call's number. Returns their answers by rank, when
        all have answered. Cancelling it returns when all have let go of their buffers.

        Raises:
            RankFailure: the group is over; or a worker raised an error of another class than the two below. If the
                call was to write, find or read pages, the group ends with such an error.
            ConfigError, BackendError: a worker raised it.
        """
        if self.failure is not None:
            raise self._again()
        self._numbers += 1
        number, call = self._numbers, AwaitedAnswers(self._numbers, self._ranks)
        self._calls[number] = call
        self._put(make(number))
        try:
            await call.wait()
        except asyncio.CancelledError:
            if call.left and self.failure is None:
                self._put(m.CancelCall(number))
                await completed_quietly(self._let_go_of(call))
            raise
        finally:
            del self._calls[number]
        failures = {rank: one for rank, one in sorted(call.said.items()) if isinstance(one, m.CallFailed)}
        if failures:
            error = combined_answers.error_of(failures)
            if isinstance(error, RankFailure) and kind in (m.PagesWritten, m.PageResults):
                self._fail(error)
            raise error
        found: dict[int, T] = {}
        for rank, one in sorted(call.said.items()):
            if not isinstance(one, kind):
                raise self._nonsense(rank, f"answered a call with {type(one).__name__}")
            found[rank] = one
        return found

    async def _let_go_of(self, call: AwaitedAnswers) -> None:
        """Return when all workers have let go of a cancelled call. A worker that has not after ``_patience`` seconds
        has failed, like one that is silent. Raises ``RankFailure``: the group is over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while call.left and (rest := began + self._patience() - loop.time()) > 0:
            with suppress(TimeoutError):  # while something is being opened, more time is allowed
                async with asyncio.timeout(rest):
                    await call.wait()
        if call.left:
            why = f"did not let go of what was cancelled within {self._patience():g} s"
            self._fail(RankFailure(why, min(call.left)))

    def _patience(self) -> float:
        """Return for how many seconds a worker may be busy with a call that was cancelled."""
        return OPENING if self._opening else self._timeout + self.stores.slowest

    def _heard(self, rank: int, frame: bytes) -> None:
        for message in m.decode_worker_messages(frame):
            self._take(rank, message)

    def _take(self, rank: int, message: m.Message) -> None:
        """Act on what worker ``rank`` says."""
        if self.failure is not None:
            return
        took = self._took.get(type(message))
        if took is not None:
            took(rank, message)
        else:
            self._answered(rank, message)

    def _answered(self, rank: int, reply: Any) -> None:
        call = self._calls.get(reply.call)
        if call is None or not call.hear(rank, reply):
            self._nonsense(rank, f"answered call {reply.call}, which nobody made or which it had answered")

    # the end

    def _lost(self, rank: int, failure: RankFailure) -> None:
        if not self._leaving or any(rank in call.left for call in self._calls.values()):  # else it has closed
            self._fail(RankFailure(failure.reason, rank))

    def _died(self, rank: int, news: m.WorkerDied) -> None:
        self._fail(RankFailure(news.reason, rank))

    def _unsendable(self, failure: RankFailure) -> None:
        self._fail(RankFailure(f"the head {failure.reason}", None if self.own is None else self.own.rank))

    def _nonsense(self, rank: int, what: str) -> RankFailure:
        failure = RankFailure(what, rank)
        self._fail(failure)
        return failure

    def _again(self) -> RankFailure:
        assert self.failure is not None
        return RankFailure(self.failure.reason, self.failure.rank)

    def _fail(self, failure: RankFailure) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self._stirred.tell()
        self._wire.put(m.GroupLost(-1 if failure.rank is None else failure.rank, failure.reason))
        self._wire.flush()
        for awaited in (*self._calls.values(), *self._batches.values()):
            awaited.fail(self._again)
        if self.own is not None:
            self.own.finish(self._again())
        if self._reports is not None and not self._closing:
            self._reports.failed(failure)

    # the engine's work, and copies beside it

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools of the head's own worker; empty if it has none."""
        return {} if self.own is None or self.own.local is None else self.own.local.pools

    def engine_event(self, event: object) -> int:
        """Return ``event``, which must be the number of a batch that was sent: an event would speak for one worker
        only. From any thread.

        Raises:
            ConfigError: ``event`` is no such number.
        """
        try:
            number = checks.integer("batch", event, 1)
        except ConfigError:
            raise ConfigError(f"{checks.shown(event)} is no number of a batch: a cache with workers takes what "
                              "send_batch returned, since an event speaks for one worker only") from None
        if number > self._last_batch:
            raise ConfigError(f"batch {number} was not sent")
        return number

    def batch(self, event: object) -> GroupBatch:
        """See ``Worker``. A batch that is not known any more is over."""
        assert isinstance(event, int)
        return self._batches.get(event) or GroupBatch(event, (), failed=event in self._unable)

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """See ``Worker``."""
        self._last_batch += 1
        number = self._last_batch
        self._batches[number] = GroupBatch(number, self._ranks)
        self._put(m.SendBatch(number, payload, loads))
        return number

    async def batch_ended(self, number: int) -> None:
        """See ``AsyncCache.batch_ended``."""
        batch = self._batches.get(number)
        if batch is not None:
            await batch.wait()
        if number in self._unable:
            raise BatchFailed(number, self._unable[number])

    def _over(self, rank: int, news: m.BatchOver) -> None:
        batch = self._batches.get(news.number)
        if batch is None or not batch.hear(rank, news):
            self._nonsense(rank, f"ended batch {news.number}, which was not sent or had ended")
        elif batch.done():
            del self._batches[news.number]
            self._stirred.tell()
            if errors := {rank: over.error for rank, over in batch.said.items() if over.error}:
                self._unable[news.number] = errors
                if len(self._unable) > UNABLE:
                    del self._unable[next(iter(self._unable))]

    def perform(self, plan: Sequence[Work]) -> None:
        """See ``Worker``."""
        orders: list[m.Message] = []
        if self._to_forget and not all(work.kind is CopyKind.BACKUP for work in plan):
            # A plan with a load or a private copy was decided after all known outcomes were applied. So from now on no
            # batch and no private copy names a load whose failure was known by then.
            orders, self._to_forget = self._to_forget, []
        orders += [m.PerformWork(work) for work in plan]
        if self.failure is None:
            self._wire.send(orders)
        for work in plan:  # after sending, so that the other workers begin meanwhile
            self._copies[work.ops[0]] = WorkInFlight(work, self._ranks)
        if self.failure is None and self.own is not None:
            self.own.take(*orders)

    def _ended(self, rank: int, news: m.WorksEnded) -> None:
        for first in news.works:
            copies = self._copies.get(first)
            if copies is None or not copies.hear(rank, news.status):
                self._nonsense(rank, f"ended operation {first}, which it was not given or had ended")
                return
            if not copies.left:
                del self._copies[first]
                self._end(copies.work, copies.at, failed=Status.FAILED in copies.said.values())

    def _end(self, work: Work, at: float, *, failed: bool) -> None:
        """Count ``work``, which began ``at`` and has ended on all workers, and report its end. Private copies are not
        counted, see ``stages``."""
        if work.kind is not CopyKind.CLONE:
            meter, count = self._meters[_STAGES[work.kind]], len(work.ops)
            meter.took(perf_counter() - at, count)
            if failed:
                meter.errors += count
            else:
                meter.count(count, *self._size_of(work.moves))
        if failed and work.kind is not CopyKind.BACKUP:  # nothing names a failed backup later
            self._to_forget += map(m.ForgetLoad, work.ops)
        if self._reports is not None:
            self._reports.ended(Status.FAILED if failed else Status.DONE, work.ops)

    def _size_of(self, moves: Iterable[Move]) -> tuple[int, int, int]:
        """Return how much ``moves`` copy: pages, summed over all workers; FULL's pages; and bytes, summed over all
        workers. FULL's pages are counted once, because they hold the same tokens on each worker."""
        pages = full_pages = size = 0
        for component, slots, _ in moves:
            count, (pools, weight) = len(slots) // SLOT_BYTES, self._weights[component]
            pages += count * pools
            full_pages += count if component == FULL else 0
            size += count * weight
        return pages, full_pages, size

    async def layer(self, op: int, i: int) -> None:
        """See ``Worker``. Waits for the head's own worker. Raises ``ConfigError``: the head has none."""
        await self._has_own("layer").layer(op, i)

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """See ``Worker``. Waits for the head's own worker. Raises ``ConfigError``: the head has none."""
        self._has_own("wait_layers").wait_layers(stream, ops, i)

    def _has_own(self, what: str) -> Performer:
        if self.own is None:
            raise ConfigError(f"{what}: the head has no worker of its own: layers are waited for where the engine runs")
        return self.own

    # pages and stores

    async def store(self, batch: Sequence[BackupStorage]) -> StoredBatch:
        """See ``Worker``. A batch that is too long for one message is written in parts, one after the other; once a
        part of an operation has failed, nothing more of the operation is written."""
        first = batch[0].op
        parts: list[StoredBatch] = []
        self._storing[first] = False
        try:
            for part in _parts(batch):
                if self._storing[first] or any(part[0].op in done.failed for done in parts):
                    parts.append(StoredBatch(frozenset(effect.op for effect in part), 0, 0, 0))
                else:
                    parts.append(await self._store(part))
        finally:
            del self._storing[first]
        done = parts[0] if len(parts) == 1 else combined_answers.stored(parts, full_pages=sum)
        if self.stores.keys.watches:
            for effect in batch:
                if effect.op not in done.failed:
                    self.stores.keys.name(pages.hashes for pages in effect.pages if pages.component == FULL)
        return done

    async def _store(self, batch: Sequence[BackupStorage]) -> StoredBatch:
        said = await self._call(lambda call: m.WritePages.of(call, batch), m.PagesWritten)
        ops = {effect.op for effect in batch}
        for rank, one in said.items():
            if not ops.issuperset(one.failed) or min(one.pages, one.full_pages, one.bytes) < 0:
                raise self._nonsense(rank, "wrote a batch of other operations")
        return combined_answers.stored(list(said.values()), full_pages=max)

    def give_up(self, op: int) -> None:
        """See ``Worker``."""
        if op in self._storing:
            self._storing[op] = True
        self._put(m.GiveUp(op))

    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """See ``Worker``."""
        return await self._in_parts(asked, self._ask)

    async def read(self, reads: Sequence[ReadOrder], *, run: bool) -> list[bytes]:
        """See ``Worker``. The pages of a run have to fit one message; a fetch reads 128 pages of each pool at a time,
        at most."""
        read = partial(self._read, run=run)
        return await read(reads) if run else await self._in_parts(reads, read)

    async def _in_parts(
        self, wanted: Sequence[Pages], call: Callable[[Sequence[Pages]], Awaitable[list[bytes]]]
    ) -> list[bytes]:
        """Make ``call`` for as many of the ``wanted`` pages at a time as fit one message, and return the answers joined
        as if it had been one call."""
        answers = [b""] * len(wanted)
        for part in slices([len(pages.hashes) // HASH_BYTES for pages in wanted]):
            found = await call([_cut(wanted[at], begin, end) for at, begin, end in part])
            for (at, _, _), answer in zip(part, found, strict=True):
                answers[at] += answer
        return answers

    async def _ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        said = await self._call(lambda call: m.AskPages(call, tuple(asked)), m.PageResults)
        return self._folded(said, asked, int.__eq__, "answered a question of other pages")

    async def _read(self, reads: Sequence[ReadOrder], *, run: bool) -> list[bytes]:
        said = await self._call(lambda call: m.ReadPages(call, tuple(reads), run), m.PageResults)
        return self._folded(said, reads, int.__le__ if run else int.__eq__, "read other pages")

    def _folded(
        self, said: Mapping[int, m.PageResults], wanted: Sequence[StoreQuestion] | Sequence[ReadOrder],
        fits: Callable[[int, int], bool], nonsense: str,
    ) -> list[bytes]:  # fmt: skip
        """Return the worst result of each page, for each pool. ``fits``: called with the number of a worker's results
        and the number of pages; if it returns False, the group fails, and ``nonsense`` says what the worker did."""
        counts = [len(pages.hashes) // HASH_BYTES for pages in wanted]
        for rank, one in said.items():
            sizes = [len(answer) for answer in one.answers]
            right = len(sizes) == len(counts) and all(map(fits, sizes, counts))
            if not right or not combined_answers.are_results(one.answers):
                raise self._nonsense(rank, nonsense)
        answers = combined_answers.all_worst([one.answers for one in said.values()])
        self._name([(pages.pool, pages.hashes) for pages in wanted], answers)
        return answers

    def _name(self, asked: Sequence[tuple[str, bytes]], answers: Sequence[bytes]) -> None:
        """Name the pages that all workers have to the ``WatchedKeys``, which need their hashes."""
        if self.stores.keys.watches:
            for (pool, hashes), answer in zip(asked, answers, strict=True):
                if pool in self._leads:
                    self.stores.keys.name(
                        hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at, found in enumerate(answer) if found == 1
                    )

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """See ``Worker``."""
        for at in range(0, len(hashes), DELETED):
            some = b"".join(hashes[at : at + DELETED])
            await self._call(lambda call, some=some: m.DeletePages(call, some), m.CallDone)  # type: ignore[misc]

    async def clear(self) -> None:
        """See ``Worker``."""
        await self._call(m.ClearStores, m.CallDone)

    async def flush(self) -> None:
        """See ``Worker``."""
        await self._call(m.FlushStores, m.CallDone)

    def is_away(self, page_hash: bytes) -> bool:
        """See ``Worker``. True if all stores of any worker refuse calls, since then no page can be fetched whole."""
        if self._shut:
            self._put(m.ProbeStores(page_hash))
        return bool(self._shut)

    @property
    def shut(self) -> bool:
        """See ``Worker``. True if all stores of any worker refuse calls."""
        return bool(self._shut)

    @property
    def busy(self) -> Sequence[str]:
        """See ``Worker``. Unknown: the ranks are given up instead."""
        return ()

    def _health(self, rank: int, news: m.StoreHealth) -> None:
        (self._shut.add if news.shut else self._shut.discard)(rank)

    @property
    def has_stores(self) -> bool:
        """See ``Worker``."""
        return bool(self.stores.entries)

    def _be_patient(self, more: int) -> None:
        """Allow ``PINNING`` seconds of silence while pools or stores are opened, because that may pin the host's
        memory. ``more``: 1 when an opening begins, -1 when it ends."""
        self._opening += more
        for link in self._links.values():
            link.patience(PINNING if self._opening else None)

    def _keys(self, rank: int, news: m.StoreKeys) -> None:
        self.stores.keys.told(news.store, rank, news.there, news.keys)

    def _report_keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        if self._reports is not None:
            self._reports.keys(store, there, keys)

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """See ``Worker``. The key of one worker stands for those of all."""
        return self.stores.keys.key_of

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """See ``Worker``. An operation takes as long as on the slowest worker; pages and bytes of all workers add
        up."""
        return self._meters

    def queues(self) -> Mapping[str, int]:
        """See ``Worker``. Counts the operations that have not ended on every worker."""
        counts = dict.fromkeys(self._meters, 0)
        for copies in self._copies.values():
            counts[_STAGES[copies.work.kind]] += len(copies.work.ops)
        return counts

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """See ``Worker``. The counters of other processes are as they last told them."""
        if self.own is not None:
            self.own.count()
        parts = list(self._counters.values())
        names = [entry.options.name for entry in self.stores.entries]
        by_name = {
            name: combined_answers.sums([part.stores[name] for part in parts if name in part.stores]) for name in names
        }
        return combined_answers.sums([part.storage for part in parts]), by_name

    def _counted(self, rank: int, news: m.StoreCounters) -> None:
        if not combined_answers.are_counters([news.storage, *news.stores.values()]):
            self._nonsense(rank, "counted what nobody can")
            return
        self._counters[rank] = news


def _closed() -> CacheClosed:
    return CacheClosed("the cache was closed before the batch was over")


Pages = TypeVar("Pages", StoreQuestion, ReadOrder, StoredPages)


def _cut(pages: Pages, begin: int, end: int) -> Pages:
    """Return the pages from ``begin`` up to ``end`` of ``pages``."""
    hashes = pages.hashes[begin * HASH_BYTES : end * HASH_BYTES]
    if isinstance(pages, StoreQuestion):
        return pages._replace(hashes=hashes)
    return pages._replace(hashes=hashes, slots=pages.slots[begin * SLOT_BYTES : end * SLOT_BYTES])


def _parts(batch: Sequence[BackupStorage]) -> Iterator[Sequence[BackupStorage]]:
    """Yield ``batch`` in parts that fit one message each: the whole batch or, if that does not fit, pieces of one
    operation each."""
    if len(list(slices([len(pages.hashes) // HASH_BYTES for effect in batch for pages in effect.pages]))) <= 1:
        yield batch
        return
    for effect in batch:
        for part in slices([len(pages.hashes) // HASH_BYTES for pages in effect.pages]):
            yield [BackupStorage(effect.op, tuple(_cut(effect.pages[at], begin, end) for at, begin, end in part))]
