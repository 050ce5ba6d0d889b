"""Stands in for the programs that a shell block names, so that the block's text runs unchanged but takes less time.

Run as ``docs_programs.py NAME ARGUMENT...``. Only these things are changed: a run that would take long stops early
(``SHORT``), ``explain`` waits until a server listens, a server is stopped by Ctrl-C once it has answered, ``make`` uses
the environment that the tests run in, and ``make test``, of which this is a part, only prints its commands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from tests.processes import ROOT, Running
from tests.stores.server import listens
from tests.waiting import wait_until

PATIENCE = 60.0
SHORT = {
    "stress": ["--requests", "16"],
    "replay": ["--limit", "24"],
    "bench store": ["--page-sizes", "64KiB", "--bytes", "4MiB", "--repeat", "1"],
    "-m benchmarks.ttft": ["--prefix", "256", "--layers", "2", "--width", "64", "--repeats", "1"],
}


def asynccache(arguments: list[str]) -> int:
    """The command itself."""
    from asynccache.cli.main import main

    if arguments[0] == "explain":
        wait_until(lambda: listens(urlsplit(arguments[1]).port or 0), "nobody listens")
    return main(sooner(arguments))


def sooner(arguments: list[str]) -> list[str]:
    """Arguments of ``asynccache`` with which it stops early."""
    known = " ".join(arguments[:2]) if arguments[0] == "bench" else arguments[0]
    return arguments + ([] if "--serve" in arguments else SHORT.get(known, []))


def python(arguments: list[str]) -> int:
    """Python; an example is the repository's."""
    path = ROOT / arguments[0]
    if arguments[0] == "examples/openai_server.py":
        return _served([str(path), *arguments[1:], "--port", "0", "--threads", "1"])
    arguments = arguments + SHORT.get(" ".join(arguments[:2]), [])
    return subprocess.call([sys.executable, str(path) if path.is_file() else arguments[0], *arguments[1:]])


def _served(command: list[str]) -> int:
    """A reader starts it, asks it something, and presses Ctrl-C."""
    with Running(*command, popen=subprocess.Popen) as process:
        with urlopen(f"{process.line('stdout').split()[0]}/healthz", timeout=PATIENCE) as answer:
            assert answer.status == 200
        return process.ended(signal.SIGINT).returncode


def make(arguments: list[str]) -> int:
    """A target of the Makefile, with an environment that has everything installed."""
    folder = Path("environment")
    folder.mkdir(exist_ok=True)
    if not (folder / "bin").exists():
        (folder / "bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".created", ".installed-cli", ".installed-docs", ".installed-dev"):
        (folder / stamp).touch()
    only_say = ["-n"] if arguments == ["test"] else []
    command = ["make", "-C", str(ROOT), f"VENV={folder.resolve()}", "DEMO=--requests 40", *only_say, *arguments]
    without_us = os.environ["PATH"].partition(os.pathsep)[2]
    return subprocess.call(command, env=os.environ | {"PATH": without_us})


if __name__ == "__main__":
    sys.exit({"asynccache": asynccache, "python": python, "make": make}[sys.argv[1]](sys.argv[2:]))
