"""Performs the core's moves on a device: owns the pools of every tier in memory and the streams between them.

A move names a component. The mover expands it to every pool that the component's slots index, its own pool and
sidecars, and skips logical ones. Nothing here knows a pool by name, a tree or a lease. It belongs to one thread, the
loop's, and never blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from asynccache import checks
from asynccache.errors import AsyncCacheError, CacheClosed, ConfigError, CopyFailed
from asynccache.memory.device import Device, Event, PageCopy, Stream
from asynccache.memory.pools import DevicePool, HostPool, is_logical, round_up
from asynccache.memory.signals import HAPPENED

if TYPE_CHECKING:
    from asynccache.config import PoolSpec
    from asynccache.core.plan import Move


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
        ``host_align``: host pages start at multiples of so many bytes (a store's direct I/O may want 4096).

        Raises:
            ConfigError: pools do not fit in memory, or tensors do not fit their pool. Nothing is allocated then; if the
                memory ran out on the way, nothing of it is kept.
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
        """Enqueue a backup_host, device to host, once ``after`` (the engine's writes) is done. Return an event after
        it."""
        copies = self._copies(moves)
        if not copies:
            return HAPPENED
        _hold(self._backups, after)
        self.device.device_to_host(self._backups, copies)
        return self._backups.record()

    def load(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> LayerEvents:
        """Enqueue a load_back: host to device, layer by layer, once ``after`` is done, the engine's work on the pages
        that are written. Return its events."""
        copies = self._copies(moves)
        if not copies:
            return LayerEvents((HAPPENED,) * self.layers)
        _hold(self._loads, after)
        return LayerEvents(tuple(self.device.host_to_device(self._loads, copies, self.layers)))

    def clone(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event:
        """Enqueue private copies on the device, once ``after`` is done: the loads that bring what they read, and the
        engine's work on the pages that they read and write. Return an event after them."""
        copies = self._copies(moves)
        if not copies:
            return HAPPENED
        _hold(self._clones, after)
        self.device.device_to_device(self._clones, copies)
        return self._clones.record()

    def engine_stream(self, stream: object) -> Stream:
        """Return ``stream`` as one that can wait for this device's events. That is an engine's own stream (torch, cupy)
        where the device takes those, and otherwise a ``Stream``, as it is.

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
        """Wait for the copies on their way, at most ``patience`` seconds: one may wait for an engine that never comes.
        To be called before ``close``. Cancelling it stops the waiting, and no copy."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for stream in (self._backups, self._loads, self._clones):
                    with suppress(CopyFailed, CacheClosed):  # others are told of it; or it is closed already
                        await stream.record().wait()

    def bytes_moved(self, moves: Sequence[Move]) -> int:
        """Return how many bytes these moves copy."""
        return sum(len(m.src) // 4 * spec.bytes_per_page for m in moves for spec in self._moved.get(m.component, ()))

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
        made.extend(map(device.stream, names))  # one by one
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
