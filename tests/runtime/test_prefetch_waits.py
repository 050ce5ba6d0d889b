"""A prefetch that is told to stop while it waits for the lock fetches nothing, and stops nobody else's fetch. A
prefetch gives up when its anchor leaves the host. A store that raises anything is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asynccache import PrefetchPolicy, PrefetchStatus
from asynccache.core.plan import EMPTY, Wait
from asynccache.runtime.driving import holding
from asynccache.runtime.prefetch import Wish
from asynccache.storage import PageKey, Record, Result
from tests.runtime.runtime_kit import opened, parts, serve, settings, settled, text, turns, until
from tests.runtime.test_prefetching import HeldBackend, stored


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wish", "status"), [(Wish.STOP, PrefetchStatus.MISS), (Wish.CANCEL, PrefetchStatus.CANCELLED)]
)
async def test_a_handle_that_is_told_while_it_waits_for_the_lock_fetches_nothing(
    wish: Wish, status: PrefetchStatus
) -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        storage.hold()
        asked = storage.asked
        async with holding(parts(cache).driver.lock):
            handle = cache.prefetch(text(6))
            await turns()
            parts(cache).prefetching.own(handle).tell(wish)
        await turns()
        ended, result = handle.done(), handle.result
        storage.let()
        await settled(cache)
        assert ended
        assert result is not None
        assert result.status is status
        assert storage.asked == asked


@pytest.mark.asyncio
async def test_a_handle_that_is_stopped_while_it_waits_for_the_lock_stops_nobody_elses_fetch() -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        storage.hold()
        first = cache.prefetch(text(6))
        await until(lambda: storage.waiting == 1)
        async with holding(parts(cache).driver.lock):
            second = cache.prefetch(text(6))
            await turns()
            parts(cache).prefetching.own(second).tell(Wish.STOP)
        await turns()
        ended = second.done()
        storage.let()
        assert (await first).tokens == 24
        assert ended
        assert (await second).status is PrefetchStatus.MISS


class Buggy(HeldBackend):
    """Raises what no backend should."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        raise ValueError("a bug")

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        raise ValueError("a bug")


@pytest.mark.asyncio
async def test_a_prefetch_gives_up_when_what_it_hangs_on_does_not_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backup ends, and something else takes the room before the prefetch looks: it went on for ever."""
    tried = 0

    def gone_again(*_: object) -> Wait:
        nonlocal tried
        tried += 1
        return Wait(EMPTY, (1 << 40,))

    async with stored() as storage, opened(settings(device=16, host=32), storage=storage) as cache:
        monkeypatch.setattr(parts(cache).prefetching, "_try", gone_again)
        async with asyncio.timeout(5.0):
            result = await cache.prefetch(text(6))
        assert result.status is PrefetchStatus.SKIPPED
        assert result.reason == "the anchor does not stay on the host"
        assert 1 < tried < 10


@pytest.mark.asyncio
async def test_the_cache_goes_on_without_a_store_that_raises_anything() -> None:
    storage = Buggy()
    async with opened(settings(device=16, host=32), storage=storage) as cache:
        assert (await cache.prefetch(text(6))).tokens == 0
        assert await serve(cache, text(6)) == 0
        assert (await cache.flush()).storage == 6
        assert await serve(cache, text(6, extra=1)) == 24
    await storage.aclose()
