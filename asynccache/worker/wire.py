"""Messages over links: those of one turn of the loop travel in one frame, the same for every link.

Law: what is put is sent in the order in which it was put, over each link. Putting never waits and never fails; a frame
that would be too long is sent as several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from asynccache.errors import RankFailure
from asynccache.worker.link import MOST_FRAME, Link
from asynccache.worker.messages import Message, encode

SLICE = 1024
"""Messages in a frame at most, so that a long plan is performed while its end is still being encoded."""


class Wire:
    """What one process says over its links. ``links``: may become fewer at any time; the end of one is the business of
    whoever listens to it."""

    def __init__(self, links: Iterable[Link]) -> None:
        self.links = list(links)
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Message] = []

    def __repr__(self) -> str:
        return f"Wire({len(self.links)} links, {len(self._unsent)} unsent)"

    def put(self, message: Message) -> None:
        """Send it with the others of this turn."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send now what was put."""
        unsent, self._unsent = self._unsent, []
        for at in range(0, len(unsent), SLICE):
            self._send(unsent[at : at + SLICE])

    def _send(self, messages: Sequence[Message]) -> None:
        if not self.links:
            return
        frame = encode(messages)
        if len(frame) <= MOST_FRAME:
            for link in self.links:
                link.send(frame)
        elif len(messages) > 1:
            middle = len(messages) // 2
            self._send(messages[:middle])
            self._send(messages[middle:])
        else:
            raise RankFailure(f"a message of {len(frame)} bytes does not fit a frame of {MOST_FRAME}")
