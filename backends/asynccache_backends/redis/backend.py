"""The Redis backend, for one server or a cluster. Each page is one string value under ``<prefix><32 bytes>``.

What always holds:
* A value that exists stays as it is (SET NX).
* Only keys that begin with this prefix and have the length of a page's name are listed or cleared.
* A call raises ``Unavailable`` if no server was willing to do anything. If a server refuses some keys, these are
  FAILED.
* When a server is full, puts send no pages for a moment and are FAILED, and reads go on.
* A server that is silent for ``stall`` seconds is given up. One that sends a byte now and then is never silent: the
  deadline that ``CheckedStore`` sets ends the call.
* What survives a power loss is up to the server's configuration.

``redis://user:password@host:6379/0?prefix=asynccache:&ttl=7d``; see ``settings`` for all options.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from time import time
from typing import Any, Self

from asynccache.errors import BackendError, Unavailable
from asynccache.storage import HEADER_BYTES, REFUSED, Breaker, PageKey, ParsedUrl, Record, Result, Stored, StoreLayout
from asynccache_backends.redis.cluster import Router
from asynccache_backends.redis.resp import Refusal, Request, about, storing
from asynccache_backends.redis.settings import RedisSettings, settings_of

MISS, HIT, CORRUPT, FAILED = Result

NO_ROOM = ("OOM", "MISCONF")
GONE = -2  # what PTTL says of a name that does not exist
UNWILLING = ("LOADING", "NOAUTH", "NOPERM", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "READONLY", "MOVED", "ASK")
"""The codes of refusals that say nothing about the key. If all requests of a call are refused with these, or their
servers cannot be reached, the call raises."""
COUNTERS = ("pages", "bytes", "get_bytes", "refused_pages", "errors", "connects")


class RedisBackend:
    """An open store; ``open`` makes it."""

    shared = True
    """All processes that use the server find the same pages."""

    def __init__(self, settings: RedisSettings, router: Router, counts: Counter[str]) -> None:
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._router = router
        self._counts = counts
        self._room = Breaker.brief()  # open while the server is full

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any. No server is asked."""
        settings_of(url)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Connect to the server, or connect to a cluster and read its map.

        Raises:
            ConfigError: the URL is wrong.
            Unavailable: no server can be reached, or it refuses the connection. ``Timeout``: it does not answer.

        Cancelling it leaves nothing open.
        """
        settings = settings_of(url)
        counts: Counter[str] = Counter()
        router = Router(settings, counts)
        await router.open()
        return cls(settings, router, counts)

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS."""
        return [_counted(reply) for reply in await self._about(b"EXISTS", self._names(keys))]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Receive pages directly into the buffers of their records.

        Cancelling it returns at once. The connection is closed, so nothing can write to the records any more.
        """
        names = self._names(keys)
        replies = await self._asked(names, list(zip(about(b"GET", names), records, strict=True)))
        got = [len(record.payload) for reply, record in zip(replies, records, strict=True) if reply is HIT]
        self._counts["get_bytes"] += sum(got) + len(got) * HEADER_BYTES
        return [_fetched(reply) for reply in replies]

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Ask which pages are stored, and send the others directly from the buffers of their records. After a call in
        which no page found room, no page is sent for a moment.

        Cancelling it returns at once. The connection is closed, and the server drops a command that it has received
        only in part.
        """
        results = await self.exists(keys)
        fresh = [i for i, result in enumerate(results) if result is MISS]
        if not fresh:
            return results
        permit = self._room.allow(_now())
        if permit == REFUSED:
            self._counts["refused_pages"] += len(fresh)
            return [FAILED if result is MISS else result for result in results]
        names, sent = self._names([keys[i] for i in fresh]), [records[i] for i in fresh]
        commands = storing(names, sent, round(self._settings.ttl * 1000))
        try:
            replies = await self._asked(names, [(command, None) for command in commands])
        except BaseException:
            self._room.abandon(permit)
            raise
        for i, reply in zip(fresh, replies, strict=True):
            results[i] = FAILED if isinstance(reply, BackendError) else HIT  # nil: it is there by now
        stored = [len(record.payload) for reply, record in zip(replies, sent, strict=True) if reply == b"OK"]
        refused = sum(isinstance(reply, Refusal) and reply.code in NO_ROOM for reply in replies)
        self._counts.update(pages=len(stored), bytes=sum(stored) + len(stored) * HEADER_BYTES, refused_pages=refused)
        if refused == len(fresh):
            self._room.failure(permit, _now())
        else:
            self._room.success(permit)
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if there was one, else MISS. Cancelling it may leave any of them deleted."""
        return [_counted(reply) for reply in await self._about(b"UNLINK", self._names(keys))]

    async def clear(self) -> None:
        """Delete all pages under this prefix; nothing else is touched. Cancelling it may leave some of them.

        Raises:
            BackendError: a server cannot be asked.
        """
        async for names in self._page_names():
            await self._told(b"UNLINK", names)

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all pages under this prefix, in batches. The time at which a page was written is known only if this
        store has a ``ttl`` and the page was written with it.

        Raises:
            BackendError: a server cannot be asked. Cancelling it changes nothing.
        """
        async for names in self._page_names():
            yield await self._entries(names)

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: any memory will do."""

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters of this instance. ``pages`` and ``bytes``: what it has stored; others may have stored
        more. ``refused_pages``: pages for which the server had no room. ``connects``: connections for pages and small
        questions made since it was opened, and ``connections``: those that are open."""
        nodes = self._router.nodes
        connections = sum(not link.closed for node in nodes for link in node.links)
        return {**{name: self._counts[name] for name in COUNTERS}, "nodes": len(nodes), "connections": connections}

    async def flush(self) -> None:
        """Do nothing: the server's configuration decides what survives a power loss."""

    async def aclose(self) -> None:
        """Close all connections, so that calls under way fail. Calling it twice is fine. No server is waited for."""
        await self._router.aclose()

    def _names(self, keys: Sequence[PageKey]) -> list[bytes]:
        prefix = self._prefix
        return [prefix + key.key for key in keys]

    async def _about(self, verb: bytes, names: Sequence[bytes]) -> list[Any]:
        return await self._asked(names, [(command, None) for command in about(verb, names)])

    async def _asked(self, names: Sequence[bytes], requests: Sequence[Request]) -> list[Any]:
        """Return the reply to each request, which is about one of ``names``. Errors are among the replies, and are
        counted.

        Raises:
            BackendError: no server was willing to do anything, or could be reached.
        """
        if not names:
            return []
        try:
            replies = await self._router.ask(names, requests)
        except BackendError:
            self._counts["errors"] += len(names)
            raise
        errors = [reply for reply in replies if isinstance(reply, BackendError)]
        self._counts["errors"] += len(errors)
        if len(errors) == len(replies) and not any(isinstance(e, Refusal) and e.code not in UNWILLING for e in errors):
            raise Unavailable(f"{self._settings}: {errors[0]}")
        return replies

    async def _page_names(self) -> AsyncIterator[list[bytes]]:
        """Yield the names of all pages, in batches and each name once. All keys of every server are gone through, so it
        is for people and not for requests. Raises BackendError if a server cannot be asked."""
        await self._router.refresh()
        seen: set[bytes] = set()  # SCAN may say a key twice, and so may two servers between which it moves
        for node in list(self._router.nodes):
            cursor = b""
            while cursor != b"0":
                reply = await node.said("SCAN", cursor or b"0", "MATCH", self._settings.pattern, "COUNT", "1000")
                match reply:
                    case [bytes() as cursor, list() as found] if all(isinstance(name, bytes) for name in found):
                        fresh = [name for name in {*found} - seen if self._settings.key_of(name)]
                        seen.update(fresh)
                        yield fresh
                    case _:
                        raise Unavailable(f"{node.address}: no answer to SCAN: {str(reply)[:200]}")

    async def _told(self, verb: bytes, names: Sequence[bytes]) -> list[Any]:
        """Return the replies to ``verb name`` for each name. Raises Unavailable if one of them is an error, except
        ``WRONGTYPE``: the name belongs to something that is no page."""
        replies = await self._about(verb, names)
        for reply in replies:
            if isinstance(reply, BackendError) and not (isinstance(reply, Refusal) and reply.code == "WRONGTYPE"):
                raise Unavailable(f"{self._settings}: {reply}")
        return replies

    async def _entries(self, names: Sequence[bytes]) -> list[Stored]:
        """Return the pages under these names that are still there; the size is 0 where there is no string."""
        sizes, left = await self._told(b"STRLEN", names), await self._told(b"PTTL", names)
        ttl, now, entries = self._settings.ttl, time(), []
        for name, size, ms in zip(names, sizes, left, strict=True):
            known = ttl and isinstance(ms, int) and ms >= 0
            written = min(now, now + ms / 1000 - ttl) if known else 0.0  # pages that another ttl wrote are younger
            if ms != GONE:
                entries.append(Stored(name[len(self._prefix) :], size if isinstance(size, int) else 0, written))
        return entries


def _counted(reply: Any) -> Result:
    """Return the result for one key from the reply to EXISTS or UNLINK, which is the number of keys found."""
    return FAILED if not isinstance(reply, int) else HIT if reply else MISS


def _fetched(reply: Any) -> Result:
    """Return the result for one key from the reply to GET. A value of another type than string is CORRUPT."""
    if isinstance(reply, Result):
        return reply
    return CORRUPT if isinstance(reply, Refusal) and reply.code == "WRONGTYPE" else FAILED


def _now() -> float:
    return asyncio.get_running_loop().time()
