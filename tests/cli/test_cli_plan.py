"""``asynccache plan``: its hit ratios are those of the curve, its seconds those of the model."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.hit_curves import policy_hits as found
from asynccache.cli.main import main
from asynccache.cli.plan import text
from asynccache.cli.traces import paths_of, read_trace
from asynccache.core.eviction import EvictionPolicy, Order
from asynccache.core.policies import POLICIES
from asynccache.core.tree import Node

REAL = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
BLOCK = 512
GIB_OF_BLOCKS = "8"  # at 2 GiB a block: four blocks


def write_trace(path: Path) -> Path:
    """a b c d twice, then e f g h, then a b c d, which needs eight blocks: 16 blocks, 8 hits at most."""
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    rows = [{"timestamp": 1000 * i, "input_length": 4 * BLOCK, "output_length": 1, "hash_ids": ids}
            for i, ids in enumerate([first, first, second, first])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    trace = write_trace(tmp_path / "trace.jsonl")
    assert main(["plan", str(trace), "--bytes-per-token", str(4 << 20), "--device-tokens", "0", "--json", str(out),
                 "--prefill-tokens-per-s", "100", "--host-gb-per-s", "4.194304", "--storage-gb-per-s", "2.097152",
                 *arguments]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_replay_in_ample_room_reaches_the_highest_ratio_of_the_plan(tmp_path: Path) -> None:
    """Both have one definition, also where prompts end inside a page."""
    out, trace = tmp_path / "run.json", tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 2 * BLOCK + 300, "output_length": 1, "hash_ids": [1, 2, 3 + i]}
            for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(trace), "--concurrency", "1", "--host-tokens", "none", "--quiet", "--json",
                 str(out)]) == 0
    report = json.loads(out.read_text())
    assert main(["plan", str(trace), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["highest_hit_ratio"] == round(report["hit_ratio"], 5) == round(6 * BLOCK / (4 * 1324), 5)
    assert found["hit_ratio_is"] == report["hit_ratio_is"]


def test_hits_and_seconds_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token is 4 MiB: 10 ms to compute, 1 ms from the host, 3 ms from storage."""
    found = planned(tmp_path, "--host-gib", "2,8", "--storage-gib", "16", "--eviction", "lru")
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
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert sum("GiB" in line or "L2 host" in line for line in shown) >= 3


def test_a_host_adds_to_the_device_and_storage_has_what_both_have(tmp_path: Path) -> None:
    found = planned(tmp_path, "--device-tokens", str(2 * BLOCK), "--host-gib", "2,8", "--storage-gib", "4,16")
    assert [row["tokens"] // BLOCK for row in found["rows"]] == [2, 3, 6, 6, 8]


def test_the_policy_in_use_is_played_through_the_core(tmp_path: Path) -> None:
    """Four blocks fit: a b c d hit once, and are gone when they come back. Eight fit: they hit again. A node goes
    whole."""
    requests = list(paths_of(read_trace(str(write_trace(tmp_path / "t.jsonl")))))
    times = [float(i) for i in range(len(requests))]
    assert [found(requests, size, "lru", times) for size in (0, 1, 3, 4, 6, 8)] == [0, 0, 0, 4, 4, 8]


class Newest(EvictionPolicy):
    """Keeps what came first."""

    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].newest() if order.rest[0].slices else None


def test_a_policy_of_ones_own_is_played_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks: a b c d hits once, and goes whole for e f g h. LRU over pages would keep a and b."""
    monkeypatch.setitem(POLICIES, "newest", lambda config: Newest())
    found = planned(tmp_path, "--host-gib", "12", "--storage-gib", "", "--eviction", "newest")
    host = found["rows"][-1]
    assert (host["lru"], host["hit_ratio"]) == (6 / 16, 4 / 16)


def test_the_policy_stands_beside_lru_and_the_best(tmp_path: Path) -> None:
    shown = text(planned(tmp_path, "--host-gib", "2,8") | {"eviction": "p2c"}).splitlines()
    assert max(map(len, shown)) <= 80
    head, device = next((a, b) for a, b in pairwise(shown) if a.split()[:1] == ["GiB"])
    assert head.split() == ["GiB", "tokens", "hits", "LRU", "best", "saved", "s", "per", "GiB"]
    assert device.split() == ["L1", "device", "0", "0", *["0.0", "%"] * 3, "0", "s", "0.00"]
    assert any("under p2c" in line for line in shown)


def test_a_tier_that_is_slower_than_computing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--host-gib", GIB_OF_BLOCKS, "--storage-gib", "16", "--storage-gb-per-s", "0.1")
    assert found["rows"][-1]["adds_s_per_gib"] < 0
    shown = capsys.readouterr().out
    assert "from L3 takes longer than computing it" in shown
    assert "from L2 takes longer" not in shown


def test_json_alone_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write_trace(tmp_path / "t.jsonl")), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "plan"


@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_recorded_trace(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(REAL), "--bytes-per-token", "131072", "--device-tokens", str(1000 * BLOCK),
                 "--host-gib", "125,562.5", "--storage-gib", "1875", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    blocks_of = 276_491 * BLOCK / 144_793_823
    assert [row["tokens"] // BLOCK for row in rows] == [1_000, 3_000, 10_000, 30_000]
    lru, best = ([row[name] / blocks_of for row in rows] for name in ("lru", "optimum"))
    assert lru == pytest.approx([0.047, 0.070, 0.224, 0.345], abs=0.0008)
    assert best == pytest.approx([0.199, 0.307, 0.382, 0.382], abs=0.0008)
