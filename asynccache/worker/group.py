"""Several workers as one: what the head says goes to all of them, and what they say is folded into one answer.

Laws:
* One message for all, put on every link in the core call's turn. The head's own worker takes it in that turn, too.
* An operation has one outcome: when all have let go of it; DONE if it was DONE everywhere.
* A call has one answer, when all have answered; a question's is the worst result of each page.
* A batch is over when it is over on every worker.
* A worker that is gone, silent, cannot go on, or says what makes no sense is the end of the group: everybody who waits
  is told of its rank and the reason, and so are the other workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import BackupHost, BackupStorage, Clone, Copy, LoadBack, Outcome, Status, StoredPages
from asynccache.core.slots import SLOT_BYTES
from asynccache.errors import BackendError, BatchFailed, CacheClosed, ConfigError, RankFailure
from asynccache.settle import settled
from asynccache.storage.options import StoreOptions, check_name
from asynccache.worker import fold
from asynccache.worker import messages as m
from asynccache.worker.change import Change
from asynccache.worker.contract import Asked, Read, Reports, Storage, Stored, StoreEntry, Work
from asynccache.worker.holdings import Holdings
from asynccache.worker.layout import FULL
from asynccache.worker.performing import Performer
from asynccache.worker.rank import RankWorker
from asynccache.worker.stats import Meter
from asynccache.worker.wire import Wire, slices

if TYPE_CHECKING:
    from asynccache.worker.contract import DevicePool
    from asynccache.worker.gathering import Workers
    from asynccache.worker.given import Given
    from asynccache.worker.link import Link

T = TypeVar("T")

OPENING = 600.0
"""Seconds of silence that are a failure while workers open: pinning memory may keep an interpreter from everything."""
LATE = 3.0
"""Seconds after the end of its time in which a cache that closes waits for workers."""
UNABLE = 1024
"""Batches that an engine could not run and that are remembered, for who asks when they are over."""
DELETED = 4096
"""Pages in one message."""

_STAGES: dict[type, str] = {BackupHost: "backup_host", LoadBack: "load_back", Clone: "load_back"}
_DONE, _FAILED = Status.DONE, Status.FAILED  # to look one up in an enum takes 0.2 µs, in Python 3.11


class GroupBatch:
    """A batch from when it was sent. ``left``: the ranks on which it is not over. ``errors``: those that could not run
    it, and why."""

    __slots__ = ("_changed", "_failed", "errors", "left", "number")

    def __init__(self, number: int, ranks: set[int]) -> None:
        self.number = number
        self.left = ranks
        self.errors: dict[int, str] = {}
        self._changed = Change()
        self._failed: Callable[[], BaseException] | None = None

    def __repr__(self) -> str:
        return f"GroupBatch({self.number}, {f'not over on {sorted(self.left)}' if self.left else 'over'})"

    def done(self) -> bool:
        """Whether it is over everywhere."""
        return not self.left

    async def wait(self) -> None:
        """Return when it is over everywhere. Cancelling it stops the waiting.

        Raises:
            RankFailure: the group is.
            CacheClosed: the cache was closed before.
        """
        while self.left:
            if self._failed is not None:
                raise self._failed()
            await self._changed.wait()

    def over(self, rank: int, error: str) -> None:
        """It is over on ``rank``."""
        self.left.discard(rank)
        if error:
            self.errors[rank] = error
        self._changed.tell()

    def fail(self, error: Callable[[], BaseException]) -> None:
        """Nobody will ever know. Who waits is told ``error``, and who comes later."""
        self._failed = error
        self._changed.tell()


class _Open(msgspec.Struct, gc=False):
    """An operation in flight. ``left``: the ranks that are at it, a bit each. ``failed``: whether it has failed on one.
    A struct is made in a tenth of a class's time, and this is the one object that an operation costs here."""

    effect: Copy
    left: int
    at: float
    failed: bool = False


class _Call:
    """``answers``: by rank. ``done``: set when all have answered, or the group is over."""

    def __init__(self, ranks: set[int]) -> None:
        self.left = ranks
        self.answers: dict[int, m.Message] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


