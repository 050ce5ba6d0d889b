"""Ctrl-C in every phase of a real run: the first ends it soon, cleanly, and with its report, the second at once.

Most runs are this process's own, with a real signal. Processes are used where it matters that nothing is loaded yet, or
how a process ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache.cli.main import main
from tests.cli import interrupt_child

RUN = "asynccache.cli.session:"
PHASES = {
    "start": RUN + "configure",
    "opening": "asynccache.runtime.cache:AsyncCache.__aenter__",
    "warm-up": "asynccache.cli.session:Meter.start",
    "first request": "asynccache.cli.service:Server.serve",
    "run": "asynccache.runtime.lease:Lease.commit",
    "end of the run": RUN + "Session._finish",
    "flush": "asynccache.runtime.cache:AsyncCache.flush",
    "audit": "asynccache.core.audit:check",
    "closing": "asynccache.memory.cpu:CpuDevice.aclose",
    "summary": "asynccache.cli.display:summary",
    "writing": "asynccache.cli.output:answer",
    "drawing": RUN + "page",
}
OVER = ("summary", "writing", "drawing")        # all is done by then but to tell it, so nothing was interrupted
ENDS_WITHIN = 180.0


def run(folder: Path) -> list[str]:
    return ["stress", "--duration", "0.4", "--rate", "30", "--json", str(folder / "run.json"),
            "--report", str(folder / "run.html")]  # fmt: skip


def interrupted(folder: Path, place: str, times: int) -> subprocess.CompletedProcess[str]:
    signals = ",".join(["INT"] * times)
    command = [sys.executable, interrupt_child.__file__, place, signals, *run(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)


def is_reported(folder: Path, phase: str, status: int, out: str, err: str) -> None:
    """The run ended as one that was interrupted in ``phase`` has to."""
    assert status == (0 if phase in OVER else 130), err
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err
    assert f"stress OK{'' if phase in OVER else ', interrupted'}: " in out
    report = json.loads((folder / "run.json").read_text())
    assert (report["interrupted"], report["ok"], report["leaks"]["pins"]) == (phase not in OVER, True, 0)
    assert (folder / "run.html").read_text().rstrip().endswith("</html>")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["run", "flush", "writing"])
def test_a_process_writes_its_report_and_ends(phase: str, tmp_path: Path) -> None:
    done = interrupted(tmp_path, PHASES[phase], 1)
    is_reported(tmp_path, phase, done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_whenever_it_comes_the_report_is_written(
    phase: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = interrupt_child.found(PHASES[phase])
    monkeypatch.setattr(owner, name, interrupt_child.pressing(getattr(owner, name), "INT"))
    status = main(run(tmp_path))
    is_reported(tmp_path, phase, status, *capfd.readouterr())


def test_a_background_job_hears_it_although_its_shell_has_it_ignored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = interrupt_child.found(PHASES["run"])
    monkeypatch.setattr(owner, name, interrupt_child.pressing(getattr(owner, name), "INT"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = main(run(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    is_reported(tmp_path, "run", status, *capfd.readouterr())


def test_who_insists_gets_out_without_a_report(tmp_path: Path) -> None:
    done = interrupted(tmp_path, PHASES["opening"], 2)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "run.json").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_insists_while_requests_are_cancelled_sees_no_traceback(loop: str, ranks: str, tmp_path: Path) -> None:
    """The second press ends the loop within a step of a task, whose error is nobody's."""
    place, signals = "asynccache.runtime.lease:_give_back", ";;INT;;;INT"
    command = [sys.executable, interrupt_child.__file__, place, signals, *run(tmp_path), "--loop", loop, "--rate", "0",
               "--tp", ranks, "--quiet"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


@pytest.mark.parametrize(("place", "status"), [
    ("import:asynccache.cli.main", 130), ("import:asynccache.cli.options", 130), ("import:json", 130),
    ("import:torch", 130), ("exit", -signal.SIGINT),
])  # fmt: skip
def test_before_a_run_and_after_it_there_is_nothing_to_report(place: str, status: int) -> None:
    what = ["stress", "--requests", "1"] if "torch" in place else ["config", "schema"]
    command = [sys.executable, interrupt_child.__file__, place, "INT", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)
    assert (done.returncode, done.stderr) == (status, "")
