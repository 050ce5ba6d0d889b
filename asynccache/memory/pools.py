"""Pools and their memory: per layer on the device, page-first on the host.

A pool is memory and its shape, nothing else: who holds which slot is the core's business, and moving bytes is the
device's. A logical pool (``bytes_per_page`` 0) has slots and no buffer; whoever moves or stores pages skips it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from asynccache.errors import ConfigError

if TYPE_CHECKING:
    from asynccache.config import PoolSpec
    from asynccache.memory.device import Device

Bytes = npt.NDArray[np.uint8]

BLOCK = 4096
"""Bytes that direct I/O aligns to."""


class DevicePool:
    """One uint8 tensor ``[pages, bytes_per_page / layers]`` per layer, where the engine reads and writes KV."""

    def __init__(self, spec: PoolSpec, tensors: Sequence[torch.Tensor]) -> None:
        """Take an engine's own tensors, one per layer: any dtype and shape whose first dimension is the page. They are
        viewed as bytes, never copied.

        Raises:
            ConfigError: their number, shape or layout does not fit the pool.
        """
        expected = 0 if is_logical(spec) else spec.layers
        if len(tensors) != expected:
            raise ConfigError(f"pool {spec.name!r}: {len(tensors)} tensors given, {expected} layers expected")
        self.spec = spec
        self._layers = tuple(_as_bytes(spec, i, t) for i, t in enumerate(tensors))
        self._stack: torch.Tensor | None = None

    @classmethod
    def allocate(cls, spec: PoolSpec, device: Device) -> DevicePool:
        """Return a pool of new memory on ``device``. On a CPU device the system zeroes it when it is first touched."""
        if is_logical(spec):
            return cls(spec, ())
        stack = device.device_tensor((spec.layers, spec.device_pages, spec.bytes_per_page // spec.layers))
        pool = cls(spec, stack.unbind(0))
        pool._stack = stack
        return pool

    def layer(self, i: int) -> torch.Tensor:
        """Return the bytes of layer ``i``: ``[pages, bytes_per_page / layers]``."""
        return self._layers[i]

    @cached_property
    def arrays(self) -> tuple[Bytes, ...]:
        """The layers as numpy arrays. To be asked for only if device memory is host memory."""
        return tuple(t.numpy() for t in self._layers)

    @cached_property
    def stacked(self) -> Bytes | None:
        """All layers as one view ``[pages, layers, bytes]``; None if they were not allocated as one. To be asked for
        only if device memory is host memory."""
        return None if self._stack is None else self._stack.permute(1, 0, 2).numpy()

    def __repr__(self) -> str:
        return f"<DevicePool {self.spec.name!r}: {self.spec.device_pages} pages of {self.spec.bytes_per_page} bytes>"


class HostPool:
    """One uint8 tensor ``[pages, stride]``: all layers of a page in one run, so a page is one I/O and one copy."""

    def __init__(self, spec: PoolSpec, tensor: torch.Tensor | None) -> None:
        self.spec = spec
        self.tensor = tensor
        self._stride = 0 if tensor is None else tensor.shape[1]
        self._memory = memoryview(b"") if tensor is None else tensor.numpy().reshape(-1).data

    @classmethod
    def allocate(cls, spec: PoolSpec, device: Device, *, align: int = 1) -> HostPool:
        """Return a pool of new memory that ``device`` copies from and to at full speed. Pages start at multiples of
        ``align`` bytes."""
        if is_logical(spec):
            return cls(spec, None)
        return cls(spec, device.host_tensor((spec.host_pages, round_up(spec.bytes_per_page, align))))

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return self._stride

    @property
    def memory(self) -> memoryview:
        """The whole pool, for a backend that registers memory."""
        return self._memory

    def page(self, slot: int) -> memoryview:
        """Return the bytes of one page, writable, without the padding behind it."""
        start = slot * self._stride
        return self._memory[start : start + self.spec.bytes_per_page]

    @cached_property
    def array(self) -> Bytes:
        """The pages as ``[pages, layers, bytes]``, without the padding.

        Raises:
            ConfigError: the pool is logical.
        """
        if self.tensor is None:
            raise ConfigError(f"pool {self.spec.name!r} is logical: it has no bytes")
        spec = self.spec
        return self.tensor.numpy()[:, : spec.bytes_per_page].reshape(spec.host_pages, spec.layers, -1)

    def __repr__(self) -> str:
        return f"<HostPool {self.spec.name!r}: {self.spec.host_pages} pages of {self._stride} bytes>"


def is_logical(spec: PoolSpec) -> bool:
    """Return True if the pool has slots and no buffer."""
    return spec.bytes_per_page == 0


def round_up(size: int, align: int) -> int:
    """Return ``size`` if it is a multiple of ``align``, or else the next one."""
    return -(-size // align) * align


def _as_bytes(spec: PoolSpec, layer: int, tensor: torch.Tensor) -> torch.Tensor:
    where = f"pool {spec.name!r}, layer {layer}"
    size = spec.device_pages * spec.bytes_per_page // spec.layers
    if tensor.dim() == 0 or tensor.shape[0] != spec.device_pages:
        raise ConfigError(f"{where}: shape {tuple(tensor.shape)} does not begin with {spec.device_pages} pages")
    if tensor.numel() * tensor.element_size() != size:
        given = tensor.numel() * tensor.element_size()
        raise ConfigError(f"{where}: {given} bytes given, {size} expected ({spec.device_pages} pages)")
    if not tensor.is_contiguous():
        raise ConfigError(f"{where}: the tensor is not contiguous")
    return tensor.detach().reshape(spec.device_pages, -1).view(torch.uint8)


def anonymous_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeroed host memory that costs nothing until it is touched, aligned to the system's pages, and in huge
    pages if the system has them."""
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        return torch.empty(shape, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(shape)


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask the system for huge pages, before ``memory`` is touched."""
    with suppress(OSError, AttributeError):  # a kernel or a system without them: small pages work too
        memory.madvise(mmap.MADV_HUGEPAGE)


def check_room(demands: Iterable[tuple[str, int]], available: int) -> None:
    """Refuse pools that do not fit in memory together, before any of them is allocated.

    Raises:
        ConfigError: names the first pool that does not fit, what it needs and what is there.
    """
    taken = 0
    for name, size in demands:
        if taken + size > available:
            raise ConfigError(
                f"{name}: {_gib(size)} do not fit in memory: {_gib(available)} are available, "
                f"{_gib(taken)} of them are for other pools"
            )
        taken += size


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def available_memory() -> int:
    """Return how much host memory can be had without swapping, in bytes: the machine's, or the control group's if that
    is less."""
    return min(_machine_memory(), _group_memory())


def _machine_memory() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory() -> int:
    """Return the bytes that the control group (version 2) still allows; file cache counts as free."""
    unlimited = 1 << 62
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
        group = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        limit = int((group / "memory.max").read_text())  # "max" is a ValueError: no limit
        used = int((group / "memory.current").read_text())
        stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, StopIteration, ValueError, KeyError):
        return unlimited
