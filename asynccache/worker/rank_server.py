"""One rank of a group: it takes the head's messages, and has its pools and stores do what they say.

``RankServer`` looks a message up by its type and calls the remote method that it is made of: one of its own or else one
of its ``LocalWorker``. The head's own rank is one of these, and nothing is encoded for it. ``RankProcess`` is the rank
of another process, at the end of a link; ``connect`` makes one.

A rank's engine sees a ``RankWorker``: pools, batches, layers to wait for. The head sends the numbers of batches, and
the engine ends each of them, with an event of the device or without one.

What always holds:
* A batch is *sent* until the engine has ended it; then it has an *event* until that has fired; then it is *over*, and
  the head is told so, once.
* ``async for`` gives the engine each batch once, in the order in which they were sent, without those that it asked for
  by number (``heard``).
* Messages are taken in the order in which they were sent. A work whose batches have no event here yet waits for that,
  and so do the private copies that need it; the works behind it go on.
* A load (or private copy) that has failed here is remembered until the head forgets it. Until then a private copy that
  needs it fails, too, and the engine is told if a batch names it.
* Each work and each call is answered once, when its buffers are let go, also if it is cancelled.
* An error that answers no call (a device that refuses a copy, a stage that ends) is the end of the group.
  The engine here is told first, so that it does not take pages that are lost for pages that have arrived.
* The engine sees its device pools, the head's batches and layers to wait for. It never sees what is copied where.
* A rank that loses the head lets its I/O finish, closes all that is open, and tells the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import wait
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import astuple, replace

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.plan import Status
from asynccache.errors import AsyncCacheError, ConfigError, CopyFailed, RankFailure
from asynccache.version import VERSION
from asynccache.worker import messages as m
from asynccache.worker.folds import are_counters
from asynccache.worker.link import Link, Wire, open_link
from asynccache.worker.local import EmbedderParts, LocalWorker, StoreEntry, check_device, open_local
from asynccache.worker.messages import RemoteMethod, order_decoder, orders_of, remote
from asynccache.worker.ranks import ARRIVAL, Shard, Topology, decode_welcome
from asynccache.worker.stages import ChangeSignal
from asynccache.worker.work import CopyKind, Reports, Work

if TYPE_CHECKING:
    from asynccache.memory.device import Event
    from asynccache.memory.pools import DevicePool
    from asynccache.worker.stages import Copying

T = TypeVar("T")

KEYS = 1024
"""The most storage keys of a message."""
COUNTED = 5.0
"""Seconds from an answer until the head is told the stores' counters. Answers meanwhile share that message."""
PINNING = 30.0
"""Seconds of silence that are a failure while pools or stores are opened, or the group's time-out if that is longer: a
chunk of memory (4 GiB) that is being pinned may keep an interpreter from answering."""
LOOP_ALIVE = 1.0
"""Seconds after which a thread that waits for the loop looks whether the loop still runs."""
MOST_RANK = (1 << 31) - 1
"""The largest rank that a hello can have."""
LOOP_ENDED = "the loop of its worker has ended"
CLOSED = "the worker is closed"


End = Callable[["EngineBatch", object, str], None]


class EngineBatch:
    """A piece of the engine's work."""

    __slots__ = ("_end", "arriving", "loads", "lost", "number", "payload")

    def __init__(self, number: int, payload: bytes, loads: tuple[int, ...], end: End) -> None:
        self.number = number
        self.payload = payload
        """What ``AsyncCache.send_batch`` was given."""
        self.loads = loads
        """The loads that the batch needs, for ``wait_layers``."""
        self.arriving: Sequence[Copying] | None = None
        """The copies of those loads that had not ended when the engine first asked for a layer; None before that."""
        self.lost = False
        """True once one of the loads has failed here."""
        self._end = end

    def __repr__(self) -> str:
        return f"EngineBatch({self.number}, {len(self.payload)} bytes, {len(self.loads)} loads)"

    def end(self, event: object | None = None) -> None:
        """End the batch: the engine uses no page for it after ``event`` has fired, or from now on if ``event`` is None.
        ``event``: as for ``Lease.release``. If it carries an error, the batch has failed, as with ``fail``. To be
        called once, from any thread.

        Raises:
            ConfigError: the device cannot wait for ``event``, or the batch was ended before.
            RankFailure: the worker is closed, or its loop has ended.
        """
        self._end(self, event, "")

    def fail(self, reason: str) -> None:
        """End a batch that the engine cannot run, and for which it uses no page any more. The head is told ``reason``
        (see ``AsyncCache.batch_ended``), and what the batch was to compute leaves the cache (see ``Lease.commit``). To
        be called once, instead of ``end``, from any thread. Raises as ``end``."""
        self._end(self, None, reason or "no reason was given")


