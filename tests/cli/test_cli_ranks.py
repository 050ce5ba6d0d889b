"""Runs over ranks, their parts and their processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from asynccache.cli import ranks
from asynccache.cli.engine import Comparison, PageRun, StandInEngine
from asynccache.cli.main import main
from asynccache.cli.options import RunSettings
from asynccache.cli.rank import complaint, shard_config, store_url, understood
from asynccache.cli.ranks import entry
from asynccache.cli.run_cache import configure
from asynccache.config import CacheConfig, Full, Mamba, Replicated, Sidecar
from asynccache.core.settings import ComponentKind
from asynccache.errors import BackendError, RankFailure
from asynccache.worker import Topology
from asynccache.worker.group import WorkerGroup
from tests import warm
from tests.cli.rank_runs import FEW, PP2, PP4, TP2, TP2_PP2, Command, Shape, hits, is_alive, options, run, size, sound
from tests.cli.trace_kit import BY_BLOCK, Ran, made_trace
from tests.processes import ROOT, Running
from tests.waiting import wait_until

# The parts of a run over ranks, without processes: shares, replicas, payloads of batches.


# shares


def model(**settings: object) -> CacheConfig:
    return configure(RunSettings.read("stress", {"components": "full,swa,mamba"} | settings, {}))


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    config, topology = model(), Topology(tp=2, cp=2, pp=2)
    parts = [shard_config(config, topology, rank) for rank in range(8)]
    for i, whole in enumerate(config.components):
        mine = [part.components[i] for part in parts]
        sizes = [p.state_bytes if isinstance(p, Mamba) else p.bytes_per_token for p in mine]
        assert sum(sizes) == (whole.state_bytes if isinstance(whole, Mamba) else whole.bytes_per_token)
        assert [p.covers for p in mine] == [(0, 1)] * 4 + [(2, 3)] * 4
    assert {part.core() for part in parts} == {config.core()}


def test_stages_that_cannot_be_equal_differ_by_a_layer() -> None:
    config = model(layers="5", bytes_per_token="40", mamba_bytes="640")
    parts = [shard_config(config, Topology(pp=2), rank).components[0] for rank in range(2)]
    assert [part.covers for part in parts] == [(0, 1), (2, 3, 4)]
    assert [part.bytes_per_token for part in parts if isinstance(part, Full)] == [16, 24]


def test_what_is_replicated_is_whole_on_every_rank_of_a_stage_and_slots_are_everywhere() -> None:
    config = CacheConfig(
        model="m", components=(Full(bytes_per_token=0, device_tokens=64, host_tokens=64),),
        sidecars=(Sidecar(name="a", indices_from="full", bytes_per_page=64, layers=2, replicated=Replicated.TP_CP),
                  Sidecar(name="b", indices_from="full", bytes_per_page=64, layers=2)),
    )  # fmt: skip
    part = shard_config(config, Topology(tp=2, pp=2), 3)
    assert [(s.bytes_per_page, s.covers) for s in part.sidecars] == [(32, (1,)), (16, (1,))]
    assert part.components[0].layers == 1


@pytest.mark.parametrize(("url", "mine"), [
    ("file:/var/kv?capacity=1GiB", "file:/var/kv/rank-{rank}?capacity=1GiB"),
    ("file:/var/kv/", "file:/var/kv/rank-{rank}"),
    ("file:/disk-{rank}/kv", "file:/disk-{rank}/kv"), ("redis://host/0", "redis://host/0"), ("memory:", "memory:"),
])  # fmt: skip
def test_a_folder_has_one_owner_and_everything_else_is_shared(url: str, mine: str) -> None:
    assert store_url(url) == mine


def test_bytes_of_another_rank_are_wrong() -> None:
    """Of another tp rank, of another cp rank, of another stage: with the same tokens in the same slots."""
    values = np.arange(4, dtype=np.uint64)
    piece = [PageRun(ComponentKind.FULL, np.arange(4, dtype=np.int32), values, 0)]
    topology = Topology(tp=2, cp=2, pp=2)
    layers = [torch.zeros(4, 64, dtype=torch.uint8) for _ in range(2)]

    class Layers:
        def layer(self, i: int) -> torch.Tensor:
            return layers[i]

    def engine(rank: int) -> StandInEngine:
        place = topology.place(rank)
        config = shard_config(model(components="full", bytes_per_token="64"), topology, rank)
        specs = [s.on_rank(place.tp, 2, (place.cp, 2), (place.pp, 2)) for s in config.pools()]
        return StandInEngine(specs, {"full": Layers()}, lambda: None)  # type: ignore[arg-type,return-value]

    engine(0).write(piece)
    assert [engine(rank).verify(piece).wrong for rank in range(8)] == [0] + [4] * 7


# replicas


def test_pools_are_marked_replicated_by_name() -> None:
    config = model(replicated="full:tp,mamba,swa:tp+cp")
    assert [part.replicated for part in config.components] == [Replicated.TP, Replicated.TP_CP, Replicated.TP_CP]
    part = shard_config(config, Topology(tp=2, cp=2), 3).components[0]
    assert isinstance(part, Full)
    assert part.bytes_per_token == 256                 # a half for cp, none for tp
    marked = model(sidecars="deepseek-v4", components="full,swa", replicated="c4")
    assert {pool.name for pool in marked.pools() if pool.replicated} == {"c4"}


# what a batch says


def test_a_complaint_is_understood_and_nothing_else_is_taken_for_one() -> None:
    said = complaint(Comparison(9, 4, ("full page 3 differs", "full page 5 differs", "and so on")))
    assert understood(2, said) == Comparison(0, 4, ("rank 2: full page 3 differs; full page 5 differs",))
    for other in ("", "verifying failed: OSError()", "4 pages", "4", "[]", "{}", "[4]"):
        assert understood(2, other) is None


# Runs over ranks, each a process with pools and a store of its own: the right bytes on every device, from every tier,
# and a clean end for all who are left when one is killed or stopped.

Report = dict[str, Any]
HOSTILE = ("--faults", "0.1", "--cancel-rate", "0.2", "--requests", "120", "--rank-delay", "2")


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of runs of this process begin warm."""
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


