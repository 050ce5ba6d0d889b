"""How much of a stream's work lies in the driver's queue, so that the queue is never full.

Law: a driver whose queue is full blocks whoever calls it next, and perhaps an engine that launches on another stream.
So a submitter stops long before that, and waits for older work of its own stream. It belongs to the submitter.
"""

from __future__ import annotations

from collections import deque

from asynccache.memory.cuda.events import CudaEvent

CAP = 384
"""Entries from which on a stream takes no more. The queue has about 1,024, and one call may take 512 of them."""
APART = 128
"""Entries after which there is an event to wait for. More events would cost the submitter and the waiter more time."""


class Backlog:
    """Counts entries of the driver's queue, and forgets those before an event that has happened."""

    def __init__(self) -> None:
        self._marks: deque[tuple[CudaEvent, int]] = deque()
        self._marked = 0
        self._since = 0  # the last mark

    def admit(self) -> None:
        """Before a call: hold the thread until the queue has room. That takes as long as the device does."""
        while self._marks and (self._marks[0][0].done() or self._marked + self._since >= CAP):
            event, entries = self._marks.popleft()
            event.block()
            self._marked -= entries

    def took(self, entries: int) -> None:
        """A call has put so much into the queue."""
        self._since += entries

    @property
    def due(self) -> bool:
        """Whether an event should be put behind what came since the last."""
        return self._since >= APART

    def mark(self, event: CudaEvent) -> None:
        """It is behind all that was counted so far."""
        self._marks.append((event, self._since))
        self._marked, self._since = self._marked + self._since, 0
