"""Whole caches on several ranks, in seeded worlds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate
from tests.ranks.cache_world import TIMEOUT, CacheWorld, Report

EVERY = [Topology(tp, cp, pp) for tp in (1, 2, 3, 4) for cp in (1, 2) for pp in range(1, 9)]
SMALL = [topology for topology in EVERY if 1 < topology.ranks <= 4]


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are for every commit."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.slow,)) for seed in range(count)]


def play(seed: int, topology: Topology) -> Report:
    async def world(loop: SimulatedLoop) -> Report:
        return await CacheWorld(loop, seed, topology).run()

    return simulate(world, seed)


def lose(seed: int, topology: Topology, fate: Fate) -> Report:
    random = Random(f"{seed}/strike")

    async def world(loop: SimulatedLoop) -> Report:
        ranks = CacheWorld(loop, seed, topology, iterations=60)
        return await ranks.lose(random.randrange(topology.ranks), fate, 0.05 + random.random() * 0.2)

    return simulate(world, seed)


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
@pytest.mark.parametrize("seed", worlds(6, quick=1))
def test_a_lost_rank_ends_the_group_and_a_new_one_begins(seed: int, fate: Fate) -> None:
    report = lose(seed, Random(f"{seed}/topology").choice(SMALL), fate)
    assert report.errors
    assert report.told < TIMEOUT + 1
    assert report.ends["served"] > 5


@pytest.mark.parametrize("seed", worlds(30, quick=4))
def test_ranks_hold_one_tree(seed: int) -> None:
    report = play(seed, Random(f"{seed}/topology").choice(SMALL))
    assert not report.errors
    assert report.ends["served"] > 5
