"""The CPU device: worker threads as streams. It is the default when asynccache runs embedded, and in tests it stands in
for a GPU.

A stream is one thread with an ordered queue. Only ``wait_event`` orders one stream after another. Events fire later,
from the stream's thread. Several events that fire together wake each loop that waits for them only once. No call blocks
the caller.

Where the mutable state lives: in a stream's queue (filled from any thread, emptied by its own), and in the signals.
Everything public may be called from any thread, except ``wait`` and ``aclose``, which are coroutines of whatever loop
runs them.

An error does not stop a stream: an event reports the failure of the work between the stream's previous event and
itself, and later work runs on. The failure of a load is reported by the load's own events.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial

import torch

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.memory import host_copies as batch
from asynccache.memory.device import CopyDirection, Event, Stream
from asynccache.memory.host_copies import Fates, Faults
from asynccache.memory.pools import PageCopy, anonymous_tensor, available_memory, check_room
from asynccache.memory.signals import Bells, HostGate, Signal, WorkThread


class CpuEvent(Signal):
    """A point in a CPU stream. Thread-safe; any number of coroutines and streams may wait for it."""


class CpuStream:
    """An ordered queue of work and the thread that does it."""

    def __init__(self, name: str, bells: Bells) -> None:
        self.name = name
        self._bells = bells
        self._failure: Exception | None = None  # since the last event; touched by the thread alone
        self._thread = WorkThread(name)

    def record(self) -> CpuEvent:
        """Return an event after all work submitted so far. It reports what failed since the event before it."""
        event = CpuEvent(self._bells, self.name)
        self._thread.submit(partial(self._report, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream until ``event`` is done. The call does not block.

        Raises:
            ConfigError: the event belongs to another kind of device.
        """
        if event.done():
            return
        if not isinstance(event, CpuEvent | HostGate):
            raise ConfigError(f"a CPU stream cannot wait for {event!r}")
        self._thread.submit(event.block)

    def copy(
        self, steps: Iterable[batch.Step], hitches: Mapping[int, batch.Hitch], layers: int = 0
    ) -> Sequence[CpuEvent]:
        """Enqueue one batch, and return an event after each of its ``layers`` steps; no events if ``layers`` is 0."""
        events = [CpuEvent(self._bells, self.name) for _ in range(layers)]
        self._thread.submit(partial(self._copy, steps, hitches, events))
        return events

    def close(self) -> None:
        """Take no more work; the thread ends after what is queued."""
        self._thread.close()

    def ended(self) -> bool:
        """Return True if the stream was closed and has done all that was queued."""
        return self._thread.ended()

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

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
        return f"<CpuStream {self.name!r}: {self._thread.queued()} queued>"


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


class CpuDevice:
    """Host memory as a device. ``faults``: the copies that are late, torn or failing on purpose."""

    def __init__(self, name: str = "cpu", *, faults: Faults | None = None) -> None:
        self.name = name
        self._bells = Bells()
        self._fates = Fates(faults or Faults())
        self._lock = threading.Lock()  # several caches may open in threads
        self._streams: list[CpuStream] = []
        self._gates: dict[HostGate, None] = {}  # those not open yet; each takes itself out

    def stream(self, name: str) -> CpuStream:
        """Return a new stream, with its thread. ``release`` ends it."""
        stream = CpuStream(name, self._bells)
        with self._lock:
            self._streams = [*(s for s in self._streams if not s.ended()), stream]
        return stream

    def release(self, stream: Stream) -> None:
        """Take no more work for a stream of this device; its thread ends after what is queued."""
        _own(stream).close()

    def gate(self) -> HostGate:
        """Return a new event to open by hand. ``aclose`` opens those that were forgotten."""
        return HostGate(self._bells, self._gates)

    def engine_event(self, event: object) -> Event:
        """Return ``event``, which must be an event of a CPU device.

        Raises:
            ConfigError: it is not.
        """
        if isinstance(event, CpuEvent | HostGate):
            return event
        raise ConfigError(
            f"{checks.shown(event)} is no event of the CPU device: give what device.gate() or a stream's record() "
            "returned"
        )

    def check_room(self, device: Mapping[str, int], host: Mapping[str, int]) -> None:
        """Refuse pools that do not fit together in host memory, which both tiers share.

        Raises:
            ConfigError: they do not fit; the message names the first pool that does not.
        """
        check_room((*device.items(), *host.items()), available_memory())

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return anonymous_tensor(shape)

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return anonymous_tensor(shape)

    def copy(self, stream: Stream, towards: CopyDirection, copies: Sequence[PageCopy]) -> None:
        parts = batch.checked(copies, towards)
        _own(stream).copy(batch.whole_step(parts, towards), self._fates.draw(1))

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[CpuEvent]:
        parts = batch.checked(copies, CopyDirection.IN)
        return _own(stream).copy(batch.layer_steps(parts, layers), self._fates.draw(layers), layers)

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
