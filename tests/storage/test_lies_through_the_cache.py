"""A backend that lies, seen from the engine: no wrong byte is ever read, no request fails, and the pages are found
again once it tells the truth. Wrong bytes, another page's bytes, bytes of another length, a hit without data, answers
for fewer keys or for more, a put that stores nothing, and answers that are no answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.sidecars.sidecar_kit import deepseek, everything, opened, serve, text

PAGES = 6
Lie = Callable[[list[Result], Sequence[Record]], Any]


def _wrong(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records:
        record.payload[record.payload.nbytes // 2] ^= 1
    return results


def _headless(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records:
        record.header[50] ^= 1
    return results


def _swapped(results: list[Result], records: Sequence[Record]) -> list[Result]:
    """Whole records, each under another's key, wherever they are of one size."""
    for one, other in zip(records[::2], records[1::2], strict=False):
        if one.payload.nbytes == other.payload.nbytes:
            for a, b in ((one.header, other.header), (one.payload, other.payload)):
                a[:], b[:] = bytes(b), bytes(a)
    return results


def _short(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records:
        record.payload[record.payload.nbytes - 1 :] = b"\0"
        record.header[8:16] = (record.payload.nbytes - 1).to_bytes(8, "little")
    return results


def _empty(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records:
        record.header[:] = bytes(64)
        record.payload[:] = bytes(record.payload.nbytes)
    return [Result.HIT] * len(results)


def _fewer(results: list[Result], records: Sequence[Record]) -> list[Result]:
    return results[:-1]


def _more(results: list[Result], records: Sequence[Record]) -> list[Result]:
    return [*results, Result.HIT]


def _nonsense(results: list[Result], records: Sequence[Record]) -> Any:
    return None


def _numbers(results: list[Result], records: Sequence[Record]) -> Any:
    return [17] * len(results)


LIES: dict[str, Lie] = {
    "wrong bytes": _wrong, "a wrong header": _headless, "another page": _swapped, "another length": _short,
    "nothing": _empty, "fewer answers": _fewer, "more answers": _more, "no answer": _nonsense, "numbers": _numbers,
}  # fmt: skip


class Liar(WrappedBackend):
    """Lies about what it gives; ``forgets``: it says that it stored what it did not."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.lie: Lie | None = None
        self.forgets = False

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await self.inner.get(keys, records)
        return results if self.lie is None else self.lie(results, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return [Result.HIT] * len(keys) if self.forgets else await self.inner.put(keys, records)


@pytest.mark.parametrize("shape", [deepseek, everything])
@pytest.mark.parametrize("lie", LIES)
async def test_no_lie_is_served(lie: str, shape: Any) -> None:
    config = shape(prefetch_policy="wait_complete")
    liar, tokens = Liar(), text(config, PAGES, extra=1)
    async with opened(config, storage=liar) as cache:
        await serve(cache, tokens[:-1])
        await cache.flush()
    whole = PAGES * config.page_size
    liar.lie = LIES[lie]
    async with opened(config, storage=liar) as cache:
        assert await serve(cache, tokens) < whole, "and what was cached was verified"
        statistics = cache.statistics()
        assert statistics.storage["corrupt_pages"] + statistics.storage["failed_calls"] > 0
        await cache.flush()
    liar.lie = None
    async with opened(config, storage=liar) as cache:
        assert await serve(cache, tokens) == whole, "what did not verify was stored anew"


@pytest.mark.parametrize("shape", [deepseek, everything])
async def test_what_it_says_it_stored_is_a_miss(shape: Any) -> None:
    config = shape(prefetch_policy="wait_complete")
    liar, tokens = Liar(), text(config, PAGES, extra=1)
    liar.forgets = True
    async with opened(config, storage=liar) as cache:
        await serve(cache, tokens[:-1])
        assert await cache.flush() == (0, 0)
    liar.forgets = False
    for expected in (0, PAGES * config.page_size):
        async with opened(config, storage=liar) as cache:
            assert await serve(cache, tokens) == expected
            await cache.flush()
