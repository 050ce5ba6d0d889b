"""Pools, their memory and their pages: per layer on the device, page-first on the host.

A pool is memory and its shape, nothing else. The core decides who has which slot, and a device moves the bytes
(``mover``). A logical pool (``bytes_per_page`` 0) has slots and no buffer; moves and stores skip it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asynccache import checks
from asynccache.config import item_bytes
from asynccache.core.settings import ComponentKind
from asynccache.errors import ConfigError

if TYPE_CHECKING:
    from asynccache.config import PoolSpec

Bytes = npt.NDArray[np.uint8]
PageTable = npt.NDArray[np.int32]

BLOCK = 4096
"""Bytes that direct I/O aligns to."""


class BlockTable(NamedTuple):
    """The page tables of the requests of one step, as kernels of paged attention take them. All tensors are int32, on
    the pool's device. With n requests:
    """

    pages: torch.Tensor
    """``[n, most pages]``, the page ids of each request, then ``DevicePool.padding`` (flash-attn's ``block_table``)."""
    lengths: torch.Tensor
    """``[n]``, tokens with KV (flash-attn's ``cache_seqlens``)."""
    indptr: torch.Tensor
    """``[n + 1]``. With ``indices`` (``[pages in all]``) and ``last_page_len`` (``[n]``) the same tables without
    padding, as FlashInfer's ``plan`` takes them."""
    indices: torch.Tensor
    last_page_len: torch.Tensor


class DevicePool:
    """One uint8 tensor ``[pages, bytes_per_page / layers]`` per layer, where the engine reads and writes KV.

    Where the pool's settings have the shape of its tensors (``Full.attention``, ``Mamba.recurrent``), ``kv`` and
    ``states`` show them.
    """

    def __init__(self, spec: PoolSpec, tensors: Sequence[torch.Tensor]) -> None:
        """Take an engine's own tensors, one per layer: any dtype and shape whose first dimension is the page, with
        ``device_pages`` pages or one more, the padding. They are viewed as bytes, never copied.

        Raises:
            ConfigError: their number, shape or layout does not fit the pool.
        """
        expected = 0 if is_logical(spec) else spec.layers
        if len(tensors) != expected:
            raise ConfigError(f"pool {spec.name!r}: {len(tensors)} tensors given, {expected} layers expected")
        self.spec = spec
        self._padded = tuple(_as_bytes(spec, i, t) for i, t in enumerate(tensors))
        self._layers = tuple(t[: spec.device_pages] for t in self._padded)
        self._stack: torch.Tensor | None = None
        spare = bool(tensors) and all(len(t) > spec.device_pages for t in self._padded)
        self.padding = spec.device_pages if spare else None
        """The id of a page behind all others that belongs to nobody and never will, to fill page tables with; None if
        an engine's own tensors have no such page."""
        self.has_gaps = False
        """True once ``leave_gaps`` was called."""

    @classmethod
    def allocate(cls, spec: PoolSpec, tensor: Callable[[tuple[int, ...]], torch.Tensor]) -> DevicePool:
        """Return a pool of new memory, which ``tensor`` makes: a device's ``device_tensor``. On a CPU device the system
        zeroes it when it is first touched."""
        if is_logical(spec):
            return cls(spec, ())
        stack = tensor((spec.layers, spec.device_pages + 1, spec.bytes_per_page // spec.layers))
        pool = cls(spec, stack.unbind(0))
        pool._stack = stack[:, : spec.device_pages]
        return pool

    def layer(self, i: int) -> torch.Tensor:
        """Return the bytes of layer ``i``: ``[pages, bytes_per_page / layers]``."""
        return self._layers[i]

    def leave_gaps(self) -> None:
        """Say that the engine leaves bytes of published pages unwritten, or whole pages. A cache with ``debug=True``
        does not look for these then."""
        self.has_gaps = True

    def kv(self, i: int) -> torch.Tensor:
        """Return keys and values of layer ``i``, as a view: ``[pages + padding, 2, page_size, kv_heads, head_dim]`` in
        the pool's dtype.

        That is FlashInfer's paged KV cache in its layout NHD. ``[:, 0]`` and ``[:, 1]`` are the key and the value cache
        of flash-attn's paged calls. docs/embedding.md says how PyTorch's FlexAttention reads them.

        Raises:
            ConfigError: the pool's settings do not say what a page is made of.
        """
        self._check_shape(states=False)
        return self._tensors(i)[0]

    def states(self, i: int) -> list[torch.Tensor]:
        """Return the tensors of the recurrent states of layer ``i``, as views: ``[states + padding, *part]`` for each
        part of a state, in the pool's dtype.

        Raises:
            ConfigError: the pool's settings do not say what a state is made of.
        """
        self._check_shape(states=True)
        return self._tensors(i)

    def _check_shape(self, *, states: bool) -> None:
        spec = self.spec
        if states is not (spec.component is ComponentKind.MAMBA):
            raise ConfigError(f"pool {spec.name!r}: it has {'keys and values' if states else 'states'}")
        if not spec.shapes:
            maker = "Mamba.recurrent" if states else "Full.attention or SlidingWindow.attention"
            raise ConfigError(f"pool {spec.name!r}: its pages are bytes; {maker} gives them a shape")

    def _tensors(self, i: int) -> list[torch.Tensor]:
        layer = self._padded[checks.integer("i", i, 0, len(self._padded) - 1)]
        found, at = [], 0
        for shape in self.spec.shapes:
            size = prod(shape) * item_bytes(self.spec.dtype)
            part = layer[:, at : at + size].view(getattr(torch, self.spec.dtype))
            found.append(part.view(len(layer), *shape))
            at += size
        return found

    def block_table(self, tables: Sequence[PageTable], lengths: Sequence[int]) -> BlockTable:
        """Return the page tables of one step's requests on the pool's device, for ``lengths`` tokens of each.

        ``tables``: the page table of each request, as ``Lease.page_table`` returns it. Where a window's table has no
        page it gets the padding. Make it once a step: it is four copies to the device, of a few KiB.

        Raises:
            ConfigError: a table is shorter than its length, or the pool has no padding and a table needs it; or the
                pool has states, or its settings do not say what a page is made of.
        """
        self._check_shape(states=False)
        page_size = self.spec.shapes[0][1]
        held = [checks.integer("lengths", n, 1) for n in lengths]
        if len(tables) != len(held):
            raise ConfigError(f"lengths: {len(held)} for {len(tables)} page tables")
        counts = [-(-n // page_size) for n in held]
        for table, count, n in zip(tables, counts, held, strict=True):
            if len(table) < count:
                raise ConfigError(f"lengths: {n} tokens need {count} pages, the page table has {len(table)}")
        padding = -1 if self.padding is None else self.padding
        pages = np.full((len(held), max(counts, default=0)), padding, np.int32)
        for row, table, count in zip(pages, tables, counts, strict=True):
            row[:count] = table[:count]
        if padding < 0 and (pages < 0).any():
            raise ConfigError(f"pool {self.spec.name!r}: the engine's own tensors have no page for padding; "
                              f"give it {self.spec.device_pages + 1} pages")
        pages[pages < 0] = padding
        ends = np.cumsum([0, *counts], dtype=np.int32)
        flat = [row[:count] for row, count in zip(pages, counts, strict=True)]
        indices = np.concatenate(flat) if flat else np.empty(0, np.int32)
        last = [(n - 1) % page_size + 1 for n in held]
        device = self._padded[0].device
        parts = (pages, np.array(held, np.int32), ends, indices, np.array(last, np.int32))
        return BlockTable(*(torch.from_numpy(part).to(device, non_blocking=True) for part in parts))

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
    def allocate(
        cls, spec: PoolSpec, tensor: Callable[[tuple[int, ...]], torch.Tensor], *, align: int = 1
    ) -> HostPool:
        """Return a pool of new memory, which ``tensor`` makes: a device's ``host_tensor``. Pages start at multiples of
        ``align`` bytes."""
        if is_logical(spec):
            return cls(spec, None)
        return cls(spec, tensor((spec.host_pages, round_up(spec.bytes_per_page, align))))

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


class PageCopy(NamedTuple):
    """Copy the pages ``src`` of one pool to the pages ``dst`` of its counterpart on the other tier, or of the same
    device pool.
    """

    device: DevicePool
    host: HostPool | None
    src: PageTable
    dst: PageTable
    """Page ids, like ``src``: one-dimensional int32 arrays of equal length. The device may keep arrays that are
    read-only; it copies others."""


def is_logical(spec: PoolSpec) -> bool:
    """Return True if the pool has slots and no buffer."""
    return spec.bytes_per_page == 0


def round_up(size: int, align: int) -> int:
    """Return ``size`` if it is a multiple of ``align``, or else the next one."""
    return -(-size // align) * align


def _as_bytes(spec: PoolSpec, layer: int, tensor: torch.Tensor) -> torch.Tensor:
    where = f"pool {spec.name!r}, layer {layer}"
    pages = tensor.shape[0] if tensor.dim() else 0
    if pages not in (spec.device_pages, spec.device_pages + 1):
        raise ConfigError(f"{where}: shape {tuple(tensor.shape)} does not begin with {spec.device_pages} pages")
    given, size = tensor.numel() * tensor.element_size(), pages * spec.bytes_per_page // spec.layers
    if given != size:
        raise ConfigError(f"{where}: {given} bytes given, {size} expected ({pages} pages)")
    if not tensor.is_contiguous():
        raise ConfigError(f"{where}: the tensor is not contiguous")
    return tensor.detach().reshape(pages, -1).view(torch.uint8)


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
    """Ask the system for huge pages. To be called before ``memory`` is touched. Nothing happens on a system without
    them."""
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
    """Return how many bytes of host memory can be had without swapping: in the machine, or in the control group if that
    has less."""
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
