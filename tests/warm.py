"""Processes that begin with torch imported: ``Popen`` and ``run`` as ``subprocess`` has them, for Python programs.

To import torch takes seconds of CPU, and the gate starts some two hundred processes that need it. One process of each
worker of pytest (the *starter*) imports it once and forks; what it forks is a process like any other: its own pid,
session, environment, folder, arguments and descriptors, and a child of whoever asked for it, who waits for it and gets
its status as ever. Cold starts stay where they matter: the documentation's commands, and whatever looks at imports.

How it becomes the child of who asks: the starter's child forks once more and ends; Linux gives the orphan to its
nearest ancestor that has asked for orphans (``PR_SET_CHILD_SUBREAPER``), and that is whoever asked. Elsewhere, and for
what is not Python, these are ``subprocess``'s own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUBREAPER = 36
IMPORTS = ("torch", "numpy", "msgspec", "uvloop")
COMMANDS = (
    *IMPORTS, "asynccache.cli.main", "asynccache.cli.service", "asynccache.cli.engine", "asynccache.cli.session",
    "asynccache.memory.pools", "asynccache.memory.cpu", "asynccache.worker.rank_server", "asynccache_backends.file",
)  # fmt: skip
"""For who runs many of our own commands."""
MODELS = (*IMPORTS, "transformers.models.llama.modeling_llama")
"""For who runs models: this takes another five seconds."""
LENGTH = 4


class Popen(subprocess.Popen):  # type: ignore[type-arg]  # of str or of bytes, as its arguments say
    """``subprocess.Popen``. ``ranks``: the program starts Python programs of its own, and those begin warm, too.
    ``imports``: what it begins with."""

    def __init__(
        self, args: Sequence[str], *, ranks: bool = False, imports: Sequence[str] = IMPORTS, **options: Any
    ) -> None:
        self._ranks = ranks
        self._imports = imports
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, *rest: Any) -> None:  # fmt: skip
        words = None if executable or preexec_fn or pass_fds else program(args)
        if words is None or sys.platform != "linux":
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        _, _, shell, *pipes, _, gid, gids, uid, umask, session, group = rest
        others = (bool(shell), gid, gids, uid, umask, group)
        assert others == (False, None, None, None, -1, -1), f"subprocess has this, and tests.warm not: {others}"
        given, _, _, out, _, errors = pipes
        ends = [ours if theirs == -1 else theirs for ours, theirs in ((0, given), (1, out), (2, errors))]
        asked = {
            "args": words, "cwd": os.fspath(cwd or os.getcwd()), "session": bool(session), "ranks": self._ranks,
            "env": dict(os.environ if env is None else env), "imports": list(self._imports),
        }  # fmt: skip
        self.pid = starter().start(asked, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    args: Sequence[str], *, capture_output: bool, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``, without ``check``."""
    pipe = subprocess.PIPE if capture_output else None
    with Popen(args, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def program(args: object) -> list[str] | None:
    """The words behind ``python``, if that is what ``args`` begin, and a starter can do as they say."""
    if not isinstance(args, (list, tuple)) or not args or args[0] != sys.executable:
        return None
    words = [os.fspath(word) for word in args[1:]]
    at = 0
    while at < len(words) and words[at] == "-W":
        at += 2
    if at < len(words) and (words[at] == "-m" or words[at].endswith(".py")):
        return words
    return None


class Starter:
    """This process's side of the starter, the process that forks. May be used from any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def start(self, asked: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of a new process, which is this one's child."""
        content = json.dumps(asked).encode()
        with self._lock:
            socket.send_fds(self._end, [len(content).to_bytes(LENGTH, "little")], descriptors)
            self._end.sendall(content)
            return int.from_bytes(_all(self._end, LENGTH), "little")


_starter: Starter | None = None
_making = threading.Lock()


def starter() -> Starter:
    """The starter of this process, made when it is first wanted."""
    global _starter
    with _making:
        if _starter is None:
            ours, theirs = socket.socketpair()
            with theirs:
                made = subprocess.Popen(
                    [sys.executable, "-m", "tests.warm", str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
            atexit.register(_end, ours, made)
            _starter = Starter(ours)
    return _starter


def _end(ours: socket.socket, made: subprocess.Popen[bytes]) -> None:
    ours.close()
    made.wait()


# the starter


def serve(end: socket.socket) -> dict[str, Any] | None:
    """Fork whenever somebody asks. Returns in each process that was forked, with what it is to do; and in the starter
    when nobody can ask any more, with nothing."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(end, LENGTH, 3)
        if not head:
            return None
        asked: dict[str, Any] = json.loads(_all(end, int.from_bytes(head, "little")))
        _import(asked["imports"])
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                while os.getppid() == parent:
                    time.sleep(0.001)
                os.close(told)
                os.close(tell)
                end.close()
                if asked["session"]:
                    os.setsid()
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                for descriptor in set(descriptors) - {0, 1, 2}:
                    os.close(descriptor)
                return asked
            os.write(tell, pid.to_bytes(LENGTH, "little"))
            os._exit(0)
        os.close(tell)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        end.sendall(os.read(told, LENGTH))
        os.close(told)


def become(asked: dict[str, Any]) -> None:
    """Become the process that was asked for, and run its program."""
    if asked["ranks"]:
        _start_warm()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    words = asked["args"]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings._setoption(words[1])  # type: ignore[attr-defined]
        words = words[2:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [os.getcwd(), *paths]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:1] = [str(Path(words[0]).parent), *paths]
        runpy.run_path(words[0], run_name="__main__")


def _start_warm() -> None:
    """Give this program a starter of its own, forked while there are no threads, so that processes that it starts begin
    warm."""
    global _starter
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        found = serve(theirs)
        if found is None:
            os._exit(0)
        become(found)
        raise SystemExit
    theirs.close()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    _starter = Starter(ours)
    subprocess.Popen = Popen  # type: ignore[misc,assignment]


def _import(names: Sequence[str]) -> None:
    """In the starter. What was imported is shared with all that is forked from now on."""
    if not all(name in sys.modules for name in names):
        for name in names:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()


def _all(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = end.recv(count - len(found))
        if not more:
            raise EOFError("the other end is closed")
        found += more
    return found


def _main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked)


if __name__ == "__main__":
    _main()
