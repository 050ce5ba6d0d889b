"""The simulated device: worlds in virtual time that repeat exactly, and in which a missing wait shows."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.errors import ConfigError
from asynccache.memory.host_copies import Faults
from asynccache.memory.pools import Mover
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import simulate


async def backup_then_load(seed: int, *, waits: bool) -> tuple[float, bool]:
    """When the load was done, and whether it brought the right bytes."""
    mover = Mover(SimulatedDevice(seed=seed), [pool()])
    fill_device(mover)
    wanted = device_page(mover, "full", 1)
    backup = mover.backup([move([1], [1])])
    await mover.load([move([1], [2])], after=[backup] if waits else []).done.wait()
    result = asyncio.get_running_loop().time(), device_page(mover, "full", 2) == wanted
    await mover.device.aclose()
    return result


def world(seed: int, *, waits: bool) -> tuple[float, bool]:
    return simulate(lambda _: backup_then_load(seed, waits=waits), seed)


def test_a_missing_wait_shows_on_some_seeds_and_a_wait_never_fails() -> None:
    assert all(world(seed, waits=True)[1] for seed in range(60))
    missing = [world(seed, waits=False)[1] for seed in range(60)]
    assert missing.count(False) > 0


def test_a_seed_repeats_a_world_exactly() -> None:
    assert world(5, waits=True) == world(5, waits=True)
    assert world(5, waits=True)[0] != world(6, waits=True)[0]


def test_bytes_come_in_two_halves_between_start_and_event() -> None:
    async def main() -> set[int]:
        mover = Mover(SimulatedDevice(seed=1, latency=(0.5, 1.0)), [pool(size=64, layers=1)])
        mover.device_pools["full"].arrays[0][:] = 1
        event, seen = mover.backup([move([0], [0])]), set()
        while not event.done():
            seen.add(sum(host_page(mover, "full", 0)))
            await asyncio.sleep(0.01)
        assert sum(host_page(mover, "full", 0)) == 64
        await mover.device.aclose()
        return seen

    assert simulate(lambda _: main(), 1) == {0, 32}


def test_a_fate_comes_on_top_of_the_latency() -> None:
    async def main(faults: Faults) -> float:
        mover = Mover(SimulatedDevice(seed=1, latency=(0.0, 0.001), faults=faults), [pool()])
        await mover.backup([move([0], [0])]).wait()
        await mover.device.aclose()
        return asyncio.get_running_loop().time()

    late = Faults(delayed=1.0, delay=(5.0, 5.0))
    assert simulate(lambda _: main(Faults()), 1) < 0.1
    assert simulate(lambda _: main(late), 1) > 5.0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_impossible_faults_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="failing="):
        Faults(failing=share)
    with pytest.raises(ConfigError, match="delay="):
        Faults(delay=(0.2, 0.1))
