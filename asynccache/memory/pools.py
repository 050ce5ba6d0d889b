"""Pools, their memory, and the mover that copies between them: per layer on the device, page-first on the host.

A pool is memory and its shape, nothing else. The core decides who has which slot, and the device moves the bytes. A
logical pool (``bytes_per_page`` 0) has slots and no buffer; moves and stores skip it.

The ``Mover`` performs the core's moves on a device: it owns the pools of every tier in memory and the streams between
them. A move names a component. The mover expands it to every pool that the component's slots index, its own pool and
sidecars, and skips logical ones. Nothing here knows a pool by name, a tree or a lease. A mover belongs to one thread,
the loop's, and never blocks it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from asynccache import checks
from asynccache.config import item_bytes
from asynccache.core.settings import ComponentKind
from asynccache.errors import AsyncCacheError, CacheClosed, ConfigError, CopyFailed
from asynccache.memory.device import CopyDirection, Device, Event, PageCopy, Stream
from asynccache.memory.signals import HAPPENED

if TYPE_CHECKING:
    from asynccache.config import PoolSpec
    from asynccache.core.plan import Move

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
    def allocate(cls, spec: PoolSpec, device: Device) -> DevicePool:
        """Return a pool of new memory on ``device``. On a CPU device the system zeroes it when it is first touched."""
        if is_logical(spec):
            return cls(spec, ())
        stack = device.device_tensor((spec.layers, spec.device_pages + 1, spec.bytes_per_page // spec.layers))
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


class LayerEvents(NamedTuple):
    """A load_back, layer by layer: ``layers[i]`` is done when layers 0..i of every page are on the device."""

    layers: tuple[Event, ...]

    @property
    def done(self) -> Event:
        """The event that is done when every layer is there."""
        return self.layers[-1]

    def wait_layer(self, stream: Stream, i: int) -> None:
        """Hold later work of an engine's ``stream``, on the device, until layer ``i`` is there."""
        stream.wait_event(self.layers[i])


