"""What a worker of several does: it takes the head's messages and has its pools and stores do what they say.

The head's own worker is one of these, too; nothing is encoded for it, and that is all the difference.

Laws:
* Messages are taken in the order in which they were sent. An effect whose batches have no event here yet waits for
  that, with the private copies that need it, and the effects behind it go on.
* A load (or private copy) that has failed here is remembered until the head has closed it: a private copy that needs it
  fails, too, and an engine is told whose batch names it.
* Each effect and each call is answered once, when its buffers are let go, also if it is cancelled.
* Whatever goes wrong where nothing was asked (a device that refuses a copy, a stage that ends) is the end of the group.
  The engine here is told first, so that it takes nothing that is lost for something that has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Outcome, Status
from asynccache.errors import ConfigError, RankFailure
from asynccache.worker import messages as m
from asynccache.worker.change import Change
from asynccache.worker.contract import Reports
from asynccache.worker.sent import EngineBatch, SentBatches
from asynccache.worker.topology import Topology

if TYPE_CHECKING:
    from asynccache.worker.given import Given
    from asynccache.worker.local import LocalWorker
    from asynccache.worker.stages.load_back import Copying

T = TypeVar("T")

Shard = Callable[[CacheConfig], CacheConfig]
"""From the head's configuration to that of one rank: other bytes, layers and ``covers``, and all else the same."""

Tell = Callable[[m.Message], None]

KEYS = 1024
"""Storage keys in a message."""

LOOP_ALIVE = 1.0
"""Seconds after which a thread that waits for the loop looks whether there is one still."""

LOOP_ENDED = "the loop of its worker has ended"
CLOSED = "the worker is closed"


