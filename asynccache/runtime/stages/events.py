"""KV events on their way to whoever subscribed: in order, and off the core's path."""

from __future__ import annotations

from collections.abc import Callable

from asynccache.core.plan import Publish
from asynccache.runtime.stages.queue import Inbox


class EventStage:
    """A queue of ``Publish`` effects and the worker that hands them on. A subscriber that raises closes the cache."""

    def __init__(self, on_event: Callable[[Publish], None]) -> None:
        self._on_event = on_event
        self._inbox: Inbox[Publish] = Inbox()

    def put(self, effect: Publish) -> None:
        """Queue the event."""
        self._inbox.put(effect)

    async def run(self) -> None:
        """Hand on events as they come, for ever. Cancelling it drops those that wait."""
        while True:
            await self._inbox.filled()
            for effect in self._inbox.take():
                self._on_event(effect)
