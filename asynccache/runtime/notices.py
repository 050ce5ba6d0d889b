"""KV events on their way to whoever subscribed: in order, and off the core's path."""

from __future__ import annotations

from collections.abc import Callable

from asynccache.events import Notice
from asynccache.worker.inbox import Inbox


class EventStage:
    """A queue of notices and the worker that hands them on. A subscriber that raises closes the cache."""

    def __init__(self, on_event: Callable[[Notice], None]) -> None:
        self._on_event = on_event
        self._inbox: Inbox[Notice] = Inbox()

    def put(self, notice: Notice) -> None:
        """Queue the notice."""
        self._inbox.put(notice)

    async def run(self) -> None:
        """Hand on notices as they come, for ever. Cancelling it leaves those that wait."""
        while True:
            await self._inbox.filled()
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on all that waits."""
        for notice in self._inbox.take():
            self._on_event(notice)
