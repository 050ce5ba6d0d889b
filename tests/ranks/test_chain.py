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


@pytest.mark.parametrize("room", [KEPT * 4, KEPT * 6, 192])
@pytest.mark.parametrize("count", [1, 10, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
@pytest.mark.parametrize("before", [0, 5])
def test_the_first_entry_that_differs_is_named(room: int, count: int, before: int) -> None:
    odd = max(1, count - before)
    one, other = chains(count, odd)
    lowest = np.minimum(ring_words(one, room), ring_words(other, room)).tolist()
    assert parting(other, lowest) == f"entry {odd} is where ranks part; here it was 'a call of its own' at step {odd}"
    assert parting(one, lowest) == f"entry {odd} is where ranks part; here it was 'call' at step {odd}"


@pytest.mark.parametrize("room", [KEPT * 4, KEPT * 6, 192])
def test_one_more_call_is_where_ranks_part(room: int) -> None:
    one, other = chains(KEPT, 0)
    other.add(7, "a call of its own", b"")
    lowest = np.minimum(ring_words(one, room), ring_words(other, room)).tolist()
    assert parting(other, lowest) == "entry 65 is where ranks part; here it was 'a call of its own' at step 7"
    assert parting(one, lowest) == "entry 65 is where ranks part; this rank is at entry 64"


def test_chains_that_are_alike_part_nowhere() -> None:
    one, other = chains(100, 0)
    lowest = np.minimum(ring_words(one, 384), ring_words(other, 384)).tolist()
    assert parting(one, lowest) == f"the last {KEPT} entries are alike"
