"""One worker of a group: it takes the head's messages, and has its pools and stores do what they say.

The head's own worker is one of these, too. The only difference is that nothing is encoded for it.

Laws:
* Messages are taken in the order in which they were sent. A work whose batches have no event here yet waits for that,
  and so do the private copies that need it; the works behind it go on.
* A load (or private copy) that has failed here is remembered until the head sends ``ForgetLoad`` for it. Until then a
  private copy that needs it fails, too, and the engine is told if a batch names it.
* Each work and each call is answered once, when its buffers are let go, also if it is cancelled.
* An error that answers no call (a device that refuses a copy, a stage that ends) is the end of the group.
  The engine here is told first, so that it does not take pages that are lost for pages that have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Status
from asynccache.errors import ConfigError, RankFailure
from asynccache.worker import messages as m
from asynccache.worker.contract import CopyKind, Reports, Work
from asynccache.worker.inbox import ChangeSignal
from asynccache.worker.sent_batches import EngineBatch, SentBatches
from asynccache.worker.topology import Topology

if TYPE_CHECKING:
    from asynccache.worker.contract import EmbedderParts
    from asynccache.worker.local import LocalWorker
    from asynccache.worker.stages import Copying

T = TypeVar("T")

Shard = Callable[[CacheConfig], CacheConfig]
"""A function from the head's configuration to that of one rank: bytes, layers, ``covers`` and dtypes may differ, and
all else is the same."""

Tell = Callable[[m.Message], None]

KEYS = 1024
"""The most storage keys of a message."""

LOOP_ALIVE = 1.0
"""Seconds after which a thread that waits for the loop looks whether the loop still runs."""

LOOP_ENDED = "the loop of its worker has ended"
CLOSED = "the worker is closed"


class Performer:
    """The worker of ``rank``. ``tell``: called with each message for the head. ``local``: the worker that has the pools
    and stores; None before they are open, and when they are closed. ``batches``: the engine's batches. Other mutable
    state: works that wait for a batch's event (``_held``), loads in flight, loads that failed, and calls that are under
    way.
    """

    def __init__(
        self, rank: int, topology: Topology, given: EmbedderParts, shard: Shard | None, tell: Tell
    ) -> None:  # fmt: skip
        self.rank = rank
        self.topology = topology
        self.config: CacheConfig | None = None
        self.local: LocalWorker | None = None
        self.batches = SentBatches(lambda number, error: tell(m.BatchOver(number, error)), self._try_held, self.die)
        self._given = given
        self._shard = shard
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[m.Message | None]] = {}
        self._storing: set[int] = set()
        self._stages: list[asyncio.Task[None]] = []
        self._held: dict[int, Work] = {}
        self._begun = ChangeSignal()
        self._loads: set[int] = set()
        self._failed: set[int] = set()
        self._shut = False
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None
        self._counted = m.StoreCounters({}, {})
        self._do: dict[type, Callable[[Any], Coroutine[Any, Any, m.Message | None]]] = {
            m.OpenWorker: lambda o: self._open(o),
            m.WritePages: lambda o: self._store(o),
            m.AskPages: lambda o: self._ask(o),
            m.ReadPages: lambda o: self._fetch(o),
            m.DeletePages: lambda o: self._delete(o),
            m.ClearStores: lambda _: self._own.clear(),
            m.FlushStores: lambda o: self._flush(o),
            m.OpenStore: lambda o: self._open_store(o),
            m.DropStore: lambda o: self._drop_store(o),
            m.CloseStore: lambda o: self._own.stores.close(o.number),
            m.WatchStore: lambda o: self._own.stores.watch(o.number),
            m.CloseWorker: lambda o: self.aclose(o.patience),
        }
        self._take: dict[type, Callable[[Any], object]] = {
            **dict.fromkeys(self._do, self._begin),
            m.AllOpen: lambda _: None,
            m.GroupLost: lambda _: None,
            m.PerformWork: lambda o: self._effects(o.work),
            m.ForgetLoad: lambda o: self._failed.discard(o.op),
            m.SendBatch: self._sent,
            m.GiveUp: self._give_up,
            m.ProbeStores: lambda o: self._own.is_away(o.page_hash),
            m.UseStore: self._use_store,
            m.LeaveStore: self._leave_store,
            m.UnwatchStore: lambda o: self._own.stores.unwatch(o.number),
            m.CancelCall: self._cancel,
        }

    def __repr__(self) -> str:
        return f"Performer(rank {self.rank}, {self.local!r}, {len(self._calls)} calls, {len(self._held)} held)"

    def take(self, *messages: m.Message) -> None:
        """Do what the head's ``messages`` say. Never waits and never raises; the head is told of errors."""
        for message in messages:
            try:
                self._take[type(message)](message)
            except Exception as error:
                self.die(error)

    @property
    def _own(self) -> LocalWorker:
        if self.local is None:
            self.batches.check()
            raise RankFailure("was told to work before it was open" if self._closing is None else CLOSED)
        return self.local

    @property
    def layers(self) -> int:
        """The number of the model's layers, up to the last one that this rank has. Raises ``RankFailure``: the worker
        is closed, or not open yet."""
        return self._own.layers

    def die(self, error: BaseException) -> None:
        """Tell the engine and the head that this worker cannot go on. The engine is told first, before it can take
        pages that are lost for pages that have arrived."""
        if not self._stopped:
            self._stopped = True
            self.finish(RankFailure(said(error), self.rank))
            self._tell(m.WorkerDied(said(error)))

    # opening and closing

    async def _open(self, order: m.OpenWorker) -> m.Message:
        from asynccache.worker.local import open_local  # not before there is something to open: torch comes with it

        base = order.settings
        self.config = config = self._place(base if self._shard is None else self._shard(base))
        check_shard(base, config)
        place = self.topology.place(self.rank)
        pools = tuple(
            spec.on_rank(place.tp, self.topology.tp, (place.cp, self.topology.cp), (place.pp, self.topology.pp))
            for spec in config.pools()
        )
        self.local = local = await open_local(config, pools, self._given)
        for name, work in local.start(Reports(self._ended, self.die, self._keys)):
            self._stages.append(self._loop.create_task(work, name=f"asynccache-{name}-{self.rank}"))
            self._stages[-1].add_done_callback(self._stage_ended)
        local.stores.on_change(self._note_health)
        stores = tuple((entry.options, local.stores.is_shared(entry.number)) for entry in local.stores.entries)
        weights = {spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}
        return m.WorkerOpened(order.call, local.layers, weights, stores, local.digest)

    def _place(self, config: CacheConfig) -> CacheConfig:
        """Return ``config`` with this rank's number in the URLs of its stores."""
        if not config.stores:
            return config
        return replace(config, storage=tuple(placed(url, self.rank) for url in config.stores))

    def _stage_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.die(error)

    async def aclose(self, patience: float) -> None:
        """End what is under way, then close all. ``patience``: as for ``LocalWorker.aclose``. A second call waits for
        the first one. Cancelling it stops the waiting.

        Raises:
            BackendError: a store could not close cleanly; all the rest is closed.
        """
        if self._closing is None:
            self._stopped = True
            calls = [task for task in self._calls.values() if task is not asyncio.current_task()]
            self._closing = self._loop.create_task(self._close_all([*calls, *self._stages], patience))
            self._closing.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waited may be gone
        await asyncio.wait([self._closing])
        self._closing.result()

    async def _close_all(self, tasks: Sequence[asyncio.Task[Any]], patience: float) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.batches.stop()
        local, self.local = self.local, None
        self._held.clear()
        self._begun.tell()
        if local is not None:
            self._count(local)
            await local.aclose(patience)

    def finish(self, failure: RankFailure | None) -> None:
        """Note that nothing more comes from the head. ``failure``: what every later call of the engine raises; None:
        the cache was closed."""
        self.batches.finish(failure)
        self._begun.tell()

    # effects

    def _effects(self, work: Work) -> None:
        if work.kind is not CopyKind.BACKUP:
            self._loads.update(work.ops)
        if (work.after or work.source) and self._must_wait(work):
            self._held.update(dict.fromkeys(work.ops, work))
        else:
            self._perform(work)

    def _must_wait(self, work: Work) -> bool:
        return work.source in self._held or self.batches.lacks_event(work.after)

    def _perform(self, work: Work) -> None:
        if work.source in self._failed:
            self._ended(Status.FAILED, work.ops)
        else:
            self._own.put[work.kind](work, self.batches.events(work.after))

    def _try_held(self) -> None:
        """Perform the works that wait for no other batch, after a batch has got its event or is over."""
        held, self._held = self._held, {}
        for work in {id(work): work for work in held.values()}.values():
            if self._must_wait(work):
                self._held.update(dict.fromkeys(work.ops, work))
            else:
                self._take_up(work)
        self._begun.tell()

    def _take_up(self, work: Work) -> None:
        """Perform a work that was held. An error is the end of the group; it is not raised, since the caller has only
        ended a batch."""
        try:
            self._perform(work)
        except Exception as error:
            self.die(error)

    def _ended(self, status: Status, ops: Sequence[int]) -> None:
        """Note, and tell the head, that the operations ``ops`` of one work have ended with ``status``."""
        loads = self._loads.intersection(ops)
        self._loads -= loads
        if status is Status.FAILED and loads:
            self._failed |= loads
            self.batches.lose(loads)
        self._tell(m.WorksEnded(status, [ops[0]]))

    # the engine's side

    def _sent(self, order: m.SendBatch) -> None:
        batch = EngineBatch(order.number, order.payload, order.loads, self.end_batch)
        batch.lost = not self._failed.isdisjoint(order.loads)
        self.batches.add(batch)

    def end_batch(self, batch: EngineBatch, event: object | None, error: str) -> None:
        """See ``EngineBatch.end``. From any thread."""
        own = None if event is None else self._own.engine_event(event)
        self.batches.take(batch.number)
        if _is_here(self._loop):
            self.batches.end(batch.number, own, error)
            return
        try:
            self._loop.call_soon_threadsafe(self.batches.end, batch.number, own, error)
        except RuntimeError:
            raise RankFailure(LOOP_ENDED) from None

    async def layer(self, op: int, i: int) -> None:
        """See ``Worker.layer``. Raises ``RankFailure``: the worker is closed, or the group has failed, and nobody knows
        what has arrived."""
        self.batches.check()
        while op in self._held:
            await self._begun.wait()
            self.batches.check()
        await self._own.layer(op, i)

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """See ``Worker.wait_layers``. On the loop's thread.

        Raises:
            ConfigError: ``stream`` is no stream, or a load waits for a batch that has no event yet.
        """
        self._own.hold(stream, self._arriving(ops), i)

    def wait_batch(self, stream: object, batch: EngineBatch, i: int) -> None:
        """``wait_layers`` for all loads that ``batch`` needs. From any thread: only the loop's thread knows which loads
        are on the device, so another thread waits for a turn of the loop, once for each batch. Raises as
        ``wait_layers``."""
        if batch.arriving is None:
            ask = partial(self._arriving, batch.loads)
            batch.arriving = ask() if _is_here(self._loop) else _in_turn(self._loop, ask)
        self._own.hold(stream, batch.arriving, i)

    def _arriving(self, ops: Sequence[int]) -> list[Copying]:
        self.batches.check()
        for op in ops:
            work = self._held.get(op)
            if work is not None:
                raise ConfigError(f"wait_layers: load {op} waits for the batches {work.after}: end them first")
        return self._own.arriving(ops)

    # calls

    def _begin(self, order: m.Call) -> None:
        call = order.call
        task = self._loop.create_task(self._do[type(order)](order), name=f"asynccache-call-{self.rank}")
        self._calls[call] = task
        if isinstance(order, m.WritePages):
            first = order.batch[0].op
            self._storing.add(first)  # at once: a ``GiveUp`` for it may come in this turn
            task.add_done_callback(lambda _: self._storing.discard(first))
        task.add_done_callback(lambda done: self._answer(call, done))  # also if it is cancelled before it begins

    def _answer(self, call: int, done: asyncio.Task[m.Message | None]) -> None:
        del self._calls[call]
        if done.cancelled():
            self._tell(m.CallFailed(call, asyncio.CancelledError.__name__, "it was cancelled"))
        elif (error := done.exception()) is not None:
            self._tell(m.CallFailed(call, type(error).__name__, str(error)))
        else:
            self._tell(done.result() or m.CallDone(call))

    def _cancel(self, order: m.CancelCall) -> None:
        task = self._calls.get(order.call)
        if task is not None:
            task.cancel()

    def _give_up(self, order: m.GiveUp) -> None:
        """Give up a batch, unless this worker has written it already, while others still write it."""
        if order.op in self._storing:
            self._own.give_up(order.op)

    async def _store(self, order: m.WritePages) -> m.Message:
        stored = await self._own.store(order.effects)
        return m.PagesWritten(order.call, tuple(stored.failed), stored.pages, stored.full_pages, stored.bytes)

    async def _ask(self, order: m.AskPages) -> m.Message:
        return m.PageResults(order.call, tuple(await self._own.ask(order.asked)))

    async def _fetch(self, order: m.ReadPages) -> m.Message:
        return m.PageResults(order.call, tuple(await self._own.read(order.reads, run=order.run)))

    async def _delete(self, order: m.DeletePages) -> None:
        hashes = order.hashes
        await self._own.delete([hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)])

    async def _flush(self, _: m.FlushStores) -> None:
        """Flush the stores, and then tell the head what they count."""
        try:
            await self._own.flush()
        finally:
            self.count()

    # stores

    async def _open_store(self, order: m.OpenStore) -> m.Message:
        stores, storage = self._own.stores, self._given.locate(placed(order.url, self.rank))
        entry = await stores.open(storage, order.options, order.position, number=order.number)
        return m.StoreOpened(order.call, entry.options, stores.is_shared(entry.number))

    async def _drop_store(self, order: m.DropStore) -> None:
        if self._own.stores.knows(order.number):
            await self._own.stores.drop(order.number)

    def _use_store(self, order: m.UseStore) -> None:
        self._own.stores.use(order.number, order.position)
        self._note_health()

    def _leave_store(self, order: m.LeaveStore) -> None:
        self._own.stores.leave(order.number)
        self._note_health()

    def _keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), KEYS):
            self._tell(m.StoreKeys(store, there, tuple(keys[at : at + KEYS])))

    def _note_health(self) -> None:
        """Tell the head whether all stores refuse calls, if that has changed. Called when a breaker changes, or a store
        comes or goes."""
        local = self.local
        if local is not None and local.shut != self._shut:
            self._shut = local.shut
            self._tell(m.StoreHealth(self._shut))

    def count(self) -> None:
        """Tell the head what the stores count, if that has changed since the last time."""
        if self.local is not None:
            self._count(self.local)

    def _count(self, local: LocalWorker) -> None:
        storage, stores = local.store_statistics()
        counters = m.StoreCounters(dict(storage), {name: dict(counts) for name, counts in stores.items()})
        if counters != self._counted:
            self._counted = counters
            self._tell(counters)


