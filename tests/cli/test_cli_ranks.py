"""``stress`` and ``replay`` over several ranks, each a process: what they report, and what ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from asynccache.cli import ranks
from asynccache.cli.main import main
from asynccache.cli.ranks import entry
from asynccache.worker import Topology
from tests import warm
from tests.cli import interrupt_child
from tests.cli.rank_runs import ENDS, TP2, TP2_PP2, Command, Report, Shape, hits, options, size, sound
from tests.cli.trace_kit import BY_BLOCK, made_trace

HOSTILE = ("--faults", "0.1", "--cancel-rate", "0.2", "--requests", "120", "--rank-delay", "2", "--quiet")


@pytest.fixture(autouse=True)
def _ranks_begin_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


def here(arguments: list[str], status: int = 0) -> Report:
    """A run by this process; its report."""
    assert main(arguments) == status
    report: Report = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())
    return report


def storage(folder: Path) -> str:
    return f"file:{folder}/kv?capacity=64MiB"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TP2, pytest.param(TP2_PP2, marks=pytest.mark.soak)])
def test_ranks_have_the_right_bytes_whatever_fails_or_is_late_on_one(shape: Shape, tmp_path: Path) -> None:
    report = here(options(shape, storage(tmp_path), tmp_path / "report.json", *HOSTILE))
    sound(report, shape)
    hits(report, "device", "host", "storage")
    assert report["requests"] == 120
    assert report["cancelled"] > 0
    assert report["served"] + report["cancelled"] + report["failed"] == 120
    assert report["stages"]["backup_host"]["errors"] > 0
    assert report["stages"]["backup_storage"]["errors"] > 0
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"rank-{i}" for i in range(size(shape))]


@pytest.mark.slow
def test_the_stack_of_deepseek_v4_over_tp_and_cp_with_what_is_replicated(tmp_path: Path) -> None:
    more = ("--sidecars", "deepseek-v4", "--components", "full,swa", "--bytes-per-token", "512", "--replicated",
            "c4:tp,c4_state", "--requests", "40", "--quiet")  # fmt: skip
    arguments = options((2, 2, 1), storage(tmp_path), tmp_path / "report.json", *more)
    for report in (here(arguments), again := here(arguments)):
        sound(report, (2, 2, 1))
    hits(again, "device", "host", "storage")


@pytest.mark.slow
def test_a_replay_over_ranks_hits_what_the_trace_implies_and_then_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = made_trace(tmp_path / "trace.jsonl", conversations=10), tmp_path / "report.json"
    command = ["replay", str(trace), *BY_BLOCK, "--cp", "2", "--bytes-per-token", "64", "--device-tokens",
               str(40 * 512), "--host-tokens", str(40 * 512), "--storage", storage(tmp_path), "--concurrency", "1",
               "--prefetch-policy", "wait_complete", "--json", str(out)]  # fmt: skip
    first, second = here(command), here(command)
    for report in (first, second):
        sound(report, (1, 2, 1))
    assert first["blocks"]["hit"] == first["blocks"]["shared"] < first["blocks"]["total"]
    assert second["blocks"]["hit"] == second["blocks"]["total"]
    said = capsys.readouterr()
    assert "rank 0 is process " in said.err
    assert "Ranks: tp 1 · cp 2 · pp 1" in said.out
    assert "\n  rank 1 (0 1 0)" in said.out
    assert max(map(len, said.out.partition("written: ")[0].splitlines())) <= 80


# what is wrong is seen


@pytest.mark.slow
def test_wrong_bytes_on_one_rank_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-m", "tests.cli.forgetful_rank"))
    report = here(options(TP2, "none", tmp_path / "report.json", "--requests", "30", "--quiet"), status=1)
    wrong = [rank["verify"]["mismatches"] for rank in report["ranks"]]
    assert wrong[0] == 0 < wrong[1] == report["verify"]["mismatches"]
    assert report["problems"][0].startswith("request ")
    assert " pages are wrong: rank 1: " in report["problems"][0]


@pytest.mark.slow
def test_what_one_rank_cannot_open_is_refused_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-1").write_text("in the way")
    assert main(options(TP2, f"file:{tmp_path}", tmp_path / "report.json", "--quiet")) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("asynccache: rank 1: ")


@pytest.mark.slow
def test_a_rank_that_ends_before_it_has_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no torch here')"))
    assert main(options(TP2, "none", tmp_path / "report.json", "--quiet")) == 2
    said = capsys.readouterr().err                     # by the one that ended first
    assert said in {f"asynccache: rank {rank}: ended with status 1: no torch here\n" for rank in range(2)}


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.ARRIVAL == 30.0, "docs/ranks.md says so"
    monkeypatch.setattr(ranks, "ARRIVAL", 1.0)
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    assert main(options(TP2, "none", tmp_path / "report.json", "--quiet")) == 2
    assert "asynccache: ranks [0, 1] did not come within 1 s\n" in capsys.readouterr().err


# looking in


@pytest.mark.slow
def test_a_run_of_ranks_is_served_and_reported_as_any_other(tmp_path: Path) -> None:
    page, more = tmp_path / "report.html", ("--serve", "0", "--requests", "150", "--rate", "40")
    with Command(options(TP2, storage(tmp_path), tmp_path / "report.json", *more, "--report", str(page))) as command:
        command.started()
        assert command.process.stderr is not None
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+", command.process.stderr.readline())
        assert json.load(urlopen(f"{address}/statistics", timeout=30))["stages"]
        assert b"asynccache_" in urlopen(f"{address}/metrics", timeout=30).read()
        status, said = command.ended()
    assert status == 0, said
    assert "<svg" in page.read_text()


# what ends a run


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_its_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = pressed("asynccache.cli.service:RequestRunner.run", 1, options(TP2, "none", out, "--requests", "5000"))
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "stress OK, interrupted: " in done.stdout
    report = json.loads(out.read_text())
    assert report["interrupted"]
    assert set(report["leaks"].values()) == {0}


def pressed(place: str, times: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    signals = ",".join(["INT"] * times)
    command = [sys.executable, interrupt_child.__file__, place, signals, *arguments]
    return warm.run(command, capture_output=True, text=True, timeout=ENDS, ranks=True)


@pytest.mark.slow(3)
def test_sigterm_for_all_processes_at_once_ends_a_run_with_its_report(tmp_path: Path) -> None:
    """As a service manager sends it: the ranks leave it to the command to say what happens."""
    out = tmp_path / "report.json"
    with Command(options(TP2, "none", out, "--duration", "600")) as command:
        command.started()
        for pid in (*command.pids.values(), command.process.pid):
            os.kill(pid, signal.SIGTERM)
        status, said = command.ended()
        assert (status, "stress OK, interrupted: " in said) == (143, True), said
        command.nobody_left()
    assert json.loads(out.read_text())["interrupted"]


def test_the_json_says_everything_about_each_rank() -> None:
    """What a rank that never spoke has in the report."""
    member: Any = SimpleNamespace(rank=3, account=None, early_end="was killed by signal 9",
                                  process=SimpleNamespace(pid=77))
    found = entry(member, Topology(tp=2, pp=2))
    assert found == {"rank": 3, "tp": 1, "cp": 0, "pp": 1, "pid": 77, "lost": "was killed by signal 9", "failure": None}
