"""Where ranks parted is found by what they kept, however far they are."""

from __future__ import annotations

import numpy as np
import pytest

from asynccache.ranks.chain import KEPT, Chain, parting, ring_words


def chains(count: int, odd: int) -> tuple[Chain, Chain]:
    """Two that did the same ``count`` times, but for one more call of the second before entry ``odd``."""
    one, other = Chain(), Chain()
    for number in range(1, count + 1):
        if number == odd:
            other.add(number, "a call of its own", b"")
        for chain in (one, other):
            chain.add(number, "call", number.to_bytes(4, "little"))
    return one, other


def parted(one: Chain, other: Chain, room: int) -> tuple[str | None, str | None]:
    """What each of the two says."""
    lowest = np.minimum(ring_words(one, room), ring_words(other, room)).tolist()
    return parting(one, lowest), parting(other, lowest)


@pytest.mark.parametrize("room", [KEPT * 4, KEPT * 6, 192])
@pytest.mark.parametrize("count", [1, 10, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
@pytest.mark.parametrize("before", [0, 5])
def test_the_first_entry_that_differs_is_named(room: int, count: int, before: int) -> None:
    odd = max(1, count - before)
    said = parted(*chains(count, odd), room)
    where, elsewhere = f"entry {odd} is where ranks part", "elsewhere it was another call"
    assert said == (
        f"{where}; here it was 'call' at step {odd}, {elsewhere}",
        f"{where}; here it was 'a call of its own' at step {odd}, {elsewhere}",
    )


@pytest.mark.parametrize("room", [KEPT * 4, KEPT * 6, 192])
def test_one_more_call_is_where_ranks_part(room: int) -> None:
    one, other = chains(KEPT, 0)
    other.add(7, "a call of its own", b"")
    where = "entry 65 is where ranks part"
    assert parted(one, other, room) == (
        f"{where}; this rank is at entry 64",
        f"{where}; here it was 'a call of its own' at step 7, elsewhere there was none",
    )


@pytest.mark.parametrize(
    ("what", "arguments", "result", "differs"),
    [
        ("match", b"1", b"2", "it was another call"),
        ("lease", b"2", b"2", "it had other arguments"),
        ("lease", b"1", b"1", "it had another result"),
    ],
)
@pytest.mark.parametrize("seed", range(20))
def test_what_differs_of_an_entry_is_said(seed: int, what: str, arguments: bytes, result: bytes, differs: str) -> None:
    """Also by those who did the same as most, and whatever came before and comes after."""
    same = [Chain(), Chain()]
    for number, chain in enumerate((*same, odd := Chain())):
        chain.add(1, "before", seed.to_bytes(1, "little"))
        chain.add(2, *((what, arguments, result) if number == 2 else ("lease", b"1", b"2")))
        chain.add(3, "after", b"")
    lowest = np.minimum.reduce([ring_words(chain, 384) for chain in (*same, odd)]).tolist()
    for chain, name in zip((*same, odd), ("lease", "lease", what), strict=True):
        here = f"entry 2 is where ranks part; here it was '{name}' at step 2"
        assert parting(chain, lowest) == f"{here}, elsewhere {differs}"


def test_chains_that_are_alike_part_nowhere() -> None:
    assert parted(*chains(100, 0), 384) == (None, None)