here = pytest.mark.usefixtures("warm_ranks")


def storage(folder: Path) -> str:
    return f"file:{folder}/kv?capacity=64MiB"


def folders(path: Path) -> list[str]:
    return sorted(path.name for path in (path / "kv").iterdir())


@here
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "more"), [
    (TP2, ()), (PP2, ()), (TP2_PP2, ()), (TP2, ("--replicated", "full:tp,mamba")),
    *(pytest.param(shape, (), marks=pytest.mark.soak) for shape in (PP4, (1, 2, 1), (2, 2, 2))),
])  # fmt: skip
def test_ranks_have_the_right_bytes_from_every_tier_whatever_fails_or_is_late_on_one(
    shape: Shape, more: tuple[str, ...], tmp_path: Path, ran: Ran
) -> None:
    report = ran(options(shape, storage(tmp_path), *HOSTILE, *more))
    sound(report, shape)
    hits(report, "device", "host", "storage")
    assert report["requests"] == report["served"] + report["cancelled"] == 120
    assert report["cancelled"] > 0
    assert report["stages"]["backup_host"]["errors"] > 0
    assert report["stages"]["backup_storage"]["errors"] > 0
    assert folders(tmp_path) == [f"rank-{i}" for i in range(size(shape))]


@here
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "replicated"), [
    ((2, 2, 1), ("--replicated", "c4:tp,c4_state")), pytest.param(TP2_PP2, (), marks=pytest.mark.soak),
])  # fmt: skip
def test_the_stack_of_deepseek_v4_over_several_ranks(
    shape: Shape, replicated: tuple[str, ...], tmp_path: Path, ran: Ran
) -> None:
    arguments = options(shape, storage(tmp_path), "--sidecars", "deepseek-v4", "--components", "full,swa",
                        "--bytes-per-token", "512", *replicated, "--requests", "40")  # fmt: skip
    for report in (ran(arguments), again := ran(arguments)):
        sound(report, shape)
    hits(again, "device", "host", "storage")


@here
@pytest.mark.slow
def test_a_replay_over_ranks_hits_what_the_trace_implies_and_then_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = made_trace(tmp_path / "trace.jsonl", conversations=10), tmp_path / "report.json"
    command = ["replay", str(trace), *BY_BLOCK, "--cp", "2", "--bytes-per-token", "64", "--device-tokens",
               str(40 * 512), "--host-tokens", str(40 * 512), "--storage", storage(tmp_path), "--concurrency", "1",
               "--prefetch-policy", "wait_complete", "--json", str(out)]  # fmt: skip
    reports: list[Report] = []
    for _ in range(2):
        assert main(command) == 0
        reports.append(json.loads(out.read_text()))
        sound(reports[-1], (1, 2, 1))
    first, second = reports
    assert first["blocks"]["hit"] == first["blocks"]["shared"] < first["blocks"]["total"]
    assert second["blocks"]["hit"] == second["blocks"]["total"]
    said = capsys.readouterr()
    assert "rank 0 is process " in said.err
    assert "Ranks: tp 1 · cp 2 · pp 1" in said.out
    assert "\n  rank 1 (0 1 0)" in said.out
    assert max(map(len, said.out.partition("written: ")[0].splitlines())) <= 80


