"""A store that takes longer on one rank than ranks wait for each other, or fails there alone, or is given up there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.errors import BackendError, RankFailure, Unavailable
from asynccache.ranks import Topology
from asynccache.storage import PageKey, Result, opening
from asynccache.storage.promotion import PROMOTION_POOL
from asynccache.testing.simulated_backend import HONEST, SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks

PAGE = 4
TIMEOUT = 2.0
LONG = 2 * TIMEOUT
SHAPES = [Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)]
CONFIG = CacheConfig(
    model="slow", page_size=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=16 * PAGE, host_tokens=32 * PAGE, layers=1),),
)  # fmt: skip


class Store(SimulatedBackend):
    """``slow``: the call that takes ``LONG``. ``broken``: the call that fails."""

    slow = broken = ""
    refused = ""

    async def meet(self, call: str) -> None:
        if call == self.slow:
            await asyncio.sleep(LONG)
        if call == self.broken:
            raise OSError(f"{call} is broken")  # a plug-in's bug

    def register(self, pool: str, memory: memoryview) -> None:
        if pool == self.refused:
            raise BackendError(f"no {pool}")

    async def open(self, url: Any, layout: Any) -> Store:
        """It is its own class, too: what a URL of this rank opens."""
        await self.meet("open")
        self.closed = False
        return self

    async def clear(self) -> None:
        await self.meet("clear")
        await super().clear()

    async def flush(self) -> None:
        await self.meet("flush")

    async def delete(self, keys: Any) -> list[Result]:
        await self.meet("delete")
        return await super().delete(keys)

    async def aclose(self) -> None:
        if not self.closed:
            await self.meet("close")
        await super().aclose()


Script = Callable[[int, AsyncCache], Awaitable[Any]]


class Group:
    """One cache for each rank, and a store for each: ``stores``, of the URL of its rank."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.net = SimulatedRanks(topology, Random("net"), timeout=TIMEOUT)
        pages: dict[PageKey, tuple[bytes, bytes]] = {}
        self.stores = [Store(Random(rank), HONEST, pages) for rank in range(topology.ranks)]
        for store in self.stores:
            store.closed = True

    def run(self, script: Script, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What ``script`` says, or raises, by rank."""
        by_scheme = {scheme_of(rank): store for rank, store in enumerate(self.stores)}
        monkeypatch.setattr(opening, "backend_class", by_scheme.__getitem__)

        async def lived(rank: int, device: SimulatedDevice) -> Any:
            async with AsyncCache(CONFIG, device=device, ranks=self.net.member(rank)) as cache:
                return await script(rank, cache)

        async def world(loop: SimulatedLoop) -> list[Any]:
            devices = [SimulatedDevice(seed=rank) for rank in range(self.topology.ranks)]
            said = await asyncio.gather(*map(lived, range(self.topology.ranks), devices), return_exceptions=True)
            for device in devices:
                await device.aclose()
            return said

        said = simulate(world, 3)
        assert all(store.closed for store in self.stores), "a store is open still"
        return said


def scheme_of(rank: int) -> str:
    return "rank" + "abcdefgh"[rank]


async def attach(rank: int, cache: AsyncCache, name: str = "store") -> None:
    await cache.attach_storage(f"{scheme_of(rank)}:", options={"timeout": "1000"}, name=name)


async def publish(cache: AsyncCache, first: int) -> None:
    text = list(range(first, first + 2 * PAGE))
    async with cache.lease(text, wait=False) as lease:
        await lease.commit(text)
    while cache.in_flight:
        await cache.step()


async def flush(cache: AsyncCache) -> None:
    await cache.flush()


async def invalidate(cache: AsyncCache) -> None:
    await cache.invalidate()


async def reset(cache: AsyncCache) -> None:
    await cache.reset()


async def detach(cache: AsyncCache) -> None:
    await cache.detach_storage("store")


CALLS = {"flush": flush, "delete": invalidate, "clear": reset, "close": detach}


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("slow", [0, 1])
def test_who_opens_a_store_for_long_keeps_the_others_waiting_and_no_more(
    topology: Topology, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(topology)
    group.stores[slow].slow = "open"

    async def script(rank: int, cache: AsyncCache) -> list[str]:
        await attach(rank, cache)
        there = list(cache.stores)
        await publish(cache, 0)
        return there

    assert group.run(script, monkeypatch) == [["store"]] * topology.ranks


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_takes_long_on_one_rank_keeps_the_others_waiting_and_no_more(
    topology: Topology, slow: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(topology)

    async def script(rank: int, cache: AsyncCache) -> float:
        await attach(rank, cache)
        await publish(cache, 0)
        group.stores[slow].slow = call
        began = asyncio.get_running_loop().time()
        await CALLS[call](cache)
        took = asyncio.get_running_loop().time() - began
        group.stores[slow].slow = ""
        await publish(cache, 100)
        return took

    said = group.run(script, monkeypatch)
    assert all(isinstance(took, float) and took >= LONG for took in said), said


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("call", ["flush", "clear", "close"])
def test_what_fails_on_one_rank_fails_on_all(
    topology: Topology, broken: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(topology)

    async def script(rank: int, cache: AsyncCache) -> str:
        await attach(rank, cache)
        await publish(cache, 0)
        group.stores[broken].broken = call
        with pytest.raises(BackendError) as error:
            await CALLS[call](cache)
        group.stores[broken].closed |= call == "close"
        group.stores[broken].broken = ""
        assert not cache.in_flight
        await publish(cache, 100)
        return str(error.value)

    said = group.run(script, monkeypatch)
    assert f"{call} is broken" in said.pop(broken)
    assert all("another rank" in other for other in said)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("broken", [0, 1])
def test_what_was_opened_in_vain_may_take_long_to_close(
    topology: Topology, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(topology)
    group.stores[broken].broken = "open"
    for store in group.stores:
        store.slow = "close"

    async def script(rank: int, cache: AsyncCache) -> type[Exception]:
        with pytest.raises((BackendError, OSError)) as error:
            await attach(rank, cache)
        assert group.stores[rank].closed
        assert not cache.in_flight
        assert not cache.stores
        await publish(cache, 0)
        return error.type

    said = group.run(script, monkeypatch)
    assert said.pop(broken) is OSError
    assert set(said) == {Unavailable}


@pytest.mark.parametrize("broken", [0, 1])
def test_a_nearer_store_that_cannot_register_memory_on_one_rank_is_heard_of_before_the_vote(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Topology(tp=2))
    near = [Store(Random(rank)) for rank in range(2)]
    near[broken].refused = PROMOTION_POOL

    async def script(rank: int, cache: AsyncCache) -> list[str]:
        await cache.attach_storage(near[rank], name="near")
        with pytest.raises(BackendError):
            await attach(rank, cache)
        await publish(cache, 0)
        return list(cache.stores)

    assert group.run(script, monkeypatch) == [["near"], ["near"]]


async def cancelled(work: Awaitable[Any], after: float) -> str:
    """What becomes of ``work`` if this task is cancelled so many seconds later."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.call_later(after, task.cancel)
    try:
        await work
    except asyncio.CancelledError:
        task.uncancel()
        return "cancelled"
    return "done"


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_attach_that_is_cancelled_on_one_rank_attaches_nothing_anywhere(
    topology: Topology, slow: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``victim`` is opening it, or has said yes and waits for the others."""
    group = Group(topology)
    group.stores[slow].slow = "open"

    async def script(rank: int, cache: AsyncCache) -> str:
        began = asyncio.get_running_loop().time()
        if rank == victim:
            said = await cancelled(attach(rank, cache), TIMEOUT / 2)
        else:
            with pytest.raises(Unavailable, match="another rank"):
                await attach(rank, cache)
            said = "told"
        assert asyncio.get_running_loop().time() - began < TIMEOUT, "who is opening it is told to stop"
        assert group.stores[rank].closed
        assert not cache.in_flight
        assert not cache.stores
        group.stores[slow].slow = ""
        await attach(rank, cache)
        await publish(cache, 0)
        return said

    said = group.run(script, monkeypatch)
    assert said.pop(victim) == "cancelled"
    assert set(said) == {"told"}


@pytest.mark.parametrize("call", CALLS)
def test_who_is_cancelled_while_a_store_is_slow_leaves_nothing_in_flight(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Topology(tp=2))

    async def script(rank: int, cache: AsyncCache) -> str:
        await attach(rank, cache)
        await publish(cache, 0)
        group.stores[1].slow = call
        said = await cancelled(CALLS[call](cache), TIMEOUT / 2)
        assert not cache.in_flight
        group.stores[1].slow = ""
        await publish(cache, 100)
        return said

    assert group.run(script, monkeypatch) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
def test_what_was_opened_is_closed_when_another_rank_is_gone(fate: Fate, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Topology(tp=2))
    group.stores[1].slow = "open"

    async def script(rank: int, cache: AsyncCache) -> Any:
        if rank == 1:
            strike = group.net.kill if fate is Fate.KILLED else group.net.hang
            asyncio.get_running_loop().call_later(1.0, strike, 1)
            task = asyncio.current_task()
            assert task is not None
            for after in (2 * TIMEOUT, 3 * TIMEOUT):
                asyncio.get_running_loop().call_later(after, task.cancel)
        await attach(rank, cache)

    assert isinstance(group.run(script, monkeypatch)[0], RankFailure)
