"""The Redis backend: each page one string value under ``<prefix><32 bytes>``, on one server or a cluster.

The laws. A value that exists stays as it is (SET NX). Nothing but keys of this prefix and of a page key's length is
ever listed, cleared or collected. A server that will not serve at all is ``Unavailable``; one that refuses some keys
fails those. One that is full refuses writes for a moment without being asked, and reads go on. What Redis promises of
durability is what its own configuration says; nothing is promised here.

``redis://user:password@host:6379/0?prefix=asynccache:&ttl=7d``; see ``settings`` for all options.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from time import time
from typing import Any, Self

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.storage import HEADER_BYTES, Collected, PageKey, ParsedUrl, Record, Result, Stored, StoreLayout
from asynccache_backends.pause import Pause
from asynccache_backends.redis.catalog import Catalog
from asynccache_backends.redis.connection import CommandBatch, plain
from asynccache_backends.redis.resp import Names, Refusal
from asynccache_backends.redis.routing import LOST, Lane, Router
from asynccache_backends.redis.settings import RedisSettings, settings_of

MISS, HIT, CORRUPT, FAILED = Result

GET_AHEAD_BYTES = 2 << 20
NO_ROOM = ("OOM", "MISCONF")
UNWILLING = ("LOADING", "NOAUTH", "NOPERM", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "READONLY", "MOVED", "ASK", LOST)
"""Refusals that say nothing about the key: of a request that meets only those, nothing could be done."""
COUNTERS = ("pages", "bytes", "get_bytes", "refused_pages", "errors", "connects")


class RedisBackend:
    """An open store, which ``open`` makes. ``shared``: whoever uses the server finds the same pages."""

    shared = True

    def __init__(self, settings: RedisSettings, router: Router, counts: Counter[str]) -> None:
        self._settings = settings
        self._router = router
        self._counts = counts
        self._names = Names(settings.prefix, round(settings.ttl * 1000))
        self._catalog = Catalog(router, self._names, settings.ttl)
        self._room = Pause()

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Refuse what ``open`` would refuse of ``url`` before it connects. Raises ConfigError."""
        settings_of(url)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Connect to the server, or to a cluster and learn its map.

        Raises:
            ConfigError: the URL is wrong. Unavailable: no server, or it refuses us. Timeout: it does not answer.

        Cancelling it leaves nothing open.
        """
        settings = settings_of(url)
        counts: Counter[str] = Counter()
        router = Router(settings, counts)
        await router.open()
        return cls(settings, router, counts)

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS per key. Cancelling it changes nothing."""
        return [_counted(reply) for reply in await self._said(b"EXISTS", keys)]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Receive pages straight into their buffers.

        Cancelling it returns at once: the connection is closed, and with it all that could still write to them.
        """
        names = self._names.of(keys)
        ahead = GET_AHEAD_BYTES // max((record.payload.nbytes for record in records), default=1) + 2
        batch = CommandBatch(self._names.commands(b"GET", names), records, ahead)
        results = [_fetched(reply) for reply in await self._asked(Lane.PAGES, names, batch)]
        got = [record.payload.nbytes for record, result in zip(records, results, strict=True) if result is HIT]
        self._counts["get_bytes"] += sum(got) + len(got) * HEADER_BYTES
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Send pages straight from their buffers, those that are not there yet.

        Cancelling it returns at once: the connection is closed, and the server drops what it has only half of.
        """
        results = await self.exists(keys)
        fresh = [i for i, result in enumerate(results) if result is MISS]
        if fresh:
            stored = await self._set([keys[i] for i in fresh], [records[i] for i in fresh])
            for i, result in zip(fresh, stored, strict=True):
                results[i] = result
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key. Cancelling it may leave any of them deleted."""
        return [_counted(reply) for reply in await self._said(b"UNLINK", keys)]

    async def clear(self) -> None:
        """Forget all pages under this prefix; nothing else is touched. Cancelling it leaves some of them.

        Raises:
            BackendError: a server cannot be asked.
        """
        async for names in self._catalog.names():
            await self._catalog.unlink(names)

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all pages under this prefix. When they were written is known only where they have this store's ``ttl``.

        Raises:
            BackendError: a server cannot be asked. Cancelling it changes nothing.
        """
        async for names in self._catalog.names():
            yield [stored for _, stored in await self._catalog.entries(names)]

    async def collect(self, older_than: float | None) -> Collected:
        """Remove values that are no pages: too short for a payload, or of another type.

        Raises:
            ConfigError: ``older_than`` is given and the store has no ``ttl``: nobody knows when a page was written.
            BackendError: a server cannot be asked. Cancelling it leaves the rest.
        """
        if older_than is not None and not self._settings.ttl:
            raise ConfigError("Redis does not keep when a page was written; with ?ttl=7d the server forgets by itself")
        done, until = Collected(), time() - (older_than or 0.0)
        async for names in self._catalog.names():
            entries = await self._catalog.entries(names)
            waste = [entry for entry in entries if entry[1].size <= HEADER_BYTES]
            kept = [entry for entry in entries if entry[1].size > HEADER_BYTES]
            old = [entry for entry in kept if older_than is not None and 0 < entry[1].written < until]
            await self._catalog.unlink([name for name, _ in waste + old])
            size = done.size + sum(it.size for _, it in waste + old)
            done = Collected(done.pages + len(old), done.waste + len(waste), size)
        return done

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: any memory will do."""

    def stats(self) -> Mapping[str, int | float]:
        """The counters of this instance: ``pages`` and ``bytes`` that it stored, others may have stored more;
        ``refused_pages``: the server had no room for them; ``connects``: connections made since it was opened."""
        nodes = self._router.nodes.values()
        connections = sum(not connection.closed for node in nodes for connection in node.made)
        now = {"nodes": len(nodes), "connections": connections}
        return {**{name: self._counts[name] for name in COUNTERS}, **now}

    async def flush(self) -> None:
        """Do nothing: the server's configuration decides what survives a power loss."""

    async def aclose(self) -> None:
        """Close all connections; calls under way fail. Twice is fine. No server is waited for."""
        await self._router.aclose()

    # one request

    async def _said(self, verb: bytes, keys: Sequence[PageKey]) -> list[Any]:
        names = self._names.of(keys)
        return await self._asked(Lane.WORDS, names, plain(self._names.commands(verb, names)))

    async def _asked(self, lane: Lane, names: Sequence[bytes], batch: CommandBatch) -> list[Any]:
        """Replies; refusals are counted.

        Raises:
            Unavailable: no server was willing to do anything.
        """
        if not names:
            return []
        try:
            replies = await self._router.ask(lane, names, batch)
        except BackendError:
            self._counts["errors"] += len(names)
            raise
        refusals = [reply for reply in replies if isinstance(reply, Refusal)]
        self._counts["errors"] += len(refusals)
        if any(refusal.code == "READONLY" for refusal in refusals):
            self._router.close(idle=True)
        if len(refusals) == len(replies) and all(refusal.code in UNWILLING for refusal in refusals):
            raise Unavailable(f"{self._settings}: {refusals[0].text}")
        return replies

    async def _set(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store what is not there. A server that had no room is not asked for a moment."""
        if not self._room.allows(_now()):
            self._counts["refused_pages"] += len(keys)
            return [FAILED] * len(keys)
        names = self._names.of(keys)
        commands = [self._names.storing(name, record) for name, record in zip(names, records, strict=True)]
        try:
            replies = await self._asked(Lane.PAGES, names, plain(commands))
        except BaseException:
            self._room.given_up()
            raise
        refused = sum(isinstance(reply, Refusal) and reply.code in NO_ROOM for reply in replies)
        self._counts["refused_pages"] += refused
        if refused == len(replies):
            self._room.failed(_now())
        else:
            self._room.ended()
        sizes = [len(record.payload) for reply, record in zip(replies, records, strict=True) if reply == b"OK"]
        self._counts["pages"] += len(sizes)
        self._counts["bytes"] += sum(sizes) + len(sizes) * HEADER_BYTES
        return [FAILED if isinstance(reply, Refusal) else HIT for reply in replies]  # nil: it is there by now


def _counted(reply: Any) -> Result:
    """The result of EXISTS or UNLINK, which say how many keys there were."""
    return FAILED if not isinstance(reply, int) else HIT if reply else MISS


def _fetched(reply: Any) -> Result:
    """The result of GET. Something else than a string under a page's key is no page of the right length."""
    if isinstance(reply, Result):
        return reply
    return CORRUPT if isinstance(reply, Refusal) and reply.code == "WRONGTYPE" else FAILED


def _now() -> float:
    return asyncio.get_running_loop().time()
