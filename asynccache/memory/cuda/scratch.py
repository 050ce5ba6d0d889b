"""Small buffers for kernels: page ids in pinned memory and on the device, and the staging area of a stream.

Law: a pinned buffer is written by the host, so nobody gets it again before the device has let go of it; what lies on
the device is written by one stream alone, in its order. Each stream has its own; ``give`` is called by its waiter.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch

from asynccache.memory.cuda.driver import Driver
from asynccache.memory.cuda.pinned import Pinning, pinned_tensor

SMALLEST = 1 << 16
STAGING_BYTES = 32 << 20


class Buffer(NamedTuple):
    """A pinned tensor and as much memory on the device."""

    host: torch.Tensor
    device: int

    @property
    def size(self) -> int:
        return self.host.numel()


class Scratch:
    """Buffers by size, each a power of two."""

    def __init__(self, driver: Driver) -> None:
        self.made = 0
        self._driver = driver
        self._lock = threading.Lock()
        self._free: dict[int, list[Buffer]] = {}
        self._all: list[Buffer] = []
        self._staging = 0

    def take(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes that nobody else uses."""
        rounded = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(rounded)
            if free:
                return free.pop()
        return self._make(rounded)

    def give(self, buffer: Buffer) -> None:
        """The device has let go of it."""
        with self._lock:
            self._free.setdefault(buffer.size, []).append(buffer)

    def staging(self) -> int:
        """``STAGING_BYTES`` on the device."""
        if not self._staging:
            self._staging = self._driver.malloc(STAGING_BYTES)
        return self._staging

    def close(self) -> None:
        """Free all of it. Nothing may be in flight."""
        with self._lock:
            made, self._all = self._all, []
            self._free = {}
        for buffer in made:
            self._driver.free(buffer.device)
        if self._staging:
            self._driver.free(self._staging)
            self._staging = 0

    def _make(self, size: int) -> Buffer:
        host = pinned_tensor(self._driver, (size,), Pinning(huge_pages=False, numa_node=None))
        buffer = Buffer(host, self._driver.malloc(size))
        self.made += 1
        with self._lock:
            self._all.append(buffer)
        return buffer


def pack(*arrays: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The arrays behind each other as bytes, each at a multiple of 16, and where each begins."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // 16) * 16
    packed = np.zeros(end, np.uint8)
    for array, offset in zip(arrays, offsets, strict=True):
        packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    return packed, offsets
