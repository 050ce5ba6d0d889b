"""Routing: each command goes to the server of its key. That is the only server, or the one that a cluster's map of hash
slots names.

A cluster's map may be out of date. A server that no longer has a slot answers who has it (MOVED: from now on; ASK: this
once), and the request goes there. After a MOVED, or when a server could not be reached, the next request begins to read
the map anew, at most once a second. The request does not wait for that, since the server that is asked may hang.

The map is asked for by redis-py, and kept here: redis-py's ``NodesManager`` takes the ranges and addresses in it on the
server's word, and closes all connections whenever it is read.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.settle import settled
from asynccache.storage import BreakerState, HostPort
from asynccache_backends.redis.resp import ASKING, ProtocolError, Refusal, Request
from asynccache_backends.redis.server import RedisServer
from asynccache_backends.redis.settings import RedisSettings

REDIRECTIONS = 4
REFRESH_SECONDS = 1.0

_REDIRECTION = re.compile(r"(?:MOVED|ASK) ([0-9]{1,5}) (\S{0,255}):([0-9]{1,5})(?: |$)")


class Router:
    """The servers, and who has which key."""

    def __init__(self, settings: RedisSettings, counts: Counter[str]) -> None:
        self.clustered = False
        self.nodes: set[RedisServer] = set()
        """The servers that have keys. A server alone has a map, too, of one range."""
        self._settings = settings
        self._counts = counts
        self._known: dict[HostPort, RedisServer] = {}
        self._owners: list[RedisServer | None] = []
        self._stale = False
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Ask one of the servers whether it is part of a cluster, and for the map if it is.

        Raises:
            Unavailable: no server can be reached, or it refuses, or its answer is no map. Timeout: it does not answer.
            ConfigError: the URL is that of a cluster, and the server is no part of one.
        """
        settings = self._settings
        try:
            words = ("PING",) if settings.cluster == "off" else ("CLUSTER", "SLOTS")
            address, reply = await self._any_says(settings.seeds, *words)
            code = reply.code if isinstance(reply, Refusal) else ""
            if code not in ("", "ERR", "NOPERM"):  # these: it is no cluster, or we may not ask
                raise Unavailable(f"{settings}: {reply}")
            self.clustered = not code and reply != b"PONG"
            if not self.clustered and (settings.cluster == "on" or len(settings.seeds) > 1):
                why = f"{address} is no part of a cluster: {str(reply)[:200]}"
                raise ConfigError(f"storage={str(settings)!r}: {why}")
            self._learn(address, reply if self.clustered else [[0, SLOTS - 1, [b"", address.port]]])
        except BaseException:
            await self.aclose()
            raise

    async def ask(self, keys: Sequence[bytes], requests: Sequence[Request]) -> list[Any]:
        """Send each request to the server that has its key, and return the replies. ``keys`` has the key of each
        request. Where a server of a cluster could not be reached, the reply is that error.

        Raises:
            BackendError: it is no cluster, and the server cannot be reached or hangs.

        Cancelling it returns at once; connections that were in use are closed.
        """
        if not self.clustered:
            (server,) = self.nodes
            return await server.ask(requests)
        if self._stale and not self._closed and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refreshed())
        replies: list[Any] = [Refusal("CLUSTERDOWN nobody has the slot")] * len(keys)
        groups: dict[tuple[RedisServer, bool], list[int]] = {}
        for i, key in enumerate(keys):
            if (owner := self._owners[key_slot(key)]) is not None:
                groups.setdefault((owner, False), []).append(i)
            else:
                self._stale = True
        for _ in range(REDIRECTIONS):
            parts = [self._answers(*group, [requests[i] for i in which]) for group, which in groups.items()]
            answers = zip(groups.items(), await asyncio.gather(*parts), strict=True)
            groups = {}
            for ((asked, _), which), part in answers:
                for i, reply in zip(which, part, strict=True):
                    replies[i] = reply
                    if isinstance(reply, Refusal) and (group := self._redirection(asked, reply)):
                        groups.setdefault(group, []).append(i)
        return replies

    async def refresh(self) -> None:
        """Read a cluster's map anew. The old one stays if nobody can be asked. Cancelling it leaves the old one."""
        if self.clustered:
            well = sorted(self.nodes, key=lambda server: server.breaker.state is not BreakerState.CLOSED)
            with suppress(BackendError):
                addresses = [*(server.address for server in well), *self._settings.seeds]
                address, reply = await self._any_says(addresses, "CLUSTER", "SLOTS")
                self._learn(address, reply)

    async def aclose(self) -> None:
        """End all connections, so that requests under way fail, and wait until the map is no longer being read."""
        self._closed = True
        for server in self._known.values():
            server.close()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await settled([self._refreshing])

    async def _refreshed(self) -> None:
        await self.refresh()
        await asyncio.sleep(REFRESH_SECONDS)

    def _learn(self, asked: HostPort, reply: Any) -> None:
        """Take over the map that ``asked`` has sent. Raises ProtocolError, and changes nothing, if it is none."""
        ranges = []
        for entry in reply if isinstance(reply, list) else [reply]:
            match entry:
                case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                    0 <= first <= last < SLOTS and 0 < port < 65536 and (host or b"").isascii()
                ):  # a host that it does not know is the one that was asked
                    known = asked.host if host in (None, b"", b"?") else host.decode()
                    ranges.append((first, last + 1, HostPort(known, port)))
                case _:
                    raise ProtocolError(f"{asked}: a map of the cluster that is none: {str(entry)[:200]}")
        self._owners, self._stale = [None] * SLOTS, False
        for first, end, address in ranges:
            self._owners[first:end] = [self._server(address)] * (end - first)
        self.nodes = {server for server in self._owners if server is not None}
        for server in list(self._known.values()):
            server.has_slots = server in self.nodes
            if not server.has_slots:
                server.close(idle=True)
                if all(link.closed for link in server.links):
                    del self._known[server.address]

    def _server(self, address: HostPort) -> RedisServer:
        if address not in self._known:
            self._known[address] = RedisServer(address, self._settings, self._counts)
            if self._closed:
                self._known[address].close()
        return self._known[address]

    async def _any_says(self, addresses: Sequence[HostPort], *words: str) -> tuple[HostPort, Any]:
        """Ask one server after another. Returns the address of the first that answers, and its answer. Raises the last
        server's ``BackendError`` if none answers."""
        failure: BackendError = Unavailable("no server is named")
        for address in dict.fromkeys(addresses):
            try:
                return address, await self._server(address).said(*words)
            except BackendError as error:
                failure = error
        raise failure

    async def _answers(self, server: RedisServer, asking: bool, requests: Sequence[Request]) -> list[Any]:
        """Return the replies of ``server``. ``asking``: ASKING precedes each request, since the server is just taking
        over the slots."""
        if asking:
            requests = [each for request in requests for each in ((ASKING, None), request)]
        try:
            replies = await server.ask(requests)
        except BackendError as error:
            self._stale = True
            replies = [error] * len(requests)
        return replies[1::2] if asking else replies

    def _redirection(self, asked: RedisServer, refusal: Refusal) -> tuple[RedisServer, bool] | None:
        """Return the server to which a refusal leads, and whether it wants ASKING; None if it leads nowhere, or has no
        slot or port. The host may be an IPv6 address without brackets. It is missing if the server that was asked does
        not know its own address, and means that server.
        """
        self._stale = self._stale or refusal.code in ("MOVED", "CLUSTERDOWN", "READONLY")
        match = _REDIRECTION.match(str(refusal))
        if match is None or int(match[1]) >= SLOTS or not 0 < int(match[3]) < 65536:
            return None
        host = match[2].strip("[]")
        server = self._server(HostPort(asked.address.host if host in ("", "?") else host, int(match[3])))
        return server, refusal.code == "ASK"
