"""``CudaDevice``: one GPU behind the ``Device`` protocol.

The loop's thread pays for one queue entry per batch and no more. Streams are ordered by ``wait_event``, on the
device alone. To stop waiting for a copy does not stop the copy. ``aclose`` returns when the device has let go of every
buffer. Only the device's own threads have their current GPU changed.

Errors: a call that the driver refuses fails its batch, when the device has let go of the batch's buffers. An error that
the device reports later (an illegal address, say) is the end of its context: everything in flight and every later call
fails with that error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asynccache.errors import CacheClosed, ConfigError
from asynccache.memory import host_copies as batch
from asynccache.memory.cuda.choosing_paths import at_once, by_layer
from asynccache.memory.cuda.cupy_driver import CupyDriver, EventHandle
from asynccache.memory.cuda.events import CudaContext, CudaEvent
from asynccache.memory.cuda.libcuda import CAPTURED, DriverError
from asynccache.memory.cuda.pinned import pinned_tensor
from asynccache.memory.cuda.settings import CudaSettings, settings_from
from asynccache.memory.cuda.streams import CudaEngineStream, CudaStream, event_pointer, stream_pointer
from asynccache.memory.device import CopyDirection, Event, Stream, parse_device
from asynccache.memory.host_copies import Fates, Faults
from asynccache.memory.pools import PageCopy, available_memory, check_room
from asynccache.memory.signals import HAPPENED, Happened, HostGate

ADOPTED_AT_MOST = 128
"""The most events of engines that are pending on one stream (``CudaDevice._adopt``). Each takes two entries of the
driver's queue, which has some 1,024, and a full one would block the caller."""


