"""``benchmarks/eviction_policies.py`` plays what it says, and says so when ``p2c`` falls below ``lru``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.hit_curves import BlockPath, curve
from asynccache.core.eviction import EvictionPolicy, Order
from asynccache.core.policies import POLICIES
from asynccache.core.tree import Node
from benchmarks.eviction_policies import Workload, hits, main


def drawn(count: int) -> Workload:
    """Requests of up to ten blocks, many of which begin like earlier ones."""
    draws, known = random.Random(3), [[0]]
    paths: list[BlockPath] = []
    fresh = iter(range(1, 1 << 20))
    for _ in range(count):
        start = draws.choice(known[-30:])
        path = start[: draws.randint(1, len(start))] + [next(fresh) for _ in range(draws.randint(0, 3))]
        known.append(path[:10])
        paths.append(known[-1])
    return Workload(paths, [0.5 * number for number in range(count)])


@pytest.mark.parametrize("eviction", ["lru", "p2c"])
def test_with_room_for_all_both_tiers_find_all_that_was_there_before(eviction: str) -> None:
    workload = drawn(300)
    found = curve(workload.paths)
    assert hits(workload, 2 * found.blocks, True, eviction) == found.hits[-1]


def test_device_and_host_find_what_one_lru_of_both_sizes_does_but_for_few_blocks() -> None:
    """A copy stays on the host for a while after its blocks were loaded, so both together hold a little less."""
    workload = drawn(1500)
    for size in (100, 200, 400):
        alone = curve(workload.paths).found(size)
        assert alone * 0.95 <= hits(workload, size, True, "lru") <= alone


class Mru(EvictionPolicy):
    """Most recently used first."""

    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].newest() if order.rest[0].slices else None


@pytest.mark.parametrize("bad", [False, True])
def test_a_policy_below_lru_is_told_by_the_exit_status(
    bad: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "p2c", lambda config: Mru() if bad else POLICIES["lru"](config))
    trace = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": at * 1000, "input_length": 512 * len(path), "output_length": 1, "hash_ids": list(path)}
        for path, at in zip(*drawn(400), strict=True)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(trace), "--sizes", "100", "--json"]) == int(bad)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["workload"], row["host"]) for row in rows} >= {("trace", False), ("trace", True), ("no reuse", False)}
    assert all(row["difference"] == row["p2c"] - row["lru"] for row in rows)
    assert all(row["lru"] == row["p2c"] == 0 for row in rows if row["workload"] == "no reuse")
    assert bad or all(row["difference"] == 0 for row in rows)


def conversations(count: int) -> Workload:
    """Conversations of four turns with a beginning that all have, eight of them open at a time."""
    draws, fresh, paths = random.Random(5), iter(range(2, 1 << 20)), list[BlockPath]()
    opened: list[list[int]] = []
    for _ in range(count):
        while len(opened) < 8:
            opened.append([0, 1])
        path = draws.choice(opened)
        path += [next(fresh), next(fresh)]
        paths.append(list(path))
        if len(path) == 10:
            opened.remove(path)
    return Workload(paths, [0.5 * number for number in range(count)])


def test_telling_ends_changes_nothing_with_room_for_all_and_finds_more_with_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, trace = conversations(600), tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at * 1000, "input_length": 512 * len(path), "output_length": 1, "hash_ids": path}
        for path, at in zip(*workload, strict=True)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = curve(workload.paths)
    assert main([str(trace), "--ends", "--sizes", f"50,{found.blocks}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [name for _, name, *_ in rows] == ["lru", "p2c", "host"] * 2
    assert all(row[2:] == [f"{found.hits[-1] / found.lookups:.4f}"] * 3 for row in rows[3:])
    for _, _, none, half, everything in rows[:3]:
        assert float(none) < float(half) < float(everything)
