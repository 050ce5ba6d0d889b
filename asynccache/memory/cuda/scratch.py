"""Small buffers for kernels: page ids in pinned memory and on the device, and the staging area of a stream.

Law: a pinned buffer is written by the host, so nobody gets it again before the device has let go of it; what lies on
the device is written by one stream alone, in its order. Each stream has its own; ``give`` is called by its waiter.
Pinning memory and allocating on the device may stop the whole device, so buffers are carved from slabs.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asynccache.memory.cuda.driver import Driver
from asynccache.memory.cuda.pinned import Pinning, pinned_tensor

SMALLEST = 4 << 10
SLAB = 4 << 20
STAGING_BYTES = 32 << 20


class Buffer(NamedTuple):
    """Pinned memory, and as much of the device."""

    array: npt.NDArray[np.uint8]
    host: int
    device: int

    def part(self, start: int, stop: int) -> Buffer:
        return Buffer(self.array[start:stop], self.host + start, self.device + start)


class Scratch:
    """Buffers by size, each a power of two."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._free: dict[int, list[Buffer]] = {}
        self._slabs: list[tuple[torch.Tensor, Buffer]] = []
        self._left: Buffer | None = None  # of the newest slab
        self._staging = 0

    def pack(self, *arrays: npt.NDArray[np.generic]) -> tuple[Buffer, list[int]]:
        """The bytes of the arrays in a buffer that nobody else uses, and where each begins: at a multiple of 16."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // 16) * 16
        buffer = self.take(end)
        for array, offset in zip(arrays, offsets, strict=True):
            buffer.array[offset : offset + array.nbytes].view(array.dtype)[:] = array
        return buffer, offsets

    def take(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes that nobody else uses. Called by one thread."""
        rounded = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(rounded)
            if free:
                return free.pop()
        return self._carve(rounded)

    def give(self, buffer: Buffer) -> None:
        """The device has let go of it."""
        with self._lock:
            self._free.setdefault(len(buffer.array), []).append(buffer)

    def staging(self) -> int:
        """``STAGING_BYTES`` on the device."""
        if not self._staging:
            self._staging = self._driver.malloc(STAGING_BYTES)
        return self._staging

    def close(self) -> None:
        """Free all of it. Nothing may be in flight."""
        slabs, self._slabs = self._slabs, []
        self._free, self._left = {}, None
        for _, slab in slabs:
            self._driver.free(slab.device)
        if self._staging:
            self._driver.free(self._staging)
            self._staging = 0

    def _carve(self, size: int) -> Buffer:
        if size >= SLAB:
            return self._slab(size)
        left = self._left
        if left is None or len(left.array) < size:
            left = self._slab(SLAB)
        self._left = left.part(size, len(left.array))
        return left.part(0, size)

    def _slab(self, size: int) -> Buffer:
        host = pinned_tensor(self._driver, (size,), Pinning(huge_pages=False))
        slab = Buffer(host.numpy(), host.data_ptr(), self._driver.malloc(size))
        self._slabs.append((host, slab))
        return slab
