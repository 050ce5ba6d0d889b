"""The curve of one pass equals LRU caches of every size, served one by one."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccache.cli.hit_curves import BlockPath, curve
from asynccache.cli.traces import Trace, TraceRequest, paths_of, read_trace

REAL = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
PUBLISHED = {1_000: 0.047, 10_000: 0.224, 30_000: 0.345, 100_000: 0.380}


def lru(paths: Sequence[BlockPath], capacity: int) -> int:
    """Lookups that hit, by doing it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for path in paths:
        for key in path:
            if key not in cache:
                break
            hits += 1
        for key in reversed(path):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def tree_of(shapes: Sequence[Sequence[int]]) -> list[BlockPath]:
    known: dict[tuple[int, ...], int] = {}
    return [[known.setdefault(tuple(s[: i + 1]), len(known)) for i in range(len(s))] for s in shapes]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25))
def test_one_pass_equals_an_lru_of_every_size(drawn: list[list[int]]) -> None:
    requests = tree_of(drawn)
    found = curve(requests)
    assert found.lookups == sum(map(len, requests))
    for capacity in range(found.blocks + 2):
        assert found.found(capacity) == lru(requests, capacity), capacity


def test_long_time_lines() -> None:
    rng = random.Random(3)
    shapes = [[rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(300)]
    requests = tree_of(shapes)
    found = curve(requests)
    for capacity in (0, 1, 2, 5, 17, 40, 100, 1000):
        assert found.found(capacity) == lru(requests, capacity), capacity


def test_nothing_asked_is_no_hit() -> None:
    found = curve([])
    assert (found.found(0), found.found(10), found.lookups, found.blocks) == (0, 0, 0, 0)


def test_a_block_counts_under_its_prefix_only_and_when_it_is_full() -> None:
    trace = Trace([TraceRequest(0, 1024, 1, (1, 2)), TraceRequest(0, 1024, 1, (3, 2)),
                   TraceRequest(0, 1023, 1, (1, 2))])
    assert [len(path) for path in paths_of(trace)] == [2, 2, 1]
    found = curve(list(paths_of(trace)))
    assert (found.lookups, found.blocks) == (5, 4)
    assert [found.found(c) for c in range(5)] == [0, 0, 0, 1, 1]  # 1 was pushed below 3 and the second 2


@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_recorded_trace_gives_the_published_figures() -> None:
    found = curve(list(paths_of(read_trace(str(REAL)))))
    assert (found.lookups, int(found.hits[-1])) == (276_491, 105_592)
    for capacity, ratio in PUBLISHED.items():
        assert found.found(capacity) / found.lookups == pytest.approx(ratio, abs=0.0006)
