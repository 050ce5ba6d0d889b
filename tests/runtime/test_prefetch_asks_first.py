"""A prefetch asks before it takes. A question has no page, no pin and no operation; one of which storage has nothing
waits for nobody's fetch; one asks for all who want the same pages; and what hangs keeps the quota from nobody for
good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynccache import AsyncCache, PrefetchStatus
from asynccache.runtime import prefetch as prefetch_module
from asynccache.runtime.prefetch import Fetch
from asynccache.storage import PageKey, Result
from tests.runtime.runtime_kit import opened, serve, settings, settled, text, turns, until
from tests.runtime.test_prefetching import HeldBackend

PAGES = 6
TEXTS = [text(PAGES, seed) for seed in range(3)]


class Questions(HeldBackend):
    """Notes the pages of each question; questions wait while ``deaf``."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[list[PageKey]] = []
        self.hearing = asyncio.Event()
        self.hearing.set()

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        self.questions.append(list(keys))
        await self.hearing.wait()
        return await super().exists(keys)


@asynccontextmanager
async def warm(
    texts: Sequence[list[int]] = TEXTS, host: int = 32, device: int = 32, **more: Any
) -> AsyncIterator[tuple[AsyncCache, Questions]]:
    """A cache without pages, and a store that has ``texts``."""
    storage = Questions()
    async with opened(settings(device=64, host=64), storage=storage) as cache:
        for tokens in texts:
            await serve(cache, tokens)
        await cache.flush()
    storage.questions.clear()
    more.setdefault("prefetch_policy", "wait_complete")
    async with opened(settings(device=device, host=host, **more), storage=storage) as cache:
        yield cache, storage
    await storage.aclose()


def operations(cache: AsyncCache) -> int:
    return cache.statistics().core.operations["prefetch"]


async def test_one_of_which_storage_has_nothing_does_not_wait_for_the_fetches_of_others() -> None:
    async with warm(prefetch_quota=0.25) as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        in_line = cache.prefetch(text(PAGES, 1))
        fresh = cache.prefetch(text(PAGES, 70))
        await turns()
        assert not in_line.done(), "the quota is taken"
        assert fresh.done()
        assert (await fresh).status is PrefetchStatus.MISS
        assert await serve(cache, text(PAGES, 71)) == 0
        storage.let()
        assert [(await handle).tokens for handle in (hung, in_line)] == [4 * PAGES] * 2


async def test_a_question_that_hangs_has_no_page_no_pin_and_no_operation() -> None:
    async with warm() as (cache, storage):
        await serve(cache, text(2))
        await settled(cache)
        before = cache.statistics()
        storage.hearing.clear()
        handle = cache.prefetch(text(PAGES))
        await until(lambda: storage.questions != [])
        await turns()
        now = cache.statistics()
        assert (now.device, now.host, now.core.operations) == (before.device, before.host, before.core.operations)
        storage.hearing.set()
        assert (await handle).tokens == 4 * (PAGES - 2)


async def test_what_storage_has_says_how_much_room_is_needed() -> None:
    """Of a prompt of twelve pages it has six, and no more room than that is there."""
    async with warm(prefetch_quota=1.0, host=12) as (cache, storage):
        storage.hold()
        first = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        second = cache.prefetch(text(PAGES, 1) + text(PAGES, 80))
        await until(lambda: operations(cache) == 2)
        storage.let()
        assert [(await handle).tokens for handle in (first, second)] == [4 * PAGES] * 2
        assert (await second).status is PrefetchStatus.PARTIAL


@pytest.mark.parametrize("common", [0, PAGES - 1, PAGES])
async def test_one_asks_for_all_who_want_the_same_pages(common: int) -> None:
    """Also if it hears that there is nothing: then it is the same for the others, whatever their prompts go on with."""
    async with warm() as (cache, storage):
        prompts = [text(common, 70) + text(PAGES - common, 80 + turn) for turn in range(5)]
        handles = [cache.prefetch(prompt) for prompt in prompts]
        assert [(await handle).status for handle in handles] == [PrefetchStatus.MISS] * 5
        assert len(storage.questions) == (1 if common else 5)


async def test_of_those_who_share_a_fetch_each_fetches_what_is_its_own() -> None:
    prompts = [text(3) + text(3, 90 + turn) for turn in range(3)]
    async with warm([*prompts]) as (cache, _):
        handles = [cache.prefetch(prompt) for prompt in prompts]
        assert [(await handle).tokens for handle in handles] == [4 * PAGES] * 3
        assert cache.statistics().stages["prefetch"].pages == 3 + 3 * 3, "what they share was read once"


async def test_pages_that_the_tree_lost_after_the_question_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with warm(host=8, device=8, prefetch_quota=1.0) as (cache, _):
        await serve(cache, text(3))
        await cache.flush()
        usual = Fetch._begin
        late: list[Fetch] = []

        async def begin_late(fetch: Fetch, end: int) -> bool:
            if not late:
                late.append(fetch)
                assert fetch.shape.anchor == 3 * 4
                for seed in (20, 21):
                    await serve(cache, text(8, seed))
                    await cache.flush()
                assert (await cache.match(text(PAGES))).host == 0
            return await usual(fetch, end)

        monkeypatch.setattr(Fetch, "_begin", begin_late)
        handle = cache.prefetch(text(PAGES))
        await handle
        assert (await cache.match(text(PAGES))).host == 4 * PAGES
        assert late[0].shape.anchor == 0


async def test_behind_a_fetch_that_hangs_with_the_quota_a_prefetch_begins_after_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch_module, "PATIENCE", 0.02)
    async with warm(prefetch_quota=0.25) as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        entering = asyncio.create_task(serve(cache, text(PAGES, 1, extra=1)))
        await until(lambda: storage.waiting == 2)
        assert operations(cache) == 2
        storage.let()
        assert await entering == 4 * PAGES
        assert (await hung).tokens == 4 * PAGES


async def test_nobody_joins_a_fetch_that_was_given_up() -> None:
    async with warm() as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        hung.cancel()
        again = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 2)
        storage.let()
        assert (await again).tokens == 4 * PAGES
        assert (await hung).status is PrefetchStatus.CANCELLED


async def test_a_prefetch_that_is_a_miss_claims_what_the_host_has_of_its_prompt() -> None:
    async with warm(host=8, device=16, prefetch_quota=1.0) as (cache, _):
        await (brought := cache.prefetch(text(PAGES)))
        brought.cancel()
        handle = cache.prefetch(text(PAGES) + text(PAGES, 70))
        assert (await handle).status is PrefetchStatus.MISS
        late = cache.prefetch(text(PAGES, 1))
        await turns(50)
        assert (await cache.match(text(PAGES))).host == 4 * PAGES
        assert not late.done(), "it waits for room, which is claimed"
        handle.cancel()
        assert (await late).tokens == 4 * PAGES
