"""Pools small enough to check byte by byte. Shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asynccache.config import PoolSpec
from asynccache.core.plan import Move
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.device import Device
from asynccache.memory.mover import Mover


def pool(name: str = "full", component: ComponentKind = ComponentKind.FULL, *, size: int = 64, **more: Any) -> PoolSpec:
    spec: dict[str, Any] = {"layers": 4, "device_pages": 32, "host_pages": 48, "hit_policy": HitPolicy.ALL_PAGES}
    return PoolSpec(name=name, component=component, bytes_per_page=size, **(spec | more))


def move(src: list[int], dst: list[int], component: ComponentKind = ComponentKind.FULL) -> Move:
    return Move(int(component), np.array(src, "<i4").tobytes(), np.array(dst, "<i4").tobytes())


def filled(device: Device, *specs: PoolSpec) -> Mover:
    """A mover of these pools, or of ``pool()``, with bytes on the device."""
    mover = Mover(device, specs or [pool()])
    fill_device(mover)
    return mover


def fill_device(mover: Mover, seed: int = 7) -> None:
    """Every byte of every device pool is random."""
    rng = np.random.default_rng(seed)
    for p in mover.device_pools.values():
        for i in range(p.spec.layers if p.spec.bytes_per_page else 0):
            layer = p.layer(i)
            layer.copy_(torch.from_numpy(rng.integers(0, 256, tuple(layer.shape), np.uint8)))


def device_page(mover: Mover, name: str, slot: int) -> bytes:
    """A device page as the host would hold it: layer after layer."""
    p = mover.device_pools[name]
    return b"".join(p.layer(i)[slot].cpu().numpy().tobytes() for i in range(p.spec.layers))


def host_page(mover: Mover, name: str, slot: int) -> bytes:
    return bytes(mover.host_pools[name].page(slot))
