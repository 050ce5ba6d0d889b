"""Found in review: what one rank alone meets, or what hangs, must not touch the others."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from tests.ranks.rank_world import WINDOW, RankWorld, Toy

HANGS = range(1, WINDOW + 1)


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=3)], ids=str)
def test_what_hangs_keeps_nothing_else_waiting(topology: Topology) -> None:
    """As many operations as a frame tells of hang; what begins after them is decided all the same."""

    class Hanging(Toy):
        async def _work(self, op: int) -> None:
            await asyncio.sleep(1.0 if op in HANGS else 0.0)
            await super()._work(op)

    async def world(loop: SimulatedLoop) -> None:
        ranks = RankWorld(loop, 1, topology, idle=False)
        for toy in ranks.toys:
            toy.__class__ = Hanging
        await ranks.run()
        decided = [op for _, op, _ in ranks.toys[0].commits]
        assert len(decided) > 2 * WINDOW
        assert sorted(decided[-WINDOW:]) == [*HANGS]

    simulate(world, 1)
