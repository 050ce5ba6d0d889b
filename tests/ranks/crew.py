"""Processes that are ranks, job after job; who was killed is replaced when the next job needs it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.engine.member import Member
from tests.ranks.gloo_child import Answer

ROOT = Path(__file__).parents[2]
STARTS = 60.0
FILES = iter(range(10**6))


class Crew:
    """As many members as a job needs. To be used in a ``with``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[int, Member] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        statuses = {}
        for rank, member in self.members.items():
            member.strike(signal.SIGCONT)
            statuses[rank] = member.end()
        if error is None:
            assert set(statuses.values()) <= {0}, f"exit statuses by rank: {statuses}"

    def begin(self, topology: tuple[int, int, int], own: dict[int, dict[str, Any]] | None = None, **job: Any) -> None:
        """The same job for every rank, but for what is its ``own``."""
        count = topology[0] * topology[1] * topology[2]
        fresh = [rank for rank in range(count) if rank not in self.members]
        self.members |= {rank: Member("tests.ranks.gloo_child") for rank in fresh}
        for rank in fresh:
            self.members[rank].hear("ready", STARTS)
        common = {"topology": topology, "meeting": str(self.folder / f"meeting-{next(FILES)}")} | job
        for rank in range(count):
            self.members[rank].tell(common | {"rank": rank} | (own or {}).get(rank, {}))

    def stepping(self, count: int) -> None:
        """All are in the middle of it."""
        for rank in range(count):
            self.members[rank].hear("stepping", STARTS)

    def answers(self, ranks: list[int], seconds: float) -> list[Answer]:
        """How it ended on each."""
        end = time.monotonic() + seconds
        return [Answer(**self.members[rank].hear("answer", max(0.0, end - time.monotonic()))) for rank in ranks]

    def remove(self, rank: int) -> None:
        """It is gone, or will be."""
        member = self.members.pop(rank)
        member.process.kill()
        member.end()
