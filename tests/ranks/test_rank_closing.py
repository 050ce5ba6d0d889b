"""Ranks that close: each has a deadline and a clock of its own, and all stop saving at one step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.core import audit
from asynccache.errors import CacheClosed, RankFailure
from asynccache.ranks import Topology
from asynccache.runtime import closing
from asynccache.runtime.cache import CloseReport
from asynccache.testing.simulated_backend import HONEST, SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.cache_world import CacheWorld, Member
from tests.ranks.engine_bytes import EngineBytes

PAGE, TIMEOUT, LONG, STORES = 4, 30.0, 1000.0, 200.0
CONFIG = CacheConfig(
    model="closing", page_size=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=16 * PAGE, host_tokens=32 * PAGE, layers=1),),
)  # fmt: skip
SHAPES = [Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2), Topology(pp=4)]
TEXT = list(range(8 * PAGE))


class Slow(SimulatedBackend):
    """Who writes to it waits, until that is cancelled: what the store still holds then goes on by itself."""

    async def put(self, *arguments: Any) -> Any:
        await asyncio.sleep(STORES)
        return await super().put(*arguments)


class Closed(NamedTuple):
    """``took``: from the moment this rank closed."""

    report: CloseReport
    took: float
    step: int


def closed(
    topology: Topology, deadlines: Sequence[float], late: Sequence[float] | None = None
) -> list[Closed]:
    """All have something to save, which takes long, and close with these deadlines; ``late``: so much later."""

    async def world(loop: SimulatedLoop) -> list[Closed]:
        net = SimulatedRanks(topology, Random(1), timeout=TIMEOUT)

        async def lived(rank: int) -> Closed:
            device, store = SimulatedDevice(seed=rank), Slow(Random(rank), HONEST)
            deadline = deadlines[rank]
            config = replace(CONFIG, close_deadline=deadline or LONG)
            cache = await AsyncCache(config, device=device, storage=store, ranks=net.member(rank)).__aenter__()
            async with cache.lease(TEXT, wait=False) as lease:
                await lease.commit(TEXT)
            await asyncio.sleep(late[rank] if late else 0.0)
            began = loop.time()
            report = await cache.aclose(None if deadline else deadline)
            took = loop.time() - began
            await asyncio.sleep(0.01)  # this loop calls back in any order
            audit.check(cache.core)
            assert not cache.core.active_leases()
            assert cache.statistics().tasks == 0
            lockstep = cache._opened().lockstep
            assert lockstep is not None
            await store.aclose()
            assert store.holding == 0
            await device.aclose()
            return Closed(report, took, lockstep.steps.step_number)

        return list(await asyncio.gather(*map(lived, range(topology.ranks))))

    return simulate(world, 1)


def bound(deadline: float) -> float:
    return deadline + closing.GRACE + 3.0


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("hasty", [0, 1])
def test_the_shortest_deadline_ends_saving_at_one_step_on_all_ranks(topology: Topology, hasty: int) -> None:
    deadlines = [LONG] * topology.ranks
    deadlines[hasty] = 1.0
    said = closed(topology, deadlines)
    assert [one.report.error for one in said] == [None] * topology.ranks
    assert len({one.step for one in said}) == 1
    assert {one.report for one in said} == {said[0].report}
    assert said[0].report.unsaved_storage > 0
    assert max(one.took for one in said) < bound(1.0)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_ranks_that_close_one_after_the_other_stop_at_one_step_all_the_same(topology: Topology) -> None:
    late = [0.3 * rank for rank in range(topology.ranks)]
    said = closed(topology, [5.0] * topology.ranks, late)
    assert [one.report.error for one in said] == [None] * topology.ranks
    assert len({one.step for one in said}) == 1


@pytest.mark.parametrize("topology", SHAPES[:3], ids=str)
@pytest.mark.parametrize("deadline", [0.0, 1.0])
def test_who_closes_alone_does_not_wait_for_long_and_tells_the_others(topology: Topology, deadline: float) -> None:
    last = topology.ranks - 1
    deadlines = [*[LONG] * last, deadline]
    said = closed(topology, deadlines, [20.0] * last + [0.0])
    assert said[last].took < bound(deadline)
    for one in said[:last]:
        assert isinstance(one.report.error, RankFailure)
        assert one.took < 5.0


class Hasty(Member):
    """Its scheduler closes the cache in the middle of anything, with a deadline of its own."""

    seen: tuple[Any, ...] = ()

    async def live(self, life: int) -> None:
        self.config = replace(self.config, close_deadline=self.local.choice((0.004, 0.03, 60.0)))
        self.begin(life)
        async with self.cache:
            self.bytes = EngineBytes(self.cache, self.config, self.place)
            for number in range(self.script.randint(0, 30)):
                await asyncio.sleep(self.local.random() * 0.01)
                await self.act(number)
                await self._step()
        lockstep = self.cache._opened().lockstep
        assert lockstep is not None
        self.seen = (*self.seen, lockstep.steps.step_number, len(self.jobs), await self.cache.aclose())
        for job in list(self.jobs):
            if job.task is not None:
                job.task.cancel()
                await asyncio.wait([job.task])
            self._end(job, "left")
        self._nothing_is_held()
        assert self.backend is None or self.backend.holding == 0


@pytest.mark.parametrize("seed", range(12))
def test_worlds_that_end_in_the_middle_end_at_one_step(seed: int) -> None:
    """With leases and fetches under way, in line, loading; with stores that are slow; and some deadlines pass."""
    topology = (*SHAPES, Topology(tp=2, cp=2))[seed % (len(SHAPES) + 1)]

    async def world(loop: SimulatedLoop) -> None:
        ranks = CacheWorld(loop, seed, topology)
        members = [Hasty(ranks, rank) for rank in range(topology.ranks)]
        ranks.members = list(members)
        await ranks.run()
        assert {member.seen for member in members} == {members[0].seen}

    simulate(world, seed)


def test_a_step_under_way_is_not_disturbed_by_another_task_that_closes() -> None:
    """It ends; whoever would take the next one hears that the cache is closing."""

    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(Topology(tp=2), Random(1), timeout=TIMEOUT)

        async def lived(rank: int) -> None:
            device = SimulatedDevice(seed=rank)
            async with AsyncCache(CONFIG, device=device, ranks=net.member(rank)) as cache:
                async with cache.lease(TEXT, wait=False) as lease:
                    await lease.commit(TEXT)
                await asyncio.sleep(1.0 * rank)
                begun, taken = asyncio.Event(), list[int]()
                stepping = loop.create_task(steps(cache, begun, taken))
                await begun.wait()
                report = await cache.aclose()
                assert report == CloseReport()
                with pytest.raises(CacheClosed):
                    await stepping
                assert len(taken) == 1
            await device.aclose()

        await asyncio.gather(lived(0), lived(1))

    for seed in range(5):
        simulate(world, seed)


async def steps(cache: AsyncCache, begun: asyncio.Event, taken: list[int]) -> None:
    driver = cache._opened().driver
    begun.set()
    for number in range(1000):
        await driver.step()  # as in a call that waits
        taken.append(number)


def test_whoever_has_nothing_in_flight_closes_without_a_word() -> None:
    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(Topology(tp=2), Random(1), timeout=TIMEOUT)

        async def lived(rank: int) -> None:
            device = SimulatedDevice(seed=rank)
            async with AsyncCache(CONFIG, device=device, ranks=net.member(rank)) as cache:
                async with cache.lease(TEXT, wait=False) as lease:
                    await lease.commit(TEXT)
                await cache.flush()
                while cache.in_flight:
                    await cache.step()
                await asyncio.sleep(LONG * rank)
            await device.aclose()

        await asyncio.gather(lived(0), lived(1))

    simulate(world, 1)
