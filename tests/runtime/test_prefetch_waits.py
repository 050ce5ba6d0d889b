"""A prefetch that is told to stop before its fetch has begun reads nothing, and stops nobody else's fetch. A prefetch
gives up when its anchor leaves the host. A store that raises anything is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asynccache import PrefetchPolicy, PrefetchStatus
from asynccache.core.plan import EMPTY, Wait
from asynccache.runtime.core_calls import holding
from asynccache.runtime.prefetch import Wish
from asynccache.storage import PageKey, Record, Result
from tests.runtime.runtime_kit import opened, parts, serve, settings, settled, text, turns
from tests.runtime.test_prefetching import HeldBackend, stored


@pytest.mark.parametrize(
    ("wish", "status"), [(Wish.STOP, PrefetchStatus.MISS), (Wish.CANCEL, PrefetchStatus.CANCELLED)]
)
async def test_a_handle_that_is_told_while_it_waits_for_the_lock_reads_nothing(
    wish: Wish, status: PrefetchStatus
) -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        async with holding(parts(cache).driver.lock):
            handle = cache.prefetch(text(6))
            await turns()
            handle._prefetch.tell(wish)
        await turns()
        ended, result = handle.done(), handle.result
        await settled(cache)
        assert ended
        assert result is not None
        assert result.status is status
        assert cache.statistics().stages["prefetch"].pages == 0
        assert cache.statistics().host["full"].free == 32


@pytest.mark.parametrize("wish", [Wish.STOP, Wish.CANCEL])
async def test_a_handle_that_ends_while_another_asks_for_it_stops_nobody_elses_fetch(wish: Wish) -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        async with holding(parts(cache).driver.lock):
            first, second = cache.prefetch(text(6)), cache.prefetch(text(6))
            await turns()
            second._prefetch.tell(wish)
            await turns()
            assert second.done()
        assert (await first).tokens == 24
        assert (await second).status is (PrefetchStatus.MISS if wish is Wish.STOP else PrefetchStatus.CANCELLED)
        assert storage.asked == 2, "one asked for both; before them, the request that computed it"


class Buggy(HeldBackend):
    """Raises what no backend should."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        raise ValueError("a bug")

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        raise ValueError("a bug")


@pytest.mark.source
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
        monkeypatch.setattr(parts(cache).core, "prefetch_open", gone_again)
        async with asyncio.timeout(5.0):
            result = await cache.prefetch(text(6))
        assert result.status is PrefetchStatus.SKIPPED
        assert result.reason == "the anchor does not stay on the host"
        assert 1 < tried < 10


async def test_the_cache_goes_on_without_a_store_that_raises_anything() -> None:
    storage = Buggy()
    async with opened(settings(device=16, host=32), storage=storage) as cache:
        assert (await cache.prefetch(text(6))).tokens == 0
        assert await serve(cache, text(6)) == 0
        assert (await cache.flush()).storage == 6
        assert await serve(cache, text(6, extra=1)) == 24
    await storage.aclose()
