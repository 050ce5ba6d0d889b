"""A store that hangs holds up no request of the scheduler but those that ask for its pages, and those for no longer
than the prefetch policy allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from asynccache_shim import NO_TOKEN, Batch, Limits, Request, Scheduler, SchedulerConfig

from asynccache import AsyncCache
from asynccache.core.audit import check
from asynccache.runtime.outbox import PATIENCE
from asynccache.runtime.prefetch import GRACE
from asynccache.storage import CheckedStore
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import parts, settings, text
from tests.runtime.test_hung_storage import Hangs, serve
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

DEAF = pytest.mark.parametrize("deaf", [30.0, 1e6], ids=["for a while", "for ever"])
SOON = 0.05


class OneToken:
    """A model that always says the same."""

    def forward(self, batch: Batch) -> Sequence[int]:
        return [1 if chunk.sample else NO_TOKEN for chunk in batch.chunks]


Body = Callable[[AsyncCache, Scheduler, Hangs, SimulatedLoop], Coroutine[Any, Any, None]]


def play(body: Body, verb: str, deaf: float, device: int = 20, host: int = 10, **more: Any) -> None:
    """Run ``body`` with a scheduler over a cache whose store will hang in ``verb`` alone."""

    async def main(loop: SimulatedLoop) -> None:
        copies = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs(verb, deaf, alone=True)
        config = settings(device, host, prefetch_timeout_per_1k=0.0, close_deadline=5.0, **more)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        async with AsyncCache(config, device=copies, storage=store) as cache:
            async with Scheduler(cache, OneToken(), SchedulerConfig(max_running=4, step_tokens=64)) as scheduler:
                await body(cache, scheduler, backend, loop)
            backend.answers.set()
            await asyncio.sleep(1.0)
            await cache.flush()
            parts(cache).claims.drop_all()
            check(parts(cache).core, idle=True)
        await store.aclose()
        await copies.aclose()

    simulate(main, 1)


async def ended(request: Request) -> float:
    """Return how many seconds ``request`` takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(3600):
        await request.done()
    return loop.time() - began


@DEAF
def test_requests_that_decode_get_their_pages_while_a_write_hangs(deaf: float) -> None:
    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs, loop: SimulatedLoop) -> None:
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

    play(body, "put", deaf, prefetch_policy="best_effort", write_back_watermark=0.0)


@DEAF
@pytest.mark.parametrize("verb", ["get", "exists"])
@pytest.mark.parametrize(("policy", "patience"), [("best_effort", 0.0), ("timeout", 1.0)])
def test_a_request_whose_own_prefetch_hangs_is_computed_when_its_patience_and_a_grace_are_over(
    policy: str, patience: float, verb: str, deaf: float
) -> None:
    """All of them beside each other; and one that storage has nothing of does not wait for them."""

    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs, loop: SimulatedLoop) -> None:
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
