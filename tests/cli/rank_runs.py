"""Runs of ``asynccache stress`` over ranks, each a process, undisturbed or with an accident, and their reports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests import warm
from tests.cli.trace_kit import ALL

ROOT = Path(__file__).parents[2]
TIMEOUT = 3.0
SLACK = 10.0  # a machine that is ten times slower
ENDS = 180.0
FEW = "8"
"""Requests for which device and host have room: what they hit in storage another group has left there."""

SMALL = (
    *ALL, "--rate", "0", "--concurrency", "4", "--bytes-per-token", "64", "--mamba-bytes", "1024", "--window", "256",
    "--device-tokens", "6144", "--host-tokens", "8192", "--swa-ratio", "1", "--prefetch-policy", "wait_complete",
)  # fmt: skip

Shape = tuple[int, int, int]  # tp, cp, pp
TP2, PP2, TP2_PP2, PP4 = (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4)

Report = dict[str, Any]


def size(shape: Shape) -> int:
    tp, cp, pp = shape
    return tp * cp * pp


def options(shape: Shape, storage: str, out: Path, *more: str) -> list[str]:
    tp, cp, pp = map(str, shape)
    return ["stress", "--tp", tp, "--cp", cp, "--pp", pp, *SMALL, "--storage", storage, "--json", str(out), *more]


class Command:
    """The command as a process, for a ``with``. At the end of the block it is gone, and so are its ranks."""

    def __init__(self, arguments: list[str], env: Mapping[str, str] | None = None) -> None:
        self.process = warm.Popen(
            [sys.executable, "-m", "asynccache", *arguments], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(env or {}), ranks=True,
            imports=warm.COMMANDS,
        )  # fmt: skip
        self.pids: dict[int, int] = {}

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def started(self) -> None:
        """Return when every rank has its cache."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.findall(r"rank (\d+) is process (\d+)", line)
        assert found, line + self.process.stderr.read()
        self.pids = {int(rank): int(pid) for rank, pid in found}

    def ended(self) -> tuple[int, str]:
        """Wait for its end; returns its status and its output."""
        out, errors = self.process.communicate(timeout=ENDS)
        return self.process.returncode, out + errors

    def nobody_left(self, seconds: float = 60.0) -> None:
        """Check that no rank outlives the command for longer than ``seconds``."""
        end = time.monotonic() + seconds
        while alive := [rank for rank, pid in self.pids.items() if is_alive(pid)]:
            assert time.monotonic() < end, f"ranks {alive} are still there"
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(shape: Shape, storage: str, out: Path, *more: str) -> Report:
    """Run it to its end, which must be a good one."""
    with Command(options(shape, storage, out, "--quiet", *more)) as command:
        status, said = command.ended()
    assert status == 0, said
    report: Report = json.loads(out.read_text())
    return report


class Struck(NamedTuple):
    """``at``: when, in Unix time."""

    report: Report
    at: float
    said: str


def strike(
    shape: Shape, storage: str, out: Path, victim: int, how: signal.Signals, after: float, *more: str
) -> Struck:
    """A run of which one rank is killed or stopped, ``after`` seconds from when all were ready."""
    timeout = ("--rank-timeout", str(TIMEOUT), "--duration", "600")
    with Command(options(shape, storage, out, *timeout, *more)) as command:
        command.started()
        time.sleep(after)
        at = time.time()
        os.kill(command.pids[victim], how)
        status, said = command.ended()
        assert status == 1, said
        command.nobody_left()
    return Struck(json.loads(out.read_text()), at, said)


# what must be so


def sound(report: Report, shape: Shape) -> None:
    """Every rank has verified pages, and nothing is wrong anywhere."""
    assert report["ok"], report["problems"]
    assert report["topology"] == dict(zip(("tp", "cp", "pp"), shape, strict=True))
    ranks = report["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(size(shape)))
    assert report["verify"]["pages"] == sum(rank["verify"]["pages"] for rank in ranks)
    assert report["verify"]["mismatches"] == 0
    assert set(report["leaks"].values()) == {0}
    for rank in ranks:
        assert rank["verify"]["pages"] > 0
        assert rank["verify"]["mismatches"] == 0
        assert rank["batches"] == ranks[0]["batches"] > 0
        assert set(rank["leaks"].values()) == {0}
        assert rank["lost"] is rank["failure"] is None


def hits(report: Report, *tiers: str) -> None:
    """Pages came from all of these, and were verified."""
    for tier in tiers:
        assert report["tokens"]["hit"][tier] > 0, (tier, report["tokens"])


def told(struck: Struck, victim: int) -> None:
    """Every rank but the victim has had a RankFailure, in time, and holds nothing that it should not."""
    report = struck.report
    assert any(problem.startswith(f"rank {victim} ") for problem in report["problems"]), report["problems"]
    assert not any("law of the core" in problem for problem in report["problems"]), report["problems"]
    for rank in report["ranks"]:
        if rank["rank"] != victim:
            assert rank["lost"] is None, rank
            assert rank["failure"]["kind"] == "RankFailure", rank
            assert rank["failure"]["at"] - struck.at < TIMEOUT + SLACK, rank
            assert rank["verify"]["mismatches"] == 0, rank
            assert f"rank {victim}" in rank["failure"]["sentence"], rank