class SentBatches:
    """The batches that the head has sent to this rank. Mutable state: those that are sent, unread, and not over.

    ``over(number, error)`` is called for each batch that is over. ``ended()`` is called when the engine has ended a
    batch, so that copies which waited for its event can be submitted. ``failed(error)`` is called for an event that
    raises, because then nobody can know when its batch is over. A thread that ends a batch takes it out of ``_unended``
    at once; the rest is done in a turn of the loop.
    """

    def __init__(
        self, over: Callable[[int, str], None], ended: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:  # fmt: skip
        self.last = 0
        self._sent: dict[int, EngineBatch] = {}
        self._unended: dict[int, EngineBatch] = {}
        self._running: dict[int, tuple[EngineBatch, Event]] = {}
        self._unread: dict[int, EngineBatch] = {}
        self._came = ChangeSignal()
        self._watching: set[asyncio.Task[None]] = set()
        self._finished = False
        self._failure: RankFailure | None = None
        self._over = over
        self._ended = ended
        self._failed = failed

    def __repr__(self) -> str:
        return f"SentBatches({len(self._sent)} sent, {len(self._running)} with an event, {len(self._unread)} unread)"

    # what the head says

    def add(self, batch: EngineBatch) -> None:
        """Note a batch that the head has sent."""
        self.last = batch.number
        self._sent[batch.number] = self._unended[batch.number] = self._unread[batch.number] = batch
        self._came.tell()

    def finish(self, failure: RankFailure | None) -> None:
        """Note that nothing more comes from the head. ``failure``: what the engine's calls raise from now on; None: the
        cache was closed."""
        if not self._finished:
            self._finished, self._failure = True, failure
            self._came.tell()

    # what the engine does

    async def next(self) -> EngineBatch:
        """Return the next batch that nobody has read. Cancelling it loses none.

        Raises:
            StopAsyncIteration: the cache is closed. Batches that were not read are dropped.
            RankFailure: the head is gone, or the group has failed. Batches that were not read are dropped.
        """
        while not self._finished and not self._unread:
            await self._came.wait()
        if self._finished:
            raise self._why() or StopAsyncIteration
        return self._unread.pop(next(iter(self._unread)))

    async def heard(self, number: int) -> EngineBatch | None:
        """Wait until the head has sent batch ``number``, and return it; None if it was ended before. The batch counts
        as read.

        Raises:
            ConfigError: the cache is closed, and the batch was never sent.
            RankFailure: the head is gone, or the group has failed.
        """
        while self.last < number:
            if self._finished:
                raise self._why() or ConfigError(f"batch {number} was never sent: the cache is closed")
            await self._came.wait()
        self.check()
        self._unread.pop(number, None)
        return self._unended.get(number)

    async def ended(self) -> None:
        """Return when nothing more comes from the head. Cancelling it stops the waiting. Raises ``RankFailure``: as
        ``next``."""
        while not self._finished:
            await self._came.wait()
        self.check()

    def check(self) -> None:
        """Raise ``RankFailure`` if the head is gone or the group has failed."""
        if (failure := self._why()) is not None:
            raise failure

    def _why(self) -> RankFailure | None:
        """Return a new error for one waiter; None if nothing has failed."""
        return None if self._failure is None else RankFailure(self._failure.reason, self._failure.rank)

    def find(self, number: int) -> EngineBatch:
        """Return the batch of this number. Raises ``ConfigError``: the batch was not sent, or was ended before."""
        batch = self._unended.get(number)
        if batch is None:
            raise self._unknown(number)
        return batch

    def take(self, number: int) -> None:
        """Reserve for the caller the right to end batch ``number``. From any thread. Raises as ``find``."""
        if self._unended.pop(number, None) is None:
            raise self._unknown(number)

    def _unknown(self, number: int) -> ConfigError:
        return ConfigError(f"batch {number} " + ("was ended before" if 0 < number <= self.last else "was not sent"))

    def lose(self, loads: AbstractSet[int]) -> None:
        """Mark as ``lost`` every batch that needs one of ``loads``, which have failed here. A batch that was ended with
        an event counts until that has fired."""
        for batch in (*self._sent.values(), *(batch for batch, _ in self._running.values())):
            if not loads.isdisjoint(batch.loads):
                batch.lost = True

    def end(self, number: int, event: Event | None, error: str) -> None:
        """Note that the engine has ended batch ``number``, which is over when ``event`` has fired, or now if that is
        None. ``error``: why the engine could not run the batch; empty if it did."""
        self._unread.pop(number, None)
        try:
            if event is not None:
                event.done()  # nobody can know when a batch is over whose event raises
        except Exception as failure:
            self._failed(failure)
            return
        batch = self._sent.pop(number)
        if event is None:
            self._over(number, error)
        else:  # also if it has fired: only who waits for it hears of its error
            self._running[number] = batch, event
            task = asyncio.get_running_loop().create_task(self._watch(number, event), name="asynccache-batch")
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        self._ended()

    async def _watch(self, number: int, event: Event) -> None:
        error = ""
        try:
            await event.wait()
        except CopyFailed as failure:
            error = str(failure) or "its event carries an error"
        except Exception as failure:
            self._failed(failure)
            return
        del self._running[number]
        self._over(number, error)

    def stop(self) -> None:
        """Stop watching events."""
        for task in self._watching:
            task.cancel()

    # what copies wait for

    def lacks_event(self, numbers: Sequence[int]) -> bool:
        """Return True if one of these batches was sent and the engine has not ended it."""
        return bool(numbers) and not self._sent.keys().isdisjoint(numbers)

    def events(self, numbers: Sequence[int]) -> list[Event]:
        """Return the events of those batches that the engine has ended and that are not over."""
        found = [self._running[number][1] for number in numbers if number in self._running]
        return [event for event in found if not event.done()]


class RankWorker:
    """One rank as its engine sees it: its pools, and the batches that the head sends, in an ``async for``. ``connect``
    gives one, and so does ``AsyncCache.worker`` if the head has a rank of its own."""

    def __init__(self, server: RankServer) -> None:
        self._server = server

    def __repr__(self) -> str:
        return f"RankWorker(rank {self.rank} of {self.topology})"

    @property
    def rank(self) -> int:
        """The rank's number, from 0 on."""
        return self._server.rank

    @property
    def topology(self) -> Topology:
        """The topology of the whole group."""
        return self._server.topology

    @property
    def config(self) -> CacheConfig:
        """This rank's configuration: the head's, changed by ``shard``."""
        assert self._server.config is not None
        return self._server.config

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools by name, where the engine reads and writes KV; empty once the worker is closed."""
        local = self._server.local
        return {} if local is None else local.pools

    @property
    def layers(self) -> int:
        """The number of the model's layers, up to the last one that this rank has; 0 once the worker is closed."""
        local = self._server.local
        return 0 if local is None else local.layers

    def __aiter__(self) -> RankWorker:
        return self

    async def __anext__(self) -> EngineBatch:
        """Return the next batch that ``AsyncCache.send_batch`` has sent and that was not read. Cancelling it loses
        none.

        Raises:
            StopAsyncIteration: the cache is closed.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._server.batches.next()

    async def heard(self, number: int) -> EngineBatch | None:
        """Wait until the head has sent batch ``number``, and return the batch; None if it was ended before. By then all
        that the cache decided before the batch is here, too. This is for engines whose own messages may arrive before
        the head's. Cancelling it stops the waiting.

        Raises:
            ConfigError: ``number`` is no integer from 1 on, or the cache was closed and never sent the batch.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._server.batches.heard(checks.integer("number", number, 1))

    def end_batch(self, number: int, event: object | None = None) -> None:
        """Call ``EngineBatch.end`` of batch ``number``. From any thread.

        Raises:
            ConfigError: the batch was not sent, or was ended before; or the device cannot wait for ``event``.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        self._server.batches.find(checks.integer("number", number, 1)).end(event)

    def wait_layers(self, stream: object, batch: EngineBatch, i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of all loads that ``batch``
        needs is there. The calling thread never waits for a copy. From any thread: at the first call for a batch, a
        thread other than the loop's waits for a turn of the loop, so the loop must not be waiting for that thread.

        Raises:
            ConfigError: ``stream`` is no stream, the model has no layer ``i``, or a load of the batch waits for a batch
                that was not ended.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        batch = checks.instance("batch", batch, EngineBatch)
        i = checks.integer("i", i, 0, self._server.layers - 1)
        self._server.wait_batch(stream, batch, i)

    async def layer(self, batch: EngineBatch, i: int) -> None:
        """Return when layer ``i`` of all loads that ``batch`` needs is on the device. This is for engines without
        streams. Cancelling it stops the waiting.

        Raises:
            CopyFailed: a load failed here. The head hears of it, and takes nothing that the batch computes.
            ConfigError: the model has no layer ``i``.
            RankFailure: the worker is closed, or the group has failed.
        """
        batch = checks.instance("batch", batch, EngineBatch)
        i = checks.integer("i", i, 0, self._server.layers - 1)
        for op in batch.loads:
            await self._server.layer(op, i)
        if batch.lost:
            raise CopyFailed(f"a load that batch {batch.number} needs has failed on rank {self.rank}")

    async def ended(self) -> None:
        """Return when the cache is closed, also if batches were not read. Cancelling it stops the waiting.

        Raises:
            RankFailure: the head is gone, or the group has failed.
        """
        await self._server.batches.ended()


class OpenedRank(NamedTuple):
    """The pools and stores that a rank has opened."""

    layers: int
    """How many layers the model has, up to the last one that this rank has."""
    weights: dict[str, int]
    """Bytes of a page, for each pool with bytes on this rank."""
    stores: list[StoreEntry]
    """The stores, nearest first."""
    digest: bytes
    """What turns a page's hash into its key in the pool whose stored pages stand for FULL; empty if this rank has no
    bytes of FULL."""


class RankServer:
    """The worker of ``rank``. ``tell``: called with each message for the head. Mutable state: works that wait for a
    batch's event (``_held``), loads in flight, loads that failed, and calls that are under way, with their messages.
    """

    def __init__(
        self, rank: int, topology: Topology, given: EmbedderParts, shard: Shard | None,
        tell: Callable[[m.Message], None],
    ) -> None:  # fmt: skip
        self.rank = rank
        self.topology = topology
        self.config: CacheConfig | None = None
        self.local: LocalWorker | None = None
        """The worker that has the pools and stores; None before they are open, and when they are closed."""
        self.batches = SentBatches(lambda number, error: tell(m.BatchOver(number, error)), self._try_held, self.die)
        """The engine's batches."""
        self.worker = RankWorker(self)
        self._given = given
        self._shard = shard
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._stages: list[asyncio.Task[None]] = []
        self._held: dict[int, Work] = {}
        self._begun = ChangeSignal()
        self._loads: set[int] = set()
        self._failed: set[int] = set()
        self._shut = False
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None
        self._counted = m.StoreCounters({}, {})

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank {self.rank}, {self.local!r}, {len(self._calls)} calls, {len(self._held)} held)"
        )

    # messages

    def take(self, *messages: m.Message) -> None:
        """Do what the head's ``messages`` say. Never waits and never raises; the head is told of errors."""
        for message in messages:
            try:
                order = _BY_TYPE[type(message)]
                method = getattr(self if order.name in _OWN else self._own, order.name)
                if order.answer is None:
                    method(*astuple(message))
                else:
                    call, *arguments = astuple(message)
                    self._begin(order, message, call, method(*arguments))
            except Exception as error:
                self.die(error)

    def _begin(self, order: RemoteMethod, message: m.Message, call: int, work: Any) -> None:
        task: asyncio.Future[Any]
        if order.at_once:
            task = _ended(work, self._loop)
        else:
            task = self._loop.create_task(work, name=f"asynccache-{order.name}-{self.rank}")
        self._calls[call] = message, task
        task.add_done_callback(partial(self._answer, order, call))  # also if it is cancelled before it begins

    def _answer(self, order: RemoteMethod, call: int, done: asyncio.Future[Any]) -> None:
        del self._calls[call]
        if done.cancelled():
            self._tell(m.Failed(call, asyncio.CancelledError.__name__, "it was cancelled"))
        elif (error := done.exception()) is not None:
            self._tell(m.Failed(call, type(error).__name__, str(error)))
        else:
            assert order.answer is not None
            self._tell(order.answer(call, done.result()))

    @remote()
    def cancel(self, call: int) -> None:
        """Cancel this call: nobody wants its answer any more. The answer still comes, when its buffers are let go."""
        if call in self._calls:
            self._calls[call][1].cancel()

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
            self._tell(m.Died(said(error)))

    def finish(self, failure: RankFailure | None) -> None:
        """Note that nothing more comes from the head. ``failure``: what every later call of the engine raises; None:
        the cache was closed."""
        self.batches.finish(failure)
        self._begun.tell()

    # opening and closing

    @remote()
    async def open(self, settings: CacheConfig, debug: bool) -> OpenedRank:
        """Open this rank's part of the pools, and the stores. ``debug``: as for ``open_local``."""
        config = settings if self._shard is None else self._shard(settings)
        check_shard(settings, config)
        if config.stores:
            config = replace(config, storage=tuple(map(self._placed, config.stores)))
        self.config = config
        place, topology = self.topology.place(self.rank), self.topology
        pools = [
            spec.on_rank(place.tp, topology.tp, (place.cp, topology.cp), (place.pp, topology.pp))
            for spec in config.pools()
        ]
        self.local = local = await open_local(config, pools, self._given, debug=debug)
        for name, work in local.start(Reports(self._ended, self.die, self._keys, self._note_health)):
            self._stages.append(self._loop.create_task(work, name=f"asynccache-{name}-{self.rank}"))
            self._stages[-1].add_done_callback(self._stage_ended)
        weights = {spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}
        return OpenedRank(local.layers, weights, list(local.stores), local.digest)

    def _placed(self, url: str) -> str:
        """Return a store's URL as it is on this rank, whose number replaces ``{rank}``."""
        return url.replace("{rank}", str(self.rank))

    def _stage_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.die(error)

    @remote()
    def all_open(self) -> None:
        """All ranks are open: the cache takes requests."""

    @remote()
    def be_patient(self, opening: bool) -> None:
        """Pools or stores are being opened from now on, or not any more: the head may be silent for longer."""

    @remote()
    def group_lost(self, rank: int, reason: str) -> None:
        """The group is over. ``rank``: the rank that failed; -1 if that is a head without a rank. ``reason``: what it
        did."""

    @remote()
    async def close(self, patience: float) -> None:
        """Close stores, pools and device: the last call. ``patience``: as for ``LocalWorker.aclose``."""
        await self.aclose(patience)

    async def aclose(self, patience: float) -> None:
        """End what is under way, then close all. ``patience``: as for ``LocalWorker.aclose``. A second call waits for
        the first one. Cancelling it stops the waiting.

        Raises:
            BackendError: a store could not close cleanly; all the rest is closed.
        """
        if self._closing is None:
            self._stopped = True
            calls = [task for _, task in self._calls.values() if task is not asyncio.current_task()]
            self._closing = self._loop.create_task(self._close_all([*calls, *self._stages], patience))
            self._closing.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waited may be gone
        await asyncio.wait([self._closing])
        self._closing.result()

    async def _close_all(self, tasks: Sequence[asyncio.Future[Any]], patience: float) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.batches.stop()
        self.count()
        local, self.local = self.local, None
        self._held.clear()
        self._begun.tell()
        if local is not None:
            await local.aclose(patience)

    # copies

    @remote()
    def perform(self, work: Work) -> None:
        """Copy what ``work`` says, when the batches that it waits for have events here. ``Ended`` tells its end."""
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
            self._own.copy(work, self.batches.events(work.after))

    def _try_held(self) -> None:
        """Perform the works that wait for no other batch, after a batch has got its event or is over. An error is the
        end of the group; it is not raised, since the caller has only ended a batch."""
        held, self._held = self._held, {}
        for work in {id(work): work for work in held.values()}.values():
            if self._must_wait(work):
                self._held.update(dict.fromkeys(work.ops, work))
                continue
            try:
                self._perform(work)
            except Exception as error:
                self.die(error)
        self._begun.tell()

    def _ended(self, status: Status, ops: Sequence[int]) -> None:
        """Note, and tell the head, that the operations ``ops`` of one work have ended with ``status``."""
        loads = self._loads.intersection(ops)
        self._loads -= loads
        if status is Status.FAILED and loads:
            self._failed |= loads
            self.batches.lose(loads)
        self._tell(m.WorksOver(status, [ops[0]]))

    @remote()
    def forget_load(self, op: int) -> None:
        """Forget a load or private copy that has failed on some rank: no later message of the head names it."""
        self._failed.discard(op)

    # the engine's side

    @remote()
    def send_batch(self, number: int, payload: bytes, loads: tuple[int, ...]) -> None:
        """A batch of the engine's work. ``loads``: the loads that it needs. ``BatchOver`` tells its end."""
        batch = EngineBatch(number, payload, loads, self.end_batch)
        batch.lost = not self._failed.isdisjoint(loads)
        self.batches.add(batch)

    def end_batch(self, batch: EngineBatch, event: object | None, error: str) -> None:
        """Note that the engine has ended ``batch``; ``event`` and ``error`` are as for ``SentBatches.end``. From any
        thread."""
        own: Any = None if event is None else self._own.engine_event(event)
        self.batches.take(batch.number)
        if _is_here(self._loop):
            self.batches.end(batch.number, own, error)
            return
        try:
            self._loop.call_soon_threadsafe(self.batches.end, batch.number, own, error)
        except RuntimeError:
            raise RankFailure(LOOP_ENDED) from None

    async def layer(self, op: int, i: int) -> None:
        """Wait for a layer, as ``LocalWorker.layer``, once the load has begun. Raises ``RankFailure``: the worker
        is closed, or the group has failed, and nobody knows what has arrived."""
        self.batches.check()
        while op in self._held:
            await self._begun.wait()
            self.batches.check()
        await self._own.layer(op, i)

    def wait_layers(self, stream: object, ops: Sequence[int], i: int) -> None:
        """As for ``LocalWorker``, for loads that have begun. On the loop's thread.

        Raises:
            ConfigError: ``stream`` is no stream, or a load waits for a batch that has no event yet.
        """
        self._own.hold(stream, self._arriving(ops), i)

    def wait_batch(self, stream: object, batch: EngineBatch, i: int) -> None:
        """Hold later work of the engine's ``stream`` until layer ``i`` of all loads that ``batch`` needs is there. From
        any thread. Only the loop's thread knows which loads are on the device, so another thread waits for a turn of
        the loop, once for each batch. Raises as ``wait_layers``."""
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

    # pages and stores: what a rank does beside the methods of ``LocalWorker``

    @remote()
    def give_up(self, op: int) -> None:
        """Give up a batch, unless this rank has written it already, while others still write it."""
        if any(type(call) is _STORE and call.batch[0].op == op for call, _ in self._calls.values()):
            self._own.give_up(op)

    @remote()
    async def flush(self) -> None:
        """Flush the stores, and then tell the head what they count."""
        try:
            await self._own.flush()
        finally:
            self.count()

    @remote()
    async def open_store(self, number: int, url: str, options: dict[str, str], position: int | None) -> StoreEntry:
        """Open the store that has this URL on this rank."""
        storage = self._given.locate(self._placed(url))
        return await self._own.open_store(storage, options, position, number=number)

    def _keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), KEYS):
            self._tell(m.StoreKeys(store, there, tuple(keys[at : at + KEYS])))

    def _note_health(self) -> None:
        local = self.local
        if local is not None and local.shut != self._shut:
            self._shut = local.shut
            self._tell(m.StoreHealth(self._shut))

    def count(self) -> None:
        """Tell the head the stores' counters if they have changed. A backend whose counters raise, or are no numbers,
        is left out, and fails neither a call nor closing."""
        if self.local is None:
            return
        try:
            storage, stores = self.local.store_statistics()
            told = m.StoreCounters(dict(storage), {name: dict(counts) for name, counts in stores.items()})
            counters: m.StoreCounters = _counters(m.encode(told))
            if not are_counters([counters.storage, *counters.stores.values()]):
                return
        except Exception:
            return
        if counters != self._counted:
            self._counted = counters
            self._tell(counters)


