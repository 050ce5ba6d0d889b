"""The engine's batches on one rank of a group. The head sends their numbers, and the engine in the rank's process ends
each of them, with an event of the device or without one.

Laws:
* A batch is *sent* until the engine has ended it; then it has an *event* until that has fired; then it is *over*, and
  the head is told so, once.
* The engine gets each batch once, in the order in which they were sent, however it asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from asynccache.errors import ConfigError, CopyFailed, RankFailure
from asynccache.worker.inbox import ChangeSignal

if TYPE_CHECKING:
    from asynccache.memory.device import Event
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
