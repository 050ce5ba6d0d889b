"""Which engine events have not fired yet: until then, pages that were committed with them may still be written.

Law: no copy reads a committed page before the event that its commit named. A backup may start long after its commit
(the core defers it), so every copy out of device pages waits, on the device, for all events that are still pending.
"""

from __future__ import annotations

from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.memory.fences import unfired


class Readiness:
    """The ``ready`` events of commits, until they fire."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return f"Readiness({len(self._events)} pending)"

    def expect(self, event: Event) -> None:
        """A commit named ``event``."""
        self._events.append(event)

    def pending(self) -> tuple[Event, ...]:
        """The events that have not fired."""
        if self._events:
            self._events = unfired(*self._events)
        return tuple(self._events)


async def fired(event: Event) -> None:
    """Return when the engine's work before ``event`` has let go of its pages, well or not.

    Cancelling stops the waiting.
    """
    try:
        await event.wait()
    except CopyFailed:
        return