def _ended(work: Any, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
    """Run a coroutine that waits for nothing, and return a future that has ended as it has."""
    future = loop.create_future()
    try:
        work.send(None)
    except StopIteration as end:
        future.set_result(end.value)
    except Exception as error:
        future.set_exception(error)
    return future


ORDERS: Mapping[str, RemoteMethod] = orders_of(RankServer, LocalWorker)
"""All that a head may say to a rank."""
_BY_TYPE = {order.message: order for order in ORDERS.values()}
_OWN = frozenset(vars(RankServer))
"""The methods that ``RankServer`` has itself: the others are those of its ``LocalWorker``."""
_STORE = ORDERS["store"].message
_counters = m.decoder(m.StoreCounters)
decode_orders = order_decoder(ORDERS)


class RankProcess(RankServer):
    """A rank at its end of the link to the head. Mutable state: until when closing is waited for, and whether the link
    is over."""

    def __init__(
        self, link: Link, rank: int, topology: Topology, given: EmbedderParts, shard: Shard | None = None
    ) -> None:
        super().__init__(rank, topology, given, shard, self._say)
        self._link = link
        self._wire = Wire([link], lambda failure: self._wire.put(m.Died(failure.reason)))
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._counting: asyncio.TimerHandle | None = None
        self._last_call = 0
        self._gives_up_at = inf
        self._closing_takes = 0.0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RankWorker]:
        """Give the worker when all ranks have opened. It closes when the head closes the cache, and at the end of the
        ``async with`` at the latest.

        Raises:
            RankFailure: a rank could not open, or the head is gone.
        """
        try:
            self._link.patience(PINNING)
            self._link.begin(self._heard, self._lost)
            await self._opened
            closing = self._loop.create_task(self._close_when_over(), name="asynccache-worker")
            try:
                yield self.worker
            finally:
                closing.cancel()
                await asyncio.wait([closing])
        finally:
            await self.leave()

    async def _close_when_over(self) -> None:
        await self._over
        await self.leave()

    async def leave(self) -> None:
        """Leave the group: end what is under way, and close all that is open. A store that hangs is waited for as long
        as the link's time-out or, if that is longer, as the head has said that closing may take. After that the closing
        goes on by itself. May be called again."""
        if self._counting is not None:
            self._counting.cancel()
        self._gives_up_at = min(self._gives_up_at, self._loop.time() + max(self._link.timeout, self._closing_takes))
        try:
            with suppress(AsyncCacheError, TimeoutError):
                async with asyncio.timeout_at(self._gives_up_at):
                    await self.aclose(1.0)
        finally:
            self._wire.flush()
            self._wire.links = []
            self.finish(None)
            await self._link.aclose()

    def _heard(self, frame: bytes) -> None:
        orders = decode_orders(frame)
        self._wire.hold()
        self.take(*orders)
        self._wire.flush()

    def be_patient(self, opening: bool) -> None:
        self._link.patience(PINNING if opening else None)

    def all_open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def group_lost(self, rank: int, reason: str) -> None:
        self._end(RankFailure(reason, rank if rank >= 0 else None))

    def _begin(self, order: RemoteMethod, message: Any, call: int, work: Any) -> None:
        if order.name == "close":
            self._last_call, self._closing_takes = call, message.patience
        super()._begin(order, message, call, work)

    def _say(self, message: m.Message) -> None:
        self._wire.put(message)
        if not isinstance(message, m.Answer):
            return
        if message.call == self._last_call:
            self._wire.flush()
            self._end(None)
        elif self._counting is None:
            self._counting = self._loop.call_later(COUNTED, self._count)

    def _count(self) -> None:
        self._counting = None
        self.count()

    def _lost(self, failure: RankFailure) -> None:
        self._end(RankFailure(f"the head {failure.reason}"))

    def _end(self, failure: RankFailure | None) -> None:
        """Note that the link is over, and tell everybody who waits here. ``failure``: why; None: the head has closed
        the cache."""
        if not self._opened.done():
            self._opened.set_exception(failure or RankFailure("the cache was closed while it was opened"))
            self._opened.exception()
        self.finish(failure)
        if not self._over.done():
            self._over.set_result(None)


