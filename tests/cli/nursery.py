"""Processes of the command and of its ranks that begin in milliseconds: forks of one that has imported torch already.

``python -m tests.cli.nursery PATH`` is that one: it listens on a Unix socket, imports what every fork would import, and
runs nothing of it. ``Born`` has what is used of ``subprocess.Popen``. A fork is a process like any other: it has a
session, files and an end of its own, and the command that runs in one starts its ranks in others.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).parents[2]
MOST = 1 << 17
"""Bytes of a message."""
NEEDED = (
    "torch", "numpy.ma", "numpy.random", "uvloop", "asynccache_backends.file", "asynccache_backends.redis",
    "asynccache.cli.main", "asynccache.cli.driver", "asynccache.cli.engine", "asynccache.cli.ranked.session",
    "asynccache.cli.ranked.work", "asynccache.worker.group", "asynccache.worker.local", "asynccache.worker.serving",
)  # fmt: skip


class Born:
    """``arguments``: ``[python, "-m", module, ...]``. Each of the three files is an open file or ``PIPE``."""

    def __init__(
        self, path: str, arguments: Sequence[str], *, stdin: Any = None, stdout: Any, stderr: Any,
        env: Mapping[str, str], start_new_session: bool = True, text: bool = False,
    ) -> None:  # fmt: skip
        _, dash, module, *rest = arguments
        assert (dash, start_new_session) == ("-m", True)
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        given: list[Any] = [stdin, stdout, stderr]
        ends = []
        if stdin is None:
            given[0] = os.open(os.devnull, os.O_RDONLY)
            ends.append(given[0])
        elif stdin == subprocess.PIPE:
            given[0], ours = os.pipe()
            ends.append(given[0])
            self.stdin = open(ours, "w" if text else "wb")  # noqa: SIM115  as long as the process
        if stderr == subprocess.PIPE:
            ours, given[2] = os.pipe()
            ends.append(given[2])
            self.stderr = open(ours, "r" if text else "rb")  # noqa: SIM115
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        files = [file if isinstance(file, int) else file.fileno() for file in given]
        socket.send_fds(self._socket, [json.dumps([module, rest, dict(env)]).encode()], files)
        for end in ends:
            os.close(end)
        self.pid = int(self._socket.recv(32))

    def poll(self) -> int | None:
        """Its status, if it has ended: minus a signal's number where that has killed it."""
        with suppress(BlockingIOError):
            self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status when it has ended. Raises ``TimeoutError``: not in so many seconds."""
        self._hear(timeout)
        assert self.returncode is not None
        return self.returncode

    def _hear(self, timeout: float | None) -> None:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            self.returncode = int(self._socket.recv(32))
            self._socket.close()

    def kill(self) -> None:
        """End it now, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def nursery() -> Iterator[str]:
    """One, for as long as the body runs: the path of its socket. What it has made ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/nursery"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.nursery", path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield path
            process.communicate()


# the process itself


class _Nursery:
    """``living``: whom to tell of the end of which process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._living: dict[int, socket.socket] = {}
        self._woken, waking = socket.socketpair()
        for end in (self._woken, waking):
            end.setblocking(False)
        self._waking = waking
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())

    def run(self) -> None:
        """Return when standard input has ended, and with it whoever started this."""
        looking = selectors.DefaultSelector()
        for file in (sys.stdin, self._listener, self._woken):
            looking.register(file, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready = [key.fileobj for key, _ in looking.select()]
            if self._woken in ready:
                self._woken.recv(4096)
                self._bury()
            if self._listener in ready:
                asking, _ = self._listener.accept()
                message, files, *_ = socket.recv_fds(asking, MOST, 3)
                pid = os.fork()
                if not pid:
                    looking.close()
                    self._become(files, asking, *json.loads(message))
                for file in files:
                    os.close(file)
                self._living[pid] = asking
                asking.send(b"%d" % pid)
            if sys.stdin in ready:
                break
        for pid in self._living:
            os.kill(pid, signal.SIGKILL)

    def _bury(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                with suppress(OSError), self._living.pop(pid) as asking:
                    asking.send(b"%d" % os.waitstatus_to_exitcode(status))

    def _become(
        self, files: Sequence[int], asking: socket.socket, module: str, arguments: list[str], env: dict[str, str]
    ) -> None:
        """In the fork: run ``module``, and end as it ends."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for own, file in enumerate(files):
            os.dup2(file, own)
            os.close(file)
        for one in (self._listener, self._woken, self._waking, asking, *self._living.values()):
            one.close()
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = arguments
        from asynccache.cli.ranked import crew

        vars(crew)["subprocess"] = SimpleNamespace(PIPE=subprocess.PIPE, Popen=partial(Born, self._path))
        status: Any = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        threading._shutdown()  # type: ignore[attr-defined]  # a thread that does not end keeps the process, as anywhere
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)       # to take torch apart, module by module, costs 0.7 s of CPU


def main() -> None:
    """Import what all need."""
    for module in NEEDED:
        import_module(module)
    gc.freeze()
    _Nursery(sys.argv[1]).run()


if __name__ == "__main__":
    main()
