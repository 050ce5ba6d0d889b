"""The connections to one server: a few for pages and one for small questions, which so never wait behind pages.

A connection serves one request at a time; more requests wait in line. Where none can be made, or one falls silent, the
server is left alone for a moment: a dead one costs an attempt now and then, and not one for every request in line.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import IntEnum
from typing import Any

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache_backends.pause import Health, Pause
from asynccache_backends.redis.connection import ConnectFailed, Connection, Job, connect
from asynccache_backends.redis.settings import Address, Settings


class Lane(IntEnum):
    """Which connections a request uses."""

    PAGES = 0
    WORDS = 1


class Node:
    """One server."""

    def __init__(self, address: Address, settings: Settings, counts: Counter[str]) -> None:
        self.address = address
        self._settings = settings
        self._counts = counts
        self._pause = Pause()
        self._last: BackendError | None = None
        self._closed = False
        self._asked = 0
        self._slots = {Lane.PAGES: asyncio.Semaphore(settings.connections), Lane.WORDS: asyncio.Semaphore(1)}
        self._idle: dict[Lane, list[Connection]] = {lane: [] for lane in Lane}
        self._used: set[Connection] = set()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return sum(not connection.closed for connection in self._all())

    @property
    def well(self) -> bool:
        """Whether nothing is known against it."""
        return self._pause.health is Health.WELL

    @property
    def busy(self) -> bool:
        """Whether a request is under way, in line, or waits for its connection."""
        return self._asked > 0

    async def ask(self, lane: Lane, job: Job) -> list[Any]:
        """The reply to each command.

        Raises:
            BackendError: ``Unavailable`` if the server cannot be reached or is left alone, ``Timeout`` if it hangs.

        Cancelling it returns at once, and closes the connection if the request was under way.
        """
        self._asked += 1
        try:
            async with self._slots[lane]:
                return await self._in_turn(lane, job)
        finally:
            self._asked -= 1

    def retire(self) -> None:
        """End the connections that are not in use."""
        for connection in self._all() - self._used:
            connection.close()

    def close(self) -> None:
        """End all connections; requests under way fail."""
        self._closed = True
        for connection in self._all():
            connection.close()

    def _all(self) -> set[Connection]:
        return self._used.union(*self._idle.values())

    async def _in_turn(self, lane: Lane, job: Job) -> list[Any]:
        if self._closed:
            raise Unavailable(f"{self.address}: the store is closed")
        if not self._pause.allows(_now()):
            raise Unavailable(f"{self.address}: left alone for a moment, after: {self._last}") from self._last
        try:
            replies = await self._by_one(self._idle[lane], job)
        except (ConnectFailed, Timeout) as error:
            self._last = error
            self._pause.failed(_now())
            raise
        except BaseException:
            self._pause.given_up()
            raise
        self._pause.ended()
        return replies

    async def _by_one(self, idle: list[Connection], job: Job) -> list[Any]:
        """Use a connection of ``idle``, or make one, and keep it there if it is still good."""
        idle[:] = [connection for connection in idle if not connection.closed]
        connection = idle.pop() if idle else await self._connect()
        self._used.add(connection)
        try:
            return await connection.ask(job)
        finally:
            self._used.discard(connection)
            if not connection.closed:
                idle.append(connection)

    async def _connect(self) -> Connection:
        connection = await connect(self.address, self._settings)
        if self._closed:
            connection.close()
        self._counts["connects"] += 1
        return connection


def _now() -> float:
    return asyncio.get_running_loop().time()