@asynccontextmanager
async def connect(
    address: str, rank: int, *, secret: bytes | None = None, shard: Shard | None = None, device: object | None = None,
    arrival: float = ARRIVAL,
) -> AsyncIterator[RankWorker]:  # fmt: skip
    """Be ``rank`` of the group whose head listens at ``address``: connect, wait until the head's cache opens, and open
    the pools and stores that its configuration names, here; all ranks or none.

    ``secret``: see ``listen``. ``shard``: a function from the head's configuration to this rank's, which may differ in
    bytes, layers, ``covers`` and dtypes; by default the head's is used. ``{rank}`` in a store's URL is this rank's
    number. ``device``: used instead of the one that the configuration names; the caller closes it. ``arrival``: how
    many seconds to wait for the head.

    At the end of the ``async with`` this rank leaves; if the cache is not closed by then, the group ends with it.
    Cancelling it leaves nothing open.

    Raises:
        ConfigError: an argument is unusable, or there is no secret.
        RankFailure: no head answered, the head refused or is gone, or a rank could not open.
    """
    rank = checks.integer("rank", rank, 0, MOST_RANK)
    if shard is not None:
        checks.function("shard", shard)
    if device is not None:
        check_device("device", device)
    arrival = checks.number("arrival", arrival, above=0)
    link, welcome = await open_link(address, secret, m.encode(m.Hello(VERSION, rank)), timeout=arrival)
    try:
        topology = Topology(*decode_welcome(welcome).topology)
        process = RankProcess(link, rank, topology, EmbedderParts(device), shard)  # type: ignore[arg-type]
    except (RankFailure, ConfigError):
        link.abort()
        raise
    async with process.serving() as worker:
        yield worker