def placed(url: str, rank: int) -> str:
    """Return a store's URL as it is on ``rank``, whose number replaces ``{rank}``."""
    return url.replace("{rank}", str(rank))


def check_shard(whole: CacheConfig, own: CacheConfig) -> None:
    """Check that ``own`` can be a rank's part of ``whole``.

    Raises:
        ConfigError: ``own`` is no configuration; or it differs in the model, page size, write policy or eviction, or in
            the pools' names, components, numbers of pages or ``indices_from``; or a pool has bytes only here.
    """
    checks.instance("shard: what it returned", own, CacheConfig)
    for name in ("model", "page_size", "write_policy", "eviction"):
        if getattr(whole, name) != getattr(own, name):
            raise ConfigError(f"shard: {name} is {getattr(own, name)!r} here and {getattr(whole, name)!r} at the head")
    ours, theirs = own.pools(), whole.pools()
    if [spec.name for spec in ours] != [spec.name for spec in theirs]:
        raise ConfigError(f"shard: the pools are {[spec.name for spec in ours]} here and "
                          f"{[spec.name for spec in theirs]} at the head")
    for mine, spec in zip(ours, theirs, strict=True):
        for name in ("component", "device_pages", "host_pages", "indices_from"):
            if getattr(mine, name) != getattr(spec, name):
                raise ConfigError(f"shard: pool {spec.name!r}: {name} is {getattr(mine, name)!r} here and "
                                  f"{getattr(spec, name)!r} at the head")
        if mine.bytes_per_page and not spec.bytes_per_page:
            raise ConfigError(f"shard: pool {spec.name!r} has bytes here and none at the head")


def said(error: BaseException) -> str:
    """Return the text that other processes get for ``error``."""
    return str(error) if isinstance(error, (RankFailure, ConfigError)) else f"{type(error).__name__}: {error}"


def _in_turn(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Make ``call`` on the loop's thread, behind all that this thread has handed to the loop before. Returns what it
    returns, and raises what it raises. Raises ``RankFailure``: the loop ends first."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        raise RankFailure(LOOP_ENDED) from None
    while not wait([answer], LOOP_ALIVE).done:
        if loop.is_closed():
            raise RankFailure(LOOP_ENDED)
    return answer.result()


def _is_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
