"""The mover performs the core's moves on a device: it owns the pools of both tiers and the streams between them.

A move names a component. The mover expands it to every pool that the component's slots index, its own pool and
sidecars, and skips logical ones. It knows no tree and no lease. A mover belongs to one thread, the loop's, and never
blocks it.
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
from asynccache.memory.device import CopyDirection, Device, Event, Stream
from asynccache.memory.pools import DevicePool, HostPool, PageCopy, is_logical, round_up
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
            on_device[spec.name] = own.get(spec.name) or DevicePool.allocate(spec, device.device_tensor)
            if spec.host_pages:
                on_host[spec.name] = HostPool.allocate(spec, device.host_tensor, align=align)
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
