"""The count of different pages is right within the sketch's error, and with it the ceiling of the hit ratio."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from asynccache.cli.traces import Trace, TraceRequest, paths_of, read_trace
from asynccache.cli.workloads import block_tokens
from asynccache.runtime.distinct import DistinctPages
from tests.runtime.runtime_kit import PAGE, opened, serve, settings, text

REAL = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
SPACE = b"\x07" * 32
ERROR = 0.0081
"""One standard error of 2**14 registers: 1.04 / 128."""


def tokens(seed: int, pages: int, page: int = 16) -> bytes:
    return np.random.default_rng(seed).integers(0, 1 << 17, pages * page, dtype=np.int32).tobytes()


@pytest.mark.parametrize("pages", [0, 1, 7, 100, 3_000, 20_000, 41_000, 60_000, 250_000])
def test_the_count_is_within_four_standard_errors_at_any_size(pages: int) -> None:
    found, one = DistinctPages(16), 250
    for seed in range(-(-pages // one)):
        count = min(one, pages - seed * one)
        found.add(SPACE, tokens(seed, count), 0, count)
    assert abs(found.count() - pages) <= max(0.5 * (pages < 10), 4 * ERROR * pages)


def test_the_error_has_no_bias_and_the_spread_that_is_promised() -> None:
    errors = []
    for seed in range(40):
        found = DistinctPages(16)
        for part in range(20):
            found.add(SPACE, tokens(1000 * seed + part, 500), 0, 500)
        errors.append(found.count() / 10_000 - 1)
    assert abs(np.mean(errors)) < 3 * ERROR / 40**0.5
    assert np.std(errors) < 1.5 * ERROR


def test_a_page_is_its_tokens_and_all_before_them_and_its_namespace() -> None:
    found, one, other = DistinctPages(16), tokens(1, 3), tokens(2, 3)
    found.add(SPACE, one, 0, 3)
    found.add(SPACE, one + other, 0, 3)
    found.add(SPACE, one, 1, 3)
    assert round(found.count()) == 3
    found.add(SPACE, other + one, 0, 6)  # the same pages behind others
    assert round(found.count()) == 9
    found.add(b"\xff" * 32, one, 0, 3)
    assert round(found.count()) == 12
    page = np.frombuffer(one, np.int32, 16)
    found.add(SPACE, page[::-1].tobytes(), 0, 1)
    found.add(SPACE, np.concatenate([page[1:], page[:1]]).tobytes(), 0, 1)
    found.add(SPACE, np.zeros(32, np.int32).tobytes(), 0, 2)
    assert round(found.count()) == 16


def counted(trace: Trace) -> tuple[DistinctPages, int]:
    """The sketch after all full blocks of the trace, and how many different ones there are."""
    found, size = DistinctPages(trace.block_size), trace.block_size
    for request in trace.requests:
        if full := len(trace.path(request)):
            found.add(SPACE, block_tokens(request.blocks, full * size, size).tobytes(), 0, full)
    return found, len({key for path in paths_of(trace) for key in path})


def test_the_count_of_the_example_trace_is_exact_to_the_sketch() -> None:
    found, exact = counted(read_trace(str(Path(__file__).parents[2] / "examples" / "trace.jsonl")))
    assert abs(found.count() / exact - 1) < 4 * ERROR
    rows = [TraceRequest(0, 32 * len(blocks), 1, blocks) for blocks in ((1, 2, 3), (1, 2, 4), (2, 3))]
    found, exact = counted(Trace(rows, 32))
    assert (round(found.count()), exact) == (6, 6)


@pytest.mark.slow(2)
@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_count_of_the_recorded_trace_is_exact_to_the_sketch() -> None:
    found, exact = counted(read_trace(str(REAL)))
    assert exact == 276_491 - 105_592
    assert abs(found.count() / exact - 1) < 3 * ERROR


@pytest.mark.asyncio
async def test_the_ceiling_is_what_an_endless_cache_would_have_had() -> None:
    """Three conversations in turns, in a cache with room for one: nothing hits, and two thirds could."""
    async with opened(settings(device=6)) as cache:
        assert cache.statistics().lookups.ceiling == 0
        for _ in range(3):
            for seed in range(3):
                await serve(cache, text(4, seed=seed, extra=1))
        found = cache.statistics().lookups
        assert (found.hit_ratio, found.tokens, found.new_tokens) == (0, 36 * PAGE, 12 * PAGE)
        assert found.ceiling == pytest.approx(2 / 3)
        assert "more than about 66.7%" in str(cache.statistics())
        for _ in range(9):
            await serve(cache, text(4, seed=2, extra=1))
        found = cache.statistics().lookups
        assert found.new_tokens == 12 * PAGE
        assert found.hit_ratio < found.ceiling == pytest.approx(1 - 12 / 72)
