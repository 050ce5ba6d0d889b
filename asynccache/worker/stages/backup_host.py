"""backup_host: device to host. One batched copy per wake-up; its event decides every operation in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asynccache.core.plan import Move, Status
from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.worker.contract import Work
from asynccache.worker.inbox import Inbox, QueuedWork
from asynccache.worker.stats import StageMeter


class BackupCopier(Protocol):
    """The part of ``Mover`` that this stage uses."""

    def backup(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event: ...


class BackupHostStage:
    """A queue of backups and the task that performs them. ``post``: called with the outcome of each work. ``clock``:
    returns seconds."""

    def __init__(
        self,
        mover: BackupCopier,
        post: Callable[[Status, Sequence[int]], None],
        size_of: Callable[[Sequence[Move]], tuple[int, int, int]],
        clock: Callable[[], float],
    ) -> None:
        self._mover = mover
        self._post = post
        self._size_of = size_of
        self._clock = clock
        self._inbox: Inbox[QueuedWork] = Inbox()
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"BackupHostStage({len(self._inbox)} queued, {self.meter!r})"

    def __len__(self) -> int:
        return sum(len(queued.work.ops) for queued in self._inbox)

    def put(self, work: Work, after: Sequence[Event]) -> None:
        """Queue ``work``; its outcome is posted exactly once."""
        self._inbox.put(QueuedWork(work, after, self._clock()))

    async def run(self) -> None:
        """Copy batch after batch, for ever. Cancelling it abandons the outcome, never a buffer in use: the device
        finishes what was submitted."""
        while True:
            await self._inbox.filled()
            batch = self._inbox.take()
            moves = [move for queued in batch for move in queued.work.moves]
            after = list(dict.fromkeys(event for queued in batch for event in queued.after))
            status = await _copied(self._mover.backup(moves, after))
            self._report(batch, moves, status)

    def _report(self, batch: Sequence[QueuedWork], moves: Sequence[Move], status: Status) -> None:
        count = sum(len(queued.work.ops) for queued in batch)
        if status is Status.DONE:
            self.meter.count(count, *self._size_of(moves))
        else:
            self.meter.errors += count
        now = self._clock()
        for queued in batch:
            self.meter.took(now - queued.at, len(queued.work.ops))
            self._post(status, queued.work.ops)


async def _copied(event: Event) -> Status:
    try:
        await event.wait()
    except CopyFailed:
        return Status.FAILED
    return Status.DONE
