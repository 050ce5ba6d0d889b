"""The line of leases that wait for pages: first come, first served, holding nothing.

Law: only the head may try, and nobody overtakes it. A place keeps the ticket that its owner drew on arrival. So an
owner that leaves the line to wait for a prefetch comes back to the same position. Whatever may give pages back calls
``wake``: a release, an ack, a load that failed, a prefetch that ended in whatever way, and somebody who leaves the
line.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable


class LinePlace:
    """One waiter's place. ``signal`` is set while it sleeps."""

    __slots__ = ("signal", "ticket")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.signal: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"LinePlace(ticket={self.ticket}, {'trying' if self.signal is None else 'asleep'})"

    def __lt__(self, other: LinePlace) -> bool:
        return self.ticket < other.ticket


class Line:
    """Places in order of their tickets."""

    def __init__(self) -> None:
        self._places: list[LinePlace] = []
        self._tickets = 0

    def __repr__(self) -> str:
        return f"Line({len(self._places)} waiting)"

    def __len__(self) -> int:
        return len(self._places)

    def ticket(self) -> int:
        """Draw a ticket: a number higher than all that were drawn before."""
        self._tickets += 1
        return self._tickets

    def join(self, ticket: int) -> LinePlace:
        """Enter the line at the position that ``ticket`` gives, and return the place."""
        place = LinePlace(ticket)
        insort(self._places, place)
        return place

    def leave(self, place: LinePlace) -> None:
        """Give up ``place``, with or without success. The next one may try."""
        if place in self._places:
            self._places.remove(place)
        self.wake()

    def is_head(self, place: LinePlace) -> bool:
        """Return True if ``place`` is the first in line, whose owner may try."""
        return self._places[0] is place

    def must_wait(self, ticket: int) -> bool:
        """Return True if somebody with an earlier ticket is in line."""
        return bool(self._places) and self._places[0].ticket < ticket

    def sleep(self, place: LinePlace) -> None:
        """Let a wake-up reach ``place`` from now on. There must be no await between the attempt that failed and this
        call."""
        place.signal = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Something was given back: wake the head, which tries again."""
        if self._places and (signal := self._places[0].signal) is not None and not signal.done():
            signal.set_result(None)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The cache is closed: everybody who sleeps here gets an ``error()`` of its own."""
        for place in self._places:
            signal = place.signal
            if signal is not None and not signal.done():
                signal.set_exception(error())

