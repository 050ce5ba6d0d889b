"""The backend of a host process. The server says where a page lies; this process copies it, in threads.

What always holds:
* A read holds nothing in the server. After the copy the slot's generation is compared with the one that the server had
  named; if it has changed, the page was evicted meanwhile, and it is a MISS. (Only then the checksum is looked at, so
  such a page is never taken for a corrupt one.)
* A put reserves slots, fills them, and publishes them. Slots that are not published are given back once nothing copies
  into them. If the connection is lost in between, they are published or given back over the next one.
* ``open`` succeeds without a server, and so does the engine's start. Until there is one, all calls fail at once.

    host:/run/asynccache.sock?label=llama&owner=1001
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, Any, Self

from msgspec import Meta

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.host import wire
from asynccache.settings import Settings
from asynccache.storage import (
    HEADER_BYTES,
    Hint,
    OpenCalls,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Stored,
    StoreLayout,
    ThreadPool,
)
from asynccache_backends.host.connection import HostChannel, HostConnection
from asynccache_backends.host.mapping import copy_out

MISS, HIT, CORRUPT, FAILED = Result

THREADS = 2
PART_KEYS = 1024
LONGEST_POOL = 64
MOST_SERVED = 1 << 14
LONGEST_PATH = 107
COUNTERS = ("errors", "get_bytes", "put_bytes", "overtaken", "no_room", "untold_hints")
HINTS_SINCE = 2
"""The version of the protocol that has hints."""

LOG = logging.getLogger("asynccache.host")


class HostSettings(Settings, frozen=True):
    """The options in a URL. ``label``: whom the server counts the pages for, such as a tenant or a model. ``owner``:
    the number of the user that the server runs as; by default it must be this user, or root."""

    label: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{0,64}$")] = ""
    owner: Annotated[int, Meta(ge=-1, le=(1 << 32) - 2)] = -1


def settings_of(url: ParsedUrl) -> HostSettings:
    """Return the settings in ``url``. Raises ConfigError: an option is unusable, or the path is no socket's."""
    if not url.path.startswith("/") or "\0" in url.path or len(url.path.encode()) > LONGEST_PATH:
        raise ConfigError(f"storage={str(url)!r}: expected the path of a host process's socket, as in "
                          f"host:/run/asynccache.sock, of at most {LONGEST_PATH} bytes")  # fmt: skip
    return url.settings(HostSettings)


