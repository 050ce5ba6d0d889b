"""Real runs on a real terminal: a pty of 40 or 80 columns, none at all, and Ctrl-C, which still reports."""

from __future__ import annotations

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
from pathlib import Path

import pytest

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DEADLINE = 60.0


def command(folder: Path, kind: str = "stress") -> list[str]:
    what = ["stress", "--duration", "120", "--rate", "30"]
    if kind == "replay":
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps({"timestamp": i * 40, "input_length": 1100, "output_length": 8,
                                             "hash_ids": [0, i % 7 + 1, i + 9]}) + "\n" for i in range(3000)))
        what = ["replay", str(trace), "--speed", "1", "--storage", "memory:?capacity=64MiB"]
    return [sys.executable, "-m", "asynccache", *what, "--concurrency", "8",
            "--json", str(folder / "run.json"), "--report", str(folder / "run.html")]


def started(folder: Path, kind: str, columns: int) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal of its own, as its foreground job; and the other end of the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def become_its_job() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command(folder, kind), stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True, preexec_fn=become_its_job, env=environment)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, wanted: bytes | None, seen: bytearray) -> None:
    """Read until ``wanted`` was shown; None: until nobody has the terminal any more."""
    end = time.monotonic() + DEADLINE
    start = len(seen)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns", "word"), [("stress", 40, b"running"), ("replay", 60, b"running"), ("stress", 80, b"running")]
)
def test_the_panel_fits_and_ctrl_c_reports(kind: str, columns: int, word: bytes, tmp_path: Path) -> None:
    process, terminal = started(tmp_path, kind, columns)
    seen = bytearray()
    try:
        read_until(terminal, word, seen)
        read_until(terminal, b"verified", seen)
        panel = len(seen)
        os.write(terminal, b"\x03")
        read_until(terminal, None, seen)
        assert process.wait(DEADLINE) == 130
    finally:
        process.kill()
        os.close(terminal)
    rows = ANSI.sub("", seen[:panel].decode(errors="replace")).replace("\r", "\n").split("\n")
    assert max(map(len, rows)) <= columns
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["interrupted"], report["ok"]) == (True, True)
    assert 0 < report["elapsed_s"] < 60
    assert "interrupted" in (tmp_path / "run.html").read_text()
    after = ANSI.sub("", seen[panel:].decode(errors="replace"))
    assert f"{kind} OK" in after
    assert "Traceback" not in after


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stress", "replay"])
def test_without_a_terminal_ctrl_c_reports_too(kind: str, tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, kind), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert re.match(r"\d+ (of 120 )?s +\d+ % · requests [\d,]+ served · \d+ running", line), line
    assert process.returncode == 130, err
    assert "\x1b" not in line + out + err
    assert f"{kind} OK" in out
    assert json.loads((tmp_path / "run.json").read_text())["interrupted"] is True
