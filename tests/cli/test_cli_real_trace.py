"""The recorded trace in little room: as many hits as an LRU over blocks gets, and all that it implies over three tiers.

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
from asynccache.cli.request import BLOCK_TOKENS

REAL = os.environ.get("ASYNCCACHE_TRACE", "")
IMPLIED = 105_592 / 276_491
needs_trace = pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")


def replay(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    assert main(["replay", REAL, "--concurrency", "1", "--quiet", "--json", str(report), *arguments]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["blocks"]["total"] == 276_491
    assert found["verify"]["mismatches"] == 0
    assert set(found["leaks"].values()) == {0}
    return found


def lru(capacity: int) -> float:
    """The hit ratio of an LRU over full blocks, each path touched leaf first, so that no block outlives its parent."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hit = total = 0
    for line in Path(REAL).read_text().splitlines():
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
    return hit / total


@pytest.mark.slow
@needs_trace
@pytest.mark.parametrize(("blocks", "published"), [(10_000, 0.224), (100_000, 0.380)])
def test_one_tier_does_as_well_as_an_lru_over_blocks(blocks: int, published: float, tmp_path: Path) -> None:
    model = lru(blocks)
    assert model == pytest.approx(published, abs=0.001)
    found = replay(tmp_path, "--device-tokens", str(blocks * BLOCK_TOKENS), "--host-tokens", "none")
    assert found["blocks"]["hit"] / found["blocks"]["total"] >= model - 0.001
    assert found["evicted"]["device"] > 0


@pytest.mark.slow
@needs_trace
def test_three_tiers_hold_what_any_of_them_holds(tmp_path: Path) -> None:
    """1,000 blocks in L1, 10,000 in L2, L3 without limit: what one of them has is a hit."""
    found = replay(tmp_path, "--device-tokens", str(1_000 * BLOCK_TOKENS), "--host-tokens", str(10_000 * BLOCK_TOKENS),
                   "--storage", "memory:?capacity=2GiB", "--bytes-per-token", "4")  # fmt: skip
    assert found["blocks"]["hit"] / found["blocks"]["total"] == pytest.approx(IMPLIED, abs=0.01)
    assert min(found["tokens"]["hit"].values()) > 5_000_000
    assert min(found["evicted"].values()) > 100_000
    assert found["lost_pages"] == 0
