"""The list of a store's pages, found by going through all keys of every server: for people, not for requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from time import time
from typing import Any

from asynccache.errors import Unavailable
from asynccache.storage import Stored
from asynccache_backends.redis.connection import plain
from asynccache_backends.redis.resp import Names, Refusal, command
from asynccache_backends.redis.routing import Lane, Router

GONE = -2


class Catalog:
    """``ttl``: of the pages, in seconds, 0 where they have none."""

    def __init__(self, router: Router, names: Names, ttl: float) -> None:
        self._router = router
        self._names = names
        self._ttl = ttl

    async def names(self) -> AsyncIterator[list[bytes]]:
        """The name of every page, once, in batches.

        Raises:
            BackendError: a server cannot be asked.
        """
        await self._router.refresh()
        seen: set[bytes] = set()  # SCAN may say a key twice, and so may two servers between which it moves
        for node in list(self._router.nodes.values()):
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
                        text = reply.text if isinstance(reply, Refusal) else f"no answer to SCAN: {str(reply)[:200]}"
                        raise Unavailable(f"{node.address}: {text}")

    async def entries(self, names: Sequence[bytes]) -> list[tuple[bytes, Stored]]:
        """Return the page under each name that is still there; its size is 0 where it is no string."""
        sizes = await self._each(b"STRLEN", names)
        left = await self._each(b"PTTL", names)
        return [
            (name, Stored(self._names.key(name), size if isinstance(size, int) else 0, self._written(ms)))
            for name, size, ms in zip(names, sizes, left, strict=True)
            if ms != GONE
        ]

    async def unlink(self, names: Sequence[bytes]) -> None:
        """Forget them."""
        await self._each(b"UNLINK", names)

    async def _each(self, verb: bytes, names: Sequence[bytes]) -> list[Any]:
        """The replies. A refusal is none: a page of which nothing is known is neither waste nor forgotten."""
        if not names:
            return []
        replies = await self._router.ask(Lane.WORDS, names, plain(self._names.commands(verb, names)))
        for reply in replies:
            if isinstance(reply, Refusal) and reply.code != "WRONGTYPE":
                raise Unavailable(f"storage: {reply.text}")
        return replies

    def _written(self, left_ms: Any) -> float:
        """Known where a page lives for ``ttl`` from then on, as those do that a store with this ``ttl`` wrote."""
        if not self._ttl or not isinstance(left_ms, int) or left_ms < 0:
            return 0.0
        now = time()
        return min(now, now + left_ms / 1000 - self._ttl)

