"""What must be the same on all ranks, and how it is said what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest

from asynccache.errors import ConfigError, RankFailure
from asynccache.ranks import Topology
from asynccache.ranks.handshake import Description, Plain, differing, shake_hands
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks

POOLS: Sequence[Description] = [
    {"name": "full", "bytes": 4096, "policy": "all"},
    {"name": "swa", "bytes": 512, "policy": "trailing"},
]
SAME: Description = {"asynccache": "1.0", "page_size": 16, "pools": POOLS, "topology": {"tp": 2, "pp": 1}}


def test_ranks_that_are_alike_differ_in_nothing() -> None:
    assert differing({0: SAME, 1: dict(SAME), 2: dict(SAME)}) is None
    assert differing({0: SAME}) is None


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("page_size", 32, "page_size differs between ranks: 16 on ranks 0, 2; 32 on rank 1"),
        ("page_size", "16", 'page_size differs between ranks: 16 on ranks 0, 2; "16" on rank 1'),
        ("pools", POOLS[::-1], 'pools[0].name differs between ranks: "full" on ranks 0, 2; "swa" on rank 1'),
        ("pools", POOLS[:1], 'pools[1].name differs between ranks: "swa" on ranks 0, 2; absent on rank 1'),
        ("topology", {"tp": 2, "pp": 4}, "topology.pp differs between ranks: 1 on ranks 0, 2; 4 on rank 1"),
        ("more", True, "more differs between ranks: absent on ranks 0, 2; true on rank 1"),
    ],
)
def test_the_first_field_that_differs_is_named(field: str, value: Plain, sentence: str) -> None:
    assert differing({0: SAME, 1: {**SAME, field: value}, 2: SAME}) == sentence


def test_of_several_the_first_is_named() -> None:
    other = {**SAME, "topology": None, "page_size": 1}
    assert str(differing({0: SAME, 1: other})).startswith("page_size")


def refused(topology: Topology, victim: int | None = None) -> list[Exception]:
    """What each rank of a simulated group meets when the last two have another model than the others."""

    async def world(loop: SimulatedLoop) -> list[Exception]:
        ranks = SimulatedRanks(topology, Random(1))
        if victim is not None:
            ranks.hang(victim)

        async def one(rank: int) -> Exception:
            description = {**SAME, "model": "b" if rank >= topology.ranks - 2 else "a"}
            with pytest.raises((ConfigError, RankFailure)) as error:
                await shake_hands(partial(ranks.gather, rank), description)
            return error.value

        return await asyncio.gather(*(one(rank) for rank in range(topology.ranks) if rank != victim))

    return simulate(world, 1)


def test_every_rank_refuses_with_the_same_sentence() -> None:
    errors = refused(Topology(tp=2, cp=2, pp=2))
    sentence = 'model differs between ranks: "a" on ranks 0, 1, 2, 3, 4, 5; "b" on ranks 6, 7'
    assert {str(error) for error in errors} == {sentence}
    assert all(isinstance(error, ConfigError) for error in errors)


def test_nobody_waits_for_ever_for_a_rank_that_says_nothing() -> None:
    assert all(isinstance(error, RankFailure) for error in refused(Topology(tp=4), victim=2))
