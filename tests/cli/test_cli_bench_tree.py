"""``benchmarks/tree.py`` and ``benchmarks/runtime.py`` with little of everything: each measurement has its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runtime, tree, tree_calls
from benchmarks.tables import bench, cell, text

FEW = {"PROMPTS": 4, "CONTINUATIONS": 4, "CONVERSATIONS": 2, "TURNS": 3, "MEMORY_NODES": 200, "EVICTED": 256}


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, few in FEW.items():
        monkeypatch.setattr(tree_calls, name, few)
        if hasattr(tree, name):
            monkeypatch.setattr(tree, name, few)
    monkeypatch.setattr(tree, "SAMPLE", 40)
    path = tmp_path / "tree.json"

    def measure(*arguments: str) -> Any:
        assert tree.main([*arguments, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return measure


def test_every_call_is_measured_beside_its_goal(figures: Any) -> None:
    found = figures("--shapes", "0,1")
    assert list(found["shapes"]) == ["full p16", "full,swa,mamba p64"]
    assert all(list(rows) == list(tree_calls.OPERATIONS) for rows in found["shapes"].values())
    assert found["memory"]["all"]["bytes_per_node"] > found["memory"]["full"]["bytes_per_node"] > 0
    assert len(list(tree.charts(found))) == 3


def test_an_await_is_compared_with_the_call_of_the_core(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    assert bench(runtime, ["--calls", "100", "--json", str(path)], prog="python -m benchmarks.runtime") == 0
    found = json.loads(path.read_text())
    assert found["overhead"].keys() == {"uvloop", "asyncio"}
    assert all(calls.keys() == runtime.GOALS_US.keys() for calls in found["overhead"].values())
    assert "tree lock, uvloop" in "".join(map(text, runtime.charts(found)))


def test_growth_has_a_row_for_each_size(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured = figures("growth", "--nodes", "100,200")
    found, slowest = measured["growth"], measured["slowest"]
    assert [row["nodes"] for row in found["full"]] == [row["nodes"] for row in found["all"]] == [100, 200]
    assert found["all"][0]["worst_call"]["evict_slice"]["wall_ms"] > 0
    assert all({"lease", "release"} <= calls.keys() for calls in slowest.values())
    assert slowest["unsaved, 200 leaves of 1 pages"]["drain"]["steps"] > 0
    table = capsys.readouterr().out
    assert "200 nodes" in table
    assert "The slowest call of each kind, refused, 4 leaves of 1,000 pages" in table


def test_nodes_that_left_are_weighed(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures("ghosts", "--eviction", "p2c")["ghosts"]
    table = capsys.readouterr().out
    assert re.search(rf"^bytes for each of them +{cell(found['bytes_per_ghost'])}$", table, re.MULTILINE)
    assert found["ghosts"] > found["nodes"] > 0
    assert found["bytes_per_ghost"] > 0
    with pytest.raises(SystemExit, match="lru remembers no node"):
        tree.main(["ghosts"])


def test_metrics_are_counted_on_one_of_two_trees(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures("metrics", "--rounds", "1")["metrics"]
    assert found["on_us"].keys() == found["off_us"].keys() == {"insert", "match", "pin", "evict"}
    table = capsys.readouterr().out
    assert all(re.search(rf"^{name} +{cell(found['off_us'][name])} ", table, re.MULTILINE) for name in found["off_us"])
    assert re.search(rf"^all calls together +{re.escape(cell(100 * found['all_adds']))} +2", table, re.MULTILINE)