class Performer:
    """``rank`` of ``topology``. ``tell``: hears what it has to say to the head. ``local``: its pools and stores, once
    they are open. ``batches``: what the engine is told. ``notes``: by kind, who hears of a message before it is taken.
    """

    def __init__(
        self, rank: int, topology: Topology, given: Given, shard: Shard | None, tell: Tell,
        notes: Mapping[type, Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.rank = rank
        self.topology = topology
        self.config: CacheConfig | None = None
        self.local: LocalWorker | None = None
        self.batches = SentBatches(lambda number, error: tell(m.Over(number, error)), self._try_held, self._die)
        self._given = given
        self._shard = shard
        self._tell = tell
        self._notes = notes
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[m.Message | None]] = {}
        self._storing: set[int] = set()
        self._stages: list[asyncio.Task[None]] = []
        self._held: dict[int, m.Perform] = {}
        self._begun = Change()
        self._loads: set[int] = set()
        self._failed: set[int] = set()
        self._shut = False
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None
        self._counted = m.Counters({}, {})
        self._do: dict[type, Callable[[Any], Coroutine[Any, Any, m.Message | None]]] = {
            m.Open: lambda o: self._open(o),
            m.Store: lambda o: self._store(o),
            m.Ask: lambda o: self._ask(o),
            m.Fetch: lambda o: self._fetch(o),
            m.Delete: lambda o: self._delete(o),
            m.Clear: lambda _: self._own.clear(),
            m.Flush: lambda o: self._flush(o),
            m.OpenStore: lambda o: self._open_store(o),
            m.DropStore: lambda o: self._drop_store(o),
            m.CloseStore: lambda o: self._own.close_store(o.number),
            m.Close: lambda o: self.aclose(o.patience),
        }
        self._take: dict[type, Callable[[Any], object]] = {
            **dict.fromkeys(self._do, self._begin),
            m.Ready: lambda _: None,
            m.Lost: lambda _: None,
            m.Perform: self._effect,
            m.Forget: lambda o: self._failed.discard(o.op),
            m.SendBatch: self._sent,
            m.GiveUp: self._give_up,
            m.Probe: lambda o: self._own.is_away(o.page_hash),
            m.UseStore: self._use_store,
            m.LeaveStore: self._leave_store,
            m.Watch: lambda o: (self._own.watch_store if o.on else self._own.unwatch_store)(o.number),
            m.Cancel: self._cancel,
        }

    def __repr__(self) -> str:
        return f"Performer(rank {self.rank}, {self.local!r}, {len(self._calls)} calls, {len(self._held)} held)"

    def take(self, *messages: m.Message) -> None:
        """Do what the head says. Never waits and never raises; what goes wrong is told to the head."""
        notes, take = self._notes, self._take
        for message in messages:
            kind = type(message)
            try:
                if kind in notes:
                    notes[kind](message)
                take[kind](message)
            except Exception as error:
                self._die(error)

    @property
    def _own(self) -> LocalWorker:
        if self.local is None:
            self.batches.check()
            raise RankFailure("was told to work before it was open" if self._closing is None else CLOSED)
        return self.local

    @property
    def layers(self) -> int:
        """The model's layers up to the last one that this rank has. Raises ``RankFailure``: it is closed."""
        return self._own.layers

    def _die(self, error: BaseException) -> None:
        """It cannot go on. The engine hears of it before it can take what was lost for what has come."""
        if not self._stopped:
            self._stopped = True
            self.finish(RankFailure(said(error), self.rank))
            self._tell(m.Died(said(error)))

    # opening and closing

    async def _open(self, order: m.Open) -> m.Message:
        from asynccache.worker.local import open_local  # not before there is something to open: torch comes with it

        base = m.config_of(order.settings)
        self.config = config = self._place(base if self._shard is None else self._shard(base))
        check_shard(base, config)
        place = self.topology.place(self.rank)
        pools = tuple(
            spec.on_rank(place.tp, self.topology.tp, (place.cp, self.topology.cp), (place.pp, self.topology.pp))
            for spec in config.pools()
        )
        self.local = local = await open_local(config, pools, self._given)
        for name, work in local.start(Reports(self._ended, self._die, self._keys)):
            self._stages.append(self._loop.create_task(work, name=f"asynccache-{name}-{self.rank}"))
            self._stages[-1].add_done_callback(self._stage_ended)
        local.on_health(self._note_health)
        stores = tuple((entry.options, local.is_shared(entry.number)) for entry in local.stores)
        weights = {spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}
        return m.Opened(order.call, local.layers, weights, stores, local.digest)

    def _place(self, config: CacheConfig) -> CacheConfig:
        """With the URLs of this rank's own stores."""
        if not config.stores:
            return config
        return replace(config, storage=tuple(placed(url, self.rank) for url in config.stores))

    def _stage_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    async def aclose(self, patience: float) -> None:
        """Have what is under way let go, then close all. ``patience``: as for ``LocalWorker.aclose``. Twice is once.
        Cancelling it stops the waiting.

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
        """Nothing more comes from the head. ``failure``: what the engine is told, whatever it asks; None: that the
        worker is closed."""
        self.batches.finish(failure)
        self._begun.tell()

    # effects

    def _effect(self, order: m.Perform) -> None:
        if order.kind is not m.BACKUP:
            self._loads.add(order.op)
        if (order.after or order.source) and self._must_wait(order):
            self._held[order.op] = order
        else:
            self._perform(order)

    def _must_wait(self, order: m.Perform) -> bool:
        return order.source in self._held or self.batches.lacks_event(order.after)

    def _perform(self, order: m.Perform) -> None:
        if order.source in self._failed:
            self._ended(Outcome(order.op, Status.FAILED))
        else:
            effect = order.effect
            self._own.put[type(effect)](effect, self.batches.events(order.after))

    def _try_held(self) -> None:
        """A batch has its event."""
        held, self._held = self._held, {}
        for op, order in held.items():
            if self._must_wait(order):
                self._held[op] = order
            else:
                self._take_up(order)
        self._begun.tell()

    def _take_up(self, order: m.Perform) -> None:
        """Perform what was held. What goes wrong is the end of the group, and not the affair of who ended a batch."""
        try:
            self._perform(order)
        except Exception as error:
            self._die(error)

    def _ended(self, outcome: Outcome) -> None:
        op, status = outcome
        if op in self._loads:
            self._loads.discard(op)
            if status is Status.FAILED:
                self._failed.add(op)
                self.batches.lose(op)
        self._tell(m.Ended(status, [op]))

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
        """See ``Worker.layer``. Raises ``RankFailure``: it is closed, or the group has failed, and nobody knows what
        has arrived."""
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
        """``wait_layers`` for all that ``batch`` needs. From any thread: what is on the device the loop alone knows,
        so another thread waits for a turn of the loop, once for a batch. Raises as ``wait_layers``."""
        if batch.arriving is None:
            ask = partial(self._arriving, batch.loads)
            batch.arriving = ask() if _is_here(self._loop) else _in_turn(self._loop, ask)
        self._own.hold(stream, batch.arriving, i)

    def _arriving(self, ops: Sequence[int]) -> list[Copying]:
        self.batches.check()
        for op in ops:
            order = self._held.get(op)
            if order is not None:
                raise ConfigError(f"wait_layers: load {op} waits for the batches {order.after}: end them first")
        return self._own.arriving(ops)

    # calls

    def _begin(self, order: m.Call) -> None:
        call = order.call
        task = self._loop.create_task(self._do[type(order)](order), name=f"asynccache-call-{self.rank}")
        self._calls[call] = task
        if isinstance(order, m.Store):
            first = order.batch[0].op
            self._storing.add(first)  # at once: that it is given up may be heard in this turn
            task.add_done_callback(lambda _: self._storing.discard(first))
        task.add_done_callback(lambda done: self._answer(call, done))  # also of one that is cancelled before it begins

    def _answer(self, call: int, done: asyncio.Task[m.Message | None]) -> None:
        del self._calls[call]
        if done.cancelled():
            self._tell(m.Failed(call, asyncio.CancelledError.__name__, "it was cancelled"))
        elif (error := done.exception()) is not None:
            self._tell(m.Failed(call, type(error).__name__, str(error)))
        else:
            self._tell(done.result() or m.Done(call))

    def _cancel(self, order: m.Cancel) -> None:
        task = self._calls.get(order.call)
        if task is not None:
            task.cancel()

    def _give_up(self, order: m.GiveUp) -> None:
        """Others may still write a batch that this worker has written."""
        if order.op in self._storing:
            self._own.give_up(order.op)

    async def _store(self, order: m.Store) -> m.Message:
        stored = await self._own.store(order.effects)
        return m.Written(order.call, tuple(stored.failed), stored.pages, stored.full_pages, stored.bytes)

    async def _ask(self, order: m.Ask) -> m.Message:
        return m.Answers(order.call, tuple(await self._own.ask(order.asked)))

    async def _fetch(self, order: m.Fetch) -> m.Message:
        return m.Answers(order.call, tuple(await self._own.read(order.reads, run=order.run)))

    async def _delete(self, order: m.Delete) -> None:
        hashes = order.hashes
        await self._own.delete([hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)])

    async def _flush(self, _: m.Flush) -> None:
        """What the stores count then is told with it."""
        try:
            await self._own.flush()
        finally:
            self.count()

    # stores

    async def _open_store(self, order: m.OpenStore) -> m.Message:
        own = self._own
        storage = self._given.locate(placed(order.url, self.rank))
        entry = await own.open_store(storage, order.options, order.position, number=order.number)
        return m.StoreOpened(order.call, entry.options, own.is_shared(entry.number))

    async def _drop_store(self, order: m.DropStore) -> None:
        if self._own.knows_store(order.number):
            await self._own.drop_store(order.number)

    def _use_store(self, order: m.UseStore) -> None:
        self._own.use_store(order.number, order.position)
        self._note_health()

    def _leave_store(self, order: m.LeaveStore) -> None:
        self._own.leave_store(order.number)
        self._note_health()

    def _keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), KEYS):
            self._tell(m.Keys(store, there, tuple(keys[at : at + KEYS])))

    def _note_health(self) -> None:
        """A breaker has changed its mind, or a store has come or gone."""
        local = self.local
        if local is not None and local.shut != self._shut:
            self._shut = local.shut
            self._tell(m.Health(self._shut))

    def count(self) -> None:
        """Tell what the stores count, if that has changed since the last time."""
        if self.local is not None:
            self._count(self.local)

    def _count(self, local: LocalWorker) -> None:
        storage, stores = local.store_statistics()
        counters = m.Counters(dict(storage), {name: dict(counts) for name, counts in stores.items()})
        if counters != self._counted:
            self._counted = counters
            self._tell(counters)


def placed(url: str, rank: int) -> str:
    """A store's URL as it is on ``rank``: its number stands where the URL says ``{rank}``."""
    return url.replace("{rank}", str(rank))


def check_shard(whole: CacheConfig, own: CacheConfig) -> None:
    """Whether ``own`` can be a rank's part of ``whole``.

    Raises:
        ConfigError: something differs besides bytes, layers, ``covers`` and dtype.
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
    """What is told of an error to other processes."""
    return str(error) if isinstance(error, (RankFailure, ConfigError)) else f"{type(error).__name__}: {error}"


def _in_turn(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises on the loop's thread, behind all that this thread has handed to the loop before.
    Raises ``RankFailure``: the loop ends first."""
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
