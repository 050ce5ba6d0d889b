"""What a trace could hit: the curve, the optimum, the plan, and a program of others that says the same."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccache.cli.hit_curves import BlockPath, curve, next_uses, optimum
from asynccache.cli.hit_curves import policy_hits as found
from asynccache.cli.plan import text
from asynccache.cli.traces import Trace, TraceRequest, arrivals, paths_of, read_trace
from tests.cli.trace_kit import REAL, blocks_trace, made_trace, needs_trace, write_trace
from tests.processes import Command

# ``asynccache plan``: its hit ratios are those of the curve, its seconds those of the model.


BLOCK = 512
GIB_OF_BLOCKS = "8"  # at 2 GiB a block: four blocks


def eight_blocks(path: Path) -> Path:
    """a b c d twice, then e f g h, then a b c d, which needs eight blocks: 16 blocks, 8 hits at most."""
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    return blocks_trace(path, ((1000 * i, ids) for i, ids in enumerate([first, first, second, first])))


@pytest.fixture
def planned(tmp_path: Path, command: Command) -> Callable[..., tuple[dict[str, Any], str]]:
    """Plans with eight blocks; the plan, and what is shown of it."""

    def done(*arguments: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "plan.json"
        said = command("plan", eight_blocks(tmp_path / "trace.jsonl"), "--bytes-per-token", 4 << 20, "--device-tokens",
                       "0", "--json", out, "--prefill-tokens-per-s", "100", "--host-gb-per-s", "4.194304",
                       "--storage-gb-per-s", "2.097152", *arguments)  # fmt: skip
        return json.loads(out.read_text()), said.stdout

    return done


def test_hits_and_seconds_by_hand(planned: Any) -> None:
    """A token is 4 MiB: 10 ms to compute, 1 ms from the host, 3 ms from storage."""
    found, said = planned("--host-gib", "2,8", "--storage-gib", "16", "--eviction", "lru")
    device, small, host, storage = found["rows"]
    assert [row["hit_ratio"] for row in found["rows"]] == [0, 1 / 16, 4 / 16, 8 / 16]
    assert small["tokens"] == BLOCK
    assert device["saved_s"] == 0
    assert small["saved_s"] == pytest.approx(1 * BLOCK * 0.009, abs=1e-3)
    assert host["saved_s"] == pytest.approx(4 * BLOCK * 0.009, abs=1e-3)
    assert storage["saved_s"] == pytest.approx(4 * BLOCK * 0.009 + 4 * BLOCK * 0.007, abs=1e-3)
    assert host["adds_s_per_gib"] == pytest.approx(3 * BLOCK * 0.009 / 6, abs=1e-3)
    assert storage["adds_s_per_gib"] == pytest.approx(4 * BLOCK * 0.007 / 16, abs=1e-3)
    assert (found["highest_hit_ratio"], found["highest_needs_gib"], found["seconds"]) == (0.5, 16.0, 3.0)
    assert found["tokens_per_end"] == 4 * BLOCK, "eight blocks, and two prompts end"
    assert [row["lru"] for row in found["rows"]] == [0, 1 / 16, 4 / 16, 8 / 16]
    assert [row["optimum"] for row in found["rows"]] == [0, 2 / 16, 8 / 16, 8 / 16], "a is kept, and b; all four"
    shown = said.splitlines()
    assert max(map(len, shown)) <= 80
    assert sum("GiB" in line or "L2 host" in line for line in shown) >= 3


def test_a_host_adds_to_the_device_and_storage_has_what_both_have(planned: Any) -> None:
    found, _ = planned("--device-tokens", str(2 * BLOCK), "--host-gib", "2,8", "--storage-gib", "4,16")
    assert [row["tokens"] // BLOCK for row in found["rows"]] == [2, 3, 6, 6, 8]


def test_the_policy_in_use_is_played_through_the_core(tmp_path: Path) -> None:
    """Four blocks fit: a b c d hit once, and are gone when they come back. Eight fit: they hit again. A node goes
    whole."""
    requests = list(paths_of(read_trace(str(eight_blocks(tmp_path / "t.jsonl")))))
    times = [float(i) for i in range(len(requests))]
    assert [found(requests, size, "lru", times) for size in (0, 1, 3, 4, 6, 8)] == [0, 0, 0, 4, 4, 8]


def test_the_policy_stands_beside_lru_and_the_best(planned: Any) -> None:
    shown = text(planned("--host-gib", "2,8")[0] | {"eviction": "p2c"}).splitlines()
    assert max(map(len, shown)) <= 80
    head, device = next((a, b) for a, b in pairwise(shown) if a.split()[:1] == ["GiB"])
    assert head.split() == ["GiB", "tokens", "hits", "LRU", "best", "saved", "s", "per", "GiB"]
    assert device.split() == ["L1", "device", "0", "0", *["0.0", "%"] * 3, "0", "s", "0.00"]
    assert any("under p2c" in line for line in shown)


def test_a_tier_that_is_slower_than_computing_is_named(planned: Any) -> None:
    found, shown = planned("--host-gib", GIB_OF_BLOCKS, "--storage-gib", "16", "--storage-gb-per-s", "0.1")
    assert found["rows"][-1]["adds_s_per_gib"] < 0
    assert "from L3 takes longer than computing it" in shown
    assert "from L2 takes longer" not in shown


# The curve of one pass equals LRU caches of every size, served one by one.


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25))
def test_one_pass_equals_an_lru_of_every_size(drawn: list[list[int]]) -> None:
    requests, _ = tree_with_parents(drawn)
    found = curve(requests)
    assert found.lookups == sum(map(len, requests))
    for capacity in range(found.blocks + 2):
        assert found.found(capacity) == lru(requests, capacity), capacity


def test_long_time_lines() -> None:
    rng = random.Random(3)
    shapes = [[rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(300)]
    requests, _ = tree_with_parents(shapes)
    found = curve(requests)
    for capacity in (0, 1, 2, 5, 17, 40, 100, 1000):
        assert found.found(capacity) == lru(requests, capacity), capacity


def test_a_block_counts_under_its_prefix_only_and_when_it_is_full() -> None:
    trace = Trace([TraceRequest(0, 1024, 1, (1, 2)), TraceRequest(0, 1024, 1, (3, 2)),
                   TraceRequest(0, 1023, 1, (1, 2))])
    assert [len(path) for path in paths_of(trace)] == [2, 2, 1]
    found = curve(list(paths_of(trace)))
    assert (found.lookups, found.blocks) == (5, 4)
    assert [found.found(c) for c in range(5)] == [0, 0, 0, 1, 1]  # 1 was pushed below 3 and the second 2


@needs_trace
def test_the_recorded_trace_gives_the_published_figures() -> None:
    found = curve(list(paths_of(read_trace(REAL))))
    assert (found.lookups, int(found.hits[-1])) == (276_491, 105_592)
    for capacity, ratio in PUBLISHED.items():
        assert found.found(capacity) / found.lookups == pytest.approx(ratio, abs=0.0006)


# The offline optimum equals the best of all sequences of evictions, and bounds every policy.


OPTIMA = {1_000: 0.199, 3_000: 0.307, 10_000: 0.382, 30_000: 0.382}


def tree_with_parents(shapes: Sequence[Sequence[int]]) -> tuple[list[BlockPath], dict[int, int]]:
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
    requests, parents = tree_with_parents(drawn)
    uses = next_uses(requests)
    for capacity in range(5):
        assert optimum(requests, uses, capacity) == best(requests, parents, capacity), capacity


def test_it_bounds_the_core_and_lru_and_all_find_everything_where_all_fits() -> None:
    rng = random.Random(5)
    shapes = [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(400)]
    requests, parents = tree_with_parents(shapes)
    uses, lru, times = next_uses(requests), curve(requests), [0.5 * i for i in range(len(requests))]
    before = 0
    for capacity in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        most = optimum(requests, uses, capacity)
        assert max(before, lru.found(capacity), found(requests, capacity, "lru", times)) <= most
        before = most
    assert optimum(requests, uses, len(parents)) == int(lru.hits[-1]) == found(requests, len(parents), "lru", times)


@needs_trace
def test_the_recorded_trace_gives_the_published_optimum() -> None:
    requests = list(paths_of(read_trace(REAL)))
    uses = next_uses(requests)
    for capacity, ratio in OPTIMA.items():
        assert optimum(requests, uses, capacity) / 276_491 == pytest.approx(ratio, abs=0.0005)


@pytest.mark.soak
@needs_trace
def test_p2c_closes_the_gap_from_lru_to_the_optimum_on_the_recorded_trace() -> None:
    trace = read_trace(REAL)
    requests = list(paths_of(trace))
    uses, lru, times = next_uses(requests), curve(requests), arrivals(trace, 1.0)
    for capacity, share in {1_000: 0.22, 3_000: 0.26, 10_000: 0.09, 30_000: 0.03}.items():
        least, most = lru.found(capacity), optimum(requests, uses, capacity)
        assert found(requests, capacity, "p2c", times) >= least + share * (most - least), capacity


# The hit-rate curves agree with those of ``kvcache-simulator`` (PyPI, by KVCache.AI), which was written by others: on
# the same trace, for LRU and for the best possible cache, within .2 points. It counts the second half of the requests,
# and knows no partial blocks that do not count; so both are given whole blocks, and both halves are told apart.


EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"


def whole_blocks(source: str, path: Path) -> str:
    """Write the trace without what is no whole block, in the simulator's own form."""
    found = read_trace(source)
    rows = [{"timestamp": request.timestamp, "block_size": found.block_size, "output_length": 1,
             "input_length": len(blocks) * found.block_size, "hash_ids": blocks}
            for request in found.requests if (blocks := list(found.path(request)))]  # fmt: skip
    return str(write_trace(path, rows))


