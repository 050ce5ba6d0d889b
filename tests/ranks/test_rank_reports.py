"""Who closes waits for the reports that are due: nothing of one cache is left on the way for the next one over the
same connections."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from asynccache import AsyncCache
from asynccache.ranks import Topology
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.test_rank_closing import CONFIG, TEXT


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(tp=2, pp=2), Topology(pp=4)], ids=str)
@pytest.mark.parametrize("deadline", [0.001, 30.0])
def test_no_report_is_left_to_the_next_cache(topology: Topology, deadline: float) -> None:
    """Also where saving ends with a deadline, in the middle."""

    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(topology, Random(1))

        async def live(rank: int) -> int:
            device = SimulatedDevice(seed=rank)
            cache = await AsyncCache(CONFIG, device=device, ranks=net.member(rank)).__aenter__()
            async with cache.lease(TEXT, wait=False) as lease:
                await lease.commit(TEXT)
            report = await cache.aclose(deadline)
            assert report.error is None
            lockstep = cache._opened().lockstep
            assert lockstep is not None
            assert lockstep.steps.due == 0
            await device.aclose()
            return lockstep.chain.digest

        for _ in range(3):
            assert len(set(await asyncio.gather(*map(live, range(topology.ranks))))) == 1
            assert not any(wire._flying or wire._arrived for wire in net._wires.values())

    simulate(world, 1)
