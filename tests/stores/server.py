"""A real store server as a child process on loopback: started, hung, killed, restarted, and always ended.

Each kind of server is a subclass in a module of its own. One that cannot start raises ``CannotStart``.
``tests/conftest.py`` makes of that a failed test where the stores are required (``CI`` or
``ASYNCCACHE_STORES=required`` in the environment), and a skip with the reason anywhere else.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
READY_WITHIN = 30.0
HUNG = 0.8


class CannotStart(Exception):
    """A program is not installed, or did not come up; the message says which and what to do. Its test is skipped, or
    fails where the stores are required."""


class NowhereRequired(CannotStart):
    """One whose test is skipped also where the stores are required."""


def ours(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs code of this checkout."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "scheduler_shim"))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def required() -> bool:
    """Whether a server that cannot start is a failure."""
    return os.environ.get("ASYNCCACHE_STORES") == "required" or bool(os.environ.get("CI"))


def path_of(*names: str, install: str, missing: type[CannotStart] = CannotStart) -> str:
    """The program of the first name that is in PATH or beside the interpreter.

    Raises:
        CannotStart: there is none. ``missing`` is what is raised, and ``install`` the command that brings it.
    """
    for path in (None, str(Path(sys.executable).parent)):
        for name in names:
            if (found := shutil.which(name, path=path)) is not None:
                return found
    raise missing(f"{names[0]} is not installed: {install}")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether somebody accepts connections at ``port``."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=0.5):
        return True
    return False


def await_start(there: Callable[[], bool], complaint: Callable[[], str], seconds: float = 20.0) -> None:
    """Return when it is so. Raises CannotStart, which says ``complaint()``, if that takes more than ``seconds``."""
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise CannotStart(complaint())
        time.sleep(0.02)


class Entered:
    """An object that ``with`` starts and closes, and that is closed if it cannot start."""

    def start(self) -> Self:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class Server(Entered):
    """One process. Subclasses say ``command()``, ``url`` and, if a listening port is not enough, ``ready()``."""

    program = ""                                       # looked up in PATH and beside the interpreter
    libraries: tuple[str, ...] = ()                    # of the system, without which it ends at once
    hint = ""                                          # how to install it
    missing: type[CannotStart] = CannotStart
    ready_within = READY_WITHIN

    def __init__(self, port: int = 0) -> None:         # 0: a free one
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"asynccache-{type(self).__name__.lower()}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._stuttering: threading.Thread | None = None
        self._steady = threading.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(port={self.port}, pid={self.pid})"

    # what a subclass says

    @property
    def url(self) -> str:
        """The URL for ``--storage``."""
        raise NotImplementedError

    def command(self, program: str) -> Sequence[str]:
        """The command that runs it in the foreground."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Variables that it needs besides this process's environment."""
        return {}

    def ready(self) -> bool:
        """Whether it can serve."""
        return listens(self.port)

    # its life

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> str:
        """Everything that it has printed."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @classmethod
    def installed(cls) -> str:
        """The path of its program. Raises CannotStart if that, or a library of the system, is not there."""
        for library in cls.libraries:
            try:
                ctypes.CDLL(library)
            except OSError:
                raise CannotStart(f"{library} is not installed: make stores-install") from None
        return path_of(cls.program, install=cls.hint, missing=cls.missing)

    def start(self) -> Self:
        """Return when it serves.

        Raises:
            CannotStart: it is not installed, or was not ready in time.
        """
        program = self.installed()
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self.command(program), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env={**os.environ, **self.environment()}, start_new_session=True,
            )  # fmt: skip
        self._wait()
        return self

    def _wait(self) -> None:
        until = time.monotonic() + self.ready_within
        while not self.ready():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > until:
                tail = self.log[-2000:]
                self.kill()
                raise CannotStart(f"{self.program} {'ended' if ended else 'was not ready'}: {tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL to it and to all that it started; return when all are gone. Its folder stays."""
        self.steady()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def hang(self) -> None:
        """Stop it (SIGSTOP): connections stay and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``hang``."""
        self._signal(signal.SIGCONT)

    def stutter(self) -> None:
        """Let it hang for ``HUNG`` seconds of each second, until ``steady``."""
        self._steady.clear()
        self._stuttering = threading.Thread(target=self._stutter, daemon=True)
        self._stuttering.start()

    def steady(self) -> None:
        """Undo ``stutter``."""
        self._steady.set()
        if self._stuttering is not None:
            self._stuttering.join()
        self._stuttering = None

    def _stutter(self) -> None:
        while not self._steady.is_set():
            self.hang()
            self._steady.wait(HUNG)
            self.resume()
            self._steady.wait(1.0 - HUNG)

    def restart(self) -> None:
        """Kill it and start it again at the same port. What it held is gone: none of them writes it to a disk."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill it and remove its folder. A second call does nothing."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it does not run"
        os.killpg(self._process.pid, number)
