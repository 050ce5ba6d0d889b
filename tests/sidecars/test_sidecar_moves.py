"""Between device and host: a derived pool moves when its source moves, exactly the same pages, in the same batch; and
the memory of all pools is there or none is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from asynccache import AsyncCache, ConfigError
from asynccache.core.settings import ComponentKind
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import Mover
from asynccache.memory.signals import HAPPENED
from tests.memory.small_pools import device_page, fill_device, host_page, move
from tests.sidecars.sidecar_kit import STACKS, deepseek, indexed, of, solid, stack

FULL, SWA, MAMBA = ComponentKind
SRC, DST = {FULL: [1, 4, 5], SWA: [7, 2], MAMBA: [3]}, {FULL: [9, 8, 2], SWA: [0, 6], MAMBA: [5]}


def moves_of(kinds: Sequence[ComponentKind]) -> list[Any]:
    return [move(SRC[kind], DST[kind], kind) for kind in kinds]


def pages_of(mover: Mover, tier: str) -> dict[tuple[str, int], bytes]:
    read = device_page if tier == "device" else host_page
    slots = {s: p.spec.device_pages if tier == "device" else p.spec.host_pages for s, p in mover.device_pools.items()}
    return {(n, i): read(mover, n, i) for n, c in slots.items() if mover.device_pools[n].spec.bytes_per_page
            for i in range(c)}  # fmt: skip


def fill_host(mover: Mover) -> None:
    rng = np.random.default_rng(11)
    for pool in mover.host_pools.values():
        if pool.spec.bytes_per_page:
            pool.array[:] = rng.integers(0, 256, pool.array.shape, np.uint8)


@pytest.mark.parametrize("stack", STACKS)
async def test_what_derives_from_a_component_moves_with_it_and_nothing_else_does(stack: str) -> None:
    """Every set of components in one batch, the empty one too, back and forth: every page of every pool is looked at.
    FULL alone, while SWA is where it must be, is one of them."""
    config = STACKS[stack]()
    mine = [component for component in ComponentKind if of(config, component)]
    mover = Mover(CpuDevice(), config.pools())
    for chosen in product((False, True), repeat=len(mine)):
        kinds = [kind for kind, taken in zip(mine, chosen, strict=True) if taken]
        fill_device(mover)
        fill_host(mover)
        await check_batch(mover, kinds, up=False)
        fill_host(mover)
        await check_batch(mover, kinds, up=True)
    await mover.device.aclose()


async def check_batch(mover: Mover, kinds: Sequence[ComponentKind], up: bool) -> None:
    source, target = ("host", "device") if up else ("device", "host")
    expected, given = pages_of(mover, target), pages_of(mover, source)
    for kind in kinds:
        for name in (s.spec.name for s in mover.device_pools.values() if s.spec.component is kind):
            for src, dst in zip(SRC[kind], DST[kind], strict=True):
                if (name, src) in given:
                    expected[name, dst] = given[name, src]
    event = mover.load(moves_of(kinds)).done if up else mover.backup(moves_of(kinds))
    assert (event is HAPPENED) == (not kinds)
    await event.wait()
    assert pages_of(mover, target) == expected


async def test_a_load_of_full_alone_where_only_states_have_bytes_is_no_error() -> None:
    plain = deepseek()
    config = stack(*plain.components, sidecars=[s for s in plain.sidecars if s.indices_from == "swa"], page_size=4)
    mover = Mover(CpuDevice(), config.pools())
    fill_host(mover)
    before = pages_of(mover, "device")
    load = mover.load(moves_of([FULL]))
    assert len(load.layers) == 5
    for event in load.layers:
        await event.wait()
    await mover.backup(moves_of([FULL])).wait()
    assert pages_of(mover, "device") == before
    await mover.device.aclose()


async def test_a_pool_of_few_layers_is_there_with_its_last_and_one_batch_is_one_event() -> None:
    """Layer i of every pool is there when layer i has come, so no layer of a model is there later than its own."""
    mover = Mover(CpuDevice(), indexed().pools())
    fill_host(mover)
    gate = mover.device.gate()
    load = mover.load(moves_of([FULL]), [gate])
    assert len(load.layers) == 4
    assert not load.layers[0].done()
    gate.open()
    await load.layers[1].wait()
    for name, layers in (("indexer", 2), ("full", 2)):
        pool = mover.host_pools[name].array
        for i in range(layers):
            for src, dst in zip(SRC[FULL], DST[FULL], strict=True):
                row = mover.device_pools[name].layer(i)[dst].cpu().numpy()
                assert np.array_equal(row, pool[src, i]), (name, i)
    await load.done.wait()
    await mover.device.aclose()


# memory


class Short(CpuDevice):
    """Runs out of memory at the ``at``-th tensor, whatever was promised."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()
        self.left = at
        self.error = error
        self.made: list[weakref.ref[torch.Tensor]] = []

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made.append(weakref.ref(tensor))
        return tensor

    def _take(self) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._take()
        return self._made(super().device_tensor(shape))

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._take()
        return self._made(super().host_tensor(shape))


TENSORS = 2 * len(solid(deepseek()))


@pytest.mark.parametrize("at", range(TENSORS + 1))
async def test_memory_that_runs_out_on_the_way_is_given_back_at_once(at: int) -> None:
    """While the error is still held, with its traceback and every frame in it, nothing that it led to is."""
    device = Short(at, (MemoryError, RuntimeError, OSError)[at % 3]("no more"))
    gc.disable()
    try:
        cache = AsyncCache(deepseek(), device=device)
        if at == TENSORS:
            async with cache:
                assert len(device.made) == TENSORS
            return
        with pytest.raises(ConfigError, match=r"pool '.*': its memory cannot be had: no more") as error:
            await cache.__aenter__()
        assert error.value.__cause__ is device.error
        assert len(device.made) == at
        assert [made for made in device.made if made() is not None] == []
    finally:
        gc.enable()
        await device.aclose()
