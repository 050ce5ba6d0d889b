"""A batch that fails after a commit named it: nothing of it is served, saved or announced; who holds some of it learns
of it. ``commit`` checks its tokens when it publishes them, not only when it is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asynccache import AsyncCache, ConfigError, Lease, LoadFailed
from asynccache.core import audit
from asynccache.core.plan import Medium, Publish
from asynccache.events import Notice, StorageReport
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.signals import HostGate
from asynccache.runtime.core_calls import holding
from tests.runtime.runtime_kit import (
    PAGE,
    compute,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)

POOLS = ("full", "swa")
ERROR = RuntimeError("out of memory")


async def published(
    cache: AsyncCache, tokens: list[int], ready: HostGate, *, after: HostGate | None = None
) -> None:
    """A request whose engine has put its work off."""
    async with cache.lease(tokens) as lease:
        await lease.commit(tokens, after=ready, checkpoint=checkpoint(lease, tokens))
        lease.release(after=ready if after is None else after)


def checkpoint(lease: Lease, tokens: list[int]) -> tuple[int, int] | None:
    return (len(tokens) // PAGE * PAGE, int(lease.states[-1])) if len(lease.states) else None


async def fail(cache: AsyncCache, ready: HostGate) -> None:
    """Fire ``ready`` with an error, as an engine's thread would, and return when nothing is in flight any more."""
    await asyncio.to_thread(ready.fire, ERROR)
    await idle(cache)


async def idle(cache: AsyncCache) -> None:
    core = parts(cache).core
    while core.world.ledger.ops:
        await settled(cache)
        await turns(1)


@pytest.mark.parametrize("more", [{}, {"swa": 8}, {"mamba": 8}, {"swa": 8, "mamba": 8}], ids=str)
async def test_nothing_of_a_failed_batch_is_on_any_tier(more: dict[str, int]) -> None:
    device = CpuDevice()
    config = settings(device=16, host=32, storage="memory:", **more)
    async with opened(config, device=device) as cache:
        ready, tokens = device.gate(), text(4)
        await published(cache, tokens, ready)
        assert (await cache.match([*tokens, 1])).device == 4 * PAGE
        await fail(cache, ready)
        assert (await cache.match([*tokens, 1])).host == 0
        assert await cache.flush() == (0, 0)
        assert cache.statistics().storage.get("pages", 0) == 0
        assert cache.statistics().core.nodes == 0
        async with cache.lease([*tokens, 1]) as lease:
            assert lease.cached == 0
        assert await cache.flush() == (0, 0)
    await device.aclose()


def pages(heard: list[Notice]) -> list[Publish]:
    return [event for event in heard if isinstance(event, Publish)]


async def test_what_was_announced_is_withdrawn_and_nothing_more_is_announced() -> None:
    device, heard = CpuDevice(), list[Notice]()
    config = settings(device=16, host=32, storage="memory:")
    async with opened(config, device=device, on_event=heard.append) as cache:
        ready, tokens = device.gate(), text(4)
        await published(cache, tokens, ready)
        await turns()
        assert [(event.medium, event.stored) for event in pages(heard)] == [(Medium.GPU, True)]
        await fail(cache, ready)
        await cache.flush()
        await turns()
        there, gone = pages(heard)
        assert (gone.medium, gone.stored, gone.hashes) == (Medium.GPU, False, there.hashes)
        assert not any(isinstance(event, StorageReport) and event.keys for event in heard)
    await device.aclose()


