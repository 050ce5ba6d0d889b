"""The processes of a run, one for each rank, and what a rank's process does first.

Law: no process outlives its ``Crew``, even if the command is killed. The command holds a pipe to the standard input of
each process. When the pipe closes, the process ends within ``FAREWELL`` seconds, wherever it is. Each process is in a
session of its own, so Ctrl-C reaches the command alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from asynccache.worker.link import SECRET

COMMAND: Sequence[str] = (sys.executable, "-m", "asynccache.cli.ranked")
FAREWELL = 1.0
"""Seconds in which a rank that lost the command may close its stores by itself, as it does when its link ends."""
_EXIT = 10.0
_LOOK = 0.02


class Duty(NamedTuple):
    """The orders of a rank, which the command gives it at its start. ``faults``: the share of copies and of stores'
    calls that have faults; see ``asynccache.cli.machine``. ``delay``: for how many seconds at most the rank waits
    before each batch."""

    rank: int
    address: str
    tp: int
    cp: int
    pp: int
    device: str
    loop: str | None
    seed: int
    faults: float
    delay: float


def read_duty() -> Duty:
    """Read this process's duty from standard input, and end the process when the command is gone."""
    duty = Duty(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_the_command, name="asynccache-parent", daemon=True).start()
    return duty


def _end_with_the_command() -> None:
    while os.read(0, 1):
        pass
    time.sleep(FAREWELL)
    os._exit(2)


class Member:
    """The process of one rank. ``account``: its part of the report, which it wrote at its end; None: it wrote none."""

    def __init__(self, duty: Duty, secret: str) -> None:
        self.rank = duty.rank
        self.account: Mapping[str, Any] | None = None
        self._end_reason = ""
        self._said, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  closed in ``end``
        self.process = subprocess.Popen(
            [*COMMAND, str(duty.rank)], stdin=subprocess.PIPE, stdout=self._said, stderr=self._log,
            start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1", SECRET: secret},
        )  # fmt: skip
        assert self.process.stdin is not None
        self._pipe = self.process.stdin
        with suppress(BrokenPipeError):
            self._pipe.write(json.dumps(duty._asdict()).encode() + b"\n")
            self._pipe.flush()

    def __repr__(self) -> str:
        return f"Member(rank {self.rank}, pid {self.process.pid})"

    def end_reason(self) -> str:
        """Return how the process ended, and the last line that it wrote to standard error; an empty text as long as it
        has not ended."""
        status = self.process.poll()
        if status is None or self._log.closed:
            return self._end_reason
        lines = _read(self._log).strip().splitlines()
        how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        return how + (f": {lines[-1]}" if lines else "")

    def end(self) -> None:
        """Read what the process wrote. To be called once, after it has ended."""
        with suppress(BrokenPipeError):
            self._pipe.close()
        with suppress(ValueError):
            self.account = json.loads(_read(self._said))
        self._end_reason = self.end_reason()
        self._said.close()
        self._log.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class Crew:
    """The members of a run, one for each duty, in an ``async with``. ``early_ends``: by rank, why members ended before
    they were told to."""

    def __init__(self, duties: Sequence[Duty], secret: str) -> None:
        self.members: list[Member] = []
        self.early_ends: dict[int, str] = {}
        self._duties = duties
        self._secret = secret

    async def __aenter__(self) -> Self:
        """Start a process for each duty."""
        try:
            for duty in self._duties:
                self.members.append(Member(duty, self._secret))
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill all processes. Unless an error is being raised, wait first, at most ``_EXIT`` seconds, until they end by
        themselves."""
        try:
            if kind is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT):
                        await self.ends(len(self.members))
        finally:
            self._kill()

    def ended(self) -> list[Member]:
        """Return the members whose process has ended."""
        return [member for member in self.members if member.process.poll() is not None]

    async def ends(self, count: int) -> None:
        """Return when ``count`` processes have ended. Cancelling it stops the waiting."""
        while len(self.ended()) < count:  # noqa: ASYNC110  nothing tells of a process's end on every loop
            await asyncio.sleep(_LOOK)

    def note_ends(self) -> None:
        """Note in ``early_ends`` the processes that have ended by now: they did so by themselves."""
        self.early_ends |= {member.rank: member.end_reason() for member in self.ended()}

    def give_up(self, rank: int, reason: str) -> None:
        """Kill the process of ``rank``, which is lost for this ``reason``, so that nobody waits for it."""
        self.early_ends.setdefault(rank, reason)
        self.members[rank].process.kill()

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            member.end()
