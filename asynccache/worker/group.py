"""Several workers as one: calls of the head go to all of them, and their answers are folded into one.

``WorkerGroup`` is a ``LocalWorker`` whose remote methods are called on all ranks. A remote method that it does not have
is made by ``everywhere``: it sends the call, and folds the answers. An override adds what only the head knows, and
sends the call by ``folded``, ``call`` or ``tell``, which take the method that every rank is to call.

What always holds:
* Each message is for all workers, and is put on every link in the core call's turn. The head's own worker takes it in
  that turn, too.
* An operation has one outcome, when all workers have let go of it: DONE if it was DONE everywhere.
* A call has one answer, when all workers have answered. That of a question is the worst result of each page.
* A batch is over when it is over on every worker.
* A store is opened on all workers or on none, and has the same number on all: the head chooses it.
* A worker that is gone, is silent, cannot go on, or answers what cannot be right ends the group: everybody who waits,
  and every other worker, is told its rank and the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, partialmethod
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Status
from asynccache.errors import BackendError, BatchFailed, CacheClosed, ConfigError, RankFailure
from asynccache.settle import settled
from asynccache.storage.contract import Result
from asynccache.storage.url import check_name, place_of
from asynccache.worker import folds
from asynccache.worker import messages as m
from asynccache.worker.link import Wire
from asynccache.worker.local import LATE, EmbedderParts, LocalWorker, Storage, StoreEntry
from asynccache.worker.messages import news_decoder, orders_of
from asynccache.worker.pool_layout import FULL, size_of
from asynccache.worker.rank_server import ORDERS, PINNING, RankServer
from asynccache.worker.stages import ChangeSignal, StageMeter
from asynccache.worker.watched_keys import WatchedKeys
from asynccache.worker.work import (
    BatchInFlight,
    CopyKind,
    ReadOrder,
    Reports,
    StoredBatch,
    StoreQuestion,
    Work,
    WriteOrder,
)

if TYPE_CHECKING:
    from asynccache.memory.device import Device
    from asynccache.memory.pools import DevicePool
    from asynccache.worker.link import Link
    from asynccache.worker.rank_server import RankWorker
    from asynccache.worker.ranks import Workers

T = TypeVar("T")
P = ParamSpec("P")

OPENING = 600.0
"""Seconds in which a cancelled opening must end. It first finishes pinning memory."""
UNABLE = 1024
"""The most failed batches that are remembered after they are over, for ``batch_ended`` and ``batch``."""
PART = 64 << 10
"""The most pages that one message asks about, or tells to delete."""

_EARLY = "the cache was closed before the batch was over"
_STAGES = {CopyKind.BACKUP: "backup_host", CopyKind.LOAD: "load_back", CopyKind.CLONE: "load_back"}
_decode_news = news_decoder(ORDERS)
_PERFORM, _FORGET = ORDERS["perform"].message, ORDERS["forget_load"].message


class WorkInFlight:
    """A work that has not ended on all ranks."""

    __slots__ = ("at", "failed", "left", "work")

    def __init__(self, work: Work, ranks: Iterable[int]) -> None:
        self.work = work
        self.left = set(ranks)
        """The ranks on which the work has not ended."""
        self.failed = False
        """True once the work has failed on a rank."""
        self.at = perf_counter()
        """When the work began, in seconds of ``perf_counter``."""


class AwaitedAnswers:
    """The answers of all ranks to one call, or the ends of one batch on all of them (``BatchInFlight``)."""

    __slots__ = ("_broken", "_changed", "failed", "left", "number", "said")

    def __init__(self, number: int, ranks: Iterable[int], *, failed: bool = False) -> None:
        self.number = number
        self.left = set(ranks)
        """The ranks that have not spoken yet."""
        self.said: dict[int, Any] = {}
        """What the other ranks have said, by rank."""
        self.failed = failed
        """True once a rank has said that it could not run the batch."""
        self._changed = ChangeSignal()
        self._broken: Callable[[], BaseException] | None = None

    def __repr__(self) -> str:
        return f"AwaitedAnswers({self.number}, {f'not over on {sorted(self.left)}' if self.left else 'over'})"

    def done(self) -> bool:
        """Return True once every rank has spoken."""
        return not self.left

    async def wait(self) -> None:
        """Return when every rank has spoken.

        Raises:
            RankFailure: the group has failed.
            CacheClosed: the cache was closed before every rank has spoken.
        """
        while self.left:
            await self._change()

    async def settled(self) -> None:
        while self.left and not self.failed:
            await self._change()

    async def _change(self) -> None:
        if self._broken is not None:
            raise self._broken()
        await self._changed.wait()

    def hear(self, rank: int, message: object) -> bool:
        """Note what ``rank`` says. Returns False, and notes nothing, if it was not expected to say anything more."""
        if rank not in self.left:
            return False
        self.left.discard(rank)
        self.said[rank] = message
        if isinstance(message, m.BatchOver) and message.error:
            self.failed = True
        if self.failed or not self.left:
            self._changed.tell()
        return True

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The ranks will not speak any more: whoever waits, now or later, gets an ``error()``."""
        self._broken = error
        self._changed.tell()


