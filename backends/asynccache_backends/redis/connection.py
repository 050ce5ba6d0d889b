"""One connection to one server: the only place where bytes move. One request at a time, of any number of commands.

The law: when ``ask`` has returned or raised, nothing touches its buffers. A request that does not end well, by
cancellation, loss or silence, ends the connection with it, at once and without a word to the server: so no reply can
ever be taken for another one's, and no half-sent page completed with other bytes (the server drops what is not whole).

Bytes go through the socket itself, not through a transport: a transport would copy what it cannot send at once, and
receive into one buffer at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import Record
from asynccache_backends.redis.links import Link
from asynccache_backends.redis.resp import Buffer, Command, ProtocolError, Reader, command, joined

TURN_BYTES = 1 << 20
"""Moved in one turn of the loop at most, in each direction: 0.2-0.5 ms."""
MOST_BUFFERS = 64
UNSEEN_LOOKS = 8
"""How often, in ``stall`` seconds, it is looked for bytes that are too few to wake anybody."""

ASKING = command(b"ASKING")


class Job(NamedTuple):
    """Commands, and for each the record that its reply is a page for, if it is.

    ``ahead``: how many commands are sent before the first of them is answered. A server that prepares all of a long
    answer at once falls out of its caches, and holds it in memory. ``shortest``: no reply has fewer bytes. Where it is
    given nobody is woken before all replies can be there: to be woken for each costs more than they do."""

    commands: Sequence[Command]
    sinks: Sequence[Record | None]
    ahead: int
    shortest: int = 0

    def part(self, which: Sequence[int]) -> Job:
        """Some of them."""
        return Job([self.commands[i] for i in which], [self.sinks[i] for i in which], self.ahead, self.shortest)

    def asking(self) -> Job:
        """The same, with a word before each command that a server wants which has a slot only by half."""
        commands = [each for command in self.commands for each in (ASKING, command)]
        return Job(commands, [each for sink in self.sinks for each in (None, sink)], self.ahead)


def plain(commands: Sequence[bytes]) -> Job:
    """Commands whose replies are no pages."""
    return Job(commands, [None] * len(commands), len(commands))


class Connection:
    """``stall``: seconds without a byte, in either direction, after which the server counts as hung."""

    def __init__(self, link: Link, name: str, stall: float) -> None:
        self.closed = False
        self._link = link
        self._name = name
        self._stall = stall
        self._loop = asyncio.get_running_loop()
        self._fd = link.fileno()
        self._reader = Reader()
        self._job = plain(())
        self._next = 0
        self._out: deque[Buffer] = deque()
        self._done: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._writing = False
        self._moved_at = 0.0
        self._loop.add_reader(self._fd, self._readable)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "idle" if self._done is None else f"{self._reader.missing} replies to come"
        return f"Connection({self._name}, {state})"

    async def ask(self, job: Job) -> list[Any]:
        """The reply to each command.

        Raises:
            Unavailable: the connection is lost. Timeout: no byte came or went for ``stall`` seconds.

        Cancelling it closes the connection.
        """
        if self.closed:
            raise Unavailable(f"{self._name}: the connection is closed")
        self._done = self._loop.create_future()
        self._moved_at = self._loop.time()
        try:
            self._begin(job)
            self._watch = self._loop.call_at(self._next_look(), self._look)
            await self._done
            return self._reader.replies
        except BaseException:
            self._done.cancel()
            self.close()
            raise
        finally:
            if self._watch is not None:
                self._watch.cancel()
            self._end()

    def close(self, why: BackendError | None = None) -> None:
        """End it now; a request that is under way fails by ``why``. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._link.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(why or Unavailable(f"{self._name}: closed"))

    def _begin(self, job: Job) -> None:
        self._job, self._next = job, 0
        self._reader.begin(job.sinks)
        self._link.call_at(max(1, job.shortest * len(job.sinks)))
        self._feed()

    def _end(self) -> None:
        self._done = None
        self._job = plain(())
        self._out.clear()
        self._reader.forget()

    def _feed(self) -> None:
        """Send commands, as far ahead of the replies as the job says, and not one by one."""
        commands, replies = self._job.commands, len(self._reader.replies)
        if self._next - replies > self._job.ahead // 2:
            return
        upto = min(len(commands), replies + self._job.ahead)
        self._out.extend(joined(commands[self._next : upto]))
        self._next = max(self._next, upto)
        self._write()

    def _write(self) -> None:
        """Send what goes, up to a turn's worth; the rest when the socket says so."""
        sent = 0
        try:
            while self._out and sent < TURN_BYTES:
                sent += self._send()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(error)
            return
        if sent:
            self._moved_at = self._loop.time()
        self._want_writing(bool(self._out))

    def _send(self) -> int:
        sent = left = self._link.send(list(islice(self._out, MOST_BUFFERS)))
        while left and left >= len(self._out[0]):
            left -= len(self._out.popleft())
        if left:
            self._out[0] = memoryview(self._out[0])[left:]
        return sent

    def _want_writing(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._write)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _readable(self) -> None:
        """Receive what is there, up to a turn's worth and not beyond the last reply."""
        received = 0
        try:
            received = self._receive()
            while self._link.by_the_piece and received < TURN_BYTES and self._reader.missing:
                received += self._receive()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(error)
        except BackendError as error:
            self.close(error)
        if received:
            self._moved_at = self._loop.time()
        if not self.closed:
            self._after_reading(received)

    def _receive(self) -> int:
        """One read."""
        count = self._link.receive(self._reader.buffers())
        if not count:
            raise ConnectionResetError("closed by the server")
        if self._done is None:
            raise ProtocolError(f"{self._name}: a word that nobody asked for")
        self._reader.received(count)
        return count

    def _after_reading(self, received: int) -> None:
        missing = self._reader.missing
        if not missing:
            self._finish()
        elif self._next < len(self._job.commands):
            self._feed()
        elif self._job.shortest and received:
            self._link.call_at(self._job.shortest * (missing - 1) + 1)  # some were longer; of one a part may be here
        if self._link.by_the_piece and received >= TURN_BYTES:
            self._loop.call_soon(self._readable_again)

    def _finish(self) -> None:
        if self._out or self._next < len(self._job.commands):
            self.close(ProtocolError(f"{self._name}: answers to what was not asked yet"))
        elif self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _readable_again(self) -> None:
        if not self.closed:
            self._readable()

    def _lost(self, error: OSError) -> None:
        self.close(Unavailable(f"{self._name}: connection lost: {error}"))

    def _next_look(self) -> float:
        """When it may have been silent for long enough. Bytes that nobody is woken for are to be seen soon after they
        came."""
        silent = self._moved_at + self._stall
        return min(silent, self._loop.time() + self._stall / UNSEEN_LOOKS) if self._job.shortest else silent

    def _look(self) -> None:
        """Whether it has been silent for too long. A few replies that nobody was woken for are life, too."""
        if self._job.shortest:
            self._link.call_at(1)
            self._readable()
        if self._loop.time() >= self._moved_at + self._stall:
            self.close(Timeout(f"{self._name}: silent for {self._stall:g} s"))
        elif not self.closed:
            self._watch = self._loop.call_at(self._next_look(), self._look)
