"""CUDA events: points in streams that coroutines, threads and other streams wait for, and the threads that notify them.

To CUDA an event that was never recorded reads as complete, so nobody looks at a handle before ``recorded``. Handles are
used again, so nobody looks at one after its event has fired. Both are checked under the stream's lock. An event whose
recording was refused has no handle. It fires when its stream is empty, and so never before the work before it.

The thread that waits for a stream's events sleeps in ``event_synchronize`` on the oldest; it never polls. All events
that have happened by then are fired together, so a loop gets one hop per burst. Nothing is fired before the stream has
let go of the buffers of the work before it. The thread outlives every error, so every event fires in the end. Callbacks
of the driver into Python would be no way: they need the GIL, whose holder may wait for the driver's lock, and after an
error they are not made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from asynccache.errors import CacheClosed, forget_frames
from asynccache.memory.cuda.cupy_driver import CupyDriver, EventHandle, StreamHandle
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.signals import Bells, Callback, Signal, call_all

PATIENCE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 5.0)
"""Seconds to wait before asking again, if the driver works and yet refuses to tell of an event, as while an engine
captures a graph."""


class CudaContext:
    """The state that all streams of a device share: the driver, handles of events, which are used again and again, and
    ``failure``, the error after which the driver does nothing any more. Everything may be called from any thread."""

    def __init__(self, driver: CupyDriver) -> None:
        self.driver = driver
        self.bells = Bells()
        self.failure: DriverError | None = None
        self._free: list[EventHandle] = []  # without a lock, since each use of the list is one operation of Python's
        self._closed = False

    def take(self) -> EventHandle:
        """Return the handle of an event that nobody else uses."""
        with suppress(IndexError):
            return self._free.pop()
        return self.driver.event_create()

    def give(self, handle: EventHandle) -> None:
        """Take back the handle of an event that has fired. Nobody will ask for it again."""
        self._free.append(handle)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Destroy the events that are not in use, and others when they come back."""
        self._closed = True
        with suppress(IndexError, DriverError):  # it may tell here that an engine's kernel failed
            while self.failure is None:  # nothing can be given back to a context that is gone
                self.driver.event_destroy(self._free.pop())

    def fail(self, error: DriverError) -> DriverError:
        """Note that the device has failed with ``error``. Return the first error with which it failed."""
        if self.failure is None:
            self.failure = error
        return self.failure

    def refused(self, error: Exception) -> Exception:
        """Return the error to report for a call that raised ``error``: the device's own failure if ``error`` is the end
        of the device, or else ``error``."""
        forget_frames(error)
        return self.fail(error) if isinstance(error, DriverError) and error.sticky else error

    def use_device(self) -> None:
        """Choose the device in a new thread. If the driver refuses that, the device has failed, and events tell of
        it."""
        try:
            self.driver.use_device()
        except DriverError as error:
            self.fail(error)


class CudaEvent(Signal):
    """A point in a stream. Thread-safe."""

    def __init__(self, stream: EventRecorder) -> None:
        super().__init__(stream.context.bells, stream.name, stream.condition)
        self.stream = stream
        self.failure: Exception | None = None   # the error of its work, which may have kept it from the device
        self.recorded = False
        self.keep: object = None                # who owns the memory of the work before it
        self._handle: EventHandle = None
        self._holds = 0                         # calls under way that hold a stream with the handle

    def record_as(self, handle: EventHandle) -> None:
        """Note that the event is in the stream now, as ``handle``. None: it never will be, and ``failure`` says why."""
        with self.stream.condition:
            self._handle, self.recorded = handle, True
            self.stream.condition.notify_all()

    def await_recorded(self, seconds: float | None = None) -> bool:
        """Hold the calling thread until the event is on the device, but at most ``seconds`` (None: for ever). Return
        True if it is, or has fired. That takes as long as its submission, never as long as its work."""
        with self.stream.condition:
            return self.stream.condition.wait_for(lambda: self.recorded or self._fired, seconds)

    def gate(self) -> Signal | None:
        """Return the gate that holds up the event's submission, at the end of the chain of submitters that wait for
        each other; None if there is none, or it is open."""
        held: Signal | None = self
        while isinstance(held, CudaEvent):
            held = held.stream.held
        return None if held is None or held.done() else held

    def hold(self, stream: StreamHandle) -> bool:
        """Have later work of ``stream`` wait on the device for this event, which was recorded. Return False if the
        device cannot do that, because the event has no handle and has not fired.

        Raises:
            DriverError: the driver refused it.
        """
        with self.stream.condition:
            handle, fired = self._handle, self._fired
            if handle is None or fired:
                return fired
            self._holds += 1
        try:  # without the lock: the driver may block here, and the loop needs the lock to await an event
            self.stream.context.driver.stream_wait_event(stream, handle)
        finally:
            with self.stream.condition:
                self._holds -= 1
            self._give_back()
        return True

    def happened(self) -> bool:
        """Return True if the event has happened, without waiting. Its failure is noted. For the waiter; never
        raises."""
        context = self.stream.context
        if self._handle is None:
            return context.failure is not None
        try:
            return context.driver.event_query(self._handle)
        except Exception as error:
            context.refused(error)
            return self._is_lost()

    def synchronize(self) -> None:
        """Sleep until the event has happened, or nobody will ever know whether it has. Its failure is noted. For the
        waiter; never raises."""
        context = self.stream.context
        for pause in PATIENCE:
            try:
                if self._handle is not None:
                    context.driver.event_synchronize(self._handle)
                elif context.failure is None:
                    context.driver.stream_synchronize(self.stream.handle)
                return
            except Exception as error:
                last = context.refused(error)
                if self._is_lost():
                    return
                time.sleep(pause)
        self.failure = self.stream.give_up(last)

    def _is_lost(self) -> bool:
        """Return True if the device has failed, and this event with it."""
        self.failure = self.stream.context.failure or self.failure
        return self.stream.context.failure is not None

    def land(self) -> list[Callback]:
        """Note that the event, which has happened, has fired, and return the callbacks to call. The event's handle is
        given back, unless the device has failed."""
        callbacks = self.note_fired(self.failure)
        self.keep = None
        self._give_back()
        return callbacks

    def _give_back(self) -> None:
        """Give the handle back if the event has fired and nobody is holding a stream with it."""
        with self.stream.condition:
            if self._holds or not self._fired:
                return
            handle, self._handle = self._handle, None
        if handle is not None and self.stream.context.failure is None:
            self.stream.context.give(handle)


