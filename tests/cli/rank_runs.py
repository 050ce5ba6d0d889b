"""Runs of ``asynccache stress`` over ranks, each a process, and their reports."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import warm
from tests.cli.trace_kit import ALL
from tests.processes import ROOT, Running
from tests.waiting import wait_until

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


def options(shape: Shape, storage: str, *more: str) -> list[str]:
    tp, cp, pp = map(str, shape)
    return ["stress", "--tp", tp, "--cp", cp, "--pp", pp, *SMALL, "--storage", storage, *more]


class Command(Running):
    """The command, whose ranks are gone, too, at the end of the block."""

    def __init__(self, shape: Shape, storage: str, out: Path, *more: str) -> None:
        words = options(shape, storage, "--json", str(out), *more)
        super().__init__("-m", "asynccache", *words, env={}, cwd=ROOT, ranks=True, imports=warm.COMMANDS)
        self.pids: dict[int, int] = {}

    def __exit__(self, *end: object) -> None:
        super().__exit__(*end)
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def started(self) -> None:
        """Return when every rank has its cache."""
        line = self.line()
        self.pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) is process (\d+)", line)}
        assert self.pids, line

    def nobody_left(self, seconds: float = 60.0) -> None:
        """Check that no rank outlives the command for longer than ``seconds``."""
        wait_until(lambda: not any(map(is_alive, self.pids.values())), "ranks are still there", seconds=seconds)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(shape: Shape, storage: str, out: Path, *more: str) -> Report:
    """Run it to its end, which must be a good one."""
    with Command(shape, storage, out, "--quiet", *more) as command:
        done = command.ended()
    assert done.returncode == 0, done
    report: Report = json.loads(out.read_text())
    return report


def sound(report: Report, shape: Shape) -> None:
    """Every rank has verified pages, and nothing is wrong anywhere."""
    assert report["ok"], report["problems"]
    assert report["topology"] == dict(zip(("tp", "cp", "pp"), shape, strict=True))
    ranks = report["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(size(shape)))
    assert report["verify"] == {"pages": sum(rank["verify"]["pages"] for rank in ranks), "mismatches": 0}
    for one in (report, *ranks):
        assert one["verify"]["pages"] > one["verify"]["mismatches"] == 0
        assert set(one["leaks"].values()) == {0}
    for rank in ranks:
        assert rank["batches"] == ranks[0]["batches"] > 0
        assert rank["lost"] is rank["failure"] is None


def hits(report: Report, *tiers: str) -> None:
    """Pages came from all of these, and were verified."""
    for tier in tiers:
        assert report["tokens"]["hit"][tier] > 0, (tier, report["tokens"])
