"""Schedulers in lockstep over simulated ranks: same admissions, same retractions, same batches, same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from tests.shim.shim_rank_world import REQUESTS, Report, World

TP2, PP2, TP2_PP2 = Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)
SHAPES = [TP2, PP2, TP2_PP2]


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are for every commit."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.slow,)) for seed in range(count)]


def play(seed: int, topology: Topology, **drawn: Any) -> Report:
    async def world(loop: SimulatedLoop) -> Report:
        return await World(loop, seed, topology, **drawn).run()

    return simulate(world, seed)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("seed", worlds(12, quick=2))
def test_ranks_take_the_same_steps(seed: int, topology: Topology) -> None:
    report = play(seed, topology)
    assert not report.errors
    assert sum(report.ends.values()) >= REQUESTS
    assert report.ends["failed"] == 0
