"""A rank is lost while the others wait, each request for something else: all of them hear of it, and nothing stays
held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.core import audit
from asynccache.errors import RankFailure
from asynccache.ranks import Topology
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import PrefetchHandle, PrefetchResult
from asynccache.storage import opening, settled
from asynccache.testing.simulated_backend import HONEST
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks
from tests.ranks.test_rank_slow_stores import LONG, TIMEOUT, Store

PAGE = 4
STRUCK = 0.5
PATIENCE = 5 * TIMEOUT
COPIES = 4 * LONG
"""Seconds until the copies of two layers are there, in two halves each."""

TEXT = list(range(5 * PAGE))
CONFIG = CacheConfig(
    model="lost", page_size=PAGE, prefetch_threshold=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=12 * PAGE, host_tokens=32 * PAGE, layers=2),),
)  # fmt: skip


class Sluggish(Store):
    """From some moment on, every call takes ``PATIENCE``, also one that is cancelled."""

    is_slow = False

    async def meet(self, call: str) -> None:
        if self.is_slow:
            self.holding += 1
            try:
                await settled([asyncio.ensure_future(asyncio.sleep(PATIENCE))])
            finally:
                self.holding -= 1

    async def _pause(self) -> None:
        await self.meet("any")


@dataclass
class Heard:
    """``names``: of those who were told; ``late``: after how many seconds the last one was. ``wrong``: who was not, and
    what that one met."""

    names: set[str] = field(default_factory=set)
    late: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)


class Survivor:
    """One rank, whose copies and stores take long once there is something to copy; whoever waits for them notes what
    it hears."""

    def __init__(self, rank: int, ranks: SimulatedRanks) -> None:
        self.rank = rank
        self.device = SimulatedDevice(seed=rank, latency=(0.0, 0.001))
        self.stores = {scheme: Sluggish(Random(scheme), HONEST) for scheme in (f"l{rank}", f"g{rank}")}
        for store in self.stores.values():
            store.closed = True
        self.cache = AsyncCache(CONFIG, device=self.device, ranks=ranks.member(rank))
        self.heard = Heard()
        self._waiting: list[asyncio.Task[None]] = []

    async def live(self, call: Call, begun: Callable[[], None]) -> None:
        with pytest.raises(RankFailure):
            await self._use(call, begun)
        self._is_consistent()

    async def _use(self, call: Call, begun: Callable[[], None]) -> None:
        async with self.cache as cache:
            await self.attach("l")
            for text in (TEXT, list(range(100, 100 + 10 * PAGE))):  # of which the second takes the first's pages
                async with cache.lease(text, wait=False) as lease:
                    await lease.commit(text)
                await cache.flush()
            self.device._latency = (LONG, LONG)
            for store in self.stores.values():
                store.is_slow = True
            begun()
            await self._wait(call)

    async def attach(self, scheme: str) -> None:
        await self.cache.attach_storage(f"{scheme}{self.rank}:", options={"timeout": "1000"}, name=scheme)

    async def _wait(self, call: Call) -> None:
        cache = self.cache
        hold = cache.lease([*TEXT, 1], wait=False)
        await hold.__aenter__()
        assert hold.loading
        handle = cache.prefetch(list(range(1000, 1000 + 8 * PAGE)), extra_key="another")
        line = cache.lease(list(range(500, 500 + 8 * PAGE)), extra_key="another")
        self._note("handle", _result(handle))
        self._note("line", line.__aenter__())
        self._note("loaded", hold.loaded())
        layer = self._note("layer", hold.layer(1), COPIES)
        await self._listen("call", call(self, hold), 0.0)
        await asyncio.wait(self._waiting, timeout=0.01)
        assert [task for task in self._waiting if not task.done()] in ([], [layer])
        await layer
        with pytest.raises(RankFailure):
            cache.prefetch([0])
        for one in (hold, line):
            one.abort()

    def _note(self, name: str, waiting: Coroutine[Any, Any, Any], patience: float = 0.0) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._listen(name, waiting, patience), name=name)
        self._waiting.append(task)
        return task

    async def _listen(self, name: str, waiting: Coroutine[Any, Any, Any], patience: float) -> None:
        loop, heard = asyncio.get_running_loop(), self.heard
        began = loop.time()
        try:
            heard.wrong[name] = repr(await waiting)
        except RankFailure:
            heard.names.add(name)
            heard.late = max(heard.late, loop.time() - began - patience)
        except Exception as error:
            heard.wrong[name] = repr(error)

    def _is_consistent(self) -> None:
        cache = self.cache
        audit.check(cache.core)
        assert not cache.core.active_leases()
        assert not cache.core.active_fetches()
        statistics = cache.statistics()
        assert (statistics.waiting, statistics.kept_tokens, statistics.tasks) == (0, 0, 0)
        assert all(store.closed and not store.holding for store in self.stores.values())

    async def close(self) -> None:
        await self.cache.aclose()
        await self.device.aclose()


Call = Callable[[Survivor, Lease], Coroutine[Any, Any, Any]]


async def _result(handle: PrefetchHandle) -> PrefetchResult:
    return await handle


async def step(rank: Survivor, _: Lease) -> None:
    while True:
        await rank.cache.step()
        await asyncio.sleep(0.01)


async def loaded_here(rank: Survivor, lease: Lease) -> None:
    await lease.loaded()


async def flush(rank: Survivor, _: Lease) -> None:
    await rank.cache.flush()


async def reset(rank: Survivor, _: Lease) -> None:
    await rank.cache.reset()


async def invalidate(rank: Survivor, _: Lease) -> None:
    await rank.cache.invalidate()


async def attach(rank: Survivor, _: Lease) -> None:
    await rank.attach("g")


async def detach(rank: Survivor, _: Lease) -> None:
    await rank.cache.detach_storage("l")


class Alone(Survivor):
    """Nothing but the call is under way."""

    async def _wait(self, call: Call) -> None:
        async with self.cache.lease([1000], wait=False) as lease:
            await self._listen("call", call(self, lease), 0.0)
        assert any(store.holding for store in self.stores.values())
        for store in self.stores.values():
            store.is_slow = False


CALLS = (step, loaded_here, flush, reset, invalidate, attach, detach)
CANCELLING = (reset, detach)
"""Calls that end a prefetch before anything is lost."""

CASES = [(Topology(tp=2), 1), (Topology(pp=2), 0), (Topology(pp=2), 1), (Topology(tp=2, pp=2), 3)]


def lost(
    topology: Topology, victim: int, fate: Fate, call: Call, monkeypatch: pytest.MonkeyPatch,
    kind: type[Survivor] = Survivor,
) -> list[Heard]:  # fmt: skip
    """What the others heard."""

    async def world(loop: SimulatedLoop) -> list[Heard]:
        net = SimulatedRanks(topology, Random(1), timeout=TIMEOUT)
        ranks = [kind(rank, net) for rank in range(topology.ranks)]
        by_scheme = {scheme: store for rank in ranks for scheme, store in rank.stores.items()}
        monkeypatch.setattr(opening, "backend_class", by_scheme.__getitem__)
        strike = net.kill if fate is Fate.KILLED else net.hang

        def begun(rank: int) -> None:
            if rank == victim:
                loop.call_later(STRUCK, strike, victim)

        lives = [loop.create_task(rank.live(call, partial(begun, rank.rank))) for rank in ranks]
        await asyncio.gather(*(life for number, life in enumerate(lives) if number != victim))
        while not lives[victim].done():  # where the process has gone it comes no further; let it go
            lives[victim].cancel()
            await asyncio.wait([lives[victim]], timeout=10 * COPIES)
        for rank in ranks:
            await rank.close()
        return [rank.heard for rank in ranks if rank.rank != victim]

    return simulate(world, 1)


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("topology", "victim"), CASES, ids=str)
def test_all_who_wait_are_told_of_the_lost_rank(
    topology: Topology, victim: int, call: Call, fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for heard in lost(topology, victim, fate, call, monkeypatch):
        assert heard.late < STRUCK + TIMEOUT + 0.5
        assert set(heard.wrong) <= ({"handle"} if call in CANCELLING else set()), heard.wrong
        assert heard.names | heard.wrong.keys() == {"handle", "line", "loaded", "layer", "call"}


@pytest.mark.parametrize("call", [flush, reset, attach, detach])
@pytest.mark.parametrize(("topology", "victim"), CASES, ids=str)
def test_who_closes_waits_for_the_store_that_its_caller_did_not_wait_for(
    topology: Topology, victim: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for heard in lost(topology, victim, Fate.KILLED, call, monkeypatch, Alone):
        assert heard.names == {"call"}
        assert heard.late < STRUCK + TIMEOUT + 0.5
