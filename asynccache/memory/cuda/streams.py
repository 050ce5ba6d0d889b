"""Streams: the device's own, each with a thread that submits, and an engine's, on which the caller submits.

Law: a stream's own thread does all driver calls of that stream, in the order in which they were asked for, so the loop
pays for a queue entry and no more, and a driver that blocks (its queue of launches is full) blocks no loop. It never
waits for work on the device; on the host it waits only for gates, and for another stream's submission.

Where the mutable state lives: ``_failure``, ``_held`` and what is lent belong to the submitter; the state of events to
the stream's ``condition``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from asynccache.errors import CacheClosed, ConfigError
from asynccache.memory.copies import Hitch, InjectedFault
from asynccache.memory.cuda.driver import DriverError
from asynccache.memory.cuda.events import Context, CudaEvent, CudaGate
from asynccache.memory.cuda.waiter import Waiter
from asynccache.memory.device import Event
from asynccache.memory.signals import Signal, Work

Step = Sequence[Work]
"""Calls of the driver that together copy a step."""


class _Recorder:
    """What both kinds of stream do to record an event."""

    def __init__(self, name: str, handle: int, context: Context) -> None:
        self.name = name
        self.handle = handle
        self.context = context
        self.condition = threading.Condition(threading.Lock())
        self.waiter = Waiter(name, context.driver)

    def record_now(self, event: CudaEvent) -> None:
        """In the thread that submits. On a failed device the event fails, behind those before it."""
        error: Exception | None = self.context.failure
        handle = None
        if error is None:
            try:
                handle = self._put_on_device()
            except DriverError as refused:
                error = self.context.fail(refused)
        event.failure = event.failure or error
        event.record_as(handle)
        self.waiter.put(event)

    def _put_on_device(self) -> int:
        handle = self.context.events.take()
        self.context.driver.event_record(handle, self.handle)
        return handle

    def hold_now(self, event: CudaEvent) -> None:
        """Later work waits for ``event`` on the device. In the thread that submits."""
        try:
            event.hold(self.handle)
        except DriverError as error:
            self.context.fail(error)


class CudaStream(_Recorder):
    """A stream of the device, with the thread that submits to it."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context.driver.stream_create(), context)
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._closed = False
        self._failure: Exception | None = None  # since the last event
        self._held: Signal | None = None
        self._lent: list[Work] = []
        self._thread = threading.Thread(target=self._work, name=f"asynccache-{name}", daemon=True)
        self._thread.start()

    def record(self) -> CudaEvent:
        """An event after all work submitted so far; it reports what failed since the event before it."""
        event = CudaEvent(self)
        self._submit(partial(self._report, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream until ``event`` is done. Does not block the caller.

        Raises:
            ConfigError: the event belongs to another kind of device.
        """
        if event.done():
            return
        if isinstance(event, CudaEvent) and event.stream.context is self.context:
            self._submit(partial(self._wait, event))
        elif isinstance(event, CudaGate):
            self._submit(partial(self._block, event, event.block))
        else:
            raise ConfigError(f"a CUDA stream cannot wait for {event!r}")

    def copy(
        self, steps: Iterable[Step], hitches: Mapping[int, Hitch], keep: object, layers: int = 0
    ) -> Sequence[CudaEvent]:
        """Enqueue one batch, with an event after each of its ``layers`` steps. ``steps`` is run by the submitter;
        ``keep``, which owns the memory, is kept until the device has let go of it."""
        events = [CudaEvent(self) for _ in range(layers)]
        self._submit(partial(self._copy, steps, hitches, keep, events))
        return events

    def call(self, work: Work) -> None:
        """Have the submitter call ``work`` when everything before it is submitted."""
        self._submit(work)

    def lend(self, give_back: Work) -> None:
        """The submitter's batch uses something that is given back when the device has let go of it."""
        self._lent.append(give_back)

    def held_by(self) -> Signal | None:
        return self._held

    def close(self) -> None:
        """Take no more work; the threads end after what is queued."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)

    def join(self) -> None:
        """Block until everything submitted has ended, well or not."""
        self._thread.join()
        self.waiter.join()

    def _submit(self, work: Work) -> None:
        if self._closed:
            raise CacheClosed(f"the device of stream {self.name!r} is closed")
        self._queue.put(work)

    def _work(self) -> None:
        self.context.driver.use_device()
        while work := self._queue.get():
            work()
            del work  # it holds buffers, and the next get may last
        self.waiter.close()

    # in the submitter

    def _report(self, event: CudaEvent) -> None:
        event.failure, self._failure = self._failure, None
        self.record_now(event)

    def _wait(self, event: CudaEvent) -> None:
        self._block(event, event.await_submitted)
        self.hold_now(event)

    def _block(self, held: Signal, until: Callable[[], None]) -> None:
        self._held = held
        until()
        self._held = None

    def _copy(
        self, steps: Iterable[Step], hitches: Mapping[int, Hitch], keep: object, events: Sequence[CudaEvent]
    ) -> None:
        left = list(events)
        try:
            for i, step in enumerate(steps):
                self._issue(step, hitches.get(i))
                if left:
                    self.record_now(left.pop(0))
        except Exception as error:
            self._refused(error, left)
        self._return_lent(keep)

    def _issue(self, step: Step, hitch: Hitch | None) -> None:
        if self.context.failure is not None:
            raise self.context.failure
        half = len(step) // 2 if hitch else len(step)
        _call(step[:half])
        if hitch is not None:
            time.sleep(hitch.before + hitch.between)
            if hitch.fails:
                raise InjectedFault("an injected fault")
            _call(step[half:])

    def _refused(self, error: Exception, left: Sequence[CudaEvent]) -> None:
        """What was submitted before still runs: so the failure is told by the events behind it."""
        if not left:
            self._failure = self._failure or error
        for event in left:
            event.failure = error
            self.record_now(event)

    def _return_lent(self, keep: object) -> None:
        event, lent = CudaEvent(self), self._lent
        self._lent, event.keep = [], keep
        for give_back in lent:
            event.subscribe(give_back)
        self.record_now(event)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name!r}: {self._queue.qsize()} queued>"


class EngineStream(_Recorder):
    """An engine's own stream. Calls go to the driver at once, in the caller's thread, and are quick."""

    _closed = False

    def record(self) -> CudaEvent:
        """An event after all work that the engine has put on its stream so far."""
        if self._closed:
            raise CacheClosed(f"the device of stream {self.name!r} is closed")
        event = CudaEvent(self)
        self.record_now(event)
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of the engine's stream until ``event`` is done, on the device. The caller is held until what
        is queued before the event is submitted: some microseconds, at most some 100 of them per 1,000 fragments.

        Raises:
            ConfigError: the event belongs to another kind of device, or is one that the host has to fire.
        """
        if event.done():
            return
        if not isinstance(event, CudaEvent) or event.stream.context is not self.context:
            raise ConfigError(f"an engine's CUDA stream cannot wait for {event!r}")
        event.await_recorded()
        self.hold_now(event)

    def held_by(self) -> Signal | None:
        return None

    def close(self) -> None:
        """Record no more; the thread ends after what is recorded."""
        self._closed = True
        self.waiter.close()

    def join(self) -> None:
        """Block until all that was recorded has happened."""
        self.waiter.join()

    def __repr__(self) -> str:
        return f"<EngineStream {self.name!r}>"


def _call(works: Sequence[Work]) -> None:
    for work in works:
        work()


def stream_pointer(stream: object) -> int:
    """The ``cudaStream_t`` of a stream of torch, of cupy or of whatever speaks ``__cuda_stream__``, or the number.

    Raises:
        ConfigError: it is none of these.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for name in ("cuda_stream", "ptr"):
        if isinstance(pointer := getattr(stream, name, None), int):
            return pointer
    if isinstance(stream, int):
        return stream
    raise ConfigError(f"{stream!r} is no CUDA stream: give a torch or a cupy one, or its address")