class HostBackend:
    """An open store; ``open`` makes it. ``shared``: all processes that use the server find the same pages.
    ``longest_backoff``: a server that has come back is used again within so many seconds."""

    shared = True
    longest_backoff = 0.2

    def __init__(self, path: str, settings: HostSettings, layout: StoreLayout) -> None:
        self._path = path
        self._layout = layout
        self._connection = HostConnection(path, settings.label, settings.owner)
        self._threads = ThreadPool(THREADS, "asynccache-host")
        self._calls = OpenCalls(f"store host:{path}")
        self._counts: Counter[str] = Counter()
        self._served: dict[bytes, int] = {}
        self._warned = False
        self._dirty = False  # pages were stored since the last flush

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any. No server is asked."""
        settings_of(url)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Connect to the server if there is one.

        Raises:
            ConfigError: the URL is wrong, or there is a server that refuses this process: another user's, or of a
                version that does not fit.

        Cancelling it leaves nothing open.
        """
        backend = cls(url.path, settings_of(url), layout)
        try:
            with suppress(BackendError):
                await backend._connection.ready()
        except BaseException:
            backend._connection.close()
            raise
        return backend

    def __repr__(self) -> str:
        return f"HostBackend({self._path!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored, in the memory or in a store behind it. Cancelling it changes
        nothing."""
        return await self._codes(wire.Exist, keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Copy each page out of the shared memory. Pages that only a store behind it has are read into it first.
        Cancelling it returns when no thread copies any more."""
        return await self._in_parts(len(keys), lambda channel, part: self._get(channel, keys[part], records[part]))

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Copy each new page into the shared memory. Cancelling it returns when no thread copies any more; then none,
        or all, of a thousand pages are stored."""
        return await self._in_parts(len(keys), lambda channel, part: self._put(channel, keys[part], records[part]))

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key, from the stores behind the memory as well."""
        return await self._codes(wire.Remove, keys)

    async def damaged(self, keys: Sequence[PageKey]) -> list[Result]:
        """Have what was read for these keys, and did not verify, dropped from the memory. What a store behind it has of
        them may be good, and stays."""
        known = [(key.key, self._served[key.key]) for key in keys if key.key in self._served]
        with self._calls:
            channel = await self._ready()
            names, generations = [name for name, _ in known], [generation for _, generation in known]
            answer = await self._asked(channel, lambda number: wire.Damaged(number, names, generations))
        dropped = dict(zip(names, _results(answer, len(names)), strict=True))
        return [dropped.get(key.key, MISS) for key in keys]

    async def hint(self, verb: Hint, keys: Sequence[PageKey], seconds: float) -> list[Result]:
        """Tell the server what is known of these pages. PREFETCH: pages that only a store behind the memory has are
        read into it. A server of a version without hints is told nothing: MISS."""
        sizes = self._layout.page_bytes

        async def told(channel: HostChannel, part: slice) -> list[Result]:
            if channel.version < HINTS_SINCE:
                self._counts["untold_hints"] += not part.start
                return [MISS] * len(keys[part])
            names, pools = [key.key for key in keys[part]], _pools(keys[part])
            wanted = [sizes.get(key.pool, 0) for key in keys[part]] if verb is Hint.PREFETCH else []
            answer = await self._asked(
                channel, lambda number: wire.Hint(number, verb.value, names, pools, wanted, seconds))
            return _results(answer, len(names))

        return await self._in_parts(len(keys), told)

    async def clear(self) -> None:
        """Delete every page, from the stores as well, whoever has stored it."""
        await self._told(wire.RemoveAll)

    async def flush(self) -> None:
        """Return once everything is in the stores behind the memory, as far as these can promise that.

        Raises:
            Unavailable: there is no server, and nobody knows what became of pages that were stored since the last time.
            Without such pages nothing is raised, so that an engine without a server ends like any other.
        """
        dirty, self._dirty = self._dirty, False
        try:
            await self._told(wire.Secure)
        except BaseException as error:
            self._dirty = self._dirty or dirty
            if dirty or not isinstance(error, Unavailable) or self._calls.closed:
                raise

    async def probe(self) -> None:
        """Return when the server has answered anything at all."""
        await self._told(lambda number: wire.Exist(number, [], []))

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield the pages in the memory. Cancelling it changes nothing."""
        slot = 0
        while slot >= 0:
            told = await self._told(lambda number: wire.Enumerate(number, slot))  # noqa: B023  called at once
            slot = told.slot
            yield [Stored(key, HEADER_BYTES + size, written)
                   for key, size, written in zip(told.keys, told.sizes, told.written, strict=True)]  # fmt: skip

    async def server_counts(self) -> tuple[Mapping[str, float], Mapping[str, Mapping[str, int]]]:
        """Return the server's own counters, by name, and those of each label."""
        told = await self._told(wire.Tell)
        return told.counts, told.labels

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: any memory will do."""

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters of this instance. ``pages`` and ``bytes``: what the server has in memory, by its last
        answer. ``overtaken``: pages that were evicted while they were copied. ``no_room``: pages that found none.
        ``untold_hints``: hints for a server of a version that has none."""
        channel = self._connection.channel
        there = channel is not None and channel.lost is None
        return {
            "pages": channel.pages if channel is not None and there else 0,
            "bytes": channel.bytes if channel is not None and there else 0,
            **{name: self._counts[name] for name in COUNTERS}, "connects": self._connection.connects,
            "connected": int(there),
        }  # fmt: skip

    async def aclose(self) -> None:
        """Fail the calls under way, wait until nothing copies, and say so to the server. Calling it twice is fine. In a
        forked child it does nothing: the connection is the parent's, which may be copying."""
        channel = self._connection.channel
        self._calls.closed = True
        if self._connection.forked:
            return
        if channel is not None:
            channel.fail("the store is closed")
        await self._calls.close()
        self._connection.close()
        self._threads.close()

    async def _ready(self) -> HostChannel:
        try:
            return await self._connection.ready()
        except ConfigError as error:
            self._counts["errors"] += 1
            raise Unavailable(str(error)) from None
        except BackendError:
            self._counts["errors"] += 1
            raise

    async def _asked(self, channel: HostChannel, make: Callable[[int], wire.HostMessage]) -> Any:
        try:
            return await channel.ask(make)
        except BackendError:
            self._counts["errors"] += 1
            raise

    async def _told(self, make: Callable[[int], wire.HostMessage]) -> Any:
        with self._calls:
            return await self._asked(await self._ready(), make)

    async def _codes(self, kind: type[wire.Exist] | type[wire.Remove], keys: Sequence[PageKey]) -> list[Result]:
        async def asked(channel: HostChannel, part: slice) -> list[Result]:
            names, pools = [key.key for key in keys[part]], _pools(keys[part])
            return _results(await self._asked(channel, lambda number: kind(number, names, pools)), len(names))

        return await self._in_parts(len(keys), asked)

    async def _in_parts(
        self, count: int, call: Callable[[HostChannel, slice], Awaitable[list[Result]]]
    ) -> list[Result]:
        """Make ``call`` for at most ``PART_KEYS`` of ``count`` keys at a time, and return all results."""
        results: list[Result] = []
        with self._calls:
            channel = await self._ready()
            for at in range(0, count, PART_KEYS):
                results += await call(channel, slice(at, min(at + PART_KEYS, count)))
        return results

    async def _get(
        self, channel: HostChannel, keys: Sequence[PageKey], records: Sequence[Record]
    ) -> list[Result]:
        names, pools, mapping = [key.key for key in keys], _pools(keys), channel.mapping
        sizes = [record.payload.nbytes for record in records]
        answer = await self._asked(channel, lambda number: wire.Find(number, names, pools, sizes))
        results = _results(answer, len(keys))
        hits = [i for i, result in enumerate(results) if result is HIT]
        if not hits:
            return results
        slots, found = answer.slots, [records[i] for i in hits]
        lengths = [sizes[i] for i in hits]
        places = mapping.places(answer.offsets, lengths)
        await self._threads.spread(copy_out, lengths, places, [record.payload for record in found])
        headers = mapping.headers(slots)
        now = mapping.generations(slots)
        for n, record in enumerate(found):
            record.header[:] = headers[n * HEADER_BYTES : (n + 1) * HEADER_BYTES]
        if now != answer.generations:
            for i, is_now, was in zip(hits, now, answer.generations, strict=True):
                if is_now != was:
                    results[i] = MISS
                    self._counts["overtaken"] += 1
        if len(self._served) > MOST_SERVED:
            self._served.clear()
        self._served.update(zip([names[i] for i in hits], answer.generations, strict=True))
        self._counts["get_bytes"] += sum(lengths)
        return results

    async def _put(self, channel: HostChannel, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        first = {key.key: i for i, key in reversed(list(enumerate(keys)))}
        names = [key.key for i, key in enumerate(keys) if first[key.key] == i]
        which = [first[name] for name in names]
        pools, sizes = _pools([keys[i] for i in which]), [records[i].payload.nbytes for i in which]
        answer = await self._asked(channel, lambda number: wire.Reserve(number, names, pools, sizes))
        slots, generations = answer.slots, answer.generations
        try:
            answers = _results(answer, len(names))
            fresh = [n for n, result in enumerate(answers) if result is MISS]
            if fresh:
                mapping, lengths = channel.mapping, [sizes[n] for n in fresh]
                new = [records[which[n]] for n in fresh]
                places = mapping.places(answer.offsets, lengths)
                mapping.set_headers(slots, b"".join([record.header for record in new]))
                payloads = [record.payload for record in new]
                await self._threads.spread(mapping.copy_in, lengths, answer.offsets, places, payloads)
                published = await self._published(channel, slots, generations)
                for n, result in zip(fresh, published, strict=True):
                    answers[n] = result
                self._counts["put_bytes"] += sum(lengths)
                self._dirty = True
        except BaseException:
            self._connection.owe(channel, wire.GiveBack(slots, generations))
            raise
        if FAILED in answers:
            self._counts["no_room"] += answers.count(FAILED)
            if max(sizes) > channel.longest and not self._warned:
                self._warned = True
                LOG.warning("host:%s stores no page of %d bytes: it takes %d at most, an eighth of its --memory",
                            self._path, max(sizes), channel.longest)  # fmt: skip
        found = dict(zip(names, answers, strict=True))
        return [found[key.key] for key in keys]

    async def _published(self, channel: HostChannel, slots: list[int], generations: list[int]) -> list[Result]:
        """Publish slots. If the connection is lost, another server may have taken over, memory and all: ask it."""
        try:
            answer = await self._asked(channel, lambda number: wire.Publish(number, slots, generations))
        except Unavailable:
            if self._calls.closed:
                raise
            again = await self._ready()
            if again.boot != channel.boot:
                raise
            answer = await self._asked(again, lambda number: wire.Publish(number, slots, generations))
        return _results(answer, len(slots))


def _pools(keys: Sequence[PageKey]) -> list[str]:
    """Return the names of the keys' pools, as the server gets them: a long name's digest stands for it."""
    return [pool if len(pool) <= LONGEST_POOL else sha256(pool.encode()).hexdigest() for pool, _ in keys]


_RESULTS = tuple(Result)


def _results(answer: Any, expected: int) -> list[Result]:
    if len(answer.codes) != expected:
        raise BackendError(f"the host process answered {len(answer.codes)} for {expected} keys")
    return [_RESULTS[code] for code in answer.codes]
