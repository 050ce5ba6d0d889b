"""SIGTERM and Ctrl-C in every command and in every phase of a run: the first ends it soon, cleanly, and with its
report, the second at once. Requests can be cancelled at each of their awaits.

Most runs are this process's own, with a real signal. Processes are used where it matters that nothing is loaded yet,
how a process ends, or that there is a terminal.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import entry, session
from asynccache.cli.service import CancelledAt, Server
from asynccache.cli.workloads import RunRequest
from tests.cli import interrupt_child
from tests.cli.trace_kit import made_trace
from tests.processes import PATIENCE as ENDS_WITHIN
from tests.processes import Done, Running, run

pytestmark = [pytest.mark.slow(0.3), pytest.mark.usefixtures("own_signals")]

INT, TERM = signal.SIGINT, signal.SIGTERM
STATUS = {INT: 130, TERM: 143}
TRACE = "{folder}/trace.jsonl"
PLACES = {
    "config": ("asynccache.cli.config.execute", ["config", "schema"]),
    "plan": ("asynccache.cli.plan.plan", ["plan", TRACE, "--bytes-per-token", "1000", "--device-tokens", "1000",
                                          "--host-gib", "1"]),
    "store": ("asynccache.cli.store.perform", ["store", "stat", "file:{folder}/store"]),
    "explain": ("asynccache.cli.explain.ask", ["explain", "http://127.0.0.1:9", "--tokens", "1"]),
    "doctor": ("asynccache.cli.doctor.execute", ["doctor"]),
    "bench": ("asynccache.cli.bench.run", ["bench", "store", "memory:"]),
}
STRESS = ["stress", "--duration", "60", "--device-tokens", "8192", "--host-tokens", "16384", "--concurrency", "4"]
COMMIT = "asynccache.runtime.lease:Lease.commit"
PHASES = {
    "start": "asynccache.cli.session:configure",
    "opening": "asynccache.runtime.cache:AsyncCache.__aenter__",
    "warm-up": "asynccache.cli.session:Meter.start",
    "first request": "asynccache.cli.service:Server.serve",
    "run": COMMIT,
    "end of the run": "asynccache.cli.session:Session._finish",
    "flush": "asynccache.runtime.cache:AsyncCache.flush",
    "audit": "asynccache.core.audit:check",
    "closing": "asynccache.memory.cpu:CpuDevice.aclose",
    "summary": "asynccache.cli.display:summary",
    "writing": "asynccache.cli.output:answer",
    "drawing": "asynccache.cli.session:page",
}
OVER = ("summary", "writing", "drawing")        # all is done by then but to tell it, so nothing was interrupted
RUN = ["stress", "--duration", "0.4", "--rate", "30", "--json", "{folder}/run.json", "--report", "{folder}/run.html"]
QUIET = [*RUN, "--quiet"]
SCHEMA = ["config", "schema"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command as its program calls it, in this process; its status."""
    (tmp_path / "store").mkdir()
    made_trace(tmp_path / "trace.jsonl", conversations=2)

    def called(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["asynccache", *(one.format(folder=tmp_path) for one in arguments)])
        return entry.main()

    return called


