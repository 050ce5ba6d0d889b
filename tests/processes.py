"""Programs in processes of their own: run to their end, or started, listened to and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests import warm

ROOT = Path(__file__).parents[1]
PATIENCE = 180.0
PATHS = {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "backends", "scheduler_shim"))}
Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]
"""What the fixture ``command`` is."""


def run(*words: object, env: Mapping[str, str] = PATHS, **options: Any) -> Done:
    """``python WORD...`` to its end, whatever that is. ``env``: what its environment has besides this one's."""
    return program(sys.executable, *words, env=env, **options)


def program(*words: object, env: Mapping[str, str] = PATHS, timeout: float = PATIENCE, **options: Any) -> Done:
    """The same of any program."""
    return subprocess.run(
        [str(word) for word in words], env=os.environ | dict(env), capture_output=True, text=True, check=False,
        timeout=timeout, **options,
    )  # fmt: skip


class Running:
    """``python WORD...``, for a ``with``: at the end of the block it is killed, if it is still there. ``popen``: what
    starts it, warm unless something else is given."""

    def __init__(
        self, *words: object, env: Mapping[str, str] = PATHS, popen: Any = warm.Popen, **options: Any
    ) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = popen(
            [sys.executable, *map(str, words)], env=os.environ | dict(env), **pipes | options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self, pipe: str = "stderr") -> str:
        """The next line that it writes there; there must be one."""
        said: str = getattr(self.process, pipe).readline()
        assert said, self.process.communicate()
        return said

    def ended(self, number: int | None = None) -> Done:
        """How it ended, after the signal ``number`` if one is given, and what of its words was not read before."""
        if number is not None:
            self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, errors)
