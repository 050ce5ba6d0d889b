"""What one rank alone meets, or what hangs, must not touch the others; and who closes leaves nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.errors import BackendError, CacheClosed, ConfigError, LoadFailed, RankFailure, Unavailable
from asynccache.memory.faults import Faults
from asynccache.ranks import Frames, LockstepTurns, Steps, Topology
from asynccache.ranks.circle import Circle
from asynccache.testing.simulated_backend import SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.rank_world import POOLS, WINDOW, RankWorld, Toy

HANGS = range(1, WINDOW + 1)
PAGE, LAYERS = 4, 2
CONFIG = CacheConfig(
    model="reviewed", page_size=PAGE, prefetch_threshold=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=6 * PAGE, host_tokens=32 * PAGE, layers=LAYERS),),
)  # fmt: skip

Script = Callable[[int, AsyncCache], Awaitable[Any]]


def on_two_ranks(script: Script, faults: Faults = Faults()) -> list[Any]:  # noqa: B008
    """What ``script`` says on each; copies of rank 1 meet ``faults``."""

    async def world(loop: SimulatedLoop) -> list[Any]:
        net = SimulatedRanks(Topology(tp=2), Random(1))
        devices = [SimulatedDevice(seed=rank, faults=faults if rank else Faults()) for rank in range(2)]

        async def lived(rank: int) -> Any:
            cache = AsyncCache(CONFIG, device=devices[rank], ranks=net.member(rank))
            async with cache:
                said = await script(rank, cache)
            return await said if isinstance(said, asyncio.Task) else said

        said = list(await asyncio.gather(lived(0), lived(1)))
        for device in devices:
            await device.aclose()
        return said

    return simulate(world, 1)


async def publish(cache: AsyncCache, tokens: list[int]) -> None:
    async with cache.lease(tokens, wait=False) as lease:
        await lease.commit(tokens)
    await cache.flush()


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=3)], ids=str)
def test_what_hangs_keeps_nothing_else_waiting(topology: Topology) -> None:
    """As many operations as a frame tells of hang; what begins after them is decided all the same."""

    class Hanging(Toy):
        async def _work(self, op: int) -> None:
            await asyncio.sleep(1.0 if op in HANGS else 0.0)
            await super()._work(op)

    async def world(loop: SimulatedLoop) -> None:
        ranks = RankWorld(loop, 1, topology, idle=False)
        for toy in ranks.toys:
            toy.__class__ = Hanging
        await ranks.run()
        decided = [op for _, op, _ in ranks.toys[0].commits]
        assert len(decided) > 2 * WINDOW
        assert sorted(decided[-WINDOW:]) == [*HANGS]

    simulate(world, 1)


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(pp=4), Topology(tp=2, pp=2)], ids=str)
def test_the_first_stage_names_the_entry_in_which_a_stage_parted(topology: Topology) -> None:
    class Blind(dict[int, int]):
        def setdefault(self, key: int, default: int = 0, /) -> int:
            return default

    class Strays(RankWorld):
        """Frames have room for all that is remembered."""

        strayed = 0
        odd = 0

        def begin(self, odd: int) -> None:
            self.odd = odd
            for rank, toy in enumerate(self.toys):
                toy.steps = Steps(toy, self.net.links(rank), Frames(POOLS), credit=self.credit)

        def act(self, toy: Toy) -> None:
            super().act(toy)
            if toy.rank == self.odd and toy.next == 6:
                toy.chain.add(toy.steps.step_number, "stray", b"")
                self.strayed, self.digests = toy.chain.count, Blind()

    async def world(loop: SimulatedLoop) -> None:
        ranks = Strays(loop, loop.seed, topology)
        ranks.begin(loop.seed)
        await ranks.run()
        for rank in range(topology.tp):
            assert f"entry {ranks.strayed} is where ranks part" in str(ranks.errors[rank])

    for odd in (0, topology.ranks - 1):
        simulate(world, odd)


def test_a_layer_that_fails_on_one_rank_is_told_on_all_by_loaded_alone() -> None:
    """The copies to the host are numbers 0 and 1, the load back is number 2."""
    text = list(range(4 * PAGE))

    async def script(rank: int, cache: AsyncCache) -> str:
        await publish(cache, text)
        await publish(cache, list(range(100, 100 + 5 * PAGE)))
        async with cache.lease([*text, 1], wait=False) as lease:
            assert lease.loading
            await lease.layer(LAYERS - 1)
            await cache.match(text)  # the engine goes on, with the next lockstep call
            with pytest.raises(LoadFailed):
                await lease.loaded()
        return "told"

    assert on_two_ranks(script, Faults(fail_at=frozenset({2}))) == ["told", "told"]


def test_a_store_that_cannot_register_memory_on_one_rank_is_attached_on_none() -> None:
    class Picky(SimulatedBackend):
        def register(self, pool: str, memory: memoryview) -> None:
            if pool == "full":
                raise BackendError("this memory cannot be registered")

    async def script(rank: int, cache: AsyncCache) -> type[Exception]:
        backend = (Picky if rank else SimulatedBackend)(Random(rank))
        with pytest.raises((BackendError, Unavailable)) as error:
            await cache.attach_storage(backend)
        await publish(cache, list(range(2 * PAGE)))
        assert not cache.stores
        return error.type

    assert on_two_ranks(script) == [Unavailable, BackendError]


def test_who_waits_when_the_cache_closes_is_not_granted_a_lease_afterwards() -> None:
    caches: list[AsyncCache] = []

    async def enter(lease: Any) -> type[Exception]:
        with pytest.raises(CacheClosed) as error:
            await lease.__aenter__()
        return error.type

    async def script(rank: int, cache: AsyncCache) -> asyncio.Task[type[Exception]]:
        text = list(range(5 * PAGE))
        async with cache.lease(text, wait=False) as held:
            waiting = asyncio.get_running_loop().create_task(enter(cache.lease(list(range(100, 100 + 4 * PAGE)))))
            await cache.step()
            await held.commit(text)  # so that closing has something to save, and steps
        caches.append(cache)
        return waiting

    assert on_two_ranks(script) == [CacheClosed, CacheClosed]
    for cache in caches:
        assert not cache.core.active_leases()
        assert cache.statistics().waiting == 0


def test_a_lease_has_no_time_out_of_its_own_whether_it_waits_or_not() -> None:
    async def script(rank: int, cache: AsyncCache) -> None:
        for wait in (True, False):
            with pytest.raises(ConfigError, match="clocks of several ranks differ"):
                async with cache.lease([1], wait=wait, timeout=1.0):
                    pass

    on_two_ranks(script)


def test_a_turn_of_a_player_that_was_cancelled_before_it_began_is_not_waited_for_when_the_cache_closes() -> None:
    async def world(loop: SimulatedLoop) -> None:
        turns = LockstepTurns()
        player = loop.create_task(turns.play(lambda: asyncio.sleep(0)))
        dealing = loop.create_task(turns.run())
        loop.call_soon(turns.stop)
        player.cancel()
        await dealing
        await asyncio.wait([player])

    for seed in range(10):
        simulate(world, seed)


def test_nothing_is_called_in_a_group_whose_connections_were_closed_here() -> None:
    """Also where the group is the embedder's and stays open: the thread that made its calls has ended."""
    group: Any = object()
    circle = Circle(group, (0, 1), 0, 1.0, own=False)
    circle.check()
    circle.let_go()
    with pytest.raises(RankFailure, match="closed here"):
        circle.check()


