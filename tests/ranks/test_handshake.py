"""What must be the same on all ranks, and how it is said what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asynccache.errors import ConfigError
from asynccache.ranks.handshake import Description, Plain, differing, shake_hands

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


@pytest.mark.asyncio
async def test_every_rank_refuses_with_the_same_sentence() -> None:
    table: dict[int, bytes] = {}
    full = asyncio.Event()

    async def one(rank: int) -> str:
        async def gather(content: bytes) -> list[bytes]:
            table[rank] = content
            if len(table) == 3:
                full.set()
            await full.wait()
            return [table[i] for i in range(3)]

        with pytest.raises(ConfigError) as refused:
            await shake_hands(gather, {**SAME, "model": f"m{rank // 2}"})
        return str(refused.value)

    sentences = set(await asyncio.gather(*map(one, range(3))))
    assert sentences == {'model differs between ranks: "m0" on ranks 0, 1; "m1" on rank 2'}