# what is wrong is seen

FORGETFUL = """\
import sys
from asynccache.cli import rank
from asynccache.cli.engine import StandInEngine

write, count = StandInEngine.write, iter(range(1 << 30))
if sys.argv[1] == "1":      # this rank leaves out every fifth write
    StandInEngine.write = lambda engine, pieces: write(engine, pieces) if next(count) % 5 != 3 else None
sys.exit(rank.main(rank.read_duty()))
"""


@here
@pytest.mark.slow(8)
def test_a_rank_that_is_late_at_the_end_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    aclose = WorkerGroup.aclose

    async def fails(self: WorkerGroup, patience: float) -> None:
        await aclose(self, patience)
        raise BackendError("rank 1: was late") from RankFailure("was late", 1)

    monkeypatch.setattr(WorkerGroup, "aclose", fails)
    report = ran(options(TP2, storage(tmp_path), "--requests", "20"), status=1)
    assert any("could not close cleanly: rank 1: was late" in problem for problem in report["problems"])
    assert (report["ok"], report["served"]) == (False, 20)


@here
@pytest.mark.slow
def test_wrong_bytes_on_one_rank_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    program = tmp_path / "rank.py"
    program.write_text(FORGETFUL)
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, str(program)))
    report = ran(options(TP2, "none", "--requests", "30"), status=1)
    wrong = [rank["verify"]["mismatches"] for rank in report["ranks"]]
    assert wrong[0] == 0 < wrong[1] == report["verify"]["mismatches"]
    assert report["problems"][0].startswith("request ")
    assert " pages are wrong: rank 1: " in report["problems"][0]