async def test_who_matched_pages_of_a_failed_batch_learns_of_it_and_keeps_them() -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=16), device=device) as cache:
        ready, tokens = device.gate(), text(4)
        await published(cache, tokens, ready)
        longer = text(5)
        async with cache.lease(longer) as lease:
            assert lease.cached == 4 * PAGE
            held = lease.pages.tolist()
            await fail_and_wait_until_told(cache, ready)
            assert lease.pages.tolist() == held
            asked: list[Callable[[], Coroutine[Any, Any, object]]] = [
                lease.loaded, lambda: lease.layer(0), lambda: lease.commit(longer)
            ]  # fmt: skip
            for ask in asked:
                with pytest.raises(LoadFailed) as caught:
                    await ask()
                assert caught.value.valid == 0
            async with cache.lease(text(3, seed=2), wait=False) as other:
                assert not set(other.pages.tolist()) & set(held), "nothing that it holds is given to others"
        assert await serve(cache, longer) == 0
        assert await serve(cache, [*longer, 1]) == 5 * PAGE
    await device.aclose()


async def fail_and_wait_until_told(cache: AsyncCache, ready: HostGate) -> None:
    ready.fire(ERROR)
    await until(lambda: not parts(cache).core.world.ledger.ops)


async def test_what_was_committed_below_a_failed_batch_leaves_with_it() -> None:
    """By a request that matched half of it, so that a node was split, and whose own batch ran well."""
    device = CpuDevice()
    async with opened(settings(device=32, host=32, storage="memory:"), device=device) as cache:
        await serve(cache, text(1))
        ready, well = device.gate(), device.gate()
        await published(cache, text(4), ready)
        fork = [*text(3), *text(2, seed=7)]
        async with cache.lease(fork) as lease:
            assert lease.cached == 3 * PAGE
            compute(cache, lease, fork)
            await lease.commit(fork, after=well)
        well.open()
        await fail(cache, ready)
        assert (await cache.match([*fork, 1])).host == PAGE
        assert (await cache.match(text(4, extra=1))).host == PAGE
        await cache.flush()
        assert cache.statistics().storage["pages"] == 1
    await device.aclose()


async def test_a_lease_publishes_nothing_more_after_one_of_its_batches_has_failed() -> None:
    """Not even the pages of a batch that ran: they rest on what the first one did not compute."""
    device = CpuDevice()
    async with opened(settings(device=16, host=16), device=device) as cache:
        first, second = device.gate(), device.gate()
        tokens = text(4)
        async with cache.lease(tokens) as lease:
            await lease.commit(tokens[: 2 * PAGE], after=first)
            await lease.commit(tokens, after=second)
            second.open()
            first.fire(ERROR)
            with pytest.raises(LoadFailed):
                await lease.commit(tokens)
            lease.release(after=second)
        await idle(cache)
        assert (await cache.match([*tokens, 1])).host == 0
    await device.aclose()


async def test_a_commit_that_names_a_batch_which_has_failed_already_publishes_nothing() -> None:
    device = CpuDevice()
    async with opened(settings(device=16, host=16), device=device) as cache:
        await serve(cache, text(2))
        tokens, ready = text(4), device.gate()
        ready.fire(ERROR)
        async with cache.lease(tokens) as lease:
            with pytest.raises(LoadFailed) as caught:
                await lease.commit(tokens, after=ready)
            assert caught.value.valid == 2 * PAGE
            with pytest.raises(LoadFailed):
                await lease.commit(tokens)
        assert (await cache.match([*tokens, 1])).host == 2 * PAGE
    await device.aclose()


async def test_who_has_seen_a_batch_fail_finds_nothing_of_it() -> None:
    """In the same turn of the loop: no task of the cache has run since."""
    device = CpuDevice()
    async with opened(settings(device=16), device=device) as cache:
        ready, tokens = device.gate(), text(4)
        await published(cache, tokens, ready)
        ready.fire(ERROR)
        async with cache.lease([*tokens, 1]) as lease:
            assert lease.cached == 0
        await idle(cache)
    await device.aclose()


