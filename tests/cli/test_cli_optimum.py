"""The offline optimum equals the best of all sequences of evictions, and bounds every policy."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccache.cli.hit_curves import BlockPath, curve, next_uses, optimum
from asynccache.cli.hit_curves import policy_hits as found
from asynccache.cli.traces import arrivals, paths_of, read_trace

REAL = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
PUBLISHED = {1_000: 0.199, 3_000: 0.307, 10_000: 0.382, 30_000: 0.382}


def tree_of(shapes: Sequence[Sequence[int]]) -> tuple[list[BlockPath], dict[int, int]]:
    """Requests for these texts, and the parent of each block (-1: none)."""
    known: dict[tuple[int, ...], int] = {}
    paths: list[BlockPath] = [[known.setdefault(tuple(s[: i + 1]), len(known)) for i in range(len(s))] for s in shapes]
    parents = {block: known.get(text[:-1], -1) for text, block in known.items()}
    return paths, parents


def prefixes(blocks: frozenset[int], parents: dict[int, int], capacity: int) -> Iterator[frozenset[int]]:
    """Every set of at most ``capacity`` of ``blocks`` that has the parent of each of its blocks."""
    for size in range(min(capacity, len(blocks)) + 1):
        for kept in combinations(sorted(blocks), size):
            if all(parents[block] in kept or parents[block] < 0 for block in kept):
                yield frozenset(kept)


def best(paths: Sequence[BlockPath], parents: dict[int, int], capacity: int) -> int:
    """Lookups that hit, by trying every way to evict: after each request any prefixes of what was there and of what
    it used may stay."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            hits += sum(block in held for block in path)
            for kept in prefixes(held | set(path), parents, capacity):
                after[kept] = max(after.get(kept, 0), hits)
        reached = after
    return max(reached.values())


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=7))
def test_it_equals_the_best_of_all_sequences_of_evictions(drawn: list[list[int]]) -> None:
    requests, parents = tree_of(drawn)
    uses = next_uses(requests)
    for capacity in range(5):
        assert optimum(requests, uses, capacity) == best(requests, parents, capacity), capacity


def test_it_bounds_the_core_and_lru_and_all_find_everything_where_all_fits() -> None:
    rng = random.Random(5)
    shapes = [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(400)]
    requests, parents = tree_of(shapes)
    uses, lru, times = next_uses(requests), curve(requests), [0.5 * i for i in range(len(requests))]
    before = 0
    for capacity in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        most = optimum(requests, uses, capacity)
        assert max(before, lru.found(capacity), found(requests, capacity, "lru", times)) <= most
        before = most
    assert optimum(requests, uses, len(parents)) == int(lru.hits[-1]) == found(requests, len(parents), "lru", times)


@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_recorded_trace_gives_the_published_figures() -> None:
    requests = list(paths_of(read_trace(str(REAL))))
    uses = next_uses(requests)
    for capacity, ratio in PUBLISHED.items():
        assert optimum(requests, uses, capacity) / 276_491 == pytest.approx(ratio, abs=0.0005)


@pytest.mark.soak
@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_p2c_closes_the_gap_from_lru_to_the_optimum_on_the_recorded_trace() -> None:
    trace = read_trace(str(REAL))
    requests = list(paths_of(trace))
    uses, lru, times = next_uses(requests), curve(requests), arrivals(trace, 1.0)
    for capacity, share in {1_000: 0.22, 3_000: 0.26, 10_000: 0.09, 30_000: 0.03}.items():
        least, most = lru.found(capacity), optimum(requests, uses, capacity)
        assert found(requests, capacity, "p2c", times) >= least + share * (most - least), capacity
