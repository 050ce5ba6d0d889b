"""``benchmarks/tree.py`` with little of everything: each of its measurements has its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import bench_tree
from benchmarks import tree
from tests.docs import docs_programs


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, few in docs_programs.FEW.items():
        monkeypatch.setattr(bench_tree, name, few)
        if hasattr(tree, name):
            monkeypatch.setattr(tree, name, few)
    monkeypatch.setattr(tree, "SAMPLE", 40)
    path = tmp_path / "tree.json"

    def measure(*arguments: str) -> Any:
        assert tree.main([*arguments, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return measure


def test_growth_has_a_row_for_each_size(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures("growth", "--nodes", "100,200")["growth"]
    assert [row["nodes"] for row in found["full"]] == [row["nodes"] for row in found["all"]] == [100, 200]
    assert found["all"][0]["worst_call"]["evict_slice"]["wall_ms"] > 0
    assert "200 nodes" in capsys.readouterr().err


def test_nodes_that_left_are_weighed(figures: Any) -> None:
    found = figures("ghosts", "--eviction", "p2c")["ghosts"]
    assert found["ghosts"] > found["nodes"] > 0
    assert found["bytes_per_ghost"] > 0
    with pytest.raises(SystemExit, match="lru remembers no node"):
        tree.main(["ghosts"])


def test_metrics_are_counted_on_one_of_two_trees(figures: Any) -> None:
    found = figures("metrics", "--rounds", "1")["metrics"]
    assert found["on_us"].keys() == found["off_us"].keys() == {"insert", "match", "pin", "evict"}