async def test_a_batch_that_is_not_over_lets_others_have_room_and_no_room_is_expected_of_its_end() -> None:
    """Without a host its pages are evicted as ever; and a request that cannot be served is refused at once."""
    device = CpuDevice()
    async with opened(settings(device=8), device=device) as cache:
        ready = device.gate()
        async with cache.lease(text(4)) as lease:
            await lease.commit(text(4), after=ready)
        assert not cache._opened().holders
        async with asyncio.timeout(5):
            async with cache.lease(text(8, seed=3)) as other:
                assert other.pages.size == 8
        ready.open()
        await idle(cache)
    await device.aclose()


@pytest.mark.parametrize("deadline", [0.0, 5.0])
async def test_a_batch_that_fails_while_the_cache_closes_saves_nothing(deadline: float) -> None:
    device = CpuDevice()
    cache = AsyncCache(settings(device=16, host=32, storage="memory:"), device=device)
    async with cache:
        ready, tokens = device.gate(), text(4)
        await serve(cache, text(1, seed=5))
        await published(cache, tokens, ready)
        closing = asyncio.create_task(cache.aclose(deadline))
        await turns()
        ready.fire(ERROR)
        report = await closing
        assert report.error is None
        core = parts(cache).core
        audit.check(core)
        if deadline:
            assert (report.unsaved_host, report.unsaved_storage) == (0, 0)
            assert core.statistics().nodes == 1
    await device.aclose()


async def test_a_batch_that_never_ends_does_not_keep_the_cache_open() -> None:
    device = CpuDevice()
    cache = AsyncCache(settings(device=16), device=device)
    async with cache:
        await published(cache, text(4), device.gate())
        async with asyncio.timeout(5):
            await cache.aclose(0.0)
    await device.aclose()


async def test_a_cancelled_commit_of_a_batch_that_fails_leaves_nothing() -> None:
    """Whether it was cancelled before it took the lock or not."""
    device = CpuDevice()
    async with opened(settings(device=16, host=16), device=device) as cache:
        for steps in range(4):
            ready, tokens = device.gate(), text(4, seed=steps)
            async with cache.lease(tokens) as lease:
                committing = asyncio.create_task(lease.commit(tokens, after=ready))
                await turns(steps)
                committing.cancel()
                await asyncio.wait([committing])
                ready.fire(ERROR)
                lease.release(after=ready)
            await idle(cache)
            assert (await cache.match([*tokens, 1])).host == 0
    await device.aclose()


async def test_pages_that_the_host_had_of_a_failed_batch_are_right_when_they_are_served() -> None:
    """The commit took them over on the device, where they were lacking; what is served later is not from there."""
    device = CpuDevice()
    async with opened(settings(device=8, host=32), device=device) as cache:
        tokens = text(4)
        await serve(cache, tokens)
        await settled(cache)
        await push_out(cache, 8)
        assert (await cache.match([*tokens, 1])).device == 0
        ready = device.gate()
        lease = cache.lease(tokens)
        lease._ask = lease._ask._replace(load=False)  # as if there were no room to load them
        async with lease:
            assert lease.cached == 0
            await lease.commit(tokens, after=ready)
            lease.release(after=ready)
        await fail(cache, ready)
        assert await serve(cache, [*tokens, 1]) in (0, 4 * PAGE)
    await device.aclose()


async def test_of_two_commits_at_once_that_go_on_differently_the_second_is_refused() -> None:
    async with opened(settings(device=16, host=16)) as cache:
        prompt = text(1)
        one, two = [*prompt, *text(1, seed=1)], [*prompt, *text(1, seed=2)]
        async with cache.lease(prompt, new_tokens=PAGE) as lease:
            compute(cache, lease, one)
            async with holding(parts(cache).driver.lock):
                both = [asyncio.create_task(lease.commit(tokens)) for tokens in (one, two)]
                await turns()
            await asyncio.wait(both)
            assert both[0].exception() is None
            assert isinstance(both[1].exception(), ConfigError)
        assert (await cache.match([*one, 1])).device == 2 * PAGE
        assert (await cache.match([*two, 1])).device == PAGE
        await settled(cache)
