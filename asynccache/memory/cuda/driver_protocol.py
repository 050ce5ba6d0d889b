"""The part of the driver that the CUDA device uses: some calls on integers, so that a simulated one can stand in.

Laws. No call waits for the device's work except ``event_synchronize``, ``stream_synchronize`` and ``device_tensor``;
``host_register`` and ``host_alloc`` wait for the system. A call that may take long lets go of the GIL. Addresses are
integers, and handles are whatever the driver makes: cupy's objects, or a simulated driver's integers. ``copy``,
``launch``, ``event_synchronize`` and ``stream_synchronize`` come only from threads that have called ``use_device``.
Every other call may come from any thread, leaves that thread's current device as it is, and harms no graph that is
captured elsewhere. All errors are raised as ``DriverError``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from asynccache.errors import AsyncCacheError
from asynccache.memory.device import CopyDirection

StreamHandle = Any
EventHandle = Any
Addresses = npt.NDArray[np.uint64]
Table = npt.NDArray[Any]
"""One ``kernels.TABLE``: the rows that a launch of the copy kernel moves."""

STICKY = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
"""CUDA's codes after which a context does nothing any more: illegal addresses and instructions, failed launches, memory
and links with errors, a driver that is shutting down."""

CAPTURED = 905
"""CUDA's code for work outside of a graph that is ordered behind work in one."""


class DriverError(AsyncCacheError):
    """The driver refused a call, or reports that earlier work failed. ``code``: CUDA's number of the error; None if it
    has none."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def sticky(self) -> bool:
        """True if this error is the end of the context. Otherwise the call alone was refused, and work in flight runs
        on."""
        return self.code in STICKY


class Spans(NamedTuple):
    """Runs of bytes to copy: ``size[i]`` bytes from the address ``src[i]`` to the address ``dst[i]``."""

    dst: Addresses
    src: Addresses
    size: Addresses

    def part(self, start: int, stop: int) -> Spans:
        return Spans(self.dst[start:stop], self.src[start:stop], self.size[start:stop])


class DeviceIdentity(NamedTuple):
    """The identity of a device, and what it can do. ``capability``: CUDA's, major and minor. ``total``: its memory in
    bytes. ``bus``: its PCI address. ``driver``: the version of CUDA that the driver is for, 13020 for 13.2.
    ``batches``: as the driver's. ``registers``: True if the device sees memory that was pinned by ``host_register`` at
    its own address; under WSL2 it does not."""

    name: str
    capability: tuple[int, int]
    total: int
    bus: str
    driver: int
    batches: bool
    registers: bool


class CudaDriver(Protocol):
    """A CUDA driver for one device. ``batches``: True if it takes many copies in one call."""

    batches: bool

    def identity(self) -> DeviceIdentity:
        """Return which device this is."""

    def use_device(self) -> None:
        """Make this device the current one of the calling thread. Only for threads that belong to the device."""

    def free_memory(self) -> int:
        """Return how many bytes of device memory can be had."""

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uint8 memory on the device, which is zeroed when the call returns."""

    def host_register(self, address: int, size: int) -> None:
        """Pin host memory and map it for the device, at the same address."""

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""

    def host_alloc(self, size: int) -> int:
        """Return the address of new host memory that is pinned and mapped for the device at the same address."""

    def host_free(self, address: int) -> None:
        """Undo ``host_alloc``."""

    def stream_create(self) -> StreamHandle:
        """Return a new stream, which does not wait for the default stream. Its kernels get the next multiprocessors
        that come free."""

    def stream_from(self, pointer: int) -> StreamHandle:
        """Return the handle of an engine's stream, which is never destroyed here. ``pointer``: its ``cudaStream_t``."""

    def event_from(self, pointer: int) -> EventHandle:
        """Return the handle of an engine's event, which is never destroyed here. ``pointer``: its ``cudaEvent_t``."""

    def captures_here(self) -> bool:
        """Return True if the calling thread captures a graph in the stream that is torch's current one."""

    def stream_destroy(self, stream: StreamHandle) -> None:
        """Give a stream back. Nothing is in it any more."""

    def stream_synchronize(self, stream: StreamHandle) -> None:
        """Sleep or spin until all work that ``stream`` was given so far has happened."""

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Have later work of ``stream`` wait for the work that ``event`` stands for now. A later recording of ``event``
        does not count."""

    def is_captured(self, stream: StreamHandle) -> bool:
        """Return True if work given to ``stream`` is captured into a graph instead of being done."""

    def event_create(self) -> EventHandle:
        """Return a new event without timing, for which ``event_synchronize`` sleeps."""

    def event_destroy(self, event: EventHandle) -> None: ...

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        """Record ``event`` behind all work that ``stream`` was given so far."""

    def event_query(self, event: EventHandle) -> bool:
        """Return True if ``event`` has happened. If it was recorded in a capture, that graph is lost.

        Raises:
            DriverError: the event's work failed, or is in a graph: that is not the same as "not yet".
        """

    def event_synchronize(self, event: EventHandle) -> None:
        """Sleep until ``event`` has happened."""

    def copy(self, stream: StreamHandle, towards: CopyDirection, spans: Spans) -> int:
        """Enqueue copies of runs, which read their sources in the order of the stream. Return how many entries of the
        driver's queue they take."""

    def launch(self, stream: StreamHandle, table: Table, blocks: int) -> int:
        """Enqueue the copy kernel. ``table`` has been read when the call returns. Return how many entries of the
        driver's queue the launch takes."""