@here
@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [
    (None, "rank 1: .*"),
    ("import sys; sys.exit('no torch here')", "rank [01]: ended with status 1: no torch here"),     # the first to end
    ("import time; time.sleep(600)", r"ranks \[0, 1\] did not come within 1 s"),
])  # fmt: skip
def test_a_rank_that_cannot_start_ends_the_start_in_its_words(
    program: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One that cannot open its store, one that ends, and one that never comes."""
    assert ranks.ARRIVAL == 30.0, "docs/ranks.md says so"
    if program is None:
        (tmp_path / "rank-1").write_text("in the way")
    else:
        monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", program))
        monkeypatch.setattr(ranks, "ARRIVAL", 1.0 if "sleep" in program else 30.0)
    assert main([*options(TP2, f"file:{tmp_path}"), "--quiet"]) == 2
    assert re.fullmatch(f"asynccache: {said}\n", capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_of_ranks_is_served_and_reported_as_any_other(tmp_path: Path) -> None:
    page, more = tmp_path / "report.html", ("--serve", "0", "--requests", "150", "--rate", "40")
    with Command(TP2, storage(tmp_path), tmp_path / "report.json", *more, "--report", str(page)) as command:
        command.started()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+", command.line())
        assert json.load(urlopen(f"{address}/statistics", timeout=30))["stages"]
        assert b"asynccache_" in urlopen(f"{address}/metrics", timeout=30).read()
        done = command.ended()
    assert done.returncode == 0, done
    assert "<svg" in page.read_text()


# what ends a run

TIMEOUT = 3.0
SLACK = 10.0  # a machine that is ten times slower


def strike(
    shape: Shape, storage: str, out: Path, victim: int, how: signal.Signals, after: float, *more: str
) -> tuple[Report, float]:
    """A run of which one rank is killed or stopped, ``after`` seconds from when all were ready: its report, and when
    that was in Unix time."""
    with Command(shape, storage, out, "--rank-timeout", str(TIMEOUT), "--duration", "600", *more) as command:
        command.started()
        time.sleep(after)
        at = time.time()
        os.kill(command.pids[victim], how)
        done = command.ended()
        assert done.returncode == 1, done
        command.nobody_left()
    return json.loads(out.read_text()), at


def told(report: Report, at: float, victim: int) -> None:
    """Every rank but the victim has had a RankFailure, in time, and holds nothing that it should not."""
    assert any(problem.startswith(f"rank {victim} ") for problem in report["problems"]), report["problems"]
    assert not any("law of the core" in problem for problem in report["problems"]), report["problems"]
    for rank in report["ranks"]:
        if rank["rank"] != victim:
            assert (rank["lost"], rank["failure"]["kind"], rank["verify"]["mismatches"]) == (None, "RankFailure", 0)
            assert rank["failure"]["at"] - at < TIMEOUT + SLACK, rank
            assert f"rank {victim}" in rank["failure"]["sentence"], rank


@pytest.mark.slow(3)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_its_report(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """SIGTERM for all processes at once, as a service manager sends it: the ranks leave it to the command to say what
    happens."""
    out = tmp_path / "report.json"
    with Command(TP2, "none", out, "--duration", "600") as command:
        command.started()
        for pid in command.pids.values() if number is signal.SIGTERM else ():
            os.kill(pid, number)
        done = command.ended(number)
        assert (done.returncode, "stress OK, interrupted: " in done.stdout) == (status, True), done
        assert "Traceback" not in done.stdout + done.stderr
        command.nobody_left()
    report = json.loads(out.read_text())
    assert (report["interrupted"], set(report["leaks"].values())) == (True, {0})


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("shape", "victim"), [
    *((TP2_PP2, rank) for rank in range(4)),
    *(pytest.param(shape, rank, marks=pytest.mark.soak) for shape in (TP2, PP4) for rank in range(size(shape))),
])  # fmt: skip
def test_each_rank_in_turn_is_lost(shape: Shape, victim: int, how: signal.Signals, tmp_path: Path) -> None:
    after = Random(f"{victim} {how}").uniform(0.0, 0.7)
    report, at = strike(shape, storage(tmp_path), tmp_path / "report.json", victim, how, after)
    told(report, at, victim)
    said = "was killed by signal 9" if how is signal.SIGKILL else "was silent for 3 s"
    assert any(problem.startswith(f"rank {victim} {said}") for problem in report["problems"])


@pytest.mark.slow
def test_a_new_group_finds_what_a_group_that_failed_had_stored(tmp_path: Path) -> None:
    url, out = storage(tmp_path), tmp_path / "report.json"
    strike(TP2, url, out, 1, signal.SIGKILL, 1.5, "--seed", "4")
    again = run(TP2, url, out, "--requests", FEW, "--seed", "4")
    sound(again, TP2)
    hits(again, "storage")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_lost_the_head_end_by_themselves(how: signal.Signals, tmp_path: Path) -> None:
    more = ("--duration", "600", "--rank-timeout", str(TIMEOUT))
    with Command(TP2_PP2, storage(tmp_path), tmp_path / "report.json", *more) as command:
        command.started()
        time.sleep(0.3)
        os.kill(command.process.pid, how)
        # On the virtual clock it is one second more than the time-out; here a machine may be slow.
        command.nobody_left(3.0 * SLACK / 2 if how is signal.SIGKILL else TIMEOUT + 20.0)


@pytest.mark.slow(8)
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_a_command_that_is_killed_while_its_ranks_start_takes_them_with_it_and_leaves_no_file(
    after: float, tmp_path: Path
) -> None:
    """Not from warm processes: a rank imports torch for seconds, and the command may be killed meanwhile."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ("-m", "asynccache", *options(TP2, "none", "--duration", "600"))
    with Running(*words, popen=subprocess.Popen, cwd=ROOT, env={"TMPDIR": str(scratch)}) as command:
        wait_until(lambda: len(children(command.process.pid)) == 2)
        started = children(command.process.pid)
        time.sleep(after)
    wait_until(lambda: not any(map(is_alive, started)), "a rank outlives its command", seconds=3.0 * SLACK / 2)
    assert list(scratch.iterdir()) == []


def children(parent: int) -> list[int]:
    """The processes that ``parent`` has started."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def test_the_json_says_everything_about_each_rank() -> None:
    """What a rank that never spoke has in the report."""
    member: Any = SimpleNamespace(rank=3, account=None, early_end="was killed by signal 9",
                                  process=SimpleNamespace(pid=77))
    found = entry(member, Topology(tp=2, pp=2))
    assert found == {"rank": 3, "tp": 1, "cp": 0, "pp": 1, "pid": 77, "lost": "was killed by signal 9", "failure": None}
