"""Links over real sockets, and both ends of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from asynccache.errors import RankFailure
from asynccache.worker.link import Link, Listener, open_link, open_listener
from tests.waiting import until

SECRET = b"what both ends know"
ANYWHERE = "127.0.0.1:0"


class Ear:
    """Hears a link. ``then``: called with every frame."""

    def __init__(self, link: Link, then: Callable[[bytes], None] = lambda _: None) -> None:
        self.frames: list[bytes] = []
        self.lost: list[str] = []
        self.at: list[int] = []
        self.link = link
        self._then = then
        link.begin(self._heard, self._lost)

    def _heard(self, frame: bytes) -> None:
        assert not self.lost, "a frame after the end"
        self.frames.append(frame)
        self._then(frame)

    def _lost(self, failure: RankFailure) -> None:
        self.lost.append(str(failure))
        self.at.append(len(self.frames))

    async def hears(self, count: int) -> list[bytes]:
        """The first ``count`` frames, when they have come."""
        await until(lambda: len(self.frames) >= count, f"{count} frames did not come")
        return self.frames[:count]

    async def loses(self) -> str:
        """Wait until the link has ended; returns why."""
        await until(lambda: bool(self.lost), "nobody was lost")
        return self.lost[0]


class Pair(NamedTuple):
    """Both ends of a link."""

    head: Link
    worker: Link
    listener: Listener


@asynccontextmanager
async def connected(address: str = ANYWHERE, timeout: float = 30.0, to: str = "") -> AsyncIterator[Pair]:
    """An established link to which neither end listens yet. ``to``: the host that the worker connects to; by default
    the one where the head listens."""
    heads: list[Link] = []

    def take(hello: bytes, link: Link) -> bytes:
        heads.append(link)
        return b"welcome, " + hello

    listener = await open_listener(address, SECRET, take, timeout=timeout)
    try:
        where = f"{to}:{listener.address.rpartition(':')[2]}" if to else listener.address
        worker, welcome = await open_link(where, SECRET, b"rank 1", timeout=30.0)
        assert welcome == b"welcome, rank 1"
        (head,) = heads
        try:
            yield Pair(head, worker, listener)
        finally:
            for link in (head, worker):
                link.abort()
            await asyncio.sleep(0.01)
    finally:
        await listener.aclose()
