"""``benchmarks/ranks.py`` over real processes: its counts are exact, and every time is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.tables import bench


def test_workers_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for word, must in (("0", "between 1 and 4096"), ("two", "an integer")):
        with pytest.raises(SystemExit):
            bench(ranks, ["--workers", word], prog="ranks")
        said = capsys.readouterr().err
        assert f"--workers: {word} must" in said
        assert must in said


@pytest.mark.slow(6)
def test_what_an_operation_takes_beside_an_echo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ranks.json"
    assert bench(ranks, ["--workers", "2", "--rounds", "50", "--json", str(path)], prog="ranks") == 0
    figures = json.loads(path.read_text())["workers"]["2"]
    for name in ("one", "plan"):
        one = figures[name]
        assert 0 < one["echo_p50_us"] < one["p99_us"]
        assert one["ratio"] == pytest.approx(one["p50_us"] / one["echo_p50_us"], rel=0.01)
    assert figures["one"]["bytes"] * ranks.PLAN / 2 < figures["plan"]["bytes"] < figures["one"]["bytes"] * ranks.PLAN
    assert 0 < figures["cpu_us"] < 10 * ranks.GOAL_CPU_US
    said = capsys.readouterr().out
    assert "head's CPU an operation and worker" in said
    assert "2 workers, plan" in said
