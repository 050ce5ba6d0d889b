"""What the command and its ranks say to each other, over a socket pair of which nobody else has an end.

A message is a pickle behind its length. The first to a rank is its ``Job``; then ``Tick`` by ``Tick``, until the one
that is ``last``, or ``Leave``. A rank says ``Opened`` or ``Refused``, then an ``Answer`` to each tick, perhaps a
``Failure``, at last ``Ended``. Who finds the socket closed is alone.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from asynccache.cli.leaks import Left
from asynccache.cli.meter import Spread
from asynccache.cli.options import Settings
from asynccache.cli.request import Request, Tokens
from asynccache.cli.tally import Tally
from asynccache.cli.trace import TraceRequest, output_of, prompt_of
from asynccache.config import CacheConfig
from asynccache.ranks import Topology

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Job:
    """``config``: this rank's part. ``meeting``: where ranks meet."""

    rank: int
    topology: Topology
    meeting: str
    settings: Settings
    config: CacheConfig


class Arrival(NamedTuple):
    """A request without what cannot be sent: its tokens, or the line of the trace that they are made from."""

    request: Request
    tokens: tuple[Tokens, Tokens] | TraceRequest

    def whole(self) -> Request:
        """The request, with the tokens again."""
        if isinstance(self.tokens, TraceRequest):
            output = output_of(self.request.number, self.request.output_length)
            return self.request._replace(prompt=prompt_of(self.tokens), output=output)
        prompt, answer = self.tokens
        return self.request._replace(prompt=lambda: prompt, output=lambda: answer)


def arrival(request: Request, line: TraceRequest | None) -> Arrival:
    """``line``: of the trace, where there is one."""
    tokens = (request.prompt(), request.output()) if line is None else line
    return Arrival(request._replace(prompt=_nothing, output=_nothing), tokens)


def _nothing() -> Tokens:
    raise AssertionError("the tokens were left behind")


class Tick(NamedTuple):
    """One scheduler iteration. ``aborts``: numbers of requests. ``look``: digest the tree, however large, and say what
    the display shows. ``last``: all requests have ended; save everything, count, and close."""

    number: int
    arrivals: tuple[Arrival, ...] = ()
    aborts: tuple[int, ...] = ()
    look: bool = False
    last: bool = False


class Leave(NamedTuple):
    """The run is over for a reason that this rank need not know."""


class Opened(NamedTuple):
    """The cache is open."""


class Refused(NamedTuple):
    """It cannot be. ``kind``: the error's class."""

    kind: str
    sentence: str


class Pulse(NamedTuple):
    """What the display shows."""

    counts: tuple[int, int, int]
    tokens: int
    hits: tuple[int, int, int]
    verified: int
    mismatches: int
    tiers: tuple[tuple[str, float], ...]
    moved: Mapping[str, int]
    lag: tuple[float, float]
    memory: int


class Answer(NamedTuple):
    """After a tick: how many steps there were by then, the digest of all calls and decisions, and the requests that
    ended. ``tree``: the digest of the tree itself."""

    tick: int
    steps: int
    digest: int
    ended: tuple[int, ...]
    tree: int | None = None
    pulse: Pulse | None = None


class Failure(NamedTuple):
    """What ended a rank too early. ``at``: in Unix time."""

    kind: str
    sentence: str
    at: float
    trace: str | None = None


class Ended(NamedTuple):
    """All that a rank has to say. ``facts``: what the cache says about itself; empty if the rank failed."""

    tally: Tally
    facts: Mapping[str, Any]
    left: Left
    tasks: int
    lag: Spread
    run_queue: Spread
    cpu: float
    memory: int
    steps: int
    digest: int
    tree: int
    failure: Failure | None = None


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Cancelling it leaves the stream unusable.

    Raises:
        EOFError, ConnectionError: there is nobody at the other end.
        ValueError: it said something that cannot be read.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    content = await reader.readexactly(length)
    try:
        return pickle.loads(content)
    except Exception as error:  # of whatever class: EOFError, too
        raise ValueError(f"sent a message of {length} bytes that cannot be read: {error!r}") from error


def send(writer: asyncio.StreamWriter, message: object) -> None:
    """Hand it over."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)