def sends(number: signal.Signals) -> Callable[..., Any]:
    def sent(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not end it")

    return sent


def reported(folder: Path, *, interrupted: bool = True) -> dict[str, Any]:
    """The report of a run that ended well."""
    report: dict[str, Any] = json.loads((folder / "run.json").read_text())
    assert (report["interrupted"], report["ok"], set(report["leaks"].values())) == (interrupted, True, {0})
    return report


@pytest.mark.parametrize(("number", "ignored"), [(INT, False), (TERM, False), (TERM, True)])
@pytest.mark.parametrize("name", PLACES)
def test_every_command_ends_quietly_with_the_status_of_its_signal(
    name: str, number: signal.Signals, ignored: bool, monkeypatch: pytest.MonkeyPatch, command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also if it is a background job, which a shell lets ignore Ctrl-C."""
    place, arguments = PLACES[name]
    if ignored:
        signal.signal(INT, signal.SIG_IGN)
    monkeypatch.setattr(place, sends(number))
    assert command(*arguments) == STATUS[number]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("number", STATUS)
def test_a_command_that_waits_on_its_loop_is_cancelled_there(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, command: Callable[..., int]
) -> None:
    """The coroutine can put away what it has, as when it is cancelled from inside."""
    ended = []

    async def waits(*_: object, **__: object) -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("in good order")

    monkeypatch.setattr("asynccache.cli.store.perform", waits)
    assert command("store", "stat", "file:{folder}/store") == STATUS[number]
    assert ended == ["in good order"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(("first", "second", "status"), [
    (TERM, None, 143), (INT, None, 130), (INT, "hangs", 130), (INT, TERM, 143), (TERM, INT, 143), (INT, INT, 130),
])  # fmt: skip
def test_a_run_ends_with_its_report(
    first: signal.Signals, second: Any, status: int, loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], command: Callable[..., int],
) -> None:  # fmt: skip
    """One signal lets the requests end that run, and cancels those that hang when their time is up; a second one ends
    the command without a report."""
    serve, begun = Server.serve, []

    async def told(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        begun.append(request.number)
        if len(begun) == 20:
            os.kill(os.getpid(), first)
            if isinstance(second, int):
                asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), second)
        if second is not None and len(begun) >= 20:
            await asyncio.Event().wait()    # hangs until it is cancelled
        await serve(self, request, places)

    monkeypatch.setattr(Server, "serve", told)
    monkeypatch.setattr(session, "GRACE", 0.05 if second == "hangs" else 60.0)
    assert command(*STRESS, "--loop", loop, "--json", "{folder}/run.json") == status
    said = capsys.readouterr()
    if isinstance(second, int):
        assert (said.out, (tmp_path / "run.json").read_text(), "Traceback" in said.err) == ("", "", False)
        return
    assert "stress OK, interrupted: " in said.out
    report = reported(tmp_path)
    assert (report["cancelled"] > 0) == (second == "hangs")
    assert 20 <= report["requests"] < 60
    assert report["elapsed_s"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_whenever_it_comes_the_report_is_written(
    phase: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., int],
) -> None:  # fmt: skip
    owner, name = interrupt_child.found(PHASES[phase])
    monkeypatch.setattr(owner, name, interrupt_child.pressing(getattr(owner, name), "INT"))
    if phase == "run":
        signal.signal(INT, signal.SIG_IGN)             # as for a background job, whose runs hear it all the same
    status, (out, err) = command(*RUN), capfd.readouterr()
    assert status == (0 if phase in OVER else 130), err
    assert not re.search("Traceback|KeyboardInterrupt", err)
    assert f"stress OK{'' if phase in OVER else ', interrupted'}: " in out
    reported(tmp_path, interrupted=phase not in OVER)
    assert (tmp_path / "run.html").read_text().rstrip().endswith("</html>")


def test_a_run_that_was_wrong_says_so_also_when_it_was_terminated(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., int]
) -> None:
    begun: list[int] = []

    async def breaks(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        begun.append(request.number)
        if len(begun) == 1:  # another would end this process at once
            os.kill(os.getpid(), TERM)
        raise KeyError("x")

    monkeypatch.setattr(Server, "serve", breaks)
    assert command(*STRESS, "--quiet") == 1


def test_the_command_leaves_no_handler_behind(command: Callable[..., int]) -> None:
    with pytest.raises(SystemExit):
        command("--version")
    assert [signal.getsignal(number) for number in STATUS] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize(("found", "number"), [(TERM, TERM), (TERM, INT), (INT, INT)])
def test_a_signal_while_the_handlers_are_put_away_is_quiet(
    found: signal.Signals, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, command: Callable[..., int]
) -> None:
    """``number`` comes when the handler of ``found`` is put away. The command has said all, and its status stands."""
    put = signal.signal
    sent: list[int] = []

    def put_away(each: int, handler: Any) -> Any:
        if (each, handler) == (found, signal.SIG_DFL) and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return put(each, handler)

    monkeypatch.setattr("asynccache.cli.main.main", lambda: 0)
    monkeypatch.setattr(signal, "signal", put_away)
    assert (command(), sent) == (0, [number])
    assert [signal.getsignal(each) for each in STATUS] == [signal.SIG_DFL] * 2


GIVE_BACK = "asynccache.runtime.lease:_give_back"      # the second press ends the loop within a step of a task


@pytest.mark.slow(2)
@pytest.mark.parametrize(("place", "signals", "arguments", "status"), [
    ("import:asynccache.cli.options", "TERM", SCHEMA, 143), ("exit", "TERM", SCHEMA, -TERM),
    ("import:asynccache.cli.main", "INT", SCHEMA, 130), ("import:asynccache.cli.options", "INT", SCHEMA, 130),
    ("import:torch", "INT", ["stress", "--requests", "1", "--quiet"], 130),
    ("import:json", "INT", SCHEMA, 130), ("exit", "INT", SCHEMA, -INT),
    (PHASES["first request"], "TERM,TERM", QUIET, -TERM), (PHASES["opening"], "INT,INT", QUIET, 130),
    *((GIVE_BACK, ";;INT;;;INT", [*QUIET, "--rate", "0", "--loop", loop, "--tp", ranks], 130)
      for loop in ("asyncio", "uvloop") for ranks in "12"),
])  # fmt: skip
def test_a_process_that_is_loading_or_ending_or_is_told_twice_is_quiet_and_has_no_report(
    place: str, signals: str, arguments: list[str], status: int, tmp_path: Path
) -> None:
    done = process(place, signals, arguments, tmp_path)
    assert (done.returncode, done.stderr, done.stdout if arguments is not SCHEMA else "") == (status, "", "")
    assert not (tmp_path / "run.json").exists() or (tmp_path / "run.json").read_text() == ""


def process(place: str, signals: str, arguments: list[str], folder: Path) -> Done:
    return run(interrupt_child.__file__, place, signals, *(one.format(folder=folder) for one in arguments))


def test_a_signal_before_the_first_request_ends_the_run(tmp_path: Path) -> None:
    made_trace(tmp_path / "trace.jsonl", conversations=2)
    arguments = ["replay", TRACE, "--concurrency", "1", "--json", "{folder}/run.json"]
    done = process(PHASES["start"], "TERM", arguments, tmp_path)
    assert (done.returncode, "replay OK, interrupted: " in done.stdout) == (143, True), done.stderr
    assert reported(tmp_path)["served"] == 0


# on a terminal, and without one

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def words(folder: Path, kind: str) -> list[str]:
    what = ["stress", "--duration", "120", "--rate", "30"]
    if kind == "replay":
        trace = made_trace(folder / "trace.jsonl", conversations=750)
        what = ["replay", str(trace), "--speed", "50", "--storage", "memory:?capacity=64MiB"]
    return ["-m", "asynccache", *what, "--concurrency", "8",
            "--json", str(folder / "run.json"), "--report", str(folder / "run.html")]


def started(folder: Path, kind: str, columns: int) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal of its own, as its foreground job; and the other end of the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, *words(folder, kind)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                               env=environment | {"TERM": "xterm"})  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, wanted: bytes | None, seen: bytearray) -> None:
    """Read until ``wanted`` was shown; None: until nobody has the terminal any more."""
    end, start = time.monotonic() + ENDS_WITHIN, len(seen)
    while wanted is None or wanted not in seen[start:]:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, seen[-2000:].decode(errors="replace")
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the last one has closed it
            data = b""
        if not data:
            assert wanted is None, seen[-2000:].decode(errors="replace")
            return
        seen += data


@pytest.mark.slow(6)
@pytest.mark.parametrize(("kind", "columns"), [("stress", 40), ("replay", 80)])
def test_the_panel_fits_and_ctrl_c_reports(kind: str, columns: int, tmp_path: Path) -> None:
    process, terminal = started(tmp_path, kind, columns)
    seen = bytearray()
    try:
        read_until(terminal, b"running", seen)
        read_until(terminal, b"verified", seen)
        panel = len(seen)
        os.write(terminal, b"\x03")
        read_until(terminal, None, seen)
        assert process.wait(ENDS_WITHIN) == 130
    finally:
        process.kill()
        os.close(terminal)
    rows = ANSI.sub("", seen[:panel].decode(errors="replace")).replace("\r", "\n").split("\n")
    assert max(map(len, rows)) <= columns
    assert 0 < reported(tmp_path)["elapsed_s"] < 60
    assert "interrupted" in (tmp_path / "run.html").read_text()
    after = ANSI.sub("", seen[panel:].decode(errors="replace"))
    assert (f"{kind} OK" in after, "Traceback" in after) == (True, False)


@pytest.mark.slow(6)
def test_without_a_terminal_ctrl_c_reports_too(tmp_path: Path) -> None:
    with Running(*words(tmp_path, "stress"), popen=subprocess.Popen, stdin=subprocess.DEVNULL) as command:
        line, done = command.line(), command.ended(INT)
    assert re.match(r"\d+ (of 120 )?s +\d+ % · requests [\d,]+ served · \d+ running", line), line
    assert (done.returncode, "stress OK" in done.stdout, "\x1b" in f"{line}{done}") == (130, True, False), done
    reported(tmp_path)


# a request can be cancelled at each of its awaits, and nothing else changes for it


@pytest.mark.parametrize("at", [None, 1, 2, 3, 4, 5, 6])
async def test_it_cancels_at_exactly_that_await(at: int | None) -> None:
    """Of five, of three kinds. A place behind the end never comes."""
    reached, cleaned = list[int](), list[bool]()

    async def steps() -> str:
        loop = asyncio.get_running_loop()
        try:
            for number in range(3):
                await asyncio.sleep(0)
                reached.append(number)
            future = loop.create_future()
            loop.call_soon(future.set_result, None)
            await future
            reached.append(3)
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
            reached.append(4)
        finally:
            cleaned.append(True)
        return "done"

    work = CancelledAt(steps(), at)

    async def one() -> Any:
        return await work

    if at in (None, 6):
        assert (await one(), work.awaits, len(reached)) == ("done", 5, 5)
        return
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(one())
    assert (len(reached), cleaned) == (at - 1, [True])


async def test_errors_come_out() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        await CancelledAt(fails(), None)
