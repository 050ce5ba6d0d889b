"""SIGTERM does what Ctrl-C does, in every command, with its own exit status; a second one ends the process at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import entry
from asynccache.cli.service import Server
from asynccache.cli.workloads import RunRequest
from tests.cli import interrupt_child
from tests.cli.trace_kit import made_trace

pytestmark = pytest.mark.slow(0.3)

ENDS_WITHIN = 180.0
TRACE = "{trace}"
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


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The command owns the signals of its process; here that is the process of all tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["asynccache", *arguments])
    return entry.main()


def sends(number: signal.Signals) -> Callable[..., Any]:
    def sent(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not end it")

    return sent


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", PLACES)
def test_every_command_ends_quietly_with_the_status_of_its_signal(
    name: str, number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place, arguments = PLACES[name]
    trace = made_trace(tmp_path / "trace.jsonl", conversations=2)
    (tmp_path / "store").mkdir()
    given = [argument.format(trace=trace, folder=tmp_path) for argument in arguments]
    monkeypatch.setattr(place, sends(number))
    assert command(monkeypatch, *given) == status
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_waits_on_its_loop_is_cancelled_there(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    (tmp_path / "store").mkdir()
    assert command(monkeypatch, "store", "stat", f"file:{tmp_path / 'store'}") == status
    assert ended == ["in good order"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(("first", "second", "status"), [
    (signal.SIGTERM, None, 143), (signal.SIGINT, None, 130), (signal.SIGINT, signal.SIGTERM, 143),
    (signal.SIGTERM, signal.SIGINT, 143), (signal.SIGINT, signal.SIGINT, 130),
])  # fmt: skip
def test_a_run_ends_with_its_report(
    first: signal.Signals, second: signal.Signals | None, status: int, loop: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One signal lets the requests end that run; a second one ends the command without a report."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    serve, begun = Server.serve, []

    async def told(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        begun.append(request.number)
        if len(begun) == 20:
            os.kill(os.getpid(), first)
            if second is not None:
                asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), second)
        if second is not None and len(begun) >= 20:
            await asyncio.Event().wait()    # hangs until it is cancelled
        await serve(self, request, places)

    monkeypatch.setattr(Server, "serve", told)
    out = tmp_path / "run.json"
    assert command(monkeypatch, *STRESS, "--loop", loop, "--json", str(out)) == status
    said = capsys.readouterr()
    if second is not None:
        assert (said.out, out.read_text(), "Traceback" in said.err) == ("", "", False)
        return
    assert "stress OK, interrupted: " in said.out
    report = json.loads(out.read_text())
    assert (report["interrupted"], report["ok"], set(report["leaks"].values())) == (True, True, {0})
    assert report["cancelled"] == 0


def test_a_run_that_was_wrong_says_so_also_when_it_was_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    async def breaks(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        begun.append(request.number)
        if len(begun) == 1:  # another would end this process at once
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError("x")

    monkeypatch.setattr(Server, "serve", breaks)
    assert command(monkeypatch, *STRESS, "--quiet") == 1


def test_a_background_job_that_ignores_ctrl_c_hears_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr("asynccache.cli.config.execute", sends(signal.SIGTERM))
    assert command(monkeypatch, "config", "schema") == 143


def test_the_command_leaves_no_handler_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["asynccache", "--version"])
    with pytest.raises(SystemExit):
        entry.main()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize(("found", "number"), [
    (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT),
])  # fmt: skip
def test_a_signal_while_the_handlers_are_put_away_is_quiet(
    found: signal.Signals, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
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
    assert (command(monkeypatch), sent) == (0, [number])
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == [signal.SIG_DFL] * 2


def process(place: str, signals: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, interrupt_child.__file__, place, signals, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)


@pytest.mark.parametrize(("place", "status"), [("import:asynccache.cli.options", 143), ("exit", -signal.SIGTERM)])
def test_a_process_that_is_loading_or_ending_is_quiet(place: str, status: int) -> None:
    done = process(place, "TERM", "config", "schema")
    assert (done.returncode, done.stderr) == (status, "")


def test_twice_ends_a_process_at_once(tmp_path: Path) -> None:
    """In the middle of a run, and nothing that would be done at its end is done."""
    out = tmp_path / "run.json"
    done = process("asynccache.cli.service:Server.serve", "TERM,TERM", *STRESS, "--json", str(out))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    assert out.read_text() == ""


def test_a_signal_before_the_first_request_ends_the_run(tmp_path: Path) -> None:
    trace, out = made_trace(tmp_path / "trace.jsonl", conversations=2), tmp_path / "run.json"
    arguments = ["replay", str(trace), "--concurrency", "1", "--json", str(out)]
    done = process("asynccache.cli.session:configure", "TERM", *arguments)
    assert (done.returncode, "replay OK, interrupted: " in done.stdout) == (143, True), done.stderr
    assert json.loads(out.read_text())["served"] == 0