class CudaDevice:
    """A GPU. ``open_device`` makes one. ``faults``: the copies that are late or failing on purpose."""

    def __init__(
        self, driver: CupyDriver, name: str = "cuda:0", *, settings: CudaSettings | None = None,
        faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.driver = driver
        self.settings = settings or CudaSettings()
        self._context = CudaContext(driver)
        self._fates = Fates(faults or Faults())
        self._lock = threading.Lock()  # for what follows, up to ``_closed``
        self._streams: list[CudaStream] = []
        self._engines: dict[int, CudaEngineStream] = {}
        self._adopting: list[CudaEngineStream] = []  # see ``_adopt``
        self._closed = False
        self._gates: dict[HostGate, None] = {}  # those not open yet; each takes itself out
        self._releasing = threading.Lock()
        self._released = False

    @property
    def failure(self) -> DriverError | None:
        """The error after which the device does nothing any more; None while it works."""
        return self._context.failure

    # streams and events

    def stream(self, name: str) -> CudaStream:
        """Return a new stream, with the thread that submits to it and the one that waits for it. ``release`` ends
        them."""
        with self._lock:
            self._refuse_if_closed()
            stream = CudaStream(name, self._context)
            self._streams = [*(one for one in self._streams if not one.ended()), stream]
        return stream

    def release(self, stream: Stream) -> None:
        """Take no more work for a stream of this device. When all its work is done, its threads end and the driver gets
        it back; the call does not wait for that. This is for a device that outlives the caches that use it."""
        if isinstance(stream, CudaStream) and stream.context is self._context:
            stream.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise CacheClosed(f"the device {self.name!r} is closed")

    def engine_stream(self, stream: object) -> Stream:
        """Return an engine's own stream (torch, cupy, or anything with ``__cuda_stream__``) as one of this device's.
        The returned stream can wait for layers, and its ``record()`` returns the events that parameters ``after``
        take. A stream of the device's own is returned as it is.

        Raises:
            ConfigError: it is no CUDA stream.
        """
        if isinstance(stream, CudaStream | CudaEngineStream):
            return stream
        pointer = stream_pointer(stream)
        with self._lock:
            self._refuse_if_closed()
            if pointer not in self._engines:
                handle = self.driver.stream_from(pointer)
                self._engines[pointer] = CudaEngineStream(f"engine-{pointer:x}", self._context, handle)
            return self._engines[pointer]

    def engine_event(self, event: object) -> Event:
        """Return an engine's own event (``torch.cuda.Event``, ``cupy.cuda.Event``) as one of this device's. The
        returned event happens when the work is done that the engine's event stands for now; if the engine records its
        event again, that does not count. An event of the device's own is returned as it is. An event that was never
        recorded has happened, as everywhere in CUDA. May be called from any thread.

        Raises:
            ConfigError: it is no such event, or the calling thread captures a graph, or the driver refuses to wait for
                it. An event that another thread records in a graph is refused, too, and may cost that graph.
        """
        if isinstance(event, HostGate | Happened):
            return event
        if isinstance(event, CudaEvent) and event.stream.context is self._context:
            return event
        pointer = event_pointer(event)
        if not pointer or self.failure is not None:
            return HAPPENED
        try:
            if self.driver.captures_here():  # asking the driver for an event of this graph would be the graph's end
                raise DriverError("this thread captures a graph", CAPTURED)
            return self._adopt(self.driver.event_from(pointer))
        except DriverError as error:
            if self._context.refused(error) is self.failure:
                return HAPPENED  # the device has failed, and does nothing any more
            raise ConfigError(f"{event!r}: the driver refuses to wait for it: {error}") from error

    def _adopt(self, handle: EventHandle) -> Event:
        """Return an event that happens when the work has ended that an engine's event stands for now: a stream on which
        nothing runs waits for the engine's event, at once and in the caller's thread. So it does not matter what the
        engine does with its event later. Events of one such stream fire in the order in which they were adopted."""
        if self.driver.event_query(handle):
            return HAPPENED
        with self._lock:
            if self._closed:
                return HAPPENED  # there is nothing any more that could wait for it
            stream = next((one for one in self._adopting if one.pending < ADOPTED_AT_MOST), None)
            if stream is None:
                stream = CudaEngineStream(f"engine-events-{len(self._adopting)}", self._context)
                self._adopting.append(stream)
            self.driver.stream_wait_event(stream.handle, handle)
            return stream.record()

    def gate(self) -> HostGate:
        """Return a new event to open by hand. ``aclose`` opens those that were forgotten."""
        return HostGate(self._context.bells, self._gates)

    # memory

    def check_room(self, device: Mapping[str, int], host: Mapping[str, int]) -> None:
        """Refuse pools that do not fit: those of the device tier in the GPU's free memory, those of the host tier in
        the machine's.

        Raises:
            ConfigError: they do not fit; the message names the first pool that does not.
        """
        check_room(device.items(), self.driver.free_memory())
        check_room(host.items(), available_memory())

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self.driver.device_tensor(shape)

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return pinned memory of exactly this size. It stays pinned for as long as the tensor lives."""
        return pinned_tensor(self.driver, shape)

    # copies

    def copy(self, stream: Stream, towards: CopyDirection, copies: Sequence[PageCopy]) -> None:
        own, parts = self._own(stream), batch.checked(copies, towards, np.int32)
        steps = at_once(self.driver, own.handle, self.settings, towards, parts)
        own.copy(steps, self._fates.draw(1), parts)

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[CudaEvent]:
        own, parts = self._own(stream), batch.checked(copies, CopyDirection.IN, np.int32)
        steps = by_layer(self.driver, own.handle, self.settings, parts, layers)
        return own.copy(steps, self._fates.draw(layers), parts, layers)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.context is not self._context:
            raise ConfigError(f"the CUDA device cannot copy on {stream!r}")
        return stream

    # the end

    async def aclose(self) -> None:
        """Finish all queued work, end the threads, and give back what is the device's own, without blocking the loop.
        Pools stay for as long as somebody has them. Closing again waits again. Cancelling stops the waiting; the
        threads end by themselves."""
        with self._lock:
            self._closed = True
        for stream in self._streams:
            stream.close()
        for gate in list(self._gates):
            gate.open()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for stream in self._streams:
            stream.join()
        with self._releasing:
            if not self._released:
                self._released = True
                for engine in (*self._engines.values(), *self._adopting):
                    engine.end()
                self._context.close()

    def __repr__(self) -> str:
        state = ", failed" if self.failure is not None else ""
        return f"<CudaDevice {self.name!r}: {sum(not one.ended() for one in self._streams)} streams{state}>"


def open_device(name: str, settings: CudaSettings | None = None, *, faults: Faults | None = None) -> CudaDevice:
    """Return the GPU called ``cuda`` or ``cuda:N``; options (``cuda:0?blocks=16``) are its settings. The call blocks
    for some tenths of a second, in which the kernel is compiled.

    Raises:
        ConfigError: there is no such GPU, or what it needs is not installed; the message says what.
    """
    parsed = parse_device(name)
    if parsed.options and settings is not None:
        raise ConfigError(f"device={name}: options are in the name or in settings, not in both")
    settings = settings or settings_from(parsed.options)
    try:
        return CudaDevice(CupyDriver(parsed.number), str(parsed), settings=settings, faults=faults)
    except DriverError as error:
        raise ConfigError(f"device={parsed}: {error}") from error
