"""A store that hangs holds up no request of the scheduler but those that ask for its pages, and those for no longer
than the prefetch policy allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from asynccache_shim import NO_TOKEN, Batch, Limits, Request, Scheduler, SchedulerConfig

from asynccache import AsyncCache
from asynccache.runtime.prefetch import GRACE
from asynccache.runtime.save import PATIENCE
from tests.runtime.runtime_kit import text
from tests.runtime.test_hung_storage import Hangs, serve
from tests.runtime.test_late_storage import DEAF, SOON, timed
from tests.runtime.test_late_storage import play as over_a_store_that_hangs
from tests.simulated.loop import SimulatedLoop


class OneToken:
    """A model that always says the same."""

    def forward(self, batch: Batch) -> Sequence[int]:
        return [1 if chunk.sample else NO_TOKEN for chunk in batch.chunks]


def play(
    body: Callable[[AsyncCache, Scheduler, Hangs], Coroutine[Any, Any, None]], verb: str, deaf: float, **more: Any
) -> None:
    """Run ``body`` with a scheduler over a cache whose store will hang in ``verb`` alone."""

    async def scheduled(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        async with Scheduler(cache, OneToken(), SchedulerConfig(max_running=4, step_tokens=64)) as scheduler:
            await body(cache, scheduler, backend)

    over_a_store_that_hangs(scheduled, verb, deaf, **more)


def ended(request: Request) -> Coroutine[Any, Any, float]:
    """Return how many seconds ``request`` takes. To be awaited."""
    return timed(request.done())


@DEAF
def test_requests_that_decode_get_their_pages_while_a_write_hangs(deaf: float) -> None:
    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs) -> None:
        go, ready = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with cache.lease(text(10, seed=1)) as lease:
                await lease.commit(text(10, seed=1))
                ready.set()
                await go.wait()

        backend.hung.set()
        holder = asyncio.ensure_future(hold())
        await ready.wait()
        for tokens, count in ((text(6, seed=2), 5), (text(2, seed=3), 1)):
            await scheduler.submit(Request(tokens, Limits(max_new_tokens=count))).done()
        requests = [scheduler.submit(Request([n, n, n], Limits(max_new_tokens=14))) for n in (7, 8)]
        assert max(await asyncio.gather(*map(ended, requests))) < 2 * PATIENCE + SOON
        assert [len(request.output) for request in requests] == [14, 14]
        go.set()
        await holder

    play(body, "put", deaf, host=10, prefetch_policy="best_effort", write_back_watermark=0.0)


@DEAF
@pytest.mark.parametrize("verb", ["get", "exists"])
@pytest.mark.parametrize(("policy", "patience"), [("best_effort", 0.0), ("timeout", 1.0)])
def test_a_request_whose_own_prefetch_hangs_is_computed_when_its_patience_and_a_grace_are_over(
    policy: str, patience: float, verb: str, deaf: float
) -> None:
    """All of them beside each other; and one that storage has nothing of does not wait for them."""

    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs) -> None:
        for seed in range(4):
            await serve(cache, text(4, seed=seed))
        await cache.flush()
        for seed in range(200, 220):
            await serve(cache, text(10, seed=seed))
        await cache.flush()
        backend.hung.set()
        before = cache.statistics().lookups.requests
        needy = [scheduler.submit(Request([*text(4, seed=n), 7], Limits(max_new_tokens=3))) for n in range(4)]
        await asyncio.sleep(0.01)
        other = scheduler.submit(Request([7, 8, 9], Limits(max_new_tokens=3)))
        assert await ended(other) < SOON
        assert max(await asyncio.gather(*map(ended, needy))) < patience + GRACE + PATIENCE + SOON
        assert all(len(request.output) == 3 for request in needy)
        assert cache.statistics().lookups.requests == before + 5, "each is looked up once"

    play(body, verb, deaf, device=60, host=60, prefetch_policy=policy)
