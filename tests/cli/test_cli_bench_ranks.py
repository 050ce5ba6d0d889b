"""``asynccache bench ranks`` over real processes: what it counts is exact, what it times is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asynccache.cli.bench_ranks import GOAL_EMPTY_US, POOLS, parse
from asynccache.cli.main import main
from asynccache.ranks import Frames, Topology


def test_a_topology_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("tp2-cp2-pp4") == Topology(2, 2, 4)
    assert parse("pp3") == Topology(pp=3)
    for word in ("", "tp", "tp0", "dp2", "2"):
        with pytest.raises(SystemExit) as refused:
            main(["bench", "ranks", "--topology", word])
        assert refused.value.code == 2
    assert "is no topology; one is tp2-pp2" in capsys.readouterr().err


@pytest.mark.ranks
def test_what_a_step_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ranks.json"
    assert main(["bench", "ranks", "--topology", "tp2-pp2", "--steps", "60", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    figures = report["topologies"]["tp2-pp2"]
    frame = Frames(POOLS).length * 8
    assert figures["empty"]["messages"] == 0
    assert 0 < figures["empty"]["us"] < 10 * GOAL_EMPTY_US
    assert figures["stages"] == [
        {"reductions": 1, "frames": 1, "bytes": 2 * frame},
        {"reductions": 0, "frames": 1, "bytes": frame},
    ]
    full, bare, inside = (figures[name]["p50_us"] for name in ("full", "bare", "bare_in_thread"))
    assert inside < bare
    assert figures["ratio"] == pytest.approx(full / bare, rel=0.01)
    assert figures["ratio_in_thread"] == pytest.approx(full / inside, rel=0.01)
    assert all(len(line) <= 80 for line in capsys.readouterr().err.splitlines())


@pytest.mark.ranks
def test_a_step_reduces_once_in_each_of_two_groups(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    assert main(["bench", "ranks", "--topology", "tp2-cp2", "--steps", "20", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["topologies"]["tp2-cp2"]
    assert figures["empty"]["messages"] == 0
    assert figures["stages"] == [{"reductions": 2, "frames": 0, "bytes": 2 * Frames(POOLS).length * 8}]
