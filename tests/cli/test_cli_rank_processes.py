"""Ranks that are processes, each with pools and a store of its own: the right bytes on every device, from every tier,
and a clean end for all who are left when one is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.cli.rank_runs import (
    PP2,
    PP4,
    ROOT,
    SLACK,
    TIMEOUT,
    TP2,
    TP2_PP2,
    Command,
    Shape,
    hits,
    is_alive,
    options,
    perform,
    run,
    size,
    sound,
    strike,
    told,
)
from tests.cli.trace_kit import made_trace

REPLICATED = ("--replicated", "full:tp,mamba")
FEW = "8"
"""Requests for which device and host have room: what they hit in storage another group has left there."""


def store(folder: Path) -> str:
    return f"file:{folder}/kv?capacity=64MiB"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "more"), [(TP2, ()), (PP2, ()), (TP2_PP2, ()), (TP2, REPLICATED)],
    ids=["tp2", "pp2", "tp2-pp2", "tp2-replicated"],
)  # fmt: skip
def test_ranks_have_the_right_bytes_from_every_tier_and_a_new_group_finds_what_is_stored(
    shape: Shape, more: tuple[str, ...], tmp_path: Path
) -> None:
    url, out = store(tmp_path), tmp_path / "report.json"
    first, second = (run(shape, url, out, "--requests", count, *more) for count in ("60", FEW))
    for report in (first, second):
        sound(report, shape)
    hits(first, "device", "host")
    hits(second, "storage")
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"rank-{i}" for i in range(size(shape))]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", range(4))
def test_each_rank_in_turn_is_lost(victim: int, how: signal.Signals, tmp_path: Path) -> None:
    after = Random(f"{victim} {how}").uniform(0.0, 0.7)
    struck = strike(TP2_PP2, store(tmp_path), tmp_path / "report.json", victim, how, after)
    told(struck, victim)
    said = "was killed by signal 9" if how is signal.SIGKILL else "was silent for 3 s"
    assert any(problem.startswith(f"rank {victim} {said}") for problem in struck.report["problems"])


@pytest.mark.slow
def test_a_new_group_finds_what_a_group_that_failed_had_stored(tmp_path: Path) -> None:
    url, out = store(tmp_path), tmp_path / "report.json"
    strike(TP2, url, out, 1, signal.SIGKILL, 1.5, "--seed", "4")
    again = run(TP2, url, out, "--requests", FEW, "--seed", "4")
    sound(again, TP2)
    hits(again, "storage")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_lost_the_head_end_by_themselves(how: signal.Signals, tmp_path: Path) -> None:
    more = ("--duration", "600", "--rank-timeout", str(TIMEOUT))
    with Command(options(TP2_PP2, store(tmp_path), tmp_path / "report.json", *more)) as command:
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
    command = subprocess.Popen(
        [sys.executable, "-m", "asynccache", *options(TP2, "none", tmp_path / "report.json", "--duration", "600")],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while len(ranks := children(command.pid)) < 2:
            assert command.poll() is None
            time.sleep(0.01)
        time.sleep(after)
    finally:
        command.kill()
        command.wait()
    killed = time.monotonic()
    while any(map(is_alive, ranks)):
        assert time.monotonic() - killed < 3.0 * SLACK / 2, "a rank outlives its command"
        time.sleep(0.01)
    assert list(scratch.iterdir()) == []


def children(parent: int) -> list[int]:
    """The processes that ``parent`` has started."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


# the larger matrix: make soak


@pytest.mark.soak
def test_the_stack_of_deepseek_v4_over_tp_and_pp(tmp_path: Path) -> None:
    more = ("--sidecars", "deepseek-v4", "--components", "full,swa", "--bytes-per-token", "512", "--requests", "40")
    url, out = store(tmp_path), tmp_path / "report.json"
    for report in (run(TP2_PP2, url, out, *more), again := run(TP2_PP2, url, out, *more)):
        sound(report, TP2_PP2)
    hits(again, "device", "host", "storage")


@pytest.mark.soak
def test_a_replay_of_all_components_over_tp_and_pp(tmp_path: Path) -> None:
    trace, out = made_trace(tmp_path / "trace.jsonl", conversations=6), tmp_path / "report.json"
    command = [
        "replay", str(trace), "--tp", "2", "--pp", "2", "--layers", "2", "--components", "full,swa,mamba",
        "--bytes-per-token", "64", "--mamba-bytes", "1024", "--window", "1024", "--device-tokens", str(40 * 512),
        "--host-tokens", str(40 * 512), "--swa-ratio", "1", "--storage", store(tmp_path), "--concurrency", "1",
        "--prefetch-policy", "wait_complete", "--json", str(out), "--quiet",
    ]  # fmt: skip
    for report in (perform(command, out), again := perform(command, out)):
        sound(report, TP2_PP2)
    hits(again, "storage")


@pytest.mark.soak
@pytest.mark.parametrize("storage", ["none", "file"])
@pytest.mark.parametrize("shape", [TP2, PP2, TP2_PP2, PP4, (1, 2, 1), (2, 2, 2)])
def test_stress_with_faults_and_delays(shape: Shape, storage: str, tmp_path: Path) -> None:
    more = ("--requests", "400", "--rank-delay", "5", "--faults", "0.1", "--cancel-rate", "0.2", "--seed", "7")
    url = storage if storage == "none" else store(tmp_path)
    report = run(shape, url, tmp_path / "report.json", *more)
    sound(report, shape)
    hits(report, "device", "host", *(("storage",) if storage == "file" else ()))


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("shape", "victim"), [(shape, rank) for shape in (TP2, PP4) for rank in range(size(shape))])
def test_each_rank_of_other_shapes_is_lost(shape: Shape, victim: int, how: signal.Signals, tmp_path: Path) -> None:
    after = Random(f"{shape} {victim} {how}").uniform(0.0, 2.0)
    told(strike(shape, "none", tmp_path / "report.json", victim, how, after), victim)