def test_threads_of_several_ranks_are_refused_by_the_call() -> None:
    async def script(rank: int, cache: AsyncCache) -> None:
        async with cache.lease(list(range(PAGE)), wait=False) as lease:
            with pytest.raises(RuntimeError, match="commit_threadsafe: of several ranks"):
                lease.commit_threadsafe(list(range(PAGE)))
            with pytest.raises(RuntimeError, match="release_threadsafe: of several ranks"):
                lease.release_threadsafe()

    on_two_ranks(script)


def test_a_store_on_one_rank_alone_is_refused_by_all() -> None:
    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(Topology(tp=2), Random(1))

        async def opened(rank: int) -> None:
            device = SimulatedDevice(seed=rank)
            store = None if rank else SimulatedBackend(Random(1))
            with pytest.raises(ConfigError, match=r"stores differs between ranks: 1 on rank 0; 0 on rank 1"):
                await AsyncCache(CONFIG, device=device, storage=store, ranks=net.member(rank)).__aenter__()
            await device.aclose()
            if store is not None:
                await store.aclose()

        await asyncio.gather(opened(0), opened(1))

    simulate(world, 1)


def test_whoever_leaves_after_a_rank_was_lost_hears_of_the_rank() -> None:
    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(Topology(tp=2), Random(1), timeout=3.0)
        devices = [SimulatedDevice(seed=rank) for rank in range(2)]
        lost = asyncio.Event()

        async def first() -> None:
            async with AsyncCache(CONFIG, device=devices[0], ranks=net.member(0)) as cache:
                await publish(cache, list(range(PAGE)))
                lost.set()
                with suppress(RankFailure):
                    await publish(cache, list(range(PAGE, 3 * PAGE)))

        async def second() -> None:
            async with AsyncCache(CONFIG, device=devices[1], ranks=net.member(1)) as cache:
                await publish(cache, list(range(PAGE)))
                await lost.wait()
                net.kill(1)
                await asyncio.Event().wait()

        dead = loop.create_task(second())
        with pytest.raises(RankFailure):
            await first()
        dead.cancel()
        await asyncio.wait([dead])
        for device in devices:
            await device.aclose()

    simulate(world, 1)


def test_what_begins_with_the_next_step_is_in_flight() -> None:
    async def script(rank: int, cache: AsyncCache) -> None:
        await cache.attach_storage(SimulatedBackend(Random(rank)))
        while cache.in_flight:
            await cache.step()
        handle = cache.prefetch(list(range(30 * PAGE)))
        assert not handle.done()
        assert cache.in_flight, "whoever steps while it is so must not stop here"
        for _ in range(1000):
            if not cache.in_flight:
                break
            await cache.step()
            await asyncio.sleep(0.001)
        assert handle.done()

    on_two_ranks(script)
