"""A recorded trace with little room: on one tier as many hits as an LRU over blocks, and on three tiers everything that
one of them holds is a hit.

``test_cli_runs`` has the rest of it.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main
from asynccache.cli.traces import BLOCK_TOKENS
from tests.cli.trace_kit import BY_BLOCK

REAL = os.environ.get("ASYNCCACHE_TRACE", "")
IMPLIED = 105_592 / 276_491
needs_trace = pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")


def replay(tmp_path: Path, *arguments: str, blocks: int = 276_491) -> dict[str, Any]:
    report = tmp_path / "report.json"
    assert main(["replay", REAL, *BY_BLOCK, "--concurrency", "1", "--quiet", "--json", str(report), *arguments]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["blocks"]["total"] == blocks
    assert found["verify"]["mismatches"] == 0
    assert set(found["leaks"].values()) == {0}
    return found


def lru(capacity: int, limit: int | None = None) -> tuple[int, int]:
    """Hits and blocks of an LRU over full blocks, for all requests or the first. Each path is touched leaf first, so
    that no block outlives its parent."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hit = total = 0
    for line in Path(REAL).read_text().splitlines()[:limit]:
        row = json.loads(line)
        prefix, path = 0, []
        for block in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]:
            prefix = hash((prefix, block))
            path.append((prefix, block))
        total += len(path)
        for key in path:
            if key not in cache:
                break
            hit += 1
        for key in reversed(path):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit, total


@pytest.mark.soak
@needs_trace
@pytest.mark.parametrize(("blocks", "published"), [(10_000, 0.224), (100_000, 0.380)])
def test_one_tier_does_as_well_as_an_lru_over_blocks(blocks: int, published: float, tmp_path: Path) -> None:
    hit, total = lru(blocks)
    assert hit / total == pytest.approx(published, abs=0.001)
    found = replay(tmp_path, "--device-tokens", str(blocks * BLOCK_TOKENS), "--host-tokens", "none")
    assert found["blocks"]["hit"] / found["blocks"]["total"] >= hit / total - 0.001
    assert found["evicted"]["device"] > 0


@pytest.mark.slow(5)
@needs_trace
def test_of_the_first_requests_too(tmp_path: Path) -> None:
    hit, total = lru(300, 800)
    found = replay(
        tmp_path, "--device-tokens", str(300 * BLOCK_TOKENS), "--host-tokens", "none", "--limit", "800",
        blocks=total,
    )  # fmt: skip
    assert hit > 100
    assert found["blocks"]["hit"] / found["blocks"]["total"] >= hit / total - 0.001
    assert found["evicted"]["device"] > 0


def three_tiers(device: int, host: int) -> list[str]:
    """So many blocks in L1 and in L2, and L3 without limit."""
    return ["--device-tokens", str(device * BLOCK_TOKENS), "--host-tokens", str(host * BLOCK_TOKENS),
            "--storage", "memory:?capacity=2GiB", "--bytes-per-token", "4"]  # fmt: skip


@pytest.mark.slow(8)
@needs_trace
def test_three_tiers_hold_what_any_of_them_holds(tmp_path: Path) -> None:
    """Of the first requests: what one of the tiers has is a hit."""
    hit, total = lru(1 << 20, limit=2500)
    found = replay(tmp_path, "--limit", "2500", *three_tiers(300, 2_000), blocks=total)
    assert found["blocks"]["hit"] / total == pytest.approx(hit / total, abs=0.01)
    assert min(found["tokens"]["hit"].values()) > 300_000
    assert min(found["evicted"].values()) > 10_000
    assert found["lost_pages"] == 0


@pytest.mark.soak
@needs_trace
def test_three_tiers_hold_what_any_of_them_holds_of_the_whole_trace(tmp_path: Path) -> None:
    found = replay(tmp_path, *three_tiers(1_000, 10_000))
    assert found["blocks"]["hit"] / found["blocks"]["total"] == pytest.approx(IMPLIED, abs=0.01)
    assert min(found["tokens"]["hit"].values()) > 5_000_000
    assert min(found["evicted"].values()) > 100_000
    assert found["lost_pages"] == 0
