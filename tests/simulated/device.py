"""A device for simulated worlds: no threads, no clock of its own, one seed.

Copies really move bytes, in two halves at random moments between start and end, driven by ``call_later`` of the running
loop, which may have a virtual clock. Streams are ordered, nothing orders them among each other but ``wait_event``: a
wait that is missing shows as wrong bytes on some seeds. Everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from random import Random

import torch

from asynccache.errors import CacheClosed, ConfigError, CopyFailed
from asynccache.memory import host_copies as batch
from asynccache.memory.device import CopyDirection, Event, Stream
from asynccache.memory.host_copies import Fates, Faults
from asynccache.memory.pools import PageCopy, available_memory, check_room


class SimulatedEvent:
    """A point in a simulated stream."""

    def __init__(self) -> None:
        self._fired = False
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._fired

    def failed(self) -> bool:
        return self._error is not None

    async def wait(self) -> None:
        """Return when the work before the event is done. Cancelling stops the waiting, never the work.

        Raises:
            CopyFailed: that work failed.
        """
        if not self._fired:
            future = asyncio.get_running_loop().create_future()
            self.subscribe(lambda: None if future.done() else future.set_result(None))
            await future
        if self._error is not None:
            raise CopyFailed(f"a copy failed: {self._error}") from self._error

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the event fires. It must not have fired."""
        self._callbacks.append(callback)

    def fire(self, error: Exception | None = None) -> None:
        """The work has ended, with ``error`` or well. Firing twice does nothing."""
        if self._fired:
            return
        self._fired, self._error = True, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class SimulatedGate(SimulatedEvent):
    """An event that somebody fires by hand."""

    def __init__(self, shut: dict[SimulatedGate, None]) -> None:
        super().__init__()
        self._shut = shut

    def open(self) -> None:
        """Let go of every stream and coroutine that waits."""
        self._shut.pop(self, None)
        self.fire()


_Running = Generator[float, None, Exception | None]


class SimulatedStream:
    """An ordered queue of work; its head runs, or waits for an event or the clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False
        self._failure: Exception | None = None  # since the last event

    def record(self) -> SimulatedEvent:
        """An event after all work submitted so far; it reports what failed since the event before it."""
        event = SimulatedEvent()
        self._submit(partial(self._report, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream until ``event`` is done."""
        if event.done():
            return
        if not isinstance(event, SimulatedEvent):
            raise ConfigError(f"a simulated stream cannot wait for {event!r}")
        self._submit(partial(self._wait, event))

    def copy(
        self, steps: Iterable[batch.Step], hitches: Mapping[int, batch.Hitch], layers: int = 0
    ) -> Sequence[SimulatedEvent]:
        """Enqueue one batch, with an event after each of its ``layers`` steps."""
        events = [SimulatedEvent() for _ in range(layers)]
        self._submit(partial(self._copy, batch.perform(steps, hitches, events), not events))
        return events

    def _submit(self, work: Callable[[], None]) -> None:
        if self.closed:
            raise CacheClosed(f"the device of stream {self.name!r} is closed")
        self._queue.append(work)
        self._pump()

    def _pump(self) -> None:
        while self._queue and not self._busy:
            self._queue.popleft()()

    def _resume(self) -> None:
        self._busy = False
        self._pump()

    def _report(self, event: SimulatedEvent) -> None:
        failure, self._failure = self._failure, None
        event.fire(failure)

    def _wait(self, event: SimulatedEvent) -> None:
        if not event.done():
            self._busy = True
            event.subscribe(self._resume)

    def _copy(self, running: _Running, keep: bool) -> None:
        self._busy = True
        self._drive(running, keep)

    def _drive(self, running: _Running, keep: bool) -> None:
        """Run on to the next pause. ``keep``: no event of the batch reports its failure, so the next one must."""
        try:
            pause = next(running)
        except StopIteration as end:
            if keep:
                self._failure = self._failure or end.value
            self._resume()
            return
        asyncio.get_running_loop().call_later(pause, self._drive, running, keep)


class SimulatedDevice:
    """Host memory as a device in simulated time. ``latency`` is the range (seconds) of each half of a step;
    ``faults`` comes on top of it."""

    def __init__(
        self,
        name: str = "simulated",
        *,
        seed: int = 0,
        latency: tuple[float, float] = (0.0, 0.002),
        faults: Faults | None = None,
    ) -> None:
        self.name = name
        self._random = Random(seed)
        self._latency = latency
        self._fates = Fates(faults or Faults(seed=seed))
        self._streams: list[SimulatedStream] = []
        self._gates: dict[SimulatedGate, None] = {}  # those not open yet; each takes itself out
        self._last: list[SimulatedEvent] = []  # one for each closed stream

    def stream(self, name: str) -> SimulatedStream:
        """A new stream."""
        stream = SimulatedStream(name)
        self._streams.append(stream)
        return stream

    def release(self, stream: Stream) -> None:
        """Do nothing: a simulated stream has nothing to give back."""

    def gate(self) -> SimulatedGate:
        """A new event to open by hand; ``aclose`` opens those that were forgotten."""
        gate = SimulatedGate(self._gates)
        self._gates[gate] = None
        return gate

    def engine_event(self, event: object) -> SimulatedEvent:
        """``event``, if it is one of a simulated device. Raises ConfigError if it is not."""
        if isinstance(event, SimulatedEvent):
            return event
        raise ConfigError(f"{event!r} is no event of the simulated device")

    def check_room(self, device: Mapping[str, int], host: Mapping[str, int]) -> None:
        """Raises ConfigError if the pools do not fit in host memory together."""
        check_room((*device.items(), *host.items()), available_memory())

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def copy(self, stream: Stream, towards: CopyDirection, copies: Sequence[PageCopy]) -> None:
        steps = batch.whole_step(batch.checked(copies, towards), towards)
        _own(stream).copy(steps, self._hitches(1))

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[SimulatedEvent]:
        steps = batch.layer_steps(batch.checked(copies, CopyDirection.IN), layers)
        return _own(stream).copy(steps, self._hitches(layers), layers)

    def _hitches(self, steps: int) -> dict[int, batch.Hitch]:
        """The delays and faults of each step, which comes in two halves."""
        fate = self._fates.draw(steps)
        return {i: self._hitch(fate.get(i, batch.Hitch(0.0, 0.0, False))) for i in range(steps)}

    def _hitch(self, fate: batch.Hitch) -> batch.Hitch:
        draw = partial(self._random.uniform, *self._latency)
        return batch.Hitch(fate.before + draw(), fate.between + draw(), fate.fails)

    async def aclose(self) -> None:
        """Finish all queued work. Closing again waits again. Cancelling stops the waiting, never the work."""
        for gate in list(self._gates):
            gate.open()
        for stream in self._streams:
            if not stream.closed:
                self._last.append(stream.record())
                stream.closed = True
        for event in self._last:
            await _let_go(event)


async def _let_go(event: SimulatedEvent) -> None:
    try:
        await event.wait()
    except CopyFailed:
        return  # whoever asked for the copy awaits an event of its own


def _own(stream: Stream) -> SimulatedStream:
    if not isinstance(stream, SimulatedStream):
        raise ConfigError(f"the simulated device cannot copy on {stream!r}")
    return stream