class Mover:
    """The pools, by name, and the batches of copies between them."""

    def __init__(
        self,
        device: Device,
        pools: Sequence[PoolSpec],
        *,
        device_tensors: Mapping[str, Sequence[torch.Tensor]] | None = None,
        host_align: int = 1,
    ) -> None:
        """``device_tensors``: an engine's own tensors, one per layer, for the pools that it has allocated itself.
        ``host_align``: host pages start at multiples of this, in bytes (a store's direct I/O may want 4096).

        Raises:
            ConfigError: pools do not fit in memory, or tensors do not fit their pool. No memory stays allocated then.
        """
        given = device_tensors or {}
        if unknown := given.keys() - {spec.name for spec in pools}:
            raise ConfigError(f"device_tensors: no pool is called {sorted(unknown)[0]!r}")
        own = {spec.name: DevicePool(spec, given[spec.name]) for spec in pools if spec.name in given}
        device.check_room(*_demands(pools, given, host_align))
        self.device = device
        self.layers = 1 + max(spec.model_layers[-1] for spec in pools)
        self.device_pools: Mapping[str, DevicePool]
        self.host_pools: Mapping[str, HostPool]
        self.device_pools, self.host_pools = _allocate(device, pools, own, host_align)
        self._moved = _by_component(pools)
        self._backups, self._loads, self._clones = _streams(device, "backup_host", "load_back", "clone")

    def backup(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event:
        """Enqueue a backup_host, device to host, which starts once the events ``after`` (the engine's writes) are done.
        Return the event of its end."""
        copies = self._copies(moves)
        if not copies:
            return HAPPENED
        _hold(self._backups, after)
        self.device.copy(self._backups, CopyDirection.OUT, copies)
        return self._backups.record()

    def load(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> LayerEvents:
        """Enqueue a load_back, host to device, layer by layer. It starts once the events ``after`` are done: the
        engine's work on the pages that will be overwritten. Return the load's events."""
        copies = self._copies(moves)
        if not copies:
            return LayerEvents((HAPPENED,) * self.layers)
        _hold(self._loads, after)
        return LayerEvents(tuple(self.device.load(self._loads, copies, self.layers)))

    def clone(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event:
        """Enqueue private copies on the device. They start once the events ``after`` are done: the loads that bring the
        source pages, and the engine's work on source and destination pages. Return the event of their end."""
        copies = self._copies(moves)
        if not copies:
            return HAPPENED
        _hold(self._clones, after)
        self.device.copy(self._clones, CopyDirection.WITHIN, copies)
        return self._clones.record()

    def engine_stream(self, stream: object) -> Stream:
        """Return ``stream`` as one that can wait for this device's events. A device that takes an engine's own streams
        (torch, cupy) wraps them. Any other device takes only a ``Stream``, which is returned as it is.

        Raises:
            ConfigError: it is no such stream.
        """
        adopt: Callable[[object], Stream] = getattr(self.device, "engine_stream", _as_it_is)
        return adopt(stream)

    def engine_event(self, event: object) -> Event:
        """Return an event that an engine names as one of the device's.

        Raises:
            ConfigError: the device's streams cannot wait for it.
        """
        return self.device.engine_event(event)

    def close(self) -> None:
        """Move nothing any more. The streams go back to the device, after the work that they were given."""
        for stream in (self._backups, self._loads, self._clones):
            self.device.release(stream)

    async def drain(self, patience: float) -> None:
        """Wait for the copies in flight, but at most ``patience`` seconds, since a copy may wait for an event that an
        engine never fires. To be called before ``close``. Cancelling stops the waiting, and no copy."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for stream in (self._backups, self._loads, self._clones):
                    with suppress(CopyFailed, CacheClosed):  # whoever waits for a copy is told; or all is closed
                        await stream.record().wait()

    def _copies(self, moves: Sequence[Move]) -> list[PageCopy]:
        ids = [(m, np.frombuffer(m.src, np.int32), np.frombuffer(m.dst, np.int32)) for m in moves if m.src]
        return [PageCopy(self.device_pools[spec.name], self.host_pools.get(spec.name), src, dst)
                for m, src, dst in ids for spec in self._moved.get(m.component, ())]  # fmt: skip

    def __repr__(self) -> str:
        return f"<Mover on {self.device!r}: {', '.join(map(repr, self.device_pools))}>"


def _as_it_is(stream: object) -> Stream:
    return checks.provider("stream", cast("Stream", stream), Stream)  # type: ignore[type-abstract]


def _streams(device: Device, *names: str) -> list[Stream]:
    """Return a new stream for each of ``names``. If one cannot be made, those before it are released."""
    made: list[Stream] = []
    try:
        made.extend(map(device.stream, names))  # one by one, so that ``made`` has those before one that fails
    except BaseException:
        for stream in made:
            device.release(stream)
        raise
    return made


def _hold(stream: Stream, events: Sequence[Event]) -> None:
    for event in events:
        stream.wait_event(event)


def _allocate(
    device: Device, pools: Sequence[PoolSpec], own: dict[str, DevicePool], align: int
) -> tuple[dict[str, DevicePool], dict[str, HostPool]]:
    """Return all pools of both tiers, by name. If one cannot be had, the others are let go before the error is
    raised."""
    on_device, on_host = {}, {}
    try:
        for spec in pools:
            on_device[spec.name] = own.get(spec.name) or DevicePool.allocate(spec, device)
            if spec.host_pages:
                on_host[spec.name] = HostPool.allocate(spec, device, align=align)
    except (AsyncCacheError, MemoryError, RuntimeError, OSError) as error:  # driver; host memory; torch; the system
        on_device.clear()  # the error's traceback would keep them
        on_host.clear()
        own.clear()
        raise ConfigError(f"pool {spec.name!r}: its memory cannot be had: {error}") from error
    return on_device, on_host


def _by_component(pools: Sequence[PoolSpec]) -> dict[int, list[PoolSpec]]:
    moved: dict[int, list[PoolSpec]] = {}
    for spec in pools:
        if not is_logical(spec):
            moved.setdefault(int(spec.component), []).append(spec)
    return moved


def _demands(
    pools: Sequence[PoolSpec], given: Mapping[str, Sequence[torch.Tensor]], align: int
) -> tuple[dict[str, int], dict[str, int]]:
    device = {
        f"pool {s.name!r} on the device: device_pages={s.device_pages}": (s.device_pages + 1) * s.bytes_per_page
        for s in pools if s.name not in given
    }
    host = {
        f"pool {s.name!r} on the host: host_pages={s.host_pages}": s.host_pages * round_up(s.bytes_per_page, align)
        for s in pools
    }
    return device, host
