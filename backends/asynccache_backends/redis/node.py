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
from asynccache_backends.redis.connecting import ConnectFailed, connect
from asynccache_backends.redis.connection import Connection, Job
from asynccache_backends.redis.settings import Address, Settings


class Lane(IntEnum):
    """Which connections a request uses."""

    PAGES = 0
    WORDS = 1


class _Pool:
    """At most ``size`` connections: who holds one of ``slots`` may use one, or make one."""

    def __init__(self, size: int) -> None:
        self.slots = asyncio.Semaphore(size)
        self.used: set[Connection] = set()
        self._free: list[Connection] = []

    def __len__(self) -> int:
        return len(self.used) + sum(not connection.closed for connection in self._free)

    def idle(self) -> Connection | None:
        """One that is open and not in use."""
        while self._free:
            connection = self._free.pop()
            if not connection.closed:
                return connection
        return None

    async def ask(self, connection: Connection, job: Job) -> list[Any]:
        """Use it, and keep it if it is still good."""
        self.used.add(connection)
        try:
            return await connection.ask(job)
        finally:
            self.used.discard(connection)
            if not connection.closed:
                self._free.append(connection)

    def retire(self) -> None:
        """End those that are not in use."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    def close(self) -> None:
        """End them all."""
        self.retire()
        for connection in list(self.used):
            connection.close()


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
        self._pools = {Lane.PAGES: _Pool(settings.connections), Lane.WORDS: _Pool(1)}

    def __repr__(self) -> str:
        return f"Node({self.address}, {self.connections} connections)"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return sum(map(len, self._pools.values()))

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
            return await self._in_turn(self._pools[lane], job)
        finally:
            self._asked -= 1

    def retire(self) -> None:
        """End the connections that are not in use."""
        for pool in self._pools.values():
            pool.retire()

    def close(self) -> None:
        """End all connections; requests under way fail."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()

    async def _in_turn(self, pool: _Pool, job: Job) -> list[Any]:
        async with pool.slots:
            self._check()
            try:
                replies = await pool.ask(pool.idle() or await self._connect(), job)
            except (ConnectFailed, Timeout) as error:
                self._last = error
                self._pause.failed(_now())
                raise
            except BaseException:
                self._pause.given_up()
                raise
            self._pause.ended()
            return replies

    def _check(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.address}: the store is closed")
        if not self._pause.allows(_now()):
            raise Unavailable(f"{self.address}: left alone for a moment, after: {self._last}") from self._last

    async def _connect(self) -> Connection:
        connection = await connect(self.address, self._settings)
        if self._closed:
            connection.close()
        self._counts["connects"] += 1
        return connection


def _now() -> float:
    return asyncio.get_running_loop().time()
