"""Routing: each command goes to the server of its key. That is the only server, or the one that a cluster's map of hash
slots names. The connections to each server are kept here, too.

Each server has a few connections for pages, and one for small questions, so that these never wait behind pages. A
connection serves one request at a time, and further requests wait in line. If a connection cannot be made, is lost
while it is new, or falls silent, the server is left alone for a moment. So a dead server costs an attempt now and then,
and not an attempt for every request in line.

A cluster's map may be out of date. A server that no longer has a slot answers who has it (MOVED: from now on; ASK: this
once), and the request goes there. After a MOVED, or when a server could not be reached, the next request begins to read
the map anew, at most once a second. The request does not wait for that, since the server that is asked may hang.
"""

from __future__ import annotations

import asyncio
import re
from binascii import crc_hqx
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import chain
from typing import Any

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.settle import settled
from asynccache.storage import REFUSED, Breaker, BreakerState, HostPort, Permit
from asynccache_backends.redis.connection import CommandBatch, Connection, plain
from asynccache_backends.redis.resp import ProtocolError, Refusal, command
from asynccache_backends.redis.settings import RedisSettings

SLOTS = 16384
REDIRECTIONS = 4
REFRESH_SECONDS = 1.0

LOST = "LOST"
"""The code of a ``Refusal`` that is made here, because the server of a key could not be reached."""

_REDIRECTION = re.compile(r"(?:MOVED|ASK) ([0-9]{1,5}) (\S{0,255}):([0-9]{1,5})(?: |$)")
_TAG = re.compile(rb"[^{]*\{([^}]+)\}")
_NOBODY = Refusal("CLUSTERDOWN", "CLUSTERDOWN nobody has the slot")
_SLOTS = plain([command(b"CLUSTER", b"SLOTS")])


def slot_of(key: bytes) -> int:
    """Return the hash slot of a key. If the key has braces, it is that of the bytes between the first pair of them."""
    tag = _TAG.match(key)
    return crc_hqx(tag[1] if tag else key, 0) % SLOTS


Lane = IntEnum("Lane", ["PAGES", "WORDS"])
"""The connections that a request uses: those for pages, or the one for small questions."""


class RedisNode:
    """One server. ``breaker``: open while the server is left alone. ``made``: its connections, and some that are being
    made or closed. ``has_slots``: False if the map no longer names the server; then no idle connection is kept."""

    def __init__(self, address: HostPort, settings: RedisSettings, counts: Counter[str]) -> None:
        self.address = address
        self._settings = settings
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self.breaker = Breaker.brief()
        self._last = ""                                # the text of the last error
        self._closed = False
        self.has_slots = True
        self.made: set[Connection] = set()
        self._lines = {Lane.PAGES: asyncio.Semaphore(settings.connections), Lane.WORDS: asyncio.Semaphore(1)}
        self._idle: dict[Lane, list[Connection]] = {lane: [] for lane in Lane}

    async def ask(self, lane: Lane, batch: CommandBatch) -> list[Any]:
        """Send a request and return the reply to each command.

        Raises:
            BackendError: ``Unavailable`` if the server cannot be reached or is left alone, ``Timeout`` if it hangs.

        Cancelling it returns at once, and closes the connection if the request was under way.
        """
        async with self._lines[lane]:                  # first come, first served
            if self._closed:
                raise Unavailable(f"{self.address}: the store is closed")
            permit = self.breaker.allow(self._loop.time())
            if permit == REFUSED:
                raise Unavailable(f"{self.address}: left alone for a moment, after: {self._last}")
            idle = self._idle[lane]
            connection, replies = await self._tried(permit, idle.pop() if idle else None, batch)
            if self.has_slots:
                idle.append(connection)
            else:
                connection.close()
        return replies

    def failed(self, error: BackendError, permit: Permit | None = None) -> None:
        """Leave the server alone for a moment, because of ``error``. ``permit``: the permit of the request that failed;
        None if it was given back already."""
        now = self._loop.time()
        self._last = str(error)                        # the text alone: its traceback would keep the pages alive
        self.breaker.failure(self.breaker.allow(now) if permit is None else permit, now)

    def close(self, *, idle: bool = False) -> None:
        """End all connections, so that requests under way fail, and make no new ones. With ``idle`` end only those that
        are not in use; new ones are made when they are needed."""
        self._closed = self._closed or not idle
        for connection in chain(*self._idle.values()) if idle else self.made:
            connection.close()

    async def _tried(
        self, permit: Permit, connection: Connection | None, batch: CommandBatch
    ) -> tuple[Connection, list[Any]]:
        """Return the replies, and the connection by which they came: the given one, or a new one if it is closed."""
        fresh = connection is None or connection.closed
        try:
            connection = await self._connect() if connection is None or connection.closed else connection
            replies = await connection.ask(batch)
        except BaseException as error:
            if isinstance(error, Timeout) or (fresh and isinstance(error, BackendError)):
                self.failed(error, permit)
            else:                                      # it was cancelled, or only an old connection was lost
                self.breaker.abandon(permit)
            raise
        self.breaker.success(permit)
        return connection, replies

    async def _connect(self) -> Connection:
        connection = Connection(self.address, self._settings)
        self.made = {made for made in self.made if not made.closed} | {connection}
        await connection.open()
        self._counts["connects"] += 1
        return connection


