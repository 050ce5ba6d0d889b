"""The engine's batches as a worker of several knows them: numbers that the head has sent, each of which the engine's
process ends, by an event of the device or without one.

Laws:
* A batch is *sent* until the engine has ended it; then it has an *event* until that has fired; then it is *over*, and
  the head is told so, once.
* The engine gets each batch once, in the order in which they were sent, however it asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asynccache.errors import ConfigError, CopyFailed, RankFailure
from asynccache.worker.change import Change

if TYPE_CHECKING:
    from asynccache.memory.device import Event
    from asynccache.worker.stages.load_back import Copying

End = Callable[["EngineBatch", object, str], None]


class EngineBatch:
    """A piece of the engine's work. ``payload``: what ``AsyncCache.send_batch`` was given. ``loads``: the loads that it
    needs, for ``wait_layers``. ``arriving``: those of the loads that were on the device when the engine first asked.
    ``lost``: whether one of the loads has failed here."""

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
        """The engine's use of pages for this batch is over when ``event`` has fired, an event as ``Lease.release``
        takes it; None: now. Once; from any thread.

        Raises:
            ConfigError: the device cannot wait for ``event``, or the batch was ended before.
            RankFailure: the worker is closed, or its loop has ended.
        """
        self._end(self, event, "")

    def fail(self, reason: str) -> None:
        """The engine cannot run it, and uses no page for it any more: the head hears ``reason`` (see
        ``AsyncCache.batch_ended``), and nothing else fails. Once; from any thread. Raises as ``end``."""
        self._end(self, None, reason or "no reason was given")


class SentBatches:
    """Mutable state: the batches that are sent, unread, and not over. ``over``: told of each that is; ``ended``: called
    when one has got its event, so that copies may be submitted which waited for that; ``failed``: told of an event that
    raises, so that nobody can know when its batch is over. A thread that ends a batch takes it out of ``_unended`` at
    once; the rest is done in a turn of the loop."""

    def __init__(
        self, over: Callable[[int, str], None], ended: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:  # fmt: skip
        self.last = 0
        self._sent: dict[int, EngineBatch] = {}
        self._unended: dict[int, EngineBatch] = {}
        self._events: dict[int, Event] = {}
        self._running: dict[int, EngineBatch] = {}
        self._unread: dict[int, EngineBatch] = {}
        self._came = Change()
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
        """The head has sent it."""
        self.last = batch.number
        self._sent[batch.number] = self._unended[batch.number] = self._unread[batch.number] = batch
        self._came.tell()

    def finish(self, failure: RankFailure | None) -> None:
        """Nothing more comes. ``failure``: what the engine is told then; None: that all is over."""
        if not self._finished:
            self._finished, self._failure = True, failure
            self._came.tell()

    # what the engine does

    async def next(self) -> EngineBatch:
        """The next one that nobody has read. Cancelling it loses none.

        Raises:
            StopAsyncIteration: the cache is closed; what was not read then nobody wants.
            RankFailure: the head is gone, or the group has failed; likewise.
        """
        while not self._finished and not self._unread:
            await self._came.wait()
        if self._finished:
            raise self._why() or StopAsyncIteration
        return self._unread.pop(next(iter(self._unread)))

    async def heard(self, number: int) -> EngineBatch | None:
        """The batch of this number, when the head's word of it is here; None if it was read before. Raises as
        ``next``, but for ``ConfigError`` where the cache is closed."""
        while self.last < number:
            if self._finished:
                raise self._why() or ConfigError(f"batch {number} was never sent: the cache is closed")
            await self._came.wait()
        self.check()
        self._unread.pop(number, None)
        return self._unended.get(number)

    async def ended(self) -> None:
        """Return when nothing more comes. Cancelling it stops the waiting. Raises ``RankFailure``: as ``next``."""
        while not self._finished:
            await self._came.wait()
        self.check()

    def check(self) -> None:
        """Raises ``RankFailure``: the head is gone, or the group has failed."""
        if (failure := self._why()) is not None:
            raise failure

    def _why(self) -> RankFailure | None:
        """A new error for one waiter."""
        return None if self._failure is None else RankFailure(self._failure.reason, self._failure.rank)

    def find(self, number: int) -> EngineBatch:
        """The batch of this number, which is sent and was not ended. Raises ``ConfigError``: it was, or is not here."""
        batch = self._unended.get(number)
        if batch is None:
            raise self._unknown(number)
        return batch

    def take(self, number: int) -> None:
        """It is about to be ended, and by nobody else. From any thread. Raises as ``find``."""
        if self._unended.pop(number, None) is None:
            raise self._unknown(number)

    def _unknown(self, number: int) -> ConfigError:
        return ConfigError(f"batch {number} " + ("was ended before" if 0 < number <= self.last else "was not sent"))

    def lose(self, op: int) -> None:
        """A load has failed here: engines that compute on it are told, also those that have ended their batch by an
        event which has not fired yet."""
        for batch in (*self._sent.values(), *self._running.values()):
            if op in batch.loads:
                batch.lost = True

    def end(self, number: int, event: Event | None, error: str) -> None:
        """The engine has done with it, or will have when ``event`` has fired."""
        self._unread.pop(number, None)
        try:
            over = event is None or event.done()
        except Exception as failure:
            self._failed(failure)
            return
        batch = self._sent.pop(number)
        if event is None or over:
            self._over(number, error)
        else:
            self._events[number], self._running[number] = event, batch
            task = asyncio.get_running_loop().create_task(self._watch(number, event), name="asynccache-batch")
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        self._ended()

    async def _watch(self, number: int, event: Event) -> None:
        try:
            await event.wait()
        except CopyFailed:
            pass  # over, though not well
        except Exception as error:
            self._failed(error)
            return
        del self._events[number], self._running[number]
        self._over(number, "")

    def stop(self) -> None:
        """Watch no event any more."""
        for task in self._watching:
            task.cancel()

    # what copies wait for

    def lacks_event(self, numbers: Sequence[int]) -> bool:
        """Whether one of these is sent and was not ended."""
        return bool(numbers) and not self._sent.keys().isdisjoint(numbers)

    def events(self, numbers: Sequence[int]) -> list[Event]:
        """The events of those that are not over."""
        found = (self._events.get(number) for number in numbers)
        return [event for event in found if event is not None and not event.done()]
