"""Real processes: a head that has no worker of its own, and workers over a Unix socket, each with a file store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
STARTS = ENDS = 90.0
PAGES = 6


class Child:
    """A process that says that it is open, and at its end, in JSON, how it was. ``popen``: what starts it."""

    def __init__(self, popen: type[subprocess.Popen[str]], *arguments: object) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "backends")))
        self.errors = TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self.process = popen(
            [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=self.errors, env=os.environ | {"ASYNCCACHE_SECRET": "not a secret at all", "PYTHONPATH": path},
        )  # fmt: skip

    def opened(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "open\n", said + self.said()

    def end(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(ENDS, self.process.kill)
        timer.start()
        lines = self.process.stdout.read().splitlines()
        assert self.process.wait() == 0, self.said()
        timer.cancel()
        said: dict[str, Any] = json.loads(lines[-1])
        return said

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


class Group:
    """``lives``: so many groups, one after the other, in the same processes; 0: one without end. To be used in a
    ``with``: whoever is left is killed at the end."""

    def __init__(self, folder: Path, address: str, tp: int, pp: int, lives: int) -> None:
        terms = (folder, address, tp, pp, lives)
        self.head = Child(subprocess.Popen, "tests.group.rank_child", "head", *terms)
        self.workers = [Child(warm.Popen, "tests.group.rank_child", rank, *terms) for rank in range(tp * pp)]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self.head, *self.workers):
            child.process.kill()
            child.process.communicate()
            child.errors.close()


@pytest.mark.slow(40)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_a_new_group_finds_on_every_rank_what_the_last_one_stored_and_the_head_loads_no_torch(
    tp: int, pp: int, tmp_path: Path
) -> None:
    with Group(tmp_path, f"unix:{tmp_path}/head", tp, pp, 2) as group:
        assert group.head.end() == {"found": [0] * 4 + [PAGES] * 4, "failure": None, "torch": False}
        for worker in group.workers:
            assert worker.end() == {"found": [0, 4 * PAGES], "failure": None, "torch": True}


@pytest.mark.slow(30)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_is_told_by_rank_in_time_and_the_others_end(
    how: signal.Signals, tmp_path: Path
) -> None:
    with Group(tmp_path, f"unix:{tmp_path}/head", 2, 1, 0) as group:
        for child in (group.head, *group.workers):
            child.opened()
        time.sleep(0.5)
        struck = time.monotonic()
        group.workers[1].process.send_signal(how)
        told = group.head.end()
        assert told["failure"]["rank"] == 1
        reason = "was silent for 2 s" if how is signal.SIGSTOP else "closed the connection"
        assert reason in told["failure"]["reason"] or "is gone" in told["failure"]["reason"]
        assert "rank 1: " in group.workers[0].end()["failure"]["said"]
        assert time.monotonic() - struck < 20.0


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_lose_the_head_end_by_themselves(how: signal.Signals, tmp_path: Path) -> None:
    with Group(tmp_path, f"unix:{tmp_path}/head", 2, 1, 0) as group:
        for child in (group.head, *group.workers):
            child.opened()
        time.sleep(0.5)
        struck = time.monotonic()
        group.head.process.send_signal(how)
        for worker in group.workers:
            assert worker.end()["failure"]["said"].startswith("the head ")
        assert time.monotonic() - struck < 20.0
