"""A storage backend for simulated worlds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, NamedTuple

from asynccache.errors import Unavailable
from asynccache.storage import PageKey, Record, Result, settled

# A storage backend for simulated worlds: in memory, without threads, every delay, failure and lie drawn from a seed.
#
# It is as hostile as the contract allows. Bytes move in two halves with time between them, so a buffer that is
# used too early, or a page that changes while it is written, shows. What was begun cannot be stopped: a cancelled call
# returns when it is over. Lies go beyond the contract; ``CheckedStore`` must see through each of them.
#
# It may also hang: see ``Hang``.


class Hang(NamedTuple):
    """From ``begin`` on, for ``length`` seconds, calls of ``verbs`` are not answered; the seconds are counted from
    ``SimulatedBackend.hang``. ``stubborn``: calls that are under way at ``begin`` hang, too, and calls for pages go on
    hanging when they are cancelled, as in a client whose thread is stuck."""

    verbs: frozenset[str]
    begin: float
    length: float
    stubborn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostility:
    """Shares between 0 and 1. Per call: ``unavailable`` raises. Per page: ``failed`` answers FAILED; the lies of
    ``get`` are ``wrong`` (a flipped bit), ``short`` (the first half only), ``empty`` (nothing written), each claimed as
    HIT; ``vanished``: ``exists`` says HIT and the page is gone. ``delay``: seconds at most, for each half of a call."""

    delay: float = 0.01
    unavailable: float = 0.0
    failed: float = 0.0
    wrong: float = 0.0
    short: float = 0.0
    empty: float = 0.0
    vanished: float = 0.0


HONEST = Hostility()


class SimulatedBackend:
    """``pages`` is what is stored; it may be shared by one backend after another, as a store that outlives a process.
    ``shared``: other workers have it at the same time.
    ``hangs``: when which of its calls hang. ``lies`` counts lies by name, ``hung`` the calls that hung, ``holding``
    those that hold buffers now."""

    def __init__(
        self, random: Random, hostility: Hostility = HONEST, pages: dict[PageKey, tuple[bytes, bytes]] | None = None,
        *, shared: bool = False,
    ) -> None:  # fmt: skip
        self.shared = shared
        self.hostility = hostility
        self.pages = {} if pages is None else pages
        self.lies: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.hangs: Sequence[Hang] = ()
        self.hung: Counter[str] = Counter()
        self.holding = 0
        self.closed = False
        self._random = random
        self._since = inf
        self._answers = asyncio.Event()

    def __repr__(self) -> str:
        return f"SimulatedBackend(pages={len(self.pages)}, holding={self.holding})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS; a page that vanishes does so after this said HIT."""
        return await self._whole("exists", self._exists(keys))

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Fill the records, or lie. Cancelling it returns when it is over."""
        return await self._whole("get", self._get(keys, records))

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store the records. Cancelling it returns when it is over; they are stored then."""
        return await self._whole("put", self._put(keys, records))

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget the keys. Cancelling it returns when it is over."""
        return await self._whole("delete", self._delete(keys))

    def hang(self) -> None:
        """From now on the seconds of ``hangs`` are counted."""
        self._since = asyncio.get_running_loop().time()
        self._answers.clear()

    def answer(self) -> None:
        """Answer all calls that hang, and let none hang until ``hang`` is called again."""
        self._since = inf
        self._answers.set()

    async def clear(self) -> None:
        """Forget everything."""
        await self._held("clear")
        self.pages.clear()

    def register(self, pool: str, memory: memoryview) -> None:
        """Nothing to do."""

    def stats(self) -> Mapping[str, int | float]:
        """Pages, bytes and errors, and the number of lies."""
        size = sum(len(header) + len(payload) for header, payload in self.pages.values())
        return {"pages": len(self.pages), "bytes": size, "errors": self.calls["failed"], "lies": self.lies.total()}

    async def flush(self) -> None:
        """Takes time."""
        await self._held("flush")
        await self._pause()

    async def aclose(self) -> None:
        """The pages stay, for the next backend."""
        self.closed = True

    async def _whole(self, name: str, work: Coroutine[Any, Any, list[Result]]) -> list[Result]:
        if self.closed:
            work.close()
            raise Unavailable("the simulated backend is closed")
        self.calls[name] += 1
        self.holding += 1
        try:
            await self._held(name)
        except BaseException:
            self.holding -= 1
            work.close()
            raise
        task = asyncio.get_running_loop().create_task(work, name=f"simulated-backend-{name}")
        try:
            await settled([task])
        finally:
            self.holding -= 1
            failed = task.exception()
        if failed is not None:
            raise failed
        return task.result()

    async def _held(self, verb: str, under_way: bool = False) -> None:
        """Return at once, or when a hang is over that ``verb`` is in. ``under_way``: the call has begun."""
        loop = asyncio.get_running_loop()
        for hang in self.hangs:
            if under_way and not hang.stubborn:
                continue
            if verb in hang.verbs and 0 <= loop.time() - self._since - hang.begin < hang.length:
                self.hung[verb] += 1
                over = loop.create_task(self._over(self._since + hang.begin + hang.length), name=f"hanging-{verb}")
                try:
                    await (settled([over]) if hang.stubborn and verb not in ("clear", "flush") else over)
                finally:
                    over.cancel()

    async def _over(self, end: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if end == inf else end):
                await self._answers.wait()

    async def _exists(self, keys: Sequence[PageKey]) -> list[Result]:
        await self._begin()
        results = [self._or_failed(Result.HIT if key in self.pages else Result.MISS) for key in keys]
        for key in keys:
            if key in self.pages and self._draw("vanished"):
                del self.pages[key]
        return results

    async def _get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._begin()
        found = [self.pages.get(key) for key in keys]
        lies = [self._lie() if page else "" for page in found]
        self._fill(found, records, lies, _first_half)
        await self._pause()
        await self._held("get", under_way=True)
        self._fill(found, records, lies, _second_half)
        return [self._answer(page, record) for page, record in zip(found, records, strict=True)]

    async def _put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._begin()
        results = [self._or_failed(Result.HIT) for _ in keys]
        first = [bytes(record.payload[: record.payload.nbytes // 2]) for record in records]
        await self._pause()
        await self._held("put", under_way=True)
        for key, record, half, result in zip(keys, records, first, results, strict=True):
            if result is Result.HIT:
                self.pages.setdefault(key, (bytes(record.header), half + bytes(record.payload[len(half) :])))
        return results

    async def _delete(self, keys: Sequence[PageKey]) -> list[Result]:
        await self._begin()
        outcomes = [self._or_failed(Result.HIT if key in self.pages else Result.MISS) for key in keys]
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Result.HIT:
                self.pages.pop(key, None)
        return outcomes

    async def _begin(self) -> None:
        await self._pause()
        if self._draw("unavailable"):
            self.calls["failed"] += 1
            raise Unavailable("the simulated backend is unavailable")

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(0, self.hostility.delay))

    def _fill(
        self, found: Sequence[tuple[bytes, bytes] | None], records: Sequence[Record], lies: Sequence[str],
        half: Callable[[Record, bytes, bytes, str], None],
    ) -> None:
        for page, record, lie in zip(found, records, lies, strict=True):
            if page is not None and len(page[1]) == record.payload.nbytes:
                half(record, *page, lie)

    def _answer(self, page: tuple[bytes, bytes] | None, record: Record) -> Result:
        if page is None:
            return self._or_failed(Result.MISS)
        return self._or_failed(Result.HIT if len(page[1]) == record.payload.nbytes else Result.CORRUPT)

    def _or_failed(self, result: Result) -> Result:
        return Result.FAILED if self._random.random() < self.hostility.failed else result

    def _lie(self) -> str:
        return next((name for name in ("wrong", "short", "empty") if self._draw(name)), "")

    def _draw(self, name: str) -> bool:
        share: float = getattr(self.hostility, name)
        drawn = self._random.random() < share
        if drawn and name != "unavailable":
            self.lies[name] += 1
        return drawn


def _first_half(record: Record, header: bytes, payload: bytes, lie: str) -> None:
    if lie != "empty":
        half = len(payload) // 2
        record.header[:] = header
        record.payload[:half] = payload[:half]


def _second_half(record: Record, header: bytes, payload: bytes, lie: str) -> None:
    half = len(payload) // 2
    if lie not in ("empty", "short"):
        record.payload[half:] = payload[half:]
    if lie == "wrong":
        record.payload[half] ^= 0x10