async def open_group(config: CacheConfig, given: Given, workers: Workers) -> WorkerGroup:
    """Wait for all workers, and have each open its pools and stores: all or none. Cancelling it leaves nothing open.

    Raises:
        ConfigError: pools do not fit in memory, or an unknown device or backend; with the rank.
        Unavailable: a store cannot be opened now; with the rank.
        RankFailure: a worker did not come, is gone, or silent.
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


async def completed_quietly(work: Coroutine[Any, Any, None]) -> None:
    """``work`` to its end, whatever comes of it."""
    task = asyncio.get_running_loop().create_task(work)
    await settled([task])
    if not task.cancelled():
        task.exception()


class WorkerGroup:
    """See ``Worker``, and the module. ``own``: the head's own, if there is one."""

    def __init__(self, config: CacheConfig, given: Given, workers: Workers, links: Mapping[int, Link]) -> None:
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
        self._calls: dict[int, _Call] = {}
        self._open: dict[int, _Open] = {}
        self._everybody = (1 << len(self._ranks)) - 1
        self._to_forget: list[m.Message] = []
        self._given_up: set[int] = set()
        self._batches: dict[int, GroupBatch] = {}
        self._last_batch = 0
        self._unable: dict[int, Mapping[int, str]] = {}
        self._entries: tuple[StoreEntry, ...] = ()
        self._opened: dict[int, StoreEntry] = {}
        self._shared: dict[int, bool] = {}
        self._last_store = 0
        self._opening = 0
        self._shut: set[int] = set()
        self._counters: dict[int, m.Counters] = {}
        self._meters = {"backup_host": Meter(), "load_back": Meter()}
        self._weights: dict[int, tuple[int, int]] = {}
        self._leads = [spec.name for spec in config.pools() if int(spec.component) == FULL]
        self._holdings = Holdings(self._report_keys)
        self._closing = self._leaving = self._late = self._hurried = False
        self._stirred = Change()
        self._timers: list[asyncio.TimerHandle] = []
        self._took: dict[type, Callable[[int, Any], None]] = {
            m.Ended: self._ended, m.Over: self._over, m.Keys: self._keys, m.Health: self._health,
            m.Counters: self._counted, m.Died: self._died,
        }  # fmt: skip
        self.face: RankWorker | None = None
        if workers.own is not None:
            self.own = Performer(
                workers.own, workers.topology, given, workers.shard, partial(self._take, workers.own)
            )
            self.face = RankWorker(self.own)

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{len(self._open)} operations, {len(self._calls)} calls"
        return f"WorkerGroup({len(self._ranks)} workers, {state})"

    # opening and closing

    async def open(self) -> None:
        """Have all open. To be called once. Raises as ``open_group``."""
        self._be_patient(1)
        for rank, link in self._links.items():
            link.begin(partial(self._heard, rank), partial(self._lost, rank))
        opened = await self._call(lambda call: m.Open(call, m.settings_of(self._config)), m.Opened)
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
        self._holdings.digests = {rank: one.digest for rank, one in opened.items() if one.digest}
        for at, (options, _) in enumerate(first.stores):
            entry = self._enter(options, any(one.stores[at][1] for one in opened.values()))
            self._entries = (*self._entries, entry)
        self._be_patient(-1)
        self._put(m.Ready())

    def _enter(self, options: StoreOptions, shared: bool) -> StoreEntry:
        self._last_store += 1
        entry = self._opened[self._last_store] = StoreEntry(self._last_store, options)
        self._shared[entry.number] = shared
        return entry

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """See ``Worker``."""
        self._reports = reports
        if self.failure is not None:
            reports.failed(self.failure)
        return []

    async def aclose(self, patience: float) -> None:
        """Wait until no worker is at a batch any more, for ``patience`` seconds or as ``close_by`` has said; then have
        every worker close its stores, pools and device, and end the links. ``patience``: as for ``LocalWorker.aclose``,
        too. Cancelling it may leave some of it open.

        Raises:
            BackendError: a store could not close cleanly, or a worker did not say so in time; all the rest is closed.
        """
        self._closing = True
        self.close_by(patience)
        latest = asyncio.get_running_loop().time() + patience + LATE
        while self._batches and self.failure is None and not self._hurried:
            await self._stirred.wait()
        self._leaving = True
        try:
            if self.failure is None:
                await self._call(lambda call: m.Close(call, patience), m.Done)
        except RankFailure as failure:
            if self._late:  # else it is known already, or nobody is left to be told
                raise BackendError(f"{failure}: it may have lost what it had stored last") from None
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._let_go(patience, latest)

    def close_by(self, seconds: float) -> None:
        """See ``Worker``."""
        loop, seconds = asyncio.get_running_loop(), max(seconds, 0.0)
        self._timers += [loop.call_later(seconds, self._hurry), loop.call_later(seconds + LATE, self._give_up_late)]

    def _hurry(self) -> None:
        """An engine that is still at a batch loses its pages."""
        self._hurried = True
        self._stirred.tell()

    def _give_up_late(self) -> None:
        """Who has not answered by now may be stopped, and its link may take much longer to notice; and a store may
        hang, here as anywhere."""
        late = sorted({rank for call in self._calls.values() for rank in call.left})
        if late:
            self._late = True
            self._fail(RankFailure("had not answered when the cache was to be closed", late[0]))

    async def abandon(self, error: BaseException) -> None:
        """The cache does not open: nothing stays open anywhere."""
        reason = str(error) or type(error).__name__
        self._wire.put(m.Lost(self.own.rank if self.own else -1, f"the cache was not opened: {reason}"))
        self._closing = self._leaving = True
        await self._let_go(1.0, inf)

    async def _let_go(self, patience: float, latest: float) -> None:
        """``latest``: by the loop's clock, when the head's own worker is waited for no longer; it goes on closing."""
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
        """The answers of all to what ``make`` makes of a call's number, by rank. Cancelling it returns when all have
        let go.

        Raises:
            RankFailure: the group is over; or a worker raised what is no error of a store.
            ConfigError, BackendError: that is what a worker says.
        """
        if self.failure is not None:
            raise self._again()
        self._numbers += 1
        number, call = self._numbers, _Call(set(self._ranks))
        self._calls[number] = call
        self._put(make(number))
        try:
            await call.done
        except asyncio.CancelledError:
            if call.left and self.failure is None:
                self._put(m.Cancel(number))
                await completed_quietly(self._let_go_of(call))
            raise
        finally:
            del self._calls[number]
        failures = {rank: one for rank, one in sorted(call.answers.items()) if isinstance(one, m.Failed)}
        if failures:
            raise fold.error_of(failures)
        found: dict[int, T] = {}
        for rank, one in sorted(call.answers.items()):
            if not isinstance(one, kind):
                raise self._nonsense(rank, f"answered a call with {type(one).__name__}")
            found[rank] = one
        return found

    async def _let_go_of(self, call: _Call) -> None:
        """Return when all have let go of what was cancelled, or the group is over: who does not let go within the
        time-out, and what a store's call may take, is as good as silent."""
        loop = asyncio.get_running_loop()
        began, call.done = loop.time(), loop.create_future()
        while call.left and self.failure is None:
            slowest = max((one.options.timeout for one in self._opened.values()), default=0.0)
            seconds = OPENING if self._opening else self._timeout + slowest
            if loop.time() >= began + seconds:
                self._fail(RankFailure(f"did not let go of what was cancelled within {seconds:g} s", min(call.left)))
            else:
                await asyncio.wait([call.done], timeout=began + seconds - loop.time())

    def _heard(self, rank: int, frame: bytes) -> None:
        for message in m.decode_news(frame):
            self._take(rank, message)

    def _take(self, rank: int, message: m.Message) -> None:
        """A worker has said it."""
        if self.failure is not None:
            return
        took = self._took.get(type(message))
        if took is not None:
            took(rank, message)
        else:
            self._answered(rank, message)

    def _answered(self, rank: int, reply: Any) -> None:
        call = self._calls.get(reply.call)
        if call is None or rank not in call.left:
            self._nonsense(rank, f"answered call {reply.call}, which nobody made or which it had answered")
            return
        call.left.discard(rank)
        call.answers[rank] = reply
        if not call.left and not call.done.done():
            call.done.set_result(None)

    # the end

    def _lost(self, rank: int, failure: RankFailure) -> None:
        if not self._leaving or any(rank in call.left for call in self._calls.values()):  # else it has closed
            self._fail(RankFailure(failure.reason, rank))

    def _died(self, rank: int, news: m.Died) -> None:
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
        self._wire.put(m.Lost(-1 if failure.rank is None else failure.rank, failure.reason))
        self._wire.flush()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(self._again())
                call.done.exception()  # its waiter hears, if it still waits
        for batch in self._batches.values():
            batch.fail(self._again)
        if self.own is not None:
            self.own.finish(self._again())
        if self._reports is not None and not self._closing:
            self._reports.failed(failure)

    # the engine's work, and copies beside it

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """Those of the head's own worker; empty, if it has none."""
        return {} if self.own is None or self.own.local is None else self.own.local.pools

    def engine_event(self, event: object) -> int:
        """The number of a batch that was sent, in place of an event. From any thread.

        Raises:
            ConfigError: it is none. An event speaks for one worker.
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
        """See ``Worker``; one that nobody knows any more is over."""
        assert isinstance(event, int)
        return self._batches.get(event) or GroupBatch(event, set())

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        """See ``Worker``."""
        self._last_batch += 1
        number = self._last_batch
        self._batches[number] = GroupBatch(number, set(self._ranks))
        self._put(m.SendBatch(number, payload, loads))
        return number

    async def batch_ended(self, number: int) -> None:
        """See ``AsyncCache.batch_ended``."""
        batch = self._batches.get(number)
        if batch is not None:
            await batch.wait()
        if number in self._unable:
            raise BatchFailed(number, self._unable[number])

    def _over(self, rank: int, news: m.Over) -> None:
        batch = self._batches.get(news.number)
        if batch is None or rank not in batch.left:
            self._nonsense(rank, f"ended batch {news.number}, which was not sent or had ended")
            return
        batch.over(rank, news.error)
        if batch.done():
            del self._batches[news.number]
            self._stirred.tell()
            if batch.errors:
                self._unable[news.number] = batch.errors
                if len(self._unable) > UNABLE:
                    del self._unable[next(iter(self._unable))]

    def perform(self, plan: Sequence[Work]) -> None:
        """See ``Worker``."""
        now, everybody, at_it, orders = perf_counter(), self._everybody, self._open, list[m.Message]()
        if self._to_forget and not all(isinstance(effect, BackupHost) for effect, _ in plan):
            # What is loaded now was decided with all outcomes applied that were known: no batch and no private copy
            # names a load any more that had failed by then.
            orders, self._to_forget = self._to_forget, []
        for effect, after in plan:
            at_it[effect.op] = _Open(effect, everybody, now)
            orders.append(m.Perform.of(effect, after))
        if self.failure is None:
            self._wire.send(orders)
        if self.failure is None and self.own is not None:
            self.own.take(*orders)

    def _ended(self, rank: int, news: m.Ended) -> None:
        failed, bit, at_it = news.status is not _DONE, 1 << rank, self._open
        over: list[_Open] = []
        for op in news.ops:
            one = at_it.get(op)
            if one is None or not one.left & bit:
                self._nonsense(rank, f"ended operation {op}, which it was not given or had ended")
                return
            one.left ^= bit
            if failed:
                one.failed = True
            if not one.left:
                del at_it[op]
                over.append(one)
        if over:
            self._close_ops(over)

    def _close_ops(self, over: Sequence[_Open]) -> None:
        """All have let go of these."""
        now = perf_counter()
        for one in over:
            effect, failed = one.effect, one.failed
            meter = self._meters[_STAGES[type(effect)]]
            meter.took(now - one.at)
            if failed:
                meter.errors += 1
                if not isinstance(effect, BackupHost):
                    self._to_forget.append(m.Forget(effect.op))
            else:
                meter.ops += 1
                for component, _, slots in effect.moves:
                    count, (pools, weight) = len(slots) // SLOT_BYTES, self._weights[component]
                    meter.pages += count * pools
                    meter.full_pages += count if component == FULL else 0
                    meter.bytes += count * weight
            if self._reports is not None:
                self._reports.ended(Outcome(effect.op, _FAILED if failed else _DONE))

    async def layer(self, op: int, i: int) -> None:
        """See ``Worker``; on the head's own worker."""
        await self._has_own("layer").layer(op, i)

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """See ``Worker``; on the head's own worker."""
        self._has_own("wait_layers").wait_layers(stream, ops, i)

    def _has_own(self, what: str) -> Performer:
        if self.own is None:
            raise ConfigError(f"{what}: the head has no worker of its own: layers are waited for where the engine runs")
        return self.own

    # pages and stores

    async def store(self, batch: Sequence[BackupStorage]) -> Stored:
        """See ``Worker``. What is too long for one message is written a part after the other, until one fails."""
        first = batch[0].op
        parts: list[Stored] = []
        try:
            for part in _parts(batch):
                if first in self._given_up or any(part[0].op in done.failed for done in parts):
                    parts.append(Stored(frozenset(effect.op for effect in part), 0, 0, 0))
                else:
                    parts.append(await self._store(part))
        finally:
            self._given_up.discard(first)
        done = parts[0] if len(parts) == 1 else fold.stored(parts, full_pages=sum)
        if self._holdings.watches:
            for effect in batch:
                if effect.op not in done.failed:
                    self._holdings.name(pages.hashes for pages in effect.pages if pages.component == FULL)
        return done

    async def _store(self, batch: Sequence[BackupStorage]) -> Stored:
        said = await self._call(lambda call: m.Store.of(call, batch), m.Written)
        ops = {effect.op for effect in batch}
        for rank, one in said.items():
            if not ops.issuperset(one.failed) or min(one.pages, one.full_pages, one.bytes) < 0:
                raise self._nonsense(rank, "wrote a batch of other operations")
        return fold.stored(list(said.values()), full_pages=max)

    def give_up(self, op: int) -> None:
        """See ``Worker``."""
        self._given_up.add(op)
        self._put(m.GiveUp(op))

    async def ask(self, asked: Sequence[Asked]) -> list[bytes]:
        """See ``Worker``."""
        return await self._in_parts(asked, self._ask)

    async def read(self, reads: Sequence[Read], *, run: bool) -> list[bytes]:
        """See ``Worker``. A run fits one message."""
        read = partial(self._read, run=run)
        return await read(reads) if run else await self._in_parts(reads, read)

    async def _in_parts(
        self, wanted: Sequence[Pages], call: Callable[[Sequence[Pages]], Awaitable[list[bytes]]]
    ) -> list[bytes]:
        """What ``call`` answers to as many of these pages at a time as fit one message."""
        answers = [b""] * len(wanted)
        for part in slices([len(pages.hashes) // HASH_BYTES for pages in wanted]):
            found = await call([_cut(wanted[at], begin, end) for at, begin, end in part])
            for (at, _, _), answer in zip(part, found, strict=True):
                answers[at] += answer
        return answers

    async def _ask(self, asked: Sequence[Asked]) -> list[bytes]:
        said = await self._call(lambda call: m.Ask(call, tuple(asked)), m.Answers)
        return self._folded(said, asked, int.__eq__, "answered a question of other pages")

    async def _read(self, reads: Sequence[Read], *, run: bool) -> list[bytes]:
        said = await self._call(lambda call: m.Fetch(call, tuple(reads), run), m.Answers)
        return self._folded(said, reads, int.__le__ if run else int.__eq__, "read other pages")

    def _folded(
        self, said: Mapping[int, m.Answers], wanted: Sequence[Asked] | Sequence[Read],
        fits: Callable[[int, int], bool], nonsense: str,
    ) -> list[bytes]:  # fmt: skip
        """The worst result of each page. ``fits``: whether so many answers can be those to so many pages; where they
        cannot, a worker has spoken ``nonsense``."""
        counts = [len(pages.hashes) // HASH_BYTES for pages in wanted]
        for rank, one in said.items():
            sizes = [len(answer) for answer in one.answers]
            right = len(sizes) == len(counts) and all(map(fits, sizes, counts))
            if not right or not fold.are_results(one.answers):
                raise self._nonsense(rank, nonsense)
        answers = fold.all_worst([one.answers for one in said.values()])
        self._name([(pages.pool, pages.hashes) for pages in wanted], answers)
        return answers

    def _name(self, asked: Sequence[tuple[str, bytes]], answers: Sequence[bytes]) -> None:
        """Note the hashes of pages that all have, for what is told of their keys."""
        if self._holdings.watches:
            for (pool, hashes), answer in zip(asked, answers, strict=True):
                if pool in self._leads:
                    self._holdings.name(
                        hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at, found in enumerate(answer) if found == 1
                    )

    async def delete(self, hashes: Sequence[bytes]) -> None:
        """See ``Worker``."""
        for at in range(0, len(hashes), DELETED):
            some = b"".join(hashes[at : at + DELETED])
            await self._call(lambda call, some=some: m.Delete(call, some), m.Done)  # type: ignore[misc]

    async def clear(self) -> None:
        """See ``Worker``."""
        await self._call(m.Clear, m.Done)

    async def flush(self) -> None:
        """See ``Worker``."""
        await self._call(m.Flush, m.Done)

    def is_away(self, page_hash: bytes) -> bool:
        """See ``Worker``: whether it is so on any worker, since then nothing can be fetched whole."""
        if self._shut:
            self._put(m.Probe(page_hash))
        return bool(self._shut)

    @property
    def shut(self) -> bool:
        """See ``Worker``: whether it is so on any."""
        return bool(self._shut)

    def _health(self, rank: int, news: m.Health) -> None:
        (self._shut.add if news.shut else self._shut.discard)(rank)

    # which stores there are

    @property
    def has_stores(self) -> bool:
        """See ``Worker``."""
        return bool(self._entries)

    @property
    def stores(self) -> tuple[StoreEntry, ...]:
        """See ``Worker``."""
        return self._entries

    def find_store(self, name: str | None) -> StoreEntry:
        """See ``Worker``."""
        if name is not None:
            name = checks.text("name", name)
        found = [entry for entry in self._entries if name in (None, entry.options.name)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(entry.options.name for entry in self._entries) or "none"
        raise ConfigError(f"storage: {'name the store' if name is None else f'no store {name!r}'}; attached: {there}")

    async def open_store(self, storage: Storage, options: Mapping[str, str], position: int | None) -> StoreEntry:
        """See ``Worker``: on all, or none."""
        if not isinstance(storage, str):
            raise ConfigError(f"storage={checks.shown(storage)}: workers of other processes take URLs")
        self._last_store += 1
        number = self._last_store

        def order(call: int) -> m.Message:
            return m.OpenStore(call, number, storage, dict(options), position)

        try:
            self._be_patient(1)
            try:
                opened = await self._call(order, m.StoreOpened)
            finally:
                self._be_patient(-1)
            first = next(iter(opened.values()))
            for rank, one in opened.items():
                if (one.options.name, one.options.write) != (first.options.name, first.options.write):
                    raise ConfigError(f"storage: rank {rank} opened another store: {one.options}")
        except BaseException:
            if self.failure is None:
                await completed_quietly(self.drop_store(number))
            raise
        self._shared[number] = any(one.shared for one in opened.values())
        entry = self._opened[number] = StoreEntry(number, first.options)
        return entry

    def _be_patient(self, more: int) -> None:
        """Wait for longer than the time-out while pools or a store are opened: these may pin the host's memory.
        ``more``: so many are opened, or are so no more."""
        self._opening += more
        for link in self._links.values():
            link.patience(OPENING if self._opening else None)

    def use_store(self, number: int, position: int | None) -> None:
        """See ``Worker``."""
        entry = self._opened[number]
        check_name(entry.options.name, [other.options.name for other in self._entries])
        if position is not None:
            position = checks.integer("position", position, 0, len(self._entries))
        at = len(self._entries) if position is None else position
        self._entries = (*self._entries[:at], entry, *self._entries[at:])
        self._put(m.UseStore(number, position))

    async def drop_store(self, number: int) -> None:
        """See ``Worker``."""
        self._forget_store(number)
        await self._call(lambda call: m.DropStore(call, number), m.Done)

    def _forget_store(self, number: int) -> None:
        self._opened.pop(number, None)
        self._shared.pop(number, None)

    def leave_store(self, number: int) -> None:
        """See ``Worker``."""
        if any(entry.number == number for entry in self._entries):
            self._entries = tuple(entry for entry in self._entries if entry.number != number)
            self._put(m.LeaveStore(number))

    async def close_store(self, number: int) -> None:
        """See ``Worker``."""
        self._forget_store(number)
        await self._call(lambda call: m.CloseStore(call, number), m.Done)

    def watch_store(self, number: int) -> None:
        """See ``Worker``."""
        self._holdings.watch(number, shared=self._shared[number])
        self._put(m.Watch(number, True))

    def unwatch_store(self, number: int) -> None:
        """See ``Worker``."""
        if self._holdings.unwatch(number):
            self._put(m.Watch(number, False))

    def _keys(self, rank: int, news: m.Keys) -> None:
        self._holdings.told(news.store, rank, news.there, news.keys)

    def _report_keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        if self._reports is not None:
            self._reports.keys(store, there, keys)

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """See ``Worker``: what stands for a page's keys on all workers."""
        return self._holdings.key_of

    # looking at it

    def meters(self) -> Mapping[str, Meter]:
        """See ``Worker``: an operation takes as long as on the slowest; pages and bytes of all workers add up."""
        return self._meters

    def queues(self) -> Mapping[str, int]:
        """See ``Worker``: operations that have not ended everywhere."""
        stages = [_STAGES[type(one.effect)] for one in self._open.values()]
        return {name: stages.count(name) for name in self._meters}

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """See ``Worker``; of other processes as of their last sign of life."""
        if self.own is not None:
            self.own.count()
        parts = list(self._counters.values())
        names = [entry.options.name for entry in self._entries]
        by_name = {name: fold.sums([part.stores[name] for part in parts if name in part.stores]) for name in names}
        return fold.sums([part.storage for part in parts]), by_name

    def _counted(self, rank: int, news: m.Counters) -> None:
        if not fold.are_counters([news.storage, *news.stores.values()]):
            self._nonsense(rank, "counted what nobody can")
            return
        self._counters[rank] = news


def _closed() -> CacheClosed:
    return CacheClosed("the cache was closed before the batch was over")


Pages = TypeVar("Pages", Asked, Read, StoredPages)


def _cut(pages: Pages, begin: int, end: int) -> Pages:
    """So many of these pages."""
    hashes = pages.hashes[begin * HASH_BYTES : end * HASH_BYTES]
    if isinstance(pages, Asked):
        return pages._replace(hashes=hashes)
    return pages._replace(hashes=hashes, slots=pages.slots[begin * SLOT_BYTES : end * SLOT_BYTES])


def _parts(batch: Sequence[BackupStorage]) -> Iterator[Sequence[BackupStorage]]:
    """``batch``, each part of which fits one message: the whole, or else a piece of one operation."""
    if len(list(slices([len(pages.hashes) // HASH_BYTES for effect in batch for pages in effect.pages]))) <= 1:
        yield batch
        return
    for effect in batch:
        for part in slices([len(pages.hashes) // HASH_BYTES for pages in effect.pages]):
            yield [BackupStorage(effect.op, tuple(_cut(effect.pages[at], begin, end) for at, begin, end in part))]
