"""Whole caches on several ranks, in seeded worlds; at the end, that together they met everything there is."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate
from tests.ranks.cache_world import TIMEOUT, CacheWorld, Report

EVERY = [Topology(tp, cp, pp) for tp in (1, 2, 3, 4) for cp in (1, 2) for pp in range(1, 9)]
SMALL = [topology for topology in EVERY if 1 < topology.ranks <= 4]
MEDIUM = [topology for topology in EVERY if 4 < topology.ranks <= 8]
LARGE = [topology for topology in EVERY if 16 <= topology.ranks <= 32]
TREES, LARGE_TREES, LOST = 140, 12, 12
MET: dict[str, set[int]] = {}
PLAYED: Counter[str] = Counter()


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are for every commit."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.ranks,)) for seed in range(count)]


def play(seed: int, topology: Topology, iterations: int = 16) -> Report:
    async def world(loop: SimulatedLoop) -> Report:
        return await CacheWorld(loop, seed, topology, iterations).run()

    return simulate(world, seed)


def lose(seed: int, topology: Topology, fate: Fate) -> Report:
    """The first group ends before most of its requests have; the second has half of the iterations to itself: 30.

    In 20 the tightest of these worlds (seed 2: 16 pages, most requests are refused) drew too few that it could serve.
    """
    random = Random(f"{seed}/strike")

    async def world(loop: SimulatedLoop) -> Report:
        ranks = CacheWorld(loop, seed, topology, iterations=60)
        return await ranks.lose(random.randrange(topology.ranks), fate, 0.05 + random.random() * 0.2)

    return simulate(world, seed)


def note(kind: str, seed: int, report: Report) -> None:
    """What this world came across."""
    PLAYED[kind] += 1
    found = {**report.met, **{f"{name} hit": n for name, n in report.hits.items()}, **report.ends}
    for name, count in found.items():
        if count:
            MET.setdefault(name, set()).add(seed)


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
@pytest.mark.parametrize("seed", worlds(LOST, quick=2))
def test_a_lost_rank_ends_the_group_and_a_new_one_begins(seed: int, fate: Fate) -> None:
    report = lose(seed, Random(f"{seed}/topology").choice(SMALL), fate)
    assert report.errors
    assert report.told < TIMEOUT + 1
    assert report.ends["served"] > 5


@pytest.mark.parametrize("seed", worlds(TREES, quick=6))
def test_ranks_hold_one_tree(seed: int) -> None:
    random = Random(f"{seed}/topology")
    report = play(seed, random.choice(SMALL if random.random() < 0.8 else MEDIUM))
    assert not report.errors
    assert report.ends.total() > 3
    note("trees", seed, report)


@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(1000, 1000 + LARGE_TREES))
def test_up_to_32_ranks_hold_one_tree(seed: int) -> None:
    report = play(seed, Random(f"{seed}/topology").choice(LARGE), 6)
    assert not report.errors
    note("large trees", seed, report)


EVENTS = (
    "abort", "abort while it waits", "local cancel", "granted in a step", "split in flight", "idle stretch",
    "copy failed", "load failed", "store failed", "backup dropped", "engine's event", "kept", "invalidate", "reset",
    "attach", "detach", "device hit", "host hit", "storage hit", "prefetch complete", "prefetch partial",
    "prefetch miss", "prefetch cancelled", "served", "full",
)  # fmt: skip
KINDS = (
    "FULL", "SWA", "MAMBA", "sidecars", "replicated", "tp", "cp", "pp", "best_effort", "wait_complete", "timeout",
    "write_through", "write_through_selective", "write_back",
)  # fmt: skip


@pytest.mark.ranks
def test_the_worlds_met_everything_that_there_is() -> None:
    """Or they would silently stop to show it."""
    if PLAYED != {"trees": TREES, "large trees": LARGE_TREES}:
        pytest.skip("where all worlds were played")
    met = {name: len(MET.get(name, ())) for name in (*EVENTS, *KINDS)}
    assert min(met.values()) >= 2, met
    assert min(met[name] for name in (*KINDS, "served")) >= 20, met
