"""The hit-rate curves of ``plan`` agree with those of ``kvcache-simulator`` (PyPI, by KVCache.AI), which was written by
others: on the same trace, for LRU and for the best possible cache, within .2 points. It counts the second half of the
requests, and knows no partial blocks that do not count; so both are given whole blocks, and both halves are told apart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asynccache.cli.hit_curves import curve, next_uses, optimum
from asynccache.cli.traces import paths_of, read_trace
from tests.cli.trace_kit import made_trace

trace = pytest.importorskip("kvcache_sim.trace", reason="needs kvcache-simulator: pip install kvcache-simulator")
plan = pytest.importorskip("kvcache_sim.plan")
policies = pytest.importorskip("kvcache_sim.policies")

REAL = os.environ.get("ASYNCCACHE_TRACE", "")
EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"


def whole_blocks(source: str, path: Path) -> str:
    """Write the trace without what is no whole block, in the simulator's own form."""
    found = read_trace(source)
    rows = [{"timestamp": request.timestamp, "block_size": found.block_size, "output_length": 1,
             "input_length": len(blocks) * found.block_size, "hash_ids": blocks}
            for request in found.requests if (blocks := list(found.path(request)))]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compared(path: str, capacities: tuple[int, ...]) -> list[tuple[str, int, float, float]]:
    """Policy, capacity, our hit ratio of the second half, and theirs."""
    paths = list(paths_of(read_trace(path)))
    half = len(paths) // 2
    asked = sum(len(one) for one in paths[half:])
    whole, first, uses = curve(paths), curve(paths[:half]), next_uses(paths)
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
    pytest.param(REAL, (1_000, 3_000, 10_000, 30_000), marks=pytest.mark.skipif(
        not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")),
])  # fmt: skip
def test_the_curves_agree(tmp_path: Path, source: str, capacities: tuple[int, ...]) -> None:
    if source == "made":
        source = str(made_trace(tmp_path / "made.jsonl", 60))
    for policy, capacity, ours, theirs in compared(whole_blocks(source, tmp_path / "t.jsonl"), capacities):
        assert abs(ours - theirs) <= 0.002, (policy, capacity)
