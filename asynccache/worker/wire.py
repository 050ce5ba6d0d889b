"""Messages over links: those of one turn of the loop travel in one frame, the same for every link; a plan's at once.

Laws:
* What is put is sent in the order in which it was put, over each link. Putting never waits and never fails; a frame
  that would be too long is sent as several. Outcomes that follow each other and are alike are one message.
* A message that cannot be sent takes no other one along, and is never lost in silence: ``failed`` hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from asynccache.errors import RankFailure
from asynccache.worker.link import MOST_FRAME, Link
from asynccache.worker.messages import Ended, Message, encode

SLICE = 1024
"""Messages in a frame at most, so that a long plan is performed while its end is still being encoded."""
BYTES_PER_PAGE = 256
"""More than a page takes in any message: its hash and a slot or two."""


def slices(counts: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Lists of pages, of so many pages each, cut into parts that fit a frame: of each part, which of the lists, and
    from which to which of its pages."""
    most = room = max(1, MOST_FRAME // BYTES_PER_PAGE)
    part: list[tuple[int, int, int]] = []
    for at, count in enumerate(counts):
        begin = 0
        while begin < count:
            end = min(count, begin + room)
            part.append((at, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


class Wire:
    """What one process says over its links. ``links``: may become fewer at any time; the end of one is the business of
    whoever listens to it. ``failed``: told of a message that cannot be sent, which is the end of the group."""

    def __init__(self, links: Iterable[Link], failed: Callable[[RankFailure], None]) -> None:
        self.links = list(links)
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Message] = []
        self._held = False

    def __repr__(self) -> str:
        return f"Wire({len(self.links)} links, {len(self._unsent)} unsent)"

    def put(self, message: Message) -> None:
        """Send it with the others of this turn."""
        unsent = self._unsent
        if not unsent:
            if not self._held:
                self._loop.call_soon(self.flush)
        elif (
            type(message) is Ended and type(last := unsent[-1]) is Ended
            and last.status is message.status and len(last.ops) < SLICE
        ):  # fmt: skip
            last.ops += message.ops
            return
        unsent.append(message)

    def send(self, messages: Iterable[Message]) -> None:
        """Send these now, behind what was put."""
        self._unsent += messages
        self.flush()

    def hold(self) -> None:
        """What is put from now on is sent by the next ``flush``, which must follow in this turn."""
        self._held = True

    def flush(self) -> None:
        """Send now what was put."""
        unsent, self._unsent, self._held = self._unsent, [], False
        for at in range(0, len(unsent), SLICE):
            self._send(unsent[at : at + SLICE])

    def _send(self, messages: Sequence[Message]) -> None:
        if not self.links:
            return
        try:
            frame = encode(messages)
            why = f"it has {len(frame)} bytes, and a frame {MOST_FRAME} at most"
        except (ValueError, OverflowError, TypeError) as error:  # text without UTF-8, a number of more than 64 bits
            frame, why = b"", str(error)
        if 0 < len(frame) <= MOST_FRAME:
            for link in self.links:
                link.send(frame)
        elif len(messages) > 1:
            middle = len(messages) // 2
            self._send(messages[:middle])
            self._send(messages[middle:])
        else:
            self._failed(RankFailure(f"cannot send its {type(messages[0]).__name__}: {why}"))
