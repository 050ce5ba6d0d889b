"""The processes that are ranks, and the sockets to them.

Law: no process outlives its ``Crew``; each is in a session of its own, so Ctrl-C reaches the command alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from asynccache.cli.ranked.messages import Ended, Job, Refused, receive, send

COMMAND: Sequence[str] = (sys.executable, "-m", "asynccache.cli.ranked.child")
_EXIT = 10.0


class Said(NamedTuple):
    """``message`` None: nothing will come from this rank any more."""

    rank: int
    message: Any


class Member:
    """One process. ``log`` is what it writes to its standard output and error."""

    def __init__(self, rank: int, loop: str | None, log: IO[bytes]) -> None:
        self.rank = rank
        self.log = log
        self.end, theirs = socket.socketpair()
        with theirs:
            command = [*COMMAND, str(rank), str(theirs.fileno()), *((loop,) if loop else ())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),),
                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.end.setblocking(False)
        self.writer: asyncio.StreamWriter | None = None
        self.listening: asyncio.Task[None] | None = None
        self.garbled = ""

    def __repr__(self) -> str:
        return f"Member(rank {self.rank}, pid {self.process.pid})"

    def last_words(self) -> str:
        """How it ended, and the last line that it wrote."""
        if self.garbled:
            return self.garbled
        status = self.process.poll()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        how = "closed its socket" if status is None else _how(status)
        return how + (f": {lines[-1]}" if lines else "")


def _how(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"


class Crew:
    """A member for each job; to be used in an ``async with``. ``said`` has what they say, in the order of arrival."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self.members: list[Member] = []
        self.said: asyncio.Queue[Said] = asyncio.Queue()
        self._jobs = jobs
        self._folder = folder

    async def __aenter__(self) -> Self:
        """Start them all and hand out the jobs. Cancelling it leaves no process."""
        try:
            for job in self._jobs:
                log = open(self._folder / f"rank-{job.rank}.log", "w+b")  # noqa: SIM115,ASYNC230  its own log, closed below
                self.members.append(Member(job.rank, job.settings.loop, log))
            for member, job in zip(self.members, self._jobs, strict=True):
                reader, member.writer = await asyncio.open_connection(sock=member.end)
                member.listening = asyncio.create_task(self._listen(member, reader))
                send(member.writer, job)
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody is left. Who is about to end by itself may do so, unless something is being raised."""
        try:
            if kind is None:
                await self._ended()
        finally:
            self._kill()

    def send(self, message: object, to: Sequence[int] | None = None) -> None:
        """To every rank, or to these; who has closed its socket hears nothing."""
        for member in self.members:
            writer = member.writer
            if (to is None or member.rank in to) and writer is not None and not writer.is_closing():
                send(writer, message)

    async def _listen(self, member: Member, reader: asyncio.StreamReader) -> None:
        try:
            message: object = None
            while not isinstance(message, (Ended, Refused)):
                message = await receive(reader)
                self.said.put_nowait(Said(member.rank, message))
        except (EOFError, ConnectionError):
            pass
        except ValueError as error:
            member.garbled = str(error)
            member.process.kill()
        if member.writer is not None:
            member.writer.close()    # it waits for this, so that its last word was heard
        await asyncio.to_thread(_wait, member.process, 1.0)
        self.said.put_nowait(Said(member.rank, None))

    async def _ended(self) -> None:
        for member in self.members:
            if member.listening is not None and member.process.poll() is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT):
                        await asyncio.shield(member.listening)

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            if member.listening is not None:
                member.listening.cancel()
            if member.writer is not None:
                member.writer.close()
            member.end.close()
            member.log.close()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