def compared(path: str, capacities: tuple[int, ...]) -> list[tuple[str, int, float, float]]:
    """Policy, capacity, our hit ratio of the second half, and theirs."""
    paths = list(paths_of(read_trace(path)))
    half = len(paths) // 2
    asked = sum(len(one) for one in paths[half:])
    whole, first, uses = curve(paths), curve(paths[:half]), next_uses(paths)
    reason = "needs kvcache-simulator: pip install kvcache-simulator"
    trace, plan, policies = (pytest.importorskip(f"kvcache_sim.{name}", reason=reason)
                             for name in ("trace", "plan", "policies"))  # fmt: skip
    theirs = plan.build_execution_plan(trace.parse_trace_file(path), warmup_fraction=0.5)
    found = []
    for capacity in capacities:
        ours = {"lru": whole.found(capacity) - first.found(capacity),
                "optimal": optimum(paths, uses, capacity) - optimum(paths[:half], uses[:half], capacity)}
        for policy, hits in ours.items():
            result = policies.simulate_policy(theirs, policy, capacity)
            assert result.measurementMode == "fixed_window", "the first half fills the cache"
            found.append((policy, capacity, hits / asked, result.hitRate))
    return found


@pytest.mark.parametrize(("source", "capacities"), [
    (str(EXAMPLE), (5, 10, 20, 40)), ("made", (20, 50, 100)),
    pytest.param(REAL, (1_000, 3_000, 10_000, 30_000), marks=needs_trace),
])  # fmt: skip
def test_the_curves_agree_with_kvcache_simulator(tmp_path: Path, source: str, capacities: tuple[int, ...]) -> None:
    if source == "made":
        source = str(made_trace(tmp_path / "made.jsonl", 60))
    for policy, capacity, ours, theirs in compared(whole_blocks(source, tmp_path / "t.jsonl"), capacities):
        assert abs(ours - theirs) <= 0.002, (policy, capacity)
