"""Which prefixes can be restored, against a count that looks at every prefix."""

from __future__ import annotations

from random import Random

from asynccache_sglang.hits import PoolPresence, RestorablePages, fold, leading


def test_leading_stops_at_the_first_that_is_not_there() -> None:
    assert [leading(there) for there in ([], [False, True], [True, True, False, True], [True, True])] == [0, 0, 2, 2]


def test_kv_alone() -> None:
    assert fold("kv", [True, True, False, True], []) == RestorablePages(2, {"kv": 2}, [1, 2])
    assert fold("kv", [False, True], [PoolPresence("swa", [True, True], 1)]) == RestorablePages(0, {}, [])


def test_all_pages_end_at_the_first_hole() -> None:
    asked = [PoolPresence("indexer", [True, True, False, True])]
    assert fold("kv", [True] * 4, asked) == RestorablePages(2, {"kv": 4, "indexer": 2}, [1, 2])


def test_trailing_pages_can_be_there_for_five_and_not_for_four() -> None:
    asked = [PoolPresence("mamba", [True, False, False, False, True], 1)]
    assert fold("kv", [True] * 5, asked) == RestorablePages(5, {"kv": 5, "mamba": 5}, [1, 5])


def test_a_prefix_shorter_than_the_window_needs_what_there_is_of_it() -> None:
    assert fold("kv", [True] * 2, [PoolPresence("swa", [True, True], 3)]).restorable == [1, 2]


def test_pools_that_end_at_different_pages_have_nothing_in_common() -> None:
    asked = [PoolPresence("swa", [False, False, True], 1), PoolPresence("mamba", [False, True, False], 1)]
    assert fold("kv", [True] * 3, asked) == RestorablePages(0, {"kv": 3, "swa": 3, "mamba": 2}, [])


def test_any_pools_at_all() -> None:
    random = Random(5)
    for _ in range(2000):
        pages = random.randrange(9)
        there = [[random.random() < 0.7 for _ in range(pages)] for _ in range(3)]
        windows = [random.choice((None, 1, 2, 3)) for _ in range(2)]
        asked = [PoolPresence(f"pool {at}", there[at + 1], window) for at, window in enumerate(windows)]
        expected = [
            length for length in range(1, pages + 1)
            if all(there[0][:length])
            and all(all(one.there[0 if one.window is None else max(0, length - one.window) : length]) for one in asked)
        ]  # fmt: skip
        hits = fold("kv", there[0], asked)
        assert (hits.restorable, hits.pages) == (expected, max(expected, default=0))
