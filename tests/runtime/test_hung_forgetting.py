"""A store that hangs delays an invalidation, a reset or its own detaching by its own time-outs at most, and only if it
has something to do with it. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynccache import AsyncCache
from asynccache.errors import BackendError
from asynccache.storage import CheckedStore, PageKey, Result
from asynccache.storage.call_guard import LET_GO
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import settings, text
from tests.runtime.test_hung_storage import Hangs, serve
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

TIMEOUT = 5.0
BOUND = 2 * TIMEOUT + 1.0


class Deaf(Hangs):
    """The verb that hangs, alone, may also be ``delete`` or ``flush``."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb, alone=True)

    async def flush(self) -> None:
        await self._hang("flush")

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        await self._hang("delete")
        return await self.inner.delete(keys)


@asynccontextmanager
async def with_a_deaf(verb: str) -> AsyncIterator[tuple[AsyncCache, Deaf]]:
    device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Deaf(verb)
    config = settings(20, 40, close_timeout=1.0)
    store = CheckedStore(backend, store_layout(config.pools()), threads=0, timeout=TIMEOUT)
    async with AsyncCache(config, device=device) as cache:
        await cache.attach_storage(store, options={"timeout": str(TIMEOUT)})
        await publish(cache, "other", seed=3)
        await cache.flush()
        backend.hung.set()
        try:
            yield cache, backend
        finally:
            backend.answers.set()
            await asyncio.sleep(0.1)
    await store.aclose()
    await device.aclose()


async def publish(cache: AsyncCache, namespace: str, seed: int) -> None:
    async with cache.lease(text(5, seed=seed), namespace=namespace) as lease:
        await lease.commit(text(5, seed=seed))


def simulated(verb: str, test: Callable[[AsyncCache, Deaf], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: SimulatedLoop) -> None:
        async with with_a_deaf(verb) as (cache, backend):
            await test(cache, backend)

    simulate(main, 1)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_invalidation_does_not_wait_for_a_write_of_another_namespace() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        await cache.invalidate("other")
        assert now() - begun < 0.05
        assert backend.stats()["pages"] == 0

    simulated("put", test)


def test_backups_of_the_namespace_that_wait_for_the_store_are_given_up() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        for seed in range(4, 7):
            await publish(cache, "other", seed)
        await asyncio.sleep(0.05)
        assert backend.holding >= 1
        begun = now()
        await cache.invalidate("other")
        assert now() - begun <= BOUND + 0.1

    simulated("put", test)


@pytest.mark.parametrize("verb", ["put", "delete"])
def test_an_invalidation_waits_no_longer_than_the_stores_time_outs_for_its_own_pages(verb: str) -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        if verb == "put":
            await publish(cache, "other", seed=1)
            await asyncio.sleep(0.05)
        begun = now()
        await cache.invalidate("other")
        assert TIMEOUT < now() - begun <= BOUND + 0.1
        assert await serve(cache, text(5, seed=3)) == 0

    simulated(verb, test)


@pytest.mark.parametrize("verb", ["put", "clear"])
def test_a_reset_says_that_a_store_hangs_after_its_time_outs(verb: str) -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "other", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        with pytest.raises(BackendError):
            await cache.reset()
        assert TIMEOUT < now() - begun <= BOUND + 0.1
        assert await serve(cache, text(5, seed=9)) == 0
        assert cache.closed is None

    simulated(verb, test)


def test_a_store_that_hangs_is_detached_and_closes_when_it_lets_go() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        with pytest.raises(BackendError, match="does not end"):
            await cache.detach_storage(timeout=0)
        assert now() - begun <= BOUND + 0.1
        assert not list(cache.stores)
        assert backend.holding, "the store has let go: this shows nothing"
        assert await serve(cache, text(5, seed=9)) == 0

    simulated("put", test)


def test_a_flush_with_a_time_out_ends_by_it_though_the_store_lets_nothing_go() -> None:
    async def main(loop: SimulatedLoop) -> None:
        device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Deaf("flush")
        backend.hung.set()
        async with AsyncCache(settings(20, 40), device=device, storage=backend) as cache:
            await publish(cache, "other", seed=1)
            begun = now()
            with pytest.raises(TimeoutError):
                await cache.flush(timeout=1.0)
            assert now() - begun <= 1.0 + LET_GO + 0.1
            backend.answers.set()
        await device.aclose()

    simulate(main, 1)