async def open_group(
    config: CacheConfig, given: EmbedderParts, workers: Workers, *, debug: bool = False
) -> WorkerGroup:
    """Wait for all workers, and have each open its pools and stores: all or none. ``debug``: as for ``open_local``.
    Cancelling it leaves nothing open.

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
        await group.open(debug)
    except BaseException as error:
        await _completed_quietly(group.abandon(error))
        raise
    return group


def everywhere(group: type[WorkerGroup]) -> type[WorkerGroup]:
    """Give ``group`` each remote method of ``LocalWorker`` that it does not have itself, called on all ranks."""
    for name, order in orders_of(LocalWorker).items():
        if name not in vars(group):
            send: Callable[..., Any] = group.tell if order.answer is None else group.folded
            setattr(group, name, partialmethod(send, vars(LocalWorker)[name]))
    return group


@everywhere
class WorkerGroup(LocalWorker):
    """The workers of all ranks as one."""

    def __init__(self, config: CacheConfig, given: EmbedderParts, workers: Workers, links: Mapping[int, Link]) -> None:
        self.layers = 0
        self.own: RankServer | None = None
        """The head's own rank; None: it has none."""
        self.takes_stores = config.pools()[0].host_pages > 0
        self.failure: RankFailure | None = None
        """Why the group is over, once it is."""
        self.keys = WatchedKeys(lambda store, there, keys: self._reports.keys(store, there, keys))
        """The pages that the watched stores have."""
        self._config = config
        self._timeout = workers.timeout
        self._ranks = frozenset(range(workers.topology.ranks))
        self._links = dict(links)
        self._wire = Wire(links.values(), self._unsendable)
        self._reports = Reports()
        self._numbers = 0
        self._calls: dict[int, AwaitedAnswers] = {}
        self._copies: dict[int, WorkInFlight] = {}
        self._to_forget: list[m.Message] = []
        self._sent: dict[int, AwaitedAnswers] = {}
        self._last_batch = 0
        self._unable: dict[int, Mapping[int, str]] = {}
        self._opening = 0
        self._open_stores: dict[int, StoreEntry] = {}
        self._used: tuple[StoreEntry, ...] = ()
        self._last_store = 0
        self._shut: set[int] = set()
        self._counters: dict[int, m.StoreCounters] = {}
        self._leads = [spec.name for spec in config.pools() if int(spec.component) == FULL]
        self._meters = {"backup_host": StageMeter(), "load_back": StageMeter()}
        self._weights: dict[int, tuple[int, int]] = {}
        self._closing = self._leaving = self._hurried = False
        self._stirred = ChangeSignal()
        self._timers: list[asyncio.TimerHandle] = []
        if workers.own is not None:
            self.own = RankServer(workers.own, workers.topology, given, workers.shard, partial(self._take, workers.own))

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{len(self._calls)} calls"
        return f"WorkerGroup({len(self._ranks)} workers, {len(self._copies)} works, {state})"

    @property
    def face(self) -> RankWorker | None:
        """The group as the engine in the head's process sees it; None: the head has no rank."""
        return None if self.own is None else self.own.worker

    # opening and closing

    async def open(self, debug: bool) -> None:
        """Have all workers open. To be called once. Raises as ``open_group``."""
        self._be_patient(1)
        for rank, link in self._links.items():
            link.begin(partial(self._heard, rank), partial(self._lost, rank))
        opened = await self.call(RankServer.open, self._config, debug)
        head, first = next(iter(opened.items()))
        pools = {spec.name for spec in self._config.pools()}
        for rank, one in opened.items():
            right = one.layers >= 0 and len(one.digest) in (0, HASH_BYTES) and pools.issuperset(one.weights)
            if not right or min(one.weights.values(), default=1) < 1:
                raise self._nonsense(rank, "opened other pools")
            if list(map(_use, one.stores)) != list(map(_use, first.stores)):
                raise ConfigError(f"rank {rank}: its stores are others than those of rank {head}")
        own = None if self.own is None else self.own.rank
        self.layers = max(one.layers for rank, one in opened.items() if own in (None, rank))
        for spec in self._config.pools():  # how many pools of a component all have, and the bytes of a page in all
            sizes = [one.weights[spec.name] for one in opened.values() if spec.name in one.weights]
            count, size = self._weights.get(int(spec.component), (0, 0))
            self._weights[int(spec.component)] = (count + len(sizes), size + sum(sizes))
        self.keys.digests = {rank: one.digest for rank, one in opened.items() if one.digest}
        alike = zip(*[one.stores for one in opened.values()], strict=True)
        self._used = tuple(_agreed(number, entries) for number, entries in enumerate(alike, 1))
        self._open_stores = {entry.number: entry for entry in self._used}
        self._last_store = len(self._used)
        self._be_patient(-1)
        self.tell(RankServer.all_open)

    def start(self, reports: Reports) -> list[tuple[str, Coroutine[Any, Any, None]]]:
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
        while self._sent and self.failure is None and not self._hurried:
            await self._stirred.wait()
        self._leaving = True
        try:
            if self.failure is None:
                await self.call(RankServer.close, patience)
            elif not reported:
                raise self._again()
        except RankFailure as failure:
            raise BackendError(f"{failure}: it may have lost what it had stored last") from failure
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._let_go(patience, latest)

    def close_by(self, seconds: float) -> None:
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
        self._say_lost(None if self.own is None else self.own.rank, f"the cache was not opened: {reason}")
        self._closing = self._leaving = True
        await self._let_go(1.0, inf)

    def _say_lost(self, rank: int | None, reason: str) -> None:
        """Tell the other processes that the group is over, also if this one knows it already."""
        lost = ORDERS["group_lost"].message
        self._wire.send([lost(-1 if rank is None else rank, m.sendable(reason))])

    async def _let_go(self, patience: float, latest: float) -> None:
        """Close the head's own worker and the links. ``patience``: as for ``LocalWorker.aclose``. ``latest``: until
        when, by the loop's clock, the own worker is waited for; after that it goes on closing by itself."""
        self._wire.flush()
        for batch in self._sent.values():
            batch.fail(lambda: CacheClosed(_EARLY) if self.failure is None else self._again())
        try:
            if self.own is not None:
                await self._close_own(self.own, patience, latest)
        finally:
            if self.own is not None:
                self.own.finish(None)
            links, self._wire.links = self._wire.links, []
            await asyncio.gather(*(link.aclose() for link in links))

    async def _close_own(self, own: RankServer, patience: float, latest: float) -> None:
        loop = asyncio.get_running_loop()
        closing = loop.create_task(own.aclose(patience), name="asynccache-close-own")
        await asyncio.wait([closing], timeout=None if latest == inf else max(latest - loop.time(), 0.0))
        if closing.done():
            closing.result()
        else:
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise BackendError(
                f"rank {own.rank}: had not closed when the cache was to be closed: it may have lost "
                "what it had stored last"
            )

    # both ways

    def _put(self, message: m.Message) -> None:
        if self.failure is None:
            self._wire.put(message)
            if self.own is not None:
                self.own.take(message)

    def tell(self, method: Callable[Concatenate[Any, P], object], *args: P.args, **named: P.kwargs) -> None:
        """Have all ranks call ``method``, which nobody answers."""
        self._put(ORDERS[method.__name__].message(*args, **named))

    async def folded(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **named: P.kwargs
    ) -> T:
        """Have all ranks call ``method``, and fold their answers. Cancelling and errors are those of ``call``; an
        answer that cannot be right ends the group."""
        fold = ORDERS[method.__name__].fold
        said = await self.call(method, *args, **named)
        try:
            folded: Any = None if fold is None else fold(said, *args, **named)
        except RankFailure as nonsense:
            self._fail(nonsense)
            raise
        return cast("T", folded)

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **named: P.kwargs
    ) -> dict[int, T]:
        """Have all ranks call ``method``. Returns their answers by rank, when all have answered. Cancelling it returns
        when all have let go of their buffers.

        Raises:
            RankFailure: the group is over; or a worker raised an error of another class than the two below. If the
                call was to write, find or read pages, the group ends with such an error.
            ConfigError, BackendError: a worker raised it.
        """
        if self.failure is not None:
            raise self._again()
        order = ORDERS[method.__name__]
        self._numbers += 1
        number, call = self._numbers, AwaitedAnswers(self._numbers, self._ranks)
        self._calls[number] = call
        self._put(order.message(number, *args, **named))
        try:
            await call.wait()
        except asyncio.CancelledError:
            if call.left and self.failure is None:
                self.tell(RankServer.cancel, number)
                await _completed_quietly(self._let_go_of(call))
            raise
        finally:
            del self._calls[number]
        failures = {rank: one for rank, one in sorted(call.said.items()) if isinstance(one, m.Failed)}
        if failures:
            error = folds.error_of(failures)
            if isinstance(error, RankFailure) and order.fold is not None:
                self._fail(error)
            raise error
        for rank, one in call.said.items():
            if type(one) is not order.answer:
                raise self._nonsense(rank, f"answered a call with {type(one).__name__}")
        return {rank: one.value for rank, one in sorted(call.said.items())}

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
        if self._opening:
            return OPENING
        return self._timeout + max((entry.options.timeout for entry in self._open_stores.values()), default=0.0)

    def _heard(self, rank: int, frame: bytes) -> None:
        for message in _decode_news(frame):
            self._take(rank, message)

    def _take(self, rank: int, message: m.Message) -> None:
        if self.failure is not None:
            return
        match message:
            case m.WorksOver():
                self._ended(rank, message)
            case m.Answer():
                call = self._calls.get(message.call)
                if call is None or not call.hear(rank, message):
                    self._nonsense(rank, f"answered call {message.call}, which nobody made or which it had answered")
            case m.BatchOver():
                self._over(rank, message)
            case m.StoreKeys():
                self.keys.told(message.store, rank, message.there, message.keys)
            case m.StoreHealth():
                (self._shut.add if message.shut else self._shut.discard)(rank)
            case m.StoreCounters():
                if not folds.are_counters([message.storage, *message.stores.values()]):
                    self._nonsense(rank, "counted what nobody can")
                else:
                    self._counters[rank] = message
            case m.Died():
                self._fail(RankFailure(message.reason, rank))

    # the end

    def _lost(self, rank: int, failure: RankFailure) -> None:
        if not self._leaving or any(rank in call.left for call in self._calls.values()):  # else it has closed
            self._fail(RankFailure(failure.reason, rank))

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
        self._say_lost(failure.rank, failure.reason)
        for awaited in (*self._calls.values(), *self._sent.values()):
            awaited.fail(self._again)
        if self.own is not None:
            self.own.finish(self._again())
        if not self._closing:
            self._reports.failed(failure)

    # the engine's work, and copies beside it

    @property
    def device(self) -> Device | None:
        """The device of the head's own worker; None if it has none."""
        return None if self.own is None or self.own.local is None else self.own.local.device

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
            raise ConfigError(
                f"{checks.shown(event)} is no number of a batch: a cache with workers takes what "
                "send_batch returned, since an event speaks for one worker only"
            ) from None
        if number > self._last_batch:
            raise ConfigError(f"batch {number} was not sent")
        return number

    def batch(self, event: object) -> BatchInFlight:
        """A batch that is not known any more is over."""
        assert isinstance(event, int)
        return self._sent.get(event) or AwaitedAnswers(event, (), failed=event in self._unable)

    def send_batch(self, payload: bytes, loads: tuple[int, ...]) -> int:
        self._last_batch += 1
        number = self._last_batch
        self._sent[number] = AwaitedAnswers(number, self._ranks)
        self.tell(RankServer.send_batch, number, payload, loads)
        return number

    async def batch_ended(self, number: int) -> None:
        batch = self._sent.get(number)
        if batch is not None:
            await batch.wait()
        if number in self._unable:
            raise BatchFailed(number, self._unable[number])

    def _over(self, rank: int, news: m.BatchOver) -> None:
        batch = self._sent.get(news.number)
        if batch is None or not batch.hear(rank, news):
            self._nonsense(rank, f"ended batch {news.number}, which was not sent or had ended")
        elif batch.done():
            del self._sent[news.number]
            self._stirred.tell()
            if errors := {rank: over.error for rank, over in batch.said.items() if over.error}:
                self._unable[news.number] = errors
                if len(self._unable) > UNABLE:
                    del self._unable[next(iter(self._unable))]

    def perform(self, plan: Sequence[Work]) -> None:
        orders: list[m.Message] = []
        if self._to_forget and not all(work.kind is CopyKind.BACKUP for work in plan):
            # A plan with a load or a private copy was decided after all known outcomes were applied. So from now on no
            # batch and no private copy names a load whose failure was known by then.
            orders, self._to_forget = self._to_forget, []
        orders += map(_PERFORM, plan)
        if self.failure is None:
            self._wire.send(orders)
        for work in plan:  # after sending, so that the other workers begin meanwhile
            self._copies[work.ops[0]] = WorkInFlight(work, self._ranks)
        if self.failure is None and self.own is not None:
            self.own.take(*orders)

    def _ended(self, rank: int, news: m.WorksOver) -> None:
        for first in news.works:
            copies = self._copies.get(first)
            if copies is None or rank not in copies.left:
                self._nonsense(rank, f"ended operation {first}, which it was not given or had ended")
                return
            copies.left.discard(rank)
            copies.failed |= news.status is Status.FAILED
            if copies.left:
                continue
            work = self._copies.pop(first).work
            status = Status.FAILED if copies.failed else Status.DONE
            if work.kind is not CopyKind.CLONE:  # private copies are not counted, see ``stages``
                meter, count = self._meters[_STAGES[work.kind]], len(work.ops)
                meter.took(perf_counter() - copies.at, count)
                meter.ended(count, status, size_of(work.moves, self._weights))
            if copies.failed and work.kind is not CopyKind.BACKUP:  # nothing names a failed backup later
                self._to_forget += map(_FORGET, work.ops)
            self._reports.ended(status, work.ops)

    async def layer(self, op: int, i: int) -> None:
        """Waits for the head's own worker. Raises ``ConfigError``: the head has none."""
        await self._has_own("layer").layer(op, i)

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """Waits for the head's own worker. Raises ``ConfigError``: the head has none."""
        self._has_own("wait_layers").wait_layers(stream, ops, i)

    def _has_own(self, what: str) -> RankServer:
        if self.own is None:
            raise ConfigError(f"{what}: the head has no worker of its own: layers are waited for where the engine runs")
        return self.own

    # pages

    async def store(self, batch: Sequence[WriteOrder]) -> StoredBatch:
        done = await self.folded(LocalWorker.store, batch)
        if self.keys.watches:
            for order in batch:
                if order.op not in done.failed:
                    self.keys.name(pages.hashes for pages in order.pages if pages.component == FULL)
        return done

    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """Questions about more than ``PART`` pages are asked in parts."""
        if sum(len(question.hashes) for question in asked) <= PART * HASH_BYTES:
            answers = await self.folded(LocalWorker.ask, asked)
        else:
            answers = []
            for pool, hashes in asked:
                parts = [hashes[at : at + PART * HASH_BYTES] for at in range(0, len(hashes), PART * HASH_BYTES)]
                said = [await self.folded(LocalWorker.ask, [StoreQuestion(pool, part)]) for part in parts]
                answers.append(b"".join(answer for (answer,) in said))
        self._name(asked, answers)
        return answers

    async def read(self, reads: Sequence[ReadOrder], run: bool) -> list[bytes]:
        answers = await self.folded(LocalWorker.read, reads, run)
        self._name(reads, answers)
        return answers

    def _name(self, wanted: Sequence[StoreQuestion | ReadOrder], answers: Sequence[bytes]) -> None:
        """Name the pages that all workers have to the ``WatchedKeys``, which need their hashes."""
        if self.keys.watches:
            for pages, answer in zip(wanted, answers, strict=True):
                if pages.pool in self._leads:
                    self.keys.name(
                        pages.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
                        for at, found in enumerate(answer)
                        if found == Result.HIT
                    )

    async def delete(self, hashes: Sequence[bytes]) -> None:
        for at in range(0, len(hashes), PART):
            await self.folded(LocalWorker.delete, hashes[at : at + PART])

    def is_away(self, page_hash: bytes) -> bool:
        """True if any worker's stores all refuse calls: then no page can be fetched whole."""
        if self._shut:
            self.tell(LocalWorker.is_away, page_hash)
        return bool(self._shut)

    @property
    def shut(self) -> bool:
        """True if any worker's stores all refuse calls."""
        return bool(self._shut)

    @property
    def busy(self) -> Sequence[str]:
        """Empty: a rank whose store hangs is given up as a whole."""
        return ()

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """The key of one worker stands for those of all."""
        return self.keys.key_of

    # stores

    @property
    def has_stores(self) -> bool:
        return bool(self._used)

    @property
    def stores(self) -> tuple[StoreEntry, ...]:
        return self._used

    def find_store(self, name: str | None) -> StoreEntry:
        return self._used[place_of(name, [entry.options.name for entry in self._used])]

    async def open_store(
        self, storage: Storage, options: Mapping[str, str], position: int | None, *, number: int | None = None
    ) -> StoreEntry:
        """All ranks open the store, or none."""
        if not isinstance(storage, str):
            raise ConfigError(f"storage={checks.shown(storage)}: workers of other processes take URLs")
        self._last_store = number = number or self._last_store + 1
        try:
            self._be_patient(1)
            try:
                opened = await self.call(RankServer.open_store, number, storage, dict(options), position)
            finally:
                self._be_patient(-1)
            entry = _agreed(number, list(opened.values()))
            for rank, one in opened.items():
                if _use(one) != _use(entry):
                    raise ConfigError(f"storage: rank {rank} opened another store: {one.options}")
        except BaseException:
            await _completed_quietly(self.drop_store(number))
            raise
        self._open_stores[number] = entry
        return entry

    def _be_patient(self, more: int) -> None:
        """Allow ``PINNING`` seconds of silence while pools or stores are opened, because that may pin the host's
        memory. ``more``: 1 when an opening begins, -1 when it ends."""
        self._opening += more
        for link in self._links.values():
            link.patience(PINNING if self._opening else None)
        self.tell(RankServer.be_patient, bool(self._opening))

    def use_store(self, number: int, position: int | None) -> None:
        entry = self._open_stores[number]
        check_name(entry.options.name, [other.options.name for other in self._used])
        if position is not None:
            position = checks.integer("position", position, 0, len(self._used))
        at = len(self._used) if position is None else position
        self._used = (*self._used[:at], entry, *self._used[at:])
        self.tell(LocalWorker.use_store, number, position)

    async def drop_store(self, number: int) -> None:
        self._open_stores.pop(number, None)
        await self.folded(LocalWorker.drop_store, number)

    def leave_store(self, number: int) -> None:
        if any(entry.number == number for entry in self._used):
            self._used = tuple(entry for entry in self._used if entry.number != number)
            self.tell(LocalWorker.leave_store, number)

    async def close_store(self, number: int) -> None:
        self._open_stores.pop(number, None)
        await self.folded(LocalWorker.close_store, number)

    async def watch_store(self, number: int) -> None:
        self.keys.watch(number, shared=self._open_stores[number].shared)
        await self.folded(LocalWorker.watch_store, number)

    def unwatch_store(self, number: int) -> None:
        if self.keys.unwatch(number):
            self.tell(LocalWorker.unwatch_store, number)

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """An operation takes as long as on the slowest worker; pages and bytes of all workers add
        up."""
        return self._meters

    def queues(self) -> Mapping[str, int]:
        """Counts the operations that have not ended on every worker."""
        counts = dict.fromkeys(self._meters, 0)
        for copies in self._copies.values():
            counts[_STAGES[copies.work.kind]] += len(copies.work.ops)
        return counts

    def store_statistics(self) -> tuple[Mapping[str, int | float], Mapping[str, Mapping[str, int | float]]]:
        """The counters of other processes are as they last told them."""
        if self.own is not None:
            self.own.count()
        parts = list(self._counters.values())
        names = [entry.options.name for entry in self._used]
        by_name = {name: folds.sums([part.stores[name] for part in parts if name in part.stores]) for name in names}
        return folds.sums([part.storage for part in parts]), by_name


async def _completed_quietly(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile, and drop its error."""
    await settled([asyncio.gather(work, return_exceptions=True)])


def _use(entry: StoreEntry) -> tuple[str, bool]:
    """Return what must be equal on all ranks for an open store."""
    return entry.options.name, entry.options.write


def _agreed(number: int, entries: Sequence[StoreEntry]) -> StoreEntry:
    """Return the entry of a store, given those of all ranks."""
    return StoreEntry(number, entries[0].options, any(entry.shared for entry in entries))