class EventRecorder:
    """The base of all kinds of streams: a handle, events in its order, and the thread that waits for them, oldest
    first.
    """

    held: Signal | None = None
    """What the stream's submitter waits for on the host now; None if it does not wait."""

    def __init__(self, name: str, context: CudaContext, handle: StreamHandle | None = None) -> None:
        """``handle``: an engine's stream; None: a new one, which the driver gets back at the end."""
        self.name = name
        self.context = context
        self._own = handle is None
        self.handle = context.driver.stream_create() if handle is None else handle
        self.condition = threading.Condition(threading.Lock())
        self._order = threading.Lock()  # held while an event is recorded and put, so none is put behind the end
        self._closed = False
        self._fifo: SimpleQueue[CudaEvent | None] = SimpleQueue()
        self._put_count = self._fired_count = 0  # each is changed by one thread at a time
        self._thread = threading.Thread(target=self._await_events, name=f"asynccache-{name}-waiter", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """The number of events that have not been fired."""
        return self._put_count - self._fired_count

    def _put(self, event: CudaEvent) -> CudaEvent:
        """Record ``event`` behind all that the stream was given, and return it. On a device that has failed it is not
        recorded, and fails as the device did.

        Raises:
            DriverError: the driver refuses it.
            CacheClosed: the stream was closed; nothing is recorded.
        """
        with self._order:
            if self._closed:
                raise CacheClosed(f"the device of stream {self.name!r} is closed")
            event.failure = event.failure or self.context.failure
            self._append(event, self._recorded() if self.context.failure is None else None)
        return event

    def _put_or_fail(self, event: CudaEvent) -> None:
        """Do the same as ``_put``, but raise nothing: an event that the driver refuses fails once the stream is
        empty."""
        try:
            self._put(event)
        except Exception as refused:
            event.failure = event.failure or self.context.refused(refused)
            with self._order:
                self._append(event, None)

    def _recorded(self) -> EventHandle:
        handle = self.context.take()
        try:
            self.context.driver.event_record(handle, self.handle)
        except BaseException:
            self.context.give(handle)
            raise
        return handle

    def _append(self, event: CudaEvent, handle: EventHandle) -> None:
        event.record_as(handle)
        self._put_count += 1
        self._fifo.put(event)

    def end(self) -> None:
        """Record no more; the thread ends after what is recorded. A stream of the device's own goes back to the driver
        then: its last event comes after all of its work."""
        if self._own:
            self._put_or_fail(CudaEvent(self))
        with self._order:
            self._closed = True
            self._fifo.put(None)

    def ended(self) -> bool:
        """Return True if the stream has ended and nothing is in it."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until everything that was recorded has ended, well or not."""
        self._thread.join()

    def give_up(self, error: Exception) -> Exception:
        """Return the error for events of which the driver tells nothing, because of ``error``. On a stream of the
        device's own that is the end of the device; what an engine did to its own stream is not."""
        if not self._own:
            return error
        return self.context.fail(DriverError(f"the driver does not tell of stream {self.name!r}: {error}"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # in the thread that waits for the events

    def _await_events(self) -> None:
        self.context.use_device()
        head = self._fifo.get()
        while head is not None:
            head.synchronize()
            burst, rest = self._happened([head])
            call_all([callback for event in burst for callback in event.land()])
            self._fired_count += len(burst)
            del burst, head  # they hold waiters, and the next get may last
            head = rest[0] if rest else self._fifo.get()
        if self._own and self.context.failure is None:
            with suppress(DriverError):
                self.context.driver.stream_destroy(self.handle)

    def _happened(self, burst: list[CudaEvent]) -> tuple[list[CudaEvent], Sequence[CudaEvent | None]]:
        """Return ``burst`` with all events behind it that have happened too; and what else was taken from the queue:
        nothing, the first event that has not happened, or the None at the end."""
        while True:
            try:
                event = self._fifo.get_nowait()
            except Empty:
                return burst, ()
            if event is None or not event.happened():
                return burst, (event,)
            burst.append(event)
