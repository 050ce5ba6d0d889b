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
from asynccache_backends.pause import Pause
from asynccache_backends.redis.connection import ConnectFailed, Connection, Job, connect
from asynccache_backends.redis.settings import Address, Settings


class Lane(IntEnum):
    """Which connections a request uses."""

    PAGES = 0
    WORDS = 1


class Node:
    """One server. ``pause``: whether it is left alone; ``asked``: requests under way or in line."""

    def __init__(self, address: Address, settings: Settings, counts: Counter[str]) -> None:
        self.address = address
        self._settings = settings
        self._counts = counts
        self.pause = Pause()
        self._last: BackendError | None = None
        self._closed = False
        self.asked = 0
        self._made: set[Connection] = set()
        self._lanes: dict[Lane, asyncio.LifoQueue[Connection | None]] = {lane: asyncio.LifoQueue() for lane in Lane}
        for lane in [Lane.PAGES] * settings.connections + [Lane.WORDS]:
            self._lanes[lane].put_nowait(None)  # whoever takes it makes a connection

    @property
    def connections(self) -> int:
        """How many there are now."""
        return sum(not connection.closed for connection in self._made)

    async def ask(self, lane: Lane, job: Job) -> list[Any]:
        """The reply to each command.

        Raises:
            BackendError: ``Unavailable`` if the server cannot be reached or is left alone, ``Timeout`` if it hangs.

        Cancelling it returns at once, and closes the connection if the request was under way.
        """
        self.asked += 1
        try:
            connection = await self._lanes[lane].get()
            try:
                if self._closed:
                    raise Unavailable(f"{self.address}: the store is closed")
                if not self.pause.allows(_now()):
                    raise Unavailable(f"{self.address}: left alone for a moment, after: {self._last}") from self._last
                connection, replies = await self._tried(connection, job)
            finally:
                self._lanes[lane].put_nowait(connection)
        finally:
            self.asked -= 1
        return replies

    def close(self, *, idle: bool = False) -> None:
        """End all connections, and requests under way fail; or those that are not in use, and new ones are made."""
        self._closed = self._closed or not idle
        for connection in self._made:
            if not idle or not connection.busy:
                connection.close()

    async def _tried(self, connection: Connection | None, job: Job) -> tuple[Connection, list[Any]]:
        """The replies, and the connection that they came by: the one given, or a new one if that is none any more."""
        try:
            if connection is None or connection.closed:
                connection = await self._connect()
            replies = await connection.ask(job)
        except (ConnectFailed, Timeout) as error:
            self._last = error
            self.pause.failed(_now())
            raise
        except BaseException:
            self.pause.given_up()
            raise
        self.pause.ended()
        return connection, replies

    async def _connect(self) -> Connection:
        connection = await connect(self.address, self._settings)
        self._made = {made for made in self._made if not made.closed} | {connection}
        if self._closed:
            connection.close()
        self._counts["connects"] += 1
        return connection


def _now() -> float:
    return asyncio.get_running_loop().time()
