"""A rank's worker as the engine of the rank sees it: pools, batches, layers to wait for.

The head sends the numbers of batches, and the engine ends each of them, with an event of the device or without one.

Laws:
* A batch is *sent* until the engine has ended it; then it has an *event* until that has fired; then it is *over*, and
  the head is told so, once.
* The engine gets each batch once, in the order in which they were sent, however it asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from asynccache import checks
from asynccache.errors import ConfigError, CopyFailed, RankFailure
from asynccache.worker.inbox import ChangeSignal
from asynccache.worker.ranks import Topology

if TYPE_CHECKING:
    from asynccache.config import CacheConfig
    from asynccache.memory.device import Event
    from asynccache.memory.pools import DevicePool
    from asynccache.worker.rank_server import RankServer
    from asynccache.worker.stages import Copying

End = Callable[["EngineBatch", object, str], None]


class EngineBatch:
    """A piece of the engine's work. ``payload``: what ``AsyncCache.send_batch`` was given. ``loads``: the loads that it
    needs, for ``wait_layers``. ``arriving``: the copies of those loads that had not ended when the engine first asked
    for a layer; None before that. ``lost``: True once one of the loads has failed here."""

    __slots__ = ("_end", "arriving", "loads", "lost", "number", "payload")

    def __init__(self, number: int, payload: bytes, loads: tuple[int, ...], end: End) -> None:
        self.number = number
        self.payload = payload
        self.loads = loads
        self.arriving: Sequence[Copying] | None = None
        self.lost = False
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
        self._events: dict[int, Event] = {}
        self._running: dict[int, EngineBatch] = {}
        self._unread: dict[int, EngineBatch] = {}
        self._came = ChangeSignal()
        self._watching: set[asyncio.Task[None]] = set()
        self._finished = False
        self._failure: RankFailure | None = None
        self._over = over
        self._ended = ended
        self._failed = failed

    def __repr__(self) -> str:
        return f"SentBatches({len(self._sent)} sent, {len(self._events)} with an event, {len(self._unread)} unread)"

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
        for batch in (*self._sent.values(), *self._running.values()):
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
            self._events[number], self._running[number] = event, batch
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
        del self._events[number], self._running[number]
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
        found = (self._events.get(number) for number in numbers)
        return [event for event in found if event is not None and not event.done()]


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