def check_shard(whole: CacheConfig, own: CacheConfig) -> None:
    """Check that ``own`` can be a rank's part of ``whole``.

    Raises:
        ConfigError: ``own`` is no configuration; or it differs in the model, page size, write policy or eviction, or in
            the pools' names, components, numbers of pages or ``indices_from``; or a pool has bytes only here.
    """
    checks.instance("shard: what it returned", own, CacheConfig)

    def alike(where: str, ours: object, theirs: object, *names: str) -> None:
        for name in names:
            here, there = getattr(ours, name), getattr(theirs, name)
            if here != there:
                raise ConfigError(f"shard: {where}{name} is {here!r} here and {there!r} at the head")

    alike("", own, whole, "model", "page_size", "write_policy", "eviction")
    ours, theirs = [[spec.name for spec in config.pools()] for config in (own, whole)]
    if ours != theirs:
        raise ConfigError(f"shard: the pools are {ours} here and {theirs} at the head")
    for mine, spec in zip(own.pools(), whole.pools(), strict=True):
        alike(f"pool {spec.name!r}: ", mine, spec, "component", "device_pages", "host_pages", "indices_from")
        if mine.bytes_per_page and not spec.bytes_per_page:
            raise ConfigError(f"shard: pool {spec.name!r} has bytes here and none at the head")


def said(error: BaseException) -> str:
    """Return the text that other processes get for ``error``."""
    return str(error) if isinstance(error, (RankFailure, ConfigError)) else f"{type(error).__name__}: {error}"


def _in_turn(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Make ``call`` on the loop's thread, behind all that this thread has handed to the loop before. Returns what it
    returns, and raises what it raises. Raises ``RankFailure``: the loop ends first."""
    async def ask() -> T:
        return call()

    asking = ask()
    try:
        answer = asyncio.run_coroutine_threadsafe(asking, loop)
    except RuntimeError:
        asking.close()
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
