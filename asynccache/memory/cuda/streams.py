"""Streams, of two kinds: the device's own, each with a thread that submits, and an engine's own, to which the caller
submits.

A stream's submitter thread makes all driver calls of that stream, in the order in which they were asked for, so the
loop pays for a queue entry and no more. It waits for the device only where the driver's queue would become full, or
where the driver refuses to order two streams; on the host it waits for gates, and for another stream's submission. It
outlives every error: an event reports the error. The driver gets the stream back when it is empty, that is, when its
last event, which comes after all its work, has happened.

A call that the driver refuses fails its batch, or raises in the engine's thread. Work in flight runs on, and events
fire behind it. Only an error after which a context does nothing any more is the end of the device.

Mutable state: ``_failure``, ``held`` and ``_backlog`` belong to the submitter, the stream's own thread; the state of
events is under the stream's ``condition``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.memory.cuda.events import CudaContext, CudaEvent, EventRecorder
from asynccache.memory.cuda.libcuda import CAPTURED, DriverError
from asynccache.memory.device import Event
from asynccache.memory.host_copies import Hitch, InjectedFault
from asynccache.memory.signals import Callback, HostGate, Signal, WorkThread

CAP = 384
"""The most entries of the driver's queue that a stream takes before it waits. The queue has about 1,024, and one call
may take 512 of them."""
APART = 128
"""An event that can be waited for is recorded after this many entries. More events would cost the submitter and the
waiter more time."""

Step = Sequence[Callback]
"""Calls of the driver that together copy a step."""


class QueueFill:
    """The amount of a stream's work in the driver's queue. It counts entries, and subtracts those before an event that
    has happened. Only the submitter uses it.

    A driver whose queue is full blocks the next thread that calls it, perhaps an engine that launches on another
    stream. So a submitter stops long before that, and waits for older work of its own stream.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[CudaEvent, int]] = deque()
        self._marked = 0
        self.since = 0  # entries since the last mark

    def admit(self) -> None:
        """Hold the thread until the queue has room for a call. That takes as long as the device does."""
        while self._marks and (self._marks[0][0].done() or self._marked + self.since >= CAP):
            event, entries = self._marks.popleft()
            event.block()
            self._marked -= entries

    def took(self, entries: int) -> None:
        """Count the entries that a call has put into the queue."""
        self.since += entries

    def mark(self, event: CudaEvent) -> None:
        """Note that ``event``, an entry itself, is behind all that was counted so far."""
        self._marks.append((event, self.since + 1))
        self._marked, self.since = self._marked + self.since + 1, 0