Groups = dict[tuple[RedisNode | None, bool], list[int]]
"""The positions of a request's commands, by the node that they are for (None: no node has their slot). The second part
is True if that node is just taking over the slot, so that each command must be preceded by ASKING."""


class Router:
    """Sends each command where its key is. All that changes about routing is in here. ``nodes``: the servers that have
    slots. A server that has none any more is known until the requests to it are over."""

    def __init__(self, settings: RedisSettings, counts: Counter[str]) -> None:
        self.clustered = False
        self._settings = settings
        self._counts = counts
        self.nodes: set[RedisNode] = set()
        self._known: dict[HostPort, RedisNode] = {}
        self._owners: list[RedisNode | None] = []
        self._stale = False
        self._refreshed = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    def owner(self, key: bytes) -> RedisNode | None:
        """Return the node that has ``key``; None if no node has its slot."""
        return self._owners[slot_of(key) if self.clustered else 0]

    async def open(self) -> None:
        """Ask one of the servers whether it is part of a cluster, and for the map if it is.

        Raises:
            Unavailable: no server can be reached, or it refuses, or its answer is no map. Timeout: it does not answer.
            ConfigError: the URL is that of a cluster, and the server is no part of one.
        """
        question = plain([command(b"PING")]) if self._settings.cluster == "off" else _SLOTS
        try:
            self._learn_first(*await self._of_any(self._settings.seeds, question))
        except BaseException:
            self.close()
            raise

    async def ask(self, lane: Lane, keys: Sequence[bytes], batch: CommandBatch) -> list[Any]:
        """Send each command to the node that has its key, and return the replies. ``keys`` has the key of each command.
        Where a node of a cluster could not be reached, the reply is a ``Refusal``.

        Raises:
            BackendError: it is no cluster, and the server cannot be reached or hangs.

        Cancelling it returns at once; connections that were in use are closed.
        """
        if not self.clustered:
            (node,) = self.nodes
            return await node.ask(lane, batch)
        self._refresh_if_stale()
        replies: list[Any] = [None] * len(keys)
        groups: Groups = {}
        for i, key in enumerate(keys):
            groups.setdefault((self.owner(key), False), []).append(i)
        for _ in range(REDIRECTIONS):
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    (which, tasks.create_task(self._answers(lane, batch.part(which), node, asking)))
                    for (node, asking), which in groups.items()
                ]
            for which, task in asked:
                for i, reply in zip(which, task.result(), strict=True):
                    replies[i] = reply
            groups = self._redirected(groups, replies)
        return replies

    async def refresh(self) -> None:
        """Read a cluster's map anew. The old one stays if nobody can be asked. Cancelling it leaves the old one."""
        if not self.clustered:
            return
        self._refreshed = asyncio.get_running_loop().time()
        with suppress(BackendError):
            known = sorted(self.nodes, key=lambda node: node.breaker.state is not BreakerState.CLOSED)
            address, reply = await self._of_any([*(node.address for node in known), *self._settings.seeds], _SLOTS)
            if isinstance(reply, list):
                self._learn(address, reply)

    def _refresh_if_stale(self) -> None:
        """Begin to read the map anew if it is known to be old, unless that was done in the last second."""
        now = asyncio.get_running_loop().time()
        due = self._stale and not self._closed and now >= self._refreshed + REFRESH_SECONDS
        if due and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self.refresh())

    def close(self, *, idle: bool = False) -> None:
        """End all connections, so that requests under way fail. With ``idle`` end only those that are not in use,
        because a server has become a replica; the map of a cluster is out of date then, too."""
        self._closed, self._stale = self._closed or not idle, True
        if self._closed and self._refreshing is not None:
            self._refreshing.cancel()
        for node in self._known.values():
            node.close(idle=idle)

    async def aclose(self) -> None:
        """``close`` for good, and wait until the map is no longer being read."""
        self.close()
        await settled([] if self._refreshing is None else [self._refreshing])

    # the map

    def _learn_first(self, address: HostPort, reply: Any) -> None:
        """Note from the first answer whether the server is part of a cluster. Raises as ``open`` does."""
        if isinstance(reply, list):
            self.clustered = True
            self._learn(address, reply)
            return
        self._owners = [self._node(address)]
        self.nodes = {self._node(address)}
        if isinstance(reply, Refusal) and reply.code not in ("ERR", "NOPERM"):  # ERR: no cluster; NOPERM: not told
            raise Unavailable(f"{self._settings}: {reply.text}")
        if self._settings.cluster == "on" or len(self._settings.seeds) > 1:
            raise ConfigError(f"storage={str(self._settings)!r}: {address} is no part of a cluster: {str(reply)[:200]}")

    def _learn(self, asked: HostPort, reply: Sequence[Any]) -> None:
        ranges = [_range_of(entry, asked) for entry in reply]  # all of them, before anything changes
        owners: list[RedisNode | None] = [None] * SLOTS
        for first, last, address in ranges:
            owners[first : last + 1] = [self._node(address)] * (last + 1 - first)
        self._owners, self._stale = owners, False
        self.nodes = {node for node in owners if node is not None}
        for node in self._known.values():
            node.has_slots = node in self.nodes
            if not node.has_slots:
                node.close(idle=True)
        in_use = [node for node in self._known.values() if node.has_slots or any(not made.closed for made in node.made)]
        self._known = {node.address: node for node in in_use}

    def _node(self, address: HostPort) -> RedisNode:
        if address not in self._known:
            self._known[address] = RedisNode(address, self._settings, self._counts)
            if self._closed:
                self._known[address].close()
        return self._known[address]

    async def _of_any(self, addresses: Sequence[HostPort], batch: CommandBatch) -> tuple[HostPort, Any]:
        """Ask one server after another. Returns the address of the first that answers, and its answer. Each has twice
        ``stall`` seconds: to connect, and to answer. Without that limit a server that says a byte now and then, and so
        is never silent, would be waited for without end. Raises the last server's ``BackendError`` if none answers."""
        failure: BackendError = Unavailable("no server is named")
        within = 2 * self._settings.stall
        for address in dict.fromkeys(addresses):
            node = self._node(address)
            try:
                async with asyncio.timeout(within):
                    (reply,) = await node.ask(Lane.WORDS, batch)
                return address, reply
            except BackendError as error:
                failure = error
            except TimeoutError:
                failure = Timeout(f"{address}: no answer in {within:g} s")
                node.failed(failure)
        raise failure

    # a request

    async def _answers(self, lane: Lane, part: CommandBatch, node: RedisNode | None, asking: bool) -> list[Any]:
        """Return the replies of ``node`` to ``part``."""
        try:
            if node is not None:
                return (await node.ask(lane, part.asking()))[1::2] if asking else await node.ask(lane, part)
            refusal = _NOBODY
        except BackendError as error:
            refusal = Refusal(LOST, f"{LOST} {error}")
        self._stale = True
        return [refusal] * len(part.sinks)

    def _redirected(self, groups: Groups, replies: Sequence[Any]) -> Groups:
        """Return which commands are to be sent again, and where, as the replies say. A redirection without a slot or a
        port is ignored. The host may be an IPv6 address without brackets. It is missing if the server that was asked
        does not know its own address, and means that server.
        """
        again: Groups = {}
        for asked, i in ((node, i) for (node, _), which in groups.items() for i in which):
            reply = replies[i]
            code = reply.code if isinstance(reply, Refusal) else ""
            self._stale = self._stale or code in ("MOVED", "CLUSTERDOWN")
            match = _REDIRECTION.match(reply.text) if code else None
            if match is not None and int(match[1]) < SLOTS and 0 < int(match[3]) < 65536:
                host = match[2].strip("[]")
                if host in ("", "?") and asked is not None:
                    host = asked.address.host
                node = self._node(HostPort(host, int(match[3])))
                if code == "MOVED":
                    self._owners[int(match[1])] = node
                    self.nodes.add(node)
                again.setdefault((node, code == "ASK"), []).append(i)
        return again


def _range_of(entry: Any, asked: HostPort) -> tuple[int, int, HostPort]:
    """Return the first and the last slot of one entry of ``asked``'s answer to CLUSTER SLOTS, and the address of the
    server that has these slots.

    Raises:
        ProtocolError: the entry has another form.
    """
    match entry:
        case [int(first), int(last), [bytes() | None as host, int(port), *_], *_]:
            known = b"" if host is None or host == b"?" else host  # unknown: it is the host that was asked
            if 0 <= first <= last < SLOTS and 0 < port < 65536 and known.isascii():
                return first, last, HostPort(known.decode() or asked.host, port)
    raise ProtocolError(f"{asked}: a map of the cluster that is none: {str(entry)[:200]}")
