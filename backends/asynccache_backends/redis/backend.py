"""The Redis backend, for one server or a cluster. Each page is one string value under ``<prefix><32 bytes>``.

Laws:
* A value that exists stays as it is (SET NX).
* Only keys that begin with this prefix and have the length of a page's name are listed or cleared.
* A call raises ``Unavailable`` if no server was willing to do anything. If a server refuses some keys, these are
  FAILED.
* When a server is full, puts send no pages for a moment and are FAILED, and reads go on.
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
from asynccache.storage import (
    HEADER_BYTES,
    REFUSED,
    Breaker,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Stored,
    StoreLayout,
)
from asynccache_backends.redis.connection import CommandBatch, plain
from asynccache_backends.redis.resp import Names, Refusal, command
from asynccache_backends.redis.routing import LOST, Lane, Router
from asynccache_backends.redis.settings import RedisSettings, settings_of

MISS, HIT, CORRUPT, FAILED = Result

GET_AHEAD_BYTES = 2 << 20
NO_ROOM = ("OOM", "MISCONF")
GONE = -2  # what PTTL says of a name that does not exist
UNWILLING = ("LOADING", "NOAUTH", "NOPERM", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "READONLY", "MOVED", "ASK", LOST)
"""The codes of refusals that say nothing about the key. If all commands of a request are refused with these, the call
raises ``Unavailable``."""
COUNTERS = ("pages", "bytes", "get_bytes", "refused_pages", "errors", "connects")


class RedisBackend:
    """An open store; ``open`` makes it. ``shared``: all processes that use the server find the same pages."""

    shared = True

    def __init__(self, settings: RedisSettings, router: Router, counts: Counter[str]) -> None:
        self._settings = settings
        self._router = router
        self._counts = counts
        self._names = Names(settings.prefix, round(settings.ttl * 1000))
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
        """Return for each key whether it is stored: HIT or MISS. Cancelling it changes nothing.

        In every call a server that is silent for ``stall`` seconds is given up. A server that sends a byte now and then
        is never silent; then only the deadline that ``CheckedStore`` sets for the call ends it.
        """
        return [_counted(reply) for reply in await self._said(b"EXISTS", keys)]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Receive pages directly into the buffers of their records.

        Cancelling it returns at once. The connection is closed, so nothing can write to the records any more.
        """
        names = self._names.of(keys)
        ahead = GET_AHEAD_BYTES // max((record.payload.nbytes for record in records), default=1) + 2
        batch = CommandBatch(self._names.commands(b"GET", names), records, ahead)
        results = [_fetched(reply) for reply in await self._asked(Lane.PAGES, names, batch)]
        got = [record.payload.nbytes for record, result in zip(records, results, strict=True) if result is HIT]
        self._counts["get_bytes"] += sum(got) + len(got) * HEADER_BYTES
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Ask which pages are stored, and send the others directly from the buffers of their records.

        Cancelling it returns at once. The connection is closed, and the server drops a command that it has received
        only in part.
        """
        results = await self.exists(keys)
        fresh = [i for i, result in enumerate(results) if result is MISS]
        if fresh:
            stored = await self._set([keys[i] for i in fresh], [records[i] for i in fresh])
            for i, result in zip(fresh, stored, strict=True):
                results[i] = result
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if there was one, else MISS. Cancelling it may leave any of them deleted."""
        return [_counted(reply) for reply in await self._said(b"UNLINK", keys)]

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
        more. ``refused_pages``: pages for which the server had no room. ``connects``: connections made since it was
        opened."""
        nodes = self._router.nodes
        connections = sum(not connection.closed for node in nodes for connection in node.made)
        now = {"nodes": len(nodes), "connections": connections}
        return {**{name: self._counts[name] for name in COUNTERS}, **now}

    async def flush(self) -> None:
        """Do nothing: the server's configuration decides what survives a power loss."""

    async def aclose(self) -> None:
        """Close all connections, so that calls under way fail. Calling it twice is fine. No server is waited for."""
        await self._router.aclose()

    # one request

    async def _said(self, verb: bytes, keys: Sequence[PageKey]) -> list[Any]:
        return await self._about(verb, self._names.of(keys))

    async def _about(self, verb: bytes, names: Sequence[bytes]) -> list[Any]:
        return await self._asked(Lane.WORDS, names, plain(self._names.commands(verb, names)))

    async def _asked(self, lane: Lane, names: Sequence[bytes], batch: CommandBatch) -> list[Any]:
        """Return the reply to each command of ``batch``, which is about one of ``names``. Refusals are among the
        replies, and are counted.

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

    async def _page_names(self) -> AsyncIterator[list[bytes]]:
        """Yield the names of all pages, in batches and each name once. All keys of every server are gone through, so it
        is for people and not for requests. Raises BackendError if a server cannot be asked."""
        await self._router.refresh()
        seen: set[bytes] = set()  # SCAN may say a key twice, and so may two servers between which it moves
        for node in list(self._router.nodes):
            cursor = b""
            while cursor != b"0":
                scan = command(b"SCAN", cursor or b"0", b"MATCH", self._names.pattern(), b"COUNT", b"1000")
                (reply,) = await node.ask(Lane.WORDS, plain([scan]))
                match reply:
                    case [bytes() as cursor, list() as found] if all(isinstance(name, bytes) for name in found):
                        fresh = [name for name in dict.fromkeys(self._names.ours(found)) if name not in seen]
                        seen.update(fresh)
                        yield fresh
                    case _:
                        said = reply.text if isinstance(reply, Refusal) else str(reply)
                        raise Unavailable(f"{node.address}: no answer to SCAN: {said[:200]}")

    async def _told(self, verb: bytes, names: Sequence[bytes]) -> list[Any]:
        """Return the replies to ``verb name`` for each name. Raises Unavailable if one of them is a refusal, except
        ``WRONGTYPE``: the name belongs to something that is no page."""
        replies = await self._about(verb, names)
        for reply in replies:
            if isinstance(reply, Refusal) and reply.code != "WRONGTYPE":
                raise Unavailable(f"{self._settings}: {reply.text}")
        return replies

    async def _entries(self, names: Sequence[bytes]) -> list[Stored]:
        """Return the pages under these names that are still there; the size is 0 where there is no string."""
        sizes, left = await self._told(b"STRLEN", names), await self._told(b"PTTL", names)
        return [
            Stored(self._names.key(name), size if isinstance(size, int) else 0, self._written(ms))
            for name, size, ms in zip(names, sizes, left, strict=True)
            if ms != GONE
        ]

    def _written(self, left_ms: Any) -> float:
        """Return the unix time at which a page was written that has ``left_ms`` milliseconds to live, if a store with
        this ``ttl`` wrote it; 0.0 if pages live for ever."""
        ttl, now = self._settings.ttl, time()
        known = ttl and isinstance(left_ms, int) and left_ms >= 0
        return min(now, now + left_ms / 1000 - ttl) if known else 0.0

    async def _set(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Send SET NX for each page and return the results. After a call in which no page found room, no page is sent
        for a moment."""
        permit = self._room.allow(_now())
        if permit == REFUSED:
            self._counts["refused_pages"] += len(keys)
            return [FAILED] * len(keys)
        names = self._names.of(keys)
        commands = [self._names.storing(name, record) for name, record in zip(names, records, strict=True)]
        try:
            replies = await self._asked(Lane.PAGES, names, plain(commands))
        except BaseException:
            self._room.abandon(permit)
            raise
        refused = sum(isinstance(reply, Refusal) and reply.code in NO_ROOM for reply in replies)
        self._counts["refused_pages"] += refused
        if refused == len(replies):
            self._room.failure(permit, _now())
        else:
            self._room.success(permit)
        sizes = [len(record.payload) for reply, record in zip(replies, records, strict=True) if reply == b"OK"]
        self._counts["pages"] += len(sizes)
        self._counts["bytes"] += sum(sizes) + len(sizes) * HEADER_BYTES
        return [FAILED if isinstance(reply, Refusal) else HIT for reply in replies]  # nil: it is there by now


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
