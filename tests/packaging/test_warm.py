"""Processes that ``tests.warm`` starts behave like those that ``subprocess`` starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
json.dump({
    "argv": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "parent": os.getppid(),
    "mine": os.environ.get("MINE"), "session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(),
    "path": [os.path.realpath(path) for path in sys.path[:2]], "warnings": sys.warnoptions,
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3],
}, sys.stdout)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shows.py").write_text(SHOW)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


@pytest.mark.parametrize("as_module", [True, False])
def test_a_process_has_what_it_was_given(folder: Path, as_module: bool) -> None:
    found: list[Any] = []
    for popen in (subprocess.Popen, warm.Popen):
        program = ["-m", "shows"] if as_module else [str(folder / "shows.py")]
        with popen(
            [sys.executable, "-W", "error", *program, "a", "--b"], cwd=folder / "elsewhere", text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"MINE": "yes", "PYTHONPATH": str(folder)},
        ) as process:  # fmt: skip
            out, errors = process.communicate("some input")
        found.append((process.returncode, json.loads(out), errors))
    assert found[0] == found[1]
    assert found[1][0] == 7
    assert found[1][1]["parent"] == os.getpid()


@pytest.mark.parametrize(("end", "status"), [
    ("raise KeyboardInterrupt", -signal.SIGINT), ("raise ValueError", 1), ("raise SystemExit('said')", 1), ("", 0),
    ("import atexit, os; atexit.register(os._exit, 9)", 9),
    ("import threading, time, os; threading.Thread(target=lambda: (time.sleep(.2), os._exit(8))).start()", 8),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
])  # fmt: skip
def test_a_process_ends_as_ever(end: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(end)
    command = [sys.executable, str(tmp_path / "ends.py")]
    cold = subprocess.run(command, capture_output=True, text=True, check=False)
    done = warm.run(command, capture_output=True, text=True)
    assert (done.returncode, cold.returncode) == (status, status)
    assert done.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_what_it_starts_is_its_own_child_and_begins_warm(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\n"
        "done = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "print(done.communicate()[0].decode(), done.returncode)")  # fmt: skip
    (tmp_path / "says.py").write_text("import sys; print('torch' in sys.modules); sys.exit(3)")
    command = [sys.executable, str(tmp_path / "starts.py"), str(tmp_path / "says.py")]
    for ranks in (True, False):
        assert warm.run(command, capture_output=True, text=True, ranks=ranks).stdout.split() == [str(ranks), "3"]
