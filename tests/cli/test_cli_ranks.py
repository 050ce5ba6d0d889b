"""``stress`` and ``replay`` over several ranks, each a process: what they report, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main
from asynccache.cli.ranked import crew
from tests.cli import interrupt_child
from tests.cli.trace_kit import made_trace
from tests.ranks.cache_runs import (
    ENDS,
    TP2,
    TP2_PP2,
    Command,
    Report,
    Shape,
    hits_on_every_rank,
    options,
    size,
    sound,
)

HOSTILE = ("--faults", "0.1", "--cancel-rate", "0.2", "--requests", "120", "--rank-delay", "2", "--quiet")


def here(arguments: list[str], status: int = 0) -> Report:
    """A run by this process; its report."""
    assert main(arguments) == status
    report: Report = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())
    return report


def storage(folder: Path) -> str:
    return f"file:{folder}/kv?capacity=64MiB"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TP2, pytest.param(TP2_PP2, marks=pytest.mark.ranks)])
def test_ranks_do_the_same_whatever_fails_or_is_late_on_one(shape: Shape, tmp_path: Path) -> None:
    report = here(options(shape, storage(tmp_path), tmp_path / "report.json", *HOSTILE))
    sound(report, shape, steps=100)
    hits_on_every_rank(report, "device", "host", "storage")
    assert report["requests"] == 120
    assert report["cancelled"] > 0
    assert report["served"] + report["cancelled"] + report["failed"] == 120
    assert sum(rank["errors"]["backup_storage"] for rank in report["ranks"]) > 0
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"rank-{i}" for i in range(size(shape))]


@pytest.mark.ranks
def test_a_replay_over_ranks_hits_what_the_trace_implies_and_then_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = made_trace(tmp_path / "trace.jsonl", conversations=10), tmp_path / "report.json"
    command = ["replay", str(trace), "--cp", "2", "--bytes-per-token", "64", "--device-tokens",
               str(40 * 512), "--host-tokens", str(40 * 512), "--storage", storage(tmp_path), "--concurrency", "1",
               "--prefetch-policy", "wait_complete", "--json", str(out)]  # fmt: skip
    first, second = here(command), here(command)
    for report in (first, second):
        sound(report, (1, 2, 1))
    assert first["blocks"]["hit"] == first["blocks"]["shared"] < first["blocks"]["total"]
    assert second["blocks"]["hit"] == second["blocks"]["total"]
    said = capsys.readouterr()
    assert "rank 0 is process " in said.err
    assert "Ranks: tp 1 · cp 2 · pp 1; compared after each of " in said.out
    assert "\n  rank 1 (0 1 0)" in said.out
    assert max(map(len, said.out.splitlines())) <= 80


# what is wrong is seen


def odd(shape: Shape, how: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(crew, "COMMAND", (sys.executable, "-m", "tests.cli.odd_rank_child"))
    monkeypatch.setenv("ASYNCCACHE_ODD", how)
    return here(options(shape, "none", folder / "report.json", "--requests", "30", "--quiet"), status=1)


@pytest.mark.ranks
def test_wrong_bytes_on_one_rank_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = odd(TP2, "forgetful", tmp_path, monkeypatch)
    wrong = [rank["verify"]["mismatches"] for rank in report["ranks"]]
    assert wrong[0] == 0 < wrong[1] == report["verify"]["mismatches"]
    assert report["problems"][0].startswith("rank 1: request ")
    assert " pages are wrong: " in report["problems"][0]


@pytest.mark.ranks
def test_a_call_that_one_rank_makes_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = odd(TP2, "call", tmp_path, monkeypatch)
    problems = " ".join(report["problems"])
    assert "the history of rank 1 is another than that of rank 0" in problems or "RankDivergence" in problems
    assert {rank["failure"]["kind"] for rank in report["ranks"]} <= {"RankDivergence", "RankFailure"}


@pytest.mark.ranks
def test_a_tree_that_has_changed_by_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = odd(TP2, "tampered", tmp_path, monkeypatch)
    assert report["problems"][0].startswith("after tick 10, step ")
    assert "the tree of rank 1 is another than that of rank 0" in report["problems"][0]


@pytest.mark.ranks
def test_what_cannot_be_read_of_a_rank_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = odd(TP2, "garbled", tmp_path, monkeypatch)
    assert report["problems"][0].startswith("rank 1 sent a message of 7 bytes that cannot be read: ")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--pp", "8"], "--pp=8: a stage would have no layer, there are --layers=4"),
    (["--tp", "3"], "--bytes-per-token=512 must be a multiple of 12: 4 layers over tp 3 and cp 1"),
    (["--tp", "2", "--serve", "0"], "--serve=0 looks into one cache, and there are 2 ranks, --tp 2 --cp 1 --pp 1"),
    (["--cp", "2", "--report", "x.html"], "--report=x.html draws one cache, and there are 2 ranks"),
    (["--tp", "16", "--pp", "8"], "there are 128 ranks, --tp 16 --cp 1 --pp 8: this command runs 64 at most"),
    (["--steps", "5"], "--steps=5 counts what several ranks do together; one rank has --requests"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *arguments]) == 2
    assert f"asynccache: {sentence}" in capsys.readouterr().err


@pytest.mark.ranks
def test_what_one_rank_cannot_open_is_refused_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-1").write_text("in the way")
    assert main(options(TP2, f"file:{tmp_path}", tmp_path / "report.json", "--quiet")) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("asynccache: rank 1: ")


# what ends a run


@pytest.mark.ranks
@pytest.mark.parametrize(("place", "times"), [
    ("conductor:Conductor._send", 2),
    pytest.param("crew:Crew.__aenter__", 1, marks=pytest.mark.ranks),
    pytest.param("conductor:Conductor._heard", 1, marks=pytest.mark.ranks),
    pytest.param("conductor:Conductor._saved", 1, marks=pytest.mark.ranks),
])  # fmt: skip
def test_ctrl_c_ends_a_run_with_its_report(place: str, times: int, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = options(TP2, "none", out, "--steps", "40")
    done = pressed(place, times, arguments)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "stress OK, interrupted: " in done.stdout
    report = json.loads(out.read_text())
    assert report["interrupted"]
    assert set(report["leaks"].values()) == {0}
    assert (report["cancelled"] > 0) == (times == 2)


@pytest.mark.ranks
def test_who_insists_gets_out_and_leaves_nobody_behind(tmp_path: Path) -> None:
    done = pressed("conductor:Conductor._heard", 3, options(TP2, "none", tmp_path / "report.json"))
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


def pressed(place: str, times: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    signals = ",".join(["INT"] * times)
    command = [sys.executable, interrupt_child.__file__, f"asynccache.cli.ranked.{place}", signals, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS, check=False)


@pytest.mark.ranks
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


@pytest.mark.slow
def test_ranks_end_with_the_command(tmp_path: Path) -> None:
    with Command(options(TP2, "none", tmp_path / "report.json", "--duration", "600")) as command:
        command.started()
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait()
        command.nobody_left()


def test_the_json_says_everything_about_each_rank() -> None:
    """What a rank that never spoke has in the report."""
    from asynccache.cli.ranked.merge import entry
    from asynccache.ranks import Topology

    found: dict[str, Any] = entry(3, Topology(tp=2, pp=2), 77, None, "was killed by signal 9")
    assert found == {"rank": 3, "tp": 1, "cp": 0, "pp": 1, "pid": 77, "lost": "was killed by signal 9", "failure": None}
