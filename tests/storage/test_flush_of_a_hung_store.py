"""``flush`` without a time-out, and detaching, with a store that does not answer: both end after so many times the
store's own ``timeout``, and say what is not stored. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from asynccache import AsyncCache
from asynccache.errors import Timeout
from asynccache.runtime.save import HOPELESS_ROUNDS
from asynccache.storage import CheckedStore, PageKey, Record, Result
from asynccache.storage.checked import store_layout
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import settings, text
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

TIMEOUT, SLOW = 30.0, 10.0                             # as they are if nobody says otherwise


class Hangs(WrappedBackend):
    """From ``hung`` on it answers no put, and no flush if it has any. It can be cancelled."""

    def __init__(self, *, durable: bool) -> None:
        super().__init__(SimulatedBackend(Random(1), Hostility(delay=0.0)))
        self.durable = durable
        self.hung = False

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._hang()
        return await self.inner.put(keys, records)

    async def flush(self) -> None:
        if self.durable:
            await self._hang()

    async def _hang(self) -> None:
        if self.hung:
            await asyncio.Event().wait()


async def publish(cache: AsyncCache, seed: int) -> None:
    async with cache.lease(text(10, seed=seed)) as lease:
        await lease.loaded()
        await lease.commit(text(10, seed=seed))


@pytest.mark.parametrize("durable", [False, True], ids=["nothing to flush", "flushes"])
@pytest.mark.parametrize("texts", [1, 4, 8])
def test_a_flush_ends_and_says_what_is_not_stored(texts: int, durable: bool) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs(durable=durable)
        config = settings(400, 800)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0, timeout=TIMEOUT, slow=SLOW)
        async with AsyncCache(config, device=device, storage=store) as cache:
            backend.hung = True
            for seed in range(texts):
                await publish(cache, seed)
            began = loop.time()
            if durable:
                with pytest.raises(Timeout, match="flush: no answer in 30"):
                    await cache.flush()
            else:
                assert (await cache.flush()).storage > 0
            assert loop.time() - began < (HOPELESS_ROUNDS + durable) * TIMEOUT + 1.0
            backend.hung = False
            await asyncio.sleep(60.0)                  # the breaker's longest pause, and some
            await publish(cache, texts)                # has a probe begun, if nothing else has
            await asyncio.sleep(1.0)
            assert await cache.flush() == (0, 0)
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


def test_a_detach_returns_when_the_calls_under_way_have_ended() -> None:
    """A store is closed when nobody is inside: of one that hangs, at the deadline of the call that came last. Whoever
    does not want to wait for it need not."""

    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs(durable=False)
        async with AsyncCache(settings(400, 800), device=device, storage=backend) as cache:
            backend.hung = True
            await publish(cache, 1)
            (name,) = cache.stores
            began = loop.time()
            left = await cache.detach_storage(name, timeout=2.0)
            assert left.storage > 0
            assert 2.0 < loop.time() - began <= TIMEOUT + 1.0
            await publish(cache, 2)
            assert loop.time() - began <= TIMEOUT + 2.0
        await device.aclose()

    simulate(main, 1)
