"""Admission on numbers: the window's formula, its floor, where load_back is charged, and how an offer is cut."""

from __future__ import annotations

import pytest
from asynccache_shim import Matched
from asynccache_shim.admission import (
    CacheShape,
    LeaseOffer,
    SlotCounts,
    by_rank,
    check_fits,
    chunk_stop,
    cut_offers,
    demand,
    offer,
    passes,
    shape_of,
    shorter,
    swa_budget,
    victim,
)

from asynccache import CacheFull
from tests.shim.shim_kit import PAGE, config

SHAPE = CacheShape(page_size=4, window=16, capacity=SlotCounts(100, 40, 8))


def test_the_shape_of_a_cache() -> None:
    shape = shape_of(config(64, swa=12, window=10, mamba=3))
    assert shape == CacheShape(PAGE, 10, SlotCounts(64, 12, 3))
    assert shape_of(config(64)) == CacheShape(PAGE, 0, SlotCounts(64, 0, 0))


@pytest.mark.parametrize(
    ("extend", "remaining", "more", "tokens"),
    [
        (100, 32, 50, 32 + 4),  # the chunk is larger than the window
        (100, 8, 50, 16 + 4),  # the window is larger than the chunk
        (6, 32, 50, 16 + 4),  # a short prompt will reach the window by decoding
        (6, 32, 3, 9 + 4),  # it never will
        (6, 2, 0, 6 + 4),  # not even while it prefills
    ],
)
def test_the_windows_budget(extend: int, remaining: int, more: int, tokens: int) -> None:
    assert swa_budget(SHAPE, extend, remaining, more) == tokens


def test_load_back_is_charged_at_the_first_gate_in_whole_pages() -> None:
    free = demand(SHAPE, 32, 32, 0, Matched())
    assert free == SlotCounts(8, 9, 2)
    match = Matched(0, 40, host_hit_length=9, swa_host_hit_length=5, mamba_host_hit_length=1)
    loading = demand(SHAPE, 32, 32, 0, match)
    assert loading == SlotCounts(8 + 3, 9 + 2, 2 + 1)


def test_the_second_gate_leaves_load_back_to_the_lease() -> None:
    assert offer(SHAPE, 100, 32, 10) == LeaseOffer(chunk=32, swa_chunk=36, states=2)
    small = SHAPE._replace(window=0, capacity=SlotCounts(9))
    assert offer(small, 3, 32, 10) == LeaseOffer(chunk=3, swa_chunk=1, states=0)


def test_the_first_gate_keeps_a_page_for_each_that_grows() -> None:
    assert passes(SlotCounts(5, 4, 1), SlotCounts(7, 6, 1), 2)
    assert not passes(SlotCounts(5, 4, 1), SlotCounts(6, 6, 1), 2)
    assert not passes(SlotCounts(5, 4, 1), SlotCounts(7, 5, 1), 2)
    assert not passes(SlotCounts(5, 4, 1), SlotCounts(7, 6, 0), 2)
    assert passes(SlotCounts(5), SlotCounts(7), 2)


def test_alone_the_window_of_the_own_prefix_is_left_out_of_the_room() -> None:
    two_windows = SHAPE._replace(capacity=SlotCounts(100, 8, 0))
    cut = cut_offers(two_windows, offer(two_windows, 100, 64, 10), matched=40)
    assert cut[0] == LeaseOffer(chunk=16, swa_chunk=16, states=0)
    assert cut[-1] == LeaseOffer(chunk=4, swa_chunk=4, states=0)


def test_alone_without_a_match_everything_is_offered() -> None:
    assert cut_offers(SHAPE, LeaseOffer(32, 36, 2), matched=0)[0] == LeaseOffer(32, 36, 2)


def test_an_offer_is_cut_to_one_page_and_one_state() -> None:
    chunks = [terms.chunk for terms in cut_offers(SHAPE, LeaseOffer(40, 44, 2), 0)]
    assert chunks == sorted(chunks, reverse=True)
    assert cut_offers(SHAPE, LeaseOffer(40, 44, 2), 0)[-1] == LeaseOffer(4, 4, 1)
    assert cut_offers(SHAPE, LeaseOffer(2, 18, 2), 0)[-1] == LeaseOffer(2, 2, 1)


def test_what_could_not_run_alone_is_refused() -> None:
    check_fits(SHAPE, 400)
    with pytest.raises(CacheFull, match="FULL"):
        check_fits(SHAPE, 401)
    check_fits(SHAPE._replace(capacity=SlotCounts(100, 6, 0)), 400)
    with pytest.raises(CacheFull, match="window"):
        check_fits(SHAPE._replace(capacity=SlotCounts(100, 5, 0)), 400)
    check_fits(SHAPE._replace(capacity=SlotCounts(100, 5, 0)), 20)


class Item:
    def __init__(self, priority: int, order: int) -> None:
        self.priority = priority
        self.order = order


def test_rank_and_victim() -> None:
    items = [Item(0, 1), Item(1, 4), Item(0, 2), Item(1, 3)]
    assert [item.order for item in by_rank(items)] == [3, 4, 1, 2]
    loser = victim(items)
    assert loser is not None
    assert loser.order == 2
    assert victim([]) is None


@pytest.mark.parametrize(
    ("start", "end", "budget", "marks", "stop"),
    [
        (0, 100, 18, (), 16),  # to the end of a page
        (0, 15, 18, (), 15),  # all of it
        (14, 100, 1, (), 15),  # no page's end in reach
        (0, 100, 64, (20, 40), 20),  # not beyond a mark
        (20, 100, 64, (20, 40), 40),
        (40, 43, 64, (20, 40), 43),
    ],
)
def test_where_a_chunk_stops(start: int, end: int, budget: int, marks: tuple[int, ...], stop: int) -> None:
    assert chunk_stop(start, end, budget, 4, marks) == stop


def test_a_chunk_that_does_not_fit_is_halved_to_a_page() -> None:
    stops = [64]
    while (less := shorter(10, stops[-1], 4)) < stops[-1]:
        stops.append(less)
    assert stops == [64, 36, 20, 12]
