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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from asynccache import checks
from asynccache.errors import AsyncCacheError, CacheClosed, ConfigError, CopyFailed
from asynccache.memory.device import CopyDirection, Device, Event, PageCopy, Stream
from asynccache.memory.signals import HAPPENED

if TYPE_CHECKING:
    from asynccache.config import PoolSpec
    from asynccache.core.plan import Move

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
        return [self._copy(spec.name, m) for m in moves if m.src for spec in self._moved.get(m.component, ())]

    def _copy(self, name: str, move: Move) -> PageCopy:
        src, dst = np.frombuffer(move.src, np.int32), np.frombuffer(move.dst, np.int32)
        return PageCopy(self.device_pools[name], self.host_pools.get(name), src, dst)

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
        f"pool {s.name!r} on the device: device_pages={s.device_pages}": s.device_pages * s.bytes_per_page
        for s in pools if s.name not in given
    }
    host = {
        f"pool {s.name!r} on the host: host_pages={s.host_pages}": s.host_pages * round_up(s.bytes_per_page, align)
        for s in pools
    }
    return device, host
