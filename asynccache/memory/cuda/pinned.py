"""Host memory that a device copies from and to at full speed: exactly as large as asked for, and pinned.

Law: memory is touched by several threads first and pinned then, in chunks of at most 64 GiB (one registration of a very
large range fails, or holds the driver's locks for minutes) and of whole rows (a copy that lies in two registrations is
refused), and it is given back to the system only after it has been unpinned. Allocators that round up to a power of two
are not used.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from asynccache.errors import ConfigError
from asynccache.memory.cuda.driver import Driver, DriverError
from asynccache.memory.pools import BLOCK

CHUNK = 64 << 30
TOUCH = 256 << 20
"""Bytes that one thread touches at a time."""

NODES = Path("/sys/devices/system/node")

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2


class Pinning(NamedTuple):
    """``numa_node``: memory of this node, or of whichever the system likes."""

    huge_pages: bool = True
    numa_node: int | None = None


class _Mapping(mmap.mmap):
    """Anonymous memory that is unpinned before it is unmapped."""

    driver: Driver | None = None
    pinned: tuple[int, ...] = ()

    def __del__(self) -> None:
        driver, pinned, self.pinned = self.driver, self.pinned, ()
        for address in pinned:
            with suppress(DriverError):  # the device is gone, and its pins with it
                assert driver is not None
                driver.host_unregister(address)


def chunk_of(stride: int) -> int:
    """So many bytes of memory whose rows are ``stride`` long are pinned as one: whole rows, and whole system pages."""
    whole = math.lcm(max(1, stride), BLOCK)
    return max(whole, CHUNK // whole * whole)


def pinned_tensor(driver: Driver, shape: tuple[int, ...], pinning: Pinning) -> torch.Tensor:
    """Zeroed uint8 memory of exactly this size, pinned for as long as the tensor lives; rows are pinned whole.

    Raises:
        ConfigError: the system or the driver does not pin so much, or the NUMA node is not to be had.
    """
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        return torch.empty(shape, dtype=torch.uint8)
    memory = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if pinning.huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: small pages work too
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    address = array.ctypes.data
    if pinning.numa_node is not None:
        _bind(address, size, pinning.numa_node)
    _touch(array)
    _pin(driver, memory, address, size, chunk_of(math.prod(shape[1:])))
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(shape)


def _touch(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """The system finds and zeroes pages when they are first written: several threads wait less for that than one."""
    starts = range(0, len(array), TOUCH)

    if len(starts) == 1:
        _touch_part(array, 0)
        return
    with ThreadPoolExecutor(min(len(starts), 2 * (os.cpu_count() or 1), 16)) as threads:
        list(threads.map(partial(_touch_part, array), starts))


def _touch_part(array: np.ndarray[tuple[int], np.dtype[np.uint8]], start: int) -> None:
    array[start : start + TOUCH : BLOCK] = 0


def _pin(driver: Driver, memory: _Mapping, address: int, size: int, chunk: int) -> None:
    memory.driver = driver
    for start in range(0, size, chunk):
        length = min(chunk, size - start)
        try:
            driver.host_register(address + start, length)
        except DriverError as error:
            raise ConfigError(
                f"{size / (1 << 30):.2f} GiB of host memory cannot be pinned: {error}; see asynccache doctor"
            ) from error
        memory.pinned = (*memory.pinned, address + start)


def _bind(address: int, size: int, node: int) -> None:
    """Memory of this node and of no other. Where the node has too little, the system would end the process, even if the
    machine has enough: so that is looked at first."""
    room = _node_room(node)
    if room is not None and size > room:
        raise ConfigError(
            f"numa_node={node}: {size / (1 << 30):.2f} GiB of host memory do not fit on this node: "
            f"{room / (1 << 30):.2f} GiB are available there"
        )
    number = _MBIND.get(platform.machine())
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    failed = number is None or libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_MPOL_BIND), mask,
        ctypes.c_ulong(64 * len(mask) + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if failed:
        reason = os.strerror(ctypes.get_errno()) if number is not None else "not on this processor"
        raise ConfigError(f"numa_node={node}: memory of this node cannot be had: {reason}")


def _node_room(node: int) -> int | None:
    """Bytes that can be had on a NUMA node; file cache counts as free, and a little is left to the system. ``None``:
    the system does not tell."""
    try:
        lines = (NODES / f"node{node}" / "meminfo").read_text().splitlines()
        kib = {name.rstrip(":"): int(number) for _, _, name, number, *_ in map(str.split, lines)}
        free = sum(kib[name] for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        return max(0, free - kib["MemTotal"] // 64) * 1024
    except (OSError, ValueError, KeyError):
        return None
