"""A process that does jobs: a line of JSON each on its stdin, a line of JSON each on its stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[2]


class Member:
    """One process, that runs the module ``program``."""

    def __init__(self, program: str) -> None:
        self.process = warm.Popen(
            [sys.executable, "-W", "error", "-m", program],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, imports=warm.MODELS,
        )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def tell(self, job: dict[str, Any]) -> None:
        """Begin a job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, seconds: float) -> Any:
        """The value of ``key`` in the next line that has it."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = json.loads(self._lines.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                raise AssertionError(f"no {key} within {seconds} s; exit {self.process.poll()}") from None
            if key in line:
                return line[key]

    def strike(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self, seconds: float = 60.0) -> int | None:
        """Give the process no more jobs. Returns its exit status; None if it did not end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()
