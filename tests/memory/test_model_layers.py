"""Pools that hold some of the model's layers: a load brings layer i of the model whole before layer i+1."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from asynccache import CacheConfig, ConfigError, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.plan import Move
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import CopyDirection, PageCopy
from asynccache.memory.host_copies import checked, layer_steps
from asynccache.memory.pools import Mover

# A model of five layers: full attention in 1 and 4, windows in 0, 2 and 3, and two tensors of layer 4 in a sidecar.
CONFIG = CacheConfig(
    model="m", page_size=4,
    components=(
        Full(bytes_per_token=6, device_tokens=16, host_tokens=16, layers=2, covers=(1, 4)),
        SlidingWindow(window=8, bytes_per_token=6, device_tokens=16, host_tokens=16, layers=3, covers=(0, 2, 3)),
    ),
    sidecars=(Sidecar(name="scales", indices_from="full", bytes_per_page=8, layers=2, covers=(4, 4)),),
)  # fmt: skip
ALL = np.arange(4, dtype=np.int32)


async def test_every_step_of_a_load_brings_one_layer_of_the_model() -> None:
    mover = Mover(CpuDevice(), CONFIG.pools())
    assert mover.layers == 5
    copies = [PageCopy(mover.device_pools[name], mover.host_pools[name], ALL, ALL) for name in mover.device_pools]
    names = {id(array): f"{name}.{i}" for name, p in mover.device_pools.items() for i, array in enumerate(p.arrays)}
    steps = [[names[id(transfer.dst)] for transfer in step]
             for step in layer_steps(checked(copies, CopyDirection.IN), mover.layers)]
    assert steps == [["swa.0"], ["full.0"], ["swa.1"], ["swa.2"], ["full.1", "scales.0", "scales.1"]]
    await mover.device.aclose()


async def test_all_of_it_arrives_and_each_layer_with_its_event() -> None:
    mover = Mover(CpuDevice(), CONFIG.pools())
    for i, pool in enumerate(mover.host_pools.values()):
        pool.array[:] = i + 1
    moves = [Move(0, ALL.tobytes(), ALL.tobytes()), Move(1, ALL.tobytes(), ALL.tobytes())]
    events = mover.load(moves)
    assert len(events.layers) == 5
    await events.layers[1].wait()
    assert (mover.device_pools["swa"].arrays[0] == 2).all()
    assert (mover.device_pools["full"].arrays[0] == 1).all()
    await events.done.wait()
    for i, device in enumerate(mover.device_pools.values()):
        assert all((array == i + 1).all() for array in device.arrays)
    await mover.device.aclose()


@pytest.mark.parametrize("covers", [(0,), (1, 0), (-1, 0), (0, 1, 2)])
def test_covers_that_do_not_fit_are_refused(covers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"full: covers=.* (for each of layers=2|Expected `int` >= 0)"):
        replace(CONFIG.components[0], covers=covers)
    with pytest.raises(ConfigError, match=r"mamba: covers="):
        Mamba(state_bytes=8, device_states=2, host_states=2, layers=2, covers=covers)
    with pytest.raises(ConfigError, match=r"sidecar 'scales': covers="):
        replace(CONFIG.sidecars[0], covers=covers)
