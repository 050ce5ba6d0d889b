"""Seeded worlds of the protocol alone: equal commits, no deadlock, bounded staleness, failures told in time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from asynccache.errors import RankDivergence, RankFailure
from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate
from tests.ranks.rank_world import RankWorld, Toy

COMMITTING, LARGE, GONE, ODD = 220, 24, 45, 40
STALEST: list[tuple[int, int]] = []


def topology_of(seed: int) -> Topology:
    """Up to 8 ranks, more than one."""
    every = [Topology(tp, cp, pp) for tp in (1, 2, 4) for cp in (1, 2) for pp in range(1, 9)]
    return Random(f"topology {seed}").choice([topology for topology in every if 1 < topology.ranks <= 8])


def large_topology_of(seed: int) -> Topology:
    """From 9 to 32 ranks."""
    every = [Topology(tp, cp, pp) for tp in (1, 2, 4) for cp in (1, 2) for pp in range(1, 9)]
    return Random(f"topology {seed}").choice([topology for topology in every if 8 < topology.ranks <= 32])


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are in the gate."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.ranks,)) for seed in range(count)]


def agree(seed: int, topology: Topology, length: int = 30) -> None:
    async def world(loop: SimulatedLoop) -> None:
        ranks = RankWorld(loop, seed, topology, length=length)
        await ranks.run()
        assert not ranks.errors
        first = ranks.toys[0]
        assert len(first.commits) == first.next - 1 > 0
        assert all(toy.commits == first.commits for toy in ranks.toys)
        STALEST.append((topology.pp, ranks.stalest))

    simulate(world, seed)


@pytest.mark.parametrize("seed", worlds(COMMITTING, quick=16))
def test_ranks_commit_the_same(seed: int) -> None:
    agree(seed, topology_of(seed))


@pytest.mark.parametrize("seed", worlds(LARGE, quick=2))
def test_up_to_32_ranks_commit_the_same(seed: int) -> None:
    agree(seed, large_topology_of(seed), length=12)


def test_decisions_are_late_where_there_are_stages() -> None:
    """What every world asserts a bound of is met: without stages nothing is late, with them it is."""
    if len(STALEST) < COMMITTING + LARGE:
        pytest.skip("where all worlds were played")
    assert {late for pp, late in STALEST if pp == 1} == {0}
    assert max(late for pp, late in STALEST if pp > 1) > 2


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
@pytest.mark.parametrize("seed", worlds(GONE, quick=8))
def test_everybody_hears_of_a_rank_that_is_gone(seed: int, fate: Fate) -> None:
    async def world(loop: SimulatedLoop) -> None:
        topology = topology_of(seed)
        ranks = RankWorld(loop, seed, topology, length=10**6, idle=False)
        victim = Random(seed).randrange(topology.ranks)
        told: list[float] = []

        def strike() -> None:
            told.append(loop.time())
            (ranks.net.kill if fate is Fate.KILLED else ranks.net.hang)(victim)

        loop.call_later(0.2 + Random(seed).random() * 0.1, strike)
        await ranks.run()
        alive = set(range(topology.ranks)) - {victim}
        assert {rank for rank in ranks.errors if rank != victim} == alive
        assert all(isinstance(ranks.errors[rank], RankFailure) for rank in alive)
        assert loop.time() - told[0] < ranks.net.timeout + 0.5

    simulate(world, seed)


@pytest.mark.parametrize("seed", worlds(ODD, quick=8))
def test_a_rank_that_does_something_else_is_found(seed: int) -> None:
    class Differs(RankWorld):
        def act(self, toy: Toy) -> None:
            toy.open(toy.steps.step_number)
            if toy.rank == odd and toy.next == 10:
                toy.chain.add(toy.steps.step_number, "a call of its own", b"")

    odd = 0

    async def world(loop: SimulatedLoop) -> None:
        nonlocal odd
        topology = topology_of(seed)
        odd = Random(seed).randrange(topology.ranks)
        ranks = Differs(loop, seed, topology)
        ranks.digests = _Anything()
        await ranks.run()
        assert len(ranks.errors) == topology.ranks
        assert any(isinstance(error, RankDivergence) for error in ranks.errors.values())
        if topology.pp == 1:
            assert "a call of its own" in str(ranks.errors[odd])

    simulate(world, seed)


class _Anything(dict[int, int]):
    """What a test that breaks ranks apart has instead of digests that must be equal."""

    def setdefault(self, key: int, default: int = 0, /) -> int:
        return default