class CudaStream(EventRecorder):
    """A stream of the device, with the thread that submits to it."""

    def __init__(self, name: str, context: CudaContext) -> None:
        super().__init__(name, context)
        self._backlog = QueueFill()
        self._failure: Exception | None = None  # since the last event
        self._submitter = WorkThread(name, context.use_device, self.end)

    def record(self) -> CudaEvent:
        """Return an event after all work submitted so far. It reports what failed since the event before it."""
        event = CudaEvent(self)
        self.call(partial(self._report, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream until ``event`` is done. Does not block the caller.

        Raises:
            ConfigError: the event belongs to another kind of device.
        """
        if event.done():
            return
        if isinstance(event, CudaEvent) and event.stream.context is self.context:
            self.call(partial(self._wait, event))
        elif isinstance(event, HostGate):
            self.call(partial(self._block, event, event.block))
        else:
            raise ConfigError(f"a CUDA stream cannot wait for {event!r}")

    def copy(
        self, steps: Iterable[Step], hitches: Mapping[int, Hitch], keep: object, layers: int = 0
    ) -> Sequence[CudaEvent]:
        """Enqueue one batch, and return an event after each of its ``layers`` steps; none if that is 0. The submitter
        runs ``steps``. ``keep``, which owns the memory, is kept until the device has let go of it."""
        events = [CudaEvent(self) for _ in range(layers)]
        self.call(partial(self._copy, steps, hitches, keep, events))
        return events

    def call(self, work: Callback) -> None:
        """Have the submitter call ``work`` when everything before it is submitted. If ``work`` raises, the next event
        reports the error.

        Raises:
            CacheClosed: the stream was released, or its device closed.
        """
        self._submitter.submit(partial(self._do, work))

    def close(self) -> None:
        """Take no more work; the threads end after what is queued."""
        self._submitter.close()

    def join(self) -> None:
        self._submitter.join()
        super().join()

    def _do(self, work: Callback) -> None:
        try:
            work()
        except Exception as error:
            self._failure = self._failure or self.context.refused(error)

    # in the submitter

    def _report(self, event: CudaEvent) -> None:
        event.failure, self._failure = self._failure, None
        self._record(event)

    def _record(self, event: CudaEvent) -> None:
        self._backlog.admit()
        self._put_or_fail(event)
        self._backlog.mark(event)

    def _wait(self, event: CudaEvent) -> None:
        self._block(event, event.await_recorded)
        try:
            held = self._call(partial(event.hold, self.handle))
        except Exception as error:
            self.context.refused(error)
            held = False
        if not held:
            event.block()  # what the device does not order, this thread does

    def _block(self, held: Signal, until: Callback) -> None:
        self.held = held
        until()
        self.held = None

    def _copy(
        self, steps: Iterable[Step], hitches: Mapping[int, Hitch], keep: object, events: Sequence[CudaEvent]
    ) -> None:
        """Make the calls of ``steps``. If one is refused, the events that are left report it, or else the stream's next
        one. These fire after the work that was submitted before, which still runs."""
        left = list(events)
        try:
            for i, step in enumerate(steps):
                self._issue(step, hitches.get(i))
                if left:
                    self._record(layer := left.pop(0))
                    if layer.failure is not None:
                        raise layer.failure  # the driver refuses that event, so nobody can wait for it on the device
        except Exception as refused:
            error = self.context.refused(refused)
            if not left:
                self._failure = self._failure or error
            for event in left:
                event.failure = error
                self._record(event)
        last = CudaEvent(self)
        last.keep = keep
        self._record(last)

    def _issue(self, step: Step, hitch: Hitch | None) -> None:
        if self.context.failure is not None:
            raise self.context.failure
        half = len(step) // 2 if hitch else len(step)
        for work in step[:half]:
            self._call(work)
        if hitch is not None:
            time.sleep(hitch.before + hitch.between)
            if hitch.fails:
                raise InjectedFault("an injected fault")
            for work in step[half:]:
                self._call(work)

    def _call(self, work: Callback) -> object:
        """Make one call of the driver once its queue has room, and return the call's result. An integer is the number
        of entries that the call takes; any other result stands for one entry."""
        self._backlog.admit()
        returned = work()
        self._backlog.took(returned if isinstance(returned, int) else 1)
        if self._backlog.since >= APART:
            self._record(CudaEvent(self))
        return returned


class CudaEngineStream(EventRecorder):
    """An engine's own stream, or one of the device's that waits for an engine's events. Calls go to the driver at once,
    in the caller's thread. A call that the driver refuses raises in that thread: the stream is captured in a graph,
    say, or was destroyed. The device and its copies go on."""

    def record(self) -> CudaEvent:
        """Return an event after all work that the engine has put on its stream so far.

        Raises:
            DriverError: the driver refuses it, or the stream is captured in a graph.
            CacheClosed: the device is closed.
        """
        self._check_captured()
        return self._put(CudaEvent(self))

    def wait_event(self, event: Event) -> None:
        """Hold later work of the engine's stream until ``event`` is done, on the device. The caller is held until the
        event is submitted, which takes as long as the driver calls that are queued before it. If those are more than
        the driver's queue may hold, it also takes as long as the device works on some of them.

        Raises:
            ConfigError: the event belongs to another kind of device, or is one that the host has to fire.
            DriverError: the driver refuses it, and nothing holds the engine's stream.
        """
        if event.done():
            return
        if not isinstance(event, CudaEvent) or event.stream.context is not self.context:
            raise ConfigError(f"an engine's CUDA stream cannot wait for {event!r}")
        self._check_captured()
        while not event.await_recorded(0.05):
            if (gate := event.gate()) is not None:
                raise ConfigError(f"an engine's stream cannot wait for {event!r}: the host holds it with {gate!r}")
        event.hold(self.handle)  # one without a handle has failed: whoever awaits it learns of that

    def _check_captured(self) -> None:
        """Refuse a stream that is captured in a graph. The driver would take the event into the graph, where it would
        never happen, and would pull copies in after it."""
        if self.context.failure is None and not self._own and self.context.driver.is_captured(self.handle):
            raise DriverError(f"stream {self.name!r} is captured in a graph: record and wait outside of it", CAPTURED)


def event_pointer(event: object) -> int:
    """Return the ``cudaEvent_t`` of an event of torch or of cupy; 0 for one of torch's that was never recorded.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(pointer := getattr(event, "cuda_event", None), int):
        return pointer
    if getattr(getattr(event, "device", None), "type", None) == "cuda" \
            and isinstance(pointer := getattr(event, "event_id", None), int):
        return pointer  # of a ``torch.Event``, which may be of any kind of device
    kind = type(event)  # to ask cupy's event itself whether it is ``done`` would be a call of the driver
    is_event = hasattr(kind, "done") and hasattr(kind, "synchronize") and not hasattr(kind, "wait_event")  # no stream
    if is_event and isinstance(pointer := getattr(event, "ptr", None), int):
        return pointer
    raise ConfigError(
        f"{checks.shown(event)} is no event that a CUDA stream can wait for: give a torch.cuda.Event, a "
        "cupy.cuda.Event, or what device.gate() or device.engine_stream(stream).record() returned"
    )


def stream_pointer(stream: object) -> int:
    """Return the ``cudaStream_t`` of a stream of torch, of cupy or of whatever speaks ``__cuda_stream__``; a number is
    returned as it is.

    Raises:
        ConfigError: it is none of these.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    if getattr(getattr(stream, "device", None), "type", None) == "cuda" and not hasattr(stream, "cuda_stream"):
        parts = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
        stream = torch.cuda.Stream(**parts)  # type: ignore[no-untyped-call]  # a ``torch.Stream``, of any kind of device
    for pointer in (getattr(stream, "cuda_stream", None), getattr(stream, "ptr", None), stream):
        if isinstance(pointer, int):
            return pointer
    raise ConfigError(f"{checks.shown(stream)} is no CUDA stream: give a torch or a cupy one, or its address")
