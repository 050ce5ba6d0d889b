"""Host memory that a device copies from and to at full speed: exactly as large as asked for, and pinned.

Memory is first touched by several threads of the GPU's NUMA node, and then pinned. It is pinned in chunks of at
most 4 GiB, since one registration of a very large range fails, or holds the driver's locks for minutes. Between two
chunks the other threads of the process get their turn, so a rank that pins can tell that it is alive. A chunk has whole
rows, since the driver refuses a copy that lies in two registrations. Memory is given back to the system only after it
has been unpinned. Allocators that round up to a power of two are not used.

A forked child does not get the memory. Linux would copy all of it for the child, because it is pinned; or, before 5.9,
move the parent to the copy, while the device goes on with the first. The mapping's object exists in the child all the
same. It stays there for good, since its end would unmap what the child may have at those addresses by then.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from asynccache.errors import ConfigError
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.pools import BLOCK, Bytes, prefer_huge_pages

CHUNK = 4 << 30
"""Bytes that are pinned as one, at most, unless a single row has more."""
TOUCH = 256 << 20
"""Bytes that one thread touches at a time."""


class _Mapping(mmap.mmap):
    """Anonymous memory that is unpinned before it is unmapped."""

    driver: CupyDriver
    process: int
    pinned: tuple[int, ...] = ()

    def __del__(self) -> None:
        if self.pinned and self.process != os.getpid():  # at a forked child's exit: CUDA does not work there
            return
        for address in self.pinned:
            with suppress(DriverError):  # the device is gone, and its pins with it
                self.driver.host_unregister(address)


_MAPPINGS = weakref.WeakSet[_Mapping]()
_OF_PARENTS: list[_Mapping] = []  # in a forked child
os.register_at_fork(after_in_child=lambda: _OF_PARENTS.extend(_MAPPINGS))


def chunk_of(stride: int) -> int:
    """Return how many bytes are pinned as one, of memory whose rows are ``stride`` bytes long: whole rows, and whole
    system pages."""
    whole = math.lcm(max(1, stride), BLOCK)
    return max(whole, CHUNK // whole * whole)


def pinned_tensor(driver: CupyDriver, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeroed uint8 memory of exactly this size, pinned for as long as the tensor lives. Rows are pinned whole.

    Raises:
        ConfigError: the driver does not pin so much.
    """
    size = math.prod(shape)
    if size == 0:
        return torch.empty(shape, dtype=torch.uint8)
    identity = driver.identity()
    if not identity.registers:
        return _allocated(driver, size).reshape(shape)
    memory = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.driver, memory.process = driver, os.getpid()
    _MAPPINGS.add(memory)
    memory.madvise(mmap.MADV_DONTFORK)
    prefer_huge_pages(memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _touch(tensor.numpy(), cpus_near(identity.bus))
    address, chunk = tensor.data_ptr(), chunk_of(math.prod(shape[1:]))
    for start in range(0, size, chunk):
        try:
            driver.host_register(address + start, min(chunk, size - start))
        except DriverError as error:
            raise _refused(size, error) from error
        memory.pinned = (*memory.pinned, address + start)
    return tensor.reshape(shape)


def _allocated(driver: CupyDriver, size: int) -> torch.Tensor:
    """Return memory that the driver allocates, where the device sees registered memory at another address."""
    try:
        address = driver.host_alloc(size)
    except DriverError as error:
        raise _refused(size, error) from error
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _free, driver, address, os.getpid()).atexit = False  # threads may still use it then
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _free(driver: CupyDriver, address: int, process: int) -> None:
    if process == os.getpid():
        with suppress(DriverError):
            driver.host_free(address)


def cpus_near(bus: str) -> set[int]:
    """Return the CPUs of the NUMA node of the device at the PCI address ``bus`` that this process may use; all that it
    may use if the system does not tell."""
    allowed = os.sched_getaffinity(0)
    try:
        spans = Path(f"/sys/bus/pci/devices/{bus.lower()}/local_cpulist").read_text().split(",")
        ends = [[int(end) for end in span.split("-")] for span in spans]
    except (OSError, ValueError):
        return allowed
    return {cpu for span in ends for cpu in range(span[0], span[-1] + 1)} & allowed or allowed


def _touch(array: Bytes, cpus: set[int]) -> None:
    """Write to every page of ``array``, from several threads on these CPUs. The system finds and zeroes a page when it
    is first written, on the node of the thread that writes, and several threads wait less for that than one."""
    stay = partial(os.sched_setaffinity, 0, cpus)
    with ThreadPoolExecutor(min(2 * len(cpus), 16), initializer=stay) as threads:
        list(threads.map(partial(_touch_part, array), range(0, len(array), TOUCH)))


def _touch_part(array: Bytes, start: int) -> None:
    array[start : start + TOUCH : BLOCK] = 0


def _refused(size: int, error: DriverError) -> ConfigError:
    return ConfigError(f"{size / (1 << 30):.2f} GiB of host memory cannot be pinned: {error}; see asynccache doctor")
