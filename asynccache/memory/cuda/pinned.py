"""Host memory that a device copies from and to at full speed: exactly as large as asked for, and pinned.

Laws. Memory is first touched by several threads, and then pinned. It is pinned in chunks of at most 4 GiB, since one
registration of a very large range fails, or holds the driver's locks for minutes. Between two chunks the other threads
of the process get their turn, so a rank that pins can tell that it is alive. A chunk has whole rows, since the driver
refuses a copy that lies in two registrations. Memory is given back to the system only after it has been unpinned.
Allocators that round up to a power of two are not used.
"""

from __future__ import annotations

import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch

from asynccache.errors import ConfigError
from asynccache.memory.cuda.driver_protocol import CudaDriver, DriverError
from asynccache.memory.pools import BLOCK, Bytes, prefer_huge_pages

CHUNK = 4 << 30
"""Bytes that are pinned as one, at most, unless a single row has more."""
TOUCH = 256 << 20
"""Bytes that one thread touches at a time."""


class _Mapping(mmap.mmap):
    """Anonymous memory that is unpinned before it is unmapped."""

    driver: CudaDriver
    pinned: tuple[int, ...] = ()

    def __del__(self) -> None:
        for address in self.pinned:
            with suppress(DriverError):  # the device is gone, and its pins with it
                self.driver.host_unregister(address)


def chunk_of(stride: int) -> int:
    """Return how many bytes are pinned as one, of memory whose rows are ``stride`` bytes long: whole rows, and whole
    system pages."""
    whole = math.lcm(max(1, stride), BLOCK)
    return max(whole, CHUNK // whole * whole)


def pinned_tensor(driver: CudaDriver, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeroed uint8 memory of exactly this size, pinned for as long as the tensor lives. Rows are pinned whole.

    Raises:
        ConfigError: the driver does not pin so much.
    """
    size = math.prod(shape)
    if size == 0:
        return torch.empty(shape, dtype=torch.uint8)
    memory = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _touch(tensor.numpy())
    address, chunk = tensor.data_ptr(), chunk_of(math.prod(shape[1:]))
    for start in range(0, size, chunk):
        _pin(memory, driver, address + start, min(chunk, size - start))
    return tensor.reshape(shape)


def _touch(array: Bytes) -> None:
    """Write to every page of ``array``, from several threads. The system finds and zeroes a page when it is first
    written, and several threads wait less for that than one."""
    with ThreadPoolExecutor(min(2 * (os.cpu_count() or 1), 16)) as threads:
        list(threads.map(partial(_touch_part, array), range(0, len(array), TOUCH)))


def _touch_part(array: Bytes, start: int) -> None:
    array[start : start + TOUCH : BLOCK] = 0


def _pin(memory: _Mapping, driver: CudaDriver, address: int, size: int) -> None:
    try:
        driver.host_register(address, size)
    except DriverError as error:
        whole = len(memory) / (1 << 30)
        raise ConfigError(f"{whole:.2f} GiB of host memory cannot be pinned: {error}; see asynccache doctor") from error
    memory.driver, memory.pinned = driver, (*memory.pinned, address)
