"""The CPU device: worker threads as streams. The embedded default, and an honest double of a GPU.

A stream is one thread with an ordered queue; between streams there is no order but by ``wait_event``. Events fire
later, from the thread, and wake coroutines of any loop through one coalesced hop per burst. Nothing blocks the caller.

Where the mutable state lives: a stream's queue (filled from any thread, emptied by its own), an event's state and
waiters (under the event's lock), a bell's list (under the bell's lock). Everything public may be called from any
thread, except ``wait`` and ``aclose``, which are coroutines of whatever loop runs them, and ``stream`` and ``gate``,
which belong to the thread that owns the device.

Errors are not sticky: an event reports the failure of the work between the stream's previous event and itself, and
later work runs on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

import torch

from asynccache.errors import CacheClosed, ConfigError, CopyFailed
from asynccache.memory import copies as batch
from asynccache.memory.device import Event, PageCopy, Stream
from asynccache.memory.faults import Fates, Faults
from asynccache.memory.pools import anonymous_tensor, available_memory, check_room

_Work = Callable[[], None]


class _Bell:
    """Wakes coroutines of one loop. Whatever is rung before the loop answers costs one hop together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._rung: list[asyncio.Future[None]] = []

    def ring(self, future: asyncio.Future[None]) -> None:
        """From any thread: end ``future`` soon."""
        with self._lock:
            self._rung.append(future)
            if len(self._rung) > 1:
                return
        try:
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return  # the loop was closed, and its waiters went with it

    def _answer(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for future in rung:
            if not future.done():
                future.set_result(None)


class _Bells:
    """One bell for each loop that waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: dict[asyncio.AbstractEventLoop, _Bell] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> _Bell:
        with self._lock:
            bell = self._bells.get(loop)
            if bell is None:
                self._bells = {k: b for k, b in self._bells.items() if not k.is_closed()}
                bell = self._bells[loop] = _Bell(loop)
            return bell


class CpuEvent:
    """A point in a CPU stream. Thread-safe; any number of coroutines and streams may wait for it."""

    def __init__(self, bells: _Bells, stream: str) -> None:
        self._bells = bells
        self._stream = stream
        self._lock = threading.Lock()
        self._fired = False
        self._error: Exception | None = None
        self._callbacks: list[_Work] = []

    def done(self) -> bool:
        return self._fired

    async def wait(self) -> None:
        """Return when the work before the event is done. Cancelling stops the waiting, never the work.

        Raises:
            CopyFailed: that work failed; the device's error is its cause.
        """
        if not self._fired:
            await self._fires()
        if self._error is not None:
            raise CopyFailed(f"a copy on stream {self._stream!r} failed: {self._error}") from self._error

    async def _fires(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        callback = partial(self._bells.of(loop).ring, future)
        if not self.subscribe(callback):
            return
        try:
            await future
        finally:
            self._unsubscribe(callback)

    def block(self) -> None:
        """Hold the calling thread until the event has fired. For the threads of streams, never for a loop's."""
        fired = threading.Event()
        if self.subscribe(fired.set):
            fired.wait()

    def subscribe(self, callback: _Work) -> bool:
        """Have ``callback`` called from the thread that fires the event; False, and no call, if it has fired."""
        with self._lock:
            if not self._fired:
                self._callbacks.append(callback)
            return not self._fired

    def _unsubscribe(self, callback: _Work) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def fire(self, error: Exception | None = None) -> None:
        """The work has ended, with ``error`` or well. Firing twice does nothing."""
        with self._lock:
            if self._fired:
                return
            self._error, self._fired = error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __repr__(self) -> str:
        state = "pending" if not self._fired else "failed" if self._error else "done"
        return f"<CpuEvent of {self._stream!r}: {state}>"


class CpuStream:
    """An ordered queue of work and the thread that does it."""

    def __init__(self, name: str, bells: _Bells) -> None:
        self.name = name
        self._bells = bells
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = False
        self._failure: Exception | None = None  # since the last event; touched by the thread alone
        self._thread = threading.Thread(target=self._work, name=f"asynccache-{name}", daemon=True)
        self._thread.start()

    def record(self) -> CpuEvent:
        """An event after all work submitted so far; it reports what failed since the event before it."""
        event = CpuEvent(self._bells, self.name)
        self._submit(partial(self._report, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream until ``event`` is done. Does not block the caller.

        Raises:
            ConfigError: the event belongs to another kind of device.
        """
        if event.done():
            return
        if not isinstance(event, CpuEvent):
            raise ConfigError(f"a CPU stream cannot wait for {event!r}")
        self._submit(event.block)

    def copy(
        self, steps: Iterable[batch.Step], hitches: Mapping[int, batch.Hitch], layers: int = 0
    ) -> Sequence[CpuEvent]:
        """Enqueue one batch, with an event after each of its ``layers`` steps."""
        events = [CpuEvent(self._bells, self.name) for _ in range(layers)]
        self._submit(partial(self._copy, steps, hitches, events))
        return events

    def close(self) -> None:
        """Take no more work; the thread ends after what is queued."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    def _submit(self, work: _Work) -> None:
        if self._closed:
            raise CacheClosed(f"the device of stream {self.name!r} is closed")
        self._queue.put(work)

    def _work(self) -> None:
        while work := self._queue.get():
            work()
            del work  # it holds buffers, and the next get may last

    def _report(self, event: CpuEvent) -> None:
        failure, self._failure = self._failure, None
        event.fire(failure)

    def _copy(
        self, steps: Iterable[batch.Step], hitches: Mapping[int, batch.Hitch], events: Sequence[CpuEvent]
    ) -> None:
        failure = _drive(batch.perform(steps, hitches, events))
        if not events:
            self._failure = self._failure or failure

    def __repr__(self) -> str:
        return f"<CpuStream {self.name!r}: {self._queue.qsize()} queued>"


def _drive(running: Generator[float, None, Exception | None]) -> Exception | None:
    while True:
        try:
            pause = next(running)
        except StopIteration as end:
            failure: Exception | None = end.value
            return failure
        if pause:
            time.sleep(pause)


def _own(stream: Stream) -> CpuStream:
    if not isinstance(stream, CpuStream):
        raise ConfigError(f"the CPU device cannot copy on {stream!r}")
    return stream


class Gate(CpuEvent):
    """An event that somebody fires by hand: a test that holds a stream, an engine that computes without streams."""

    def __init__(self, bells: _Bells, stream: str, shut: dict[Gate, None]) -> None:
        super().__init__(bells, stream)
        self._shut = shut

    def open(self) -> None:
        """Let go of every stream and coroutine that waits. From any thread."""
        self._shut.pop(self, None)
        self.fire()


class CpuDevice:
    """Host memory as a device. ``faults`` makes it slow and hostile."""

    def __init__(self, name: str = "cpu", *, faults: Faults | None = None) -> None:
        self.name = name
        self._bells = _Bells()
        self._fates = Fates(faults or Faults())
        self._streams: list[CpuStream] = []
        self._gates: dict[Gate, None] = {}  # those not open yet; each takes itself out

    def stream(self, name: str) -> CpuStream:
        """A new stream, with its thread."""
        stream = CpuStream(name, self._bells)
        self._streams.append(stream)
        return stream

    def gate(self) -> Gate:
        """A new event to open by hand; ``aclose`` opens those that were forgotten."""
        gate = Gate(self._bells, "gate", self._gates)
        self._gates[gate] = None
        return gate

    def check_room(self, device: Mapping[str, int], host: Mapping[str, int]) -> None:
        """Both tiers share the host's memory.

        Raises:
            ConfigError: the pools do not fit in it together.
        """
        check_room((*device.items(), *host.items()), available_memory())

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return anonymous_tensor(shape)

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return anonymous_tensor(shape)

    def device_to_host(self, stream: Stream, copies: Sequence[PageCopy]) -> None:
        parts = batch.device_to_host_parts(copies)
        _own(stream).copy(batch.device_to_host_steps(parts), self._fates.draw(1))

    def host_to_device(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[CpuEvent]:
        parts = batch.host_to_device_parts(copies)
        return _own(stream).copy(batch.host_to_device_steps(parts, layers), self._fates.draw(layers), layers)

    def device_to_device(self, stream: Stream, copies: Sequence[PageCopy]) -> None:
        parts = batch.device_to_device_parts(copies)
        _own(stream).copy(batch.device_to_device_steps(parts), self._fates.draw(1))

    async def aclose(self) -> None:
        """Finish all queued work and end the threads, without blocking the loop. Closing again waits again.

        Cancelling stops the waiting; the threads end by themselves.
        """
        for stream in self._streams:
            stream.close()
        for gate in list(self._gates):
            gate.open()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for stream in self._streams:
            stream.join()

    def __repr__(self) -> str:
        return f"<CpuDevice {self.name!r}: {len(self._streams)} streams>"
