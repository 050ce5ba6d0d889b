"""Ranks open their caches together: what takes long on one keeps the others waiting, what fails on one fails on all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache
from asynccache.errors import ConfigError, RankFailure
from asynccache.memory.cpu import CpuDevice
from asynccache.ranks import Topology
from asynccache.ranks.gloo import connect
from asynccache.ranks.membership import Ranks
from asynccache.storage import opening
from asynccache.testing.simulated_backend import HONEST
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.test_rank_slow_stores import CONFIG, LONG, SHAPES, TIMEOUT, Store, cancelled, publish, scheme_of

Script = Callable[[int, AsyncCache], Awaitable[Any]]


def caches(topology: Topology, stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> Callable[..., AsyncCache]:
    """A cache for each rank, which opens its store by URL."""
    by_scheme = {scheme_of(rank): store for rank, store in enumerate(stores)}
    monkeypatch.setattr(opening, "backend_class", by_scheme.__getitem__)

    def make(rank: int, device: Any, ranks: Ranks) -> AsyncCache:
        config = replace(CONFIG, storage=f"{scheme_of(rank)}:", storage_options={"timeout": "1000", "name": "store"})
        return AsyncCache(config, device=device, ranks=ranks)

    return make


def shut(count: int) -> list[Store]:
    stores = [Store(Random(rank), HONEST) for rank in range(count)]
    for store in stores:
        store.closed = True
    return stores


def opened(
    topology: Topology, stores: list[Store], monkeypatch: pytest.MonkeyPatch,
    enter: Callable[[int, AsyncCache, SimulatedRanks], Awaitable[Any]],
) -> list[Any]:  # fmt: skip
    """What ``enter`` says, or raises, by rank. No store is open afterwards."""
    make = caches(topology, stores, monkeypatch)

    async def world(loop: SimulatedLoop) -> list[Any]:
        net = SimulatedRanks(topology, Random("net"), timeout=TIMEOUT)
        devices = [SimulatedDevice(seed=rank) for rank in range(topology.ranks)]
        made = [make(rank, devices[rank], net.member(rank)) for rank in range(topology.ranks)]
        entering = [enter(rank, cache, net) for rank, cache in enumerate(made)]
        said = await asyncio.gather(*entering, return_exceptions=True)
        for device in devices:
            await device.aclose()
        return said

    said = simulate(world, 3)
    assert all(store.closed for store in stores), "a store is open still"
    return said


async def used(rank: int, cache: AsyncCache, net: SimulatedRanks) -> float:
    """When it was open, after the first steps."""
    async with cache:
        at = asyncio.get_running_loop().time()
        await publish(cache, 0)
    return at


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_store_that_opens_slowly_on_one_rank_keeps_the_others_waiting(
    topology: Topology, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = shut(topology.ranks)
    stores[slow].slow = "open"
    said = opened(topology, stores, monkeypatch, used)
    assert all(isinstance(at, float) and LONG <= at < LONG + TIMEOUT / 2 for at in said), said


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_store_that_cannot_be_opened_on_one_rank_opens_no_cache(
    topology: Topology, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the others have opened theirs or are about to."""
    stores = shut(topology.ranks)
    stores[broken].broken = "open"
    for other in stores[broken + 1 :]:
        other.slow = "open"
    said = opened(topology, stores, monkeypatch, used)
    assert str(said.pop(broken)) == "open is broken"
    assert all(isinstance(error, RankFailure) for error in said), said
    assert {str(error) for error in said} == {f"rank {broken} could not open its cache: OSError: open is broken"}


@pytest.mark.parametrize("broken", [0, 1])
def test_pools_that_do_not_fit_on_one_rank_open_no_cache(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def enter(rank: int, cache: AsyncCache, net: SimulatedRanks) -> Any:
        if rank == broken:
            monkeypatch.setattr(cache._given.device, "check_room", refuse)
        return await used(rank, cache, net)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("there is no such memory")

    said = opened(Topology(tp=2), shut(2), monkeypatch, enter)
    assert isinstance(said[broken], ConfigError)
    assert isinstance(said[1 - broken], RankFailure)
    assert "no such memory" in str(said[1 - broken])


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_cancelled_while_a_store_opens_is_not_waited_for(
    topology: Topology, slow: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = shut(topology.ranks)
    stores[slow].slow = "open"

    async def enter(rank: int, cache: AsyncCache, net: SimulatedRanks) -> Any:
        if rank == victim:
            return await cancelled(used(rank, cache, net), TIMEOUT / 2)
        try:
            return await used(rank, cache, net)
        finally:
            assert asyncio.get_running_loop().time() < TIMEOUT

    said = opened(topology, stores, monkeypatch, enter)
    assert said.pop(victim) == "cancelled"
    assert {str(error) for error in said} == {f"rank {victim} could not open its cache: it was cancelled"}


def test_a_rank_that_is_gone_while_a_store_opens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = shut(2)
    stores[0].slow = stores[1].slow = "open"

    async def enter(rank: int, cache: AsyncCache, net: SimulatedRanks) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if rank == 1:
            asyncio.get_running_loop().call_later(1.0, net.kill, 1)
            for after in (2.0, 4.0):
                asyncio.get_running_loop().call_later(after, task.cancel)
        try:
            return await used(rank, cache, net)
        finally:
            assert rank or asyncio.get_running_loop().time() < 1.0 + 2 * TIMEOUT

    assert isinstance(opened(Topology(tp=2), stores, monkeypatch, enter)[0], RankFailure)


# over gloo, in earnest


@pytest.mark.ranks
@pytest.mark.parametrize("broken", [None, 1])
def test_processes_wait_longer_for_a_store_than_for_a_step(
    broken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks wait four seconds for each other, and nine for the store of rank 1."""
    stores = shut(2)
    make = caches(Topology(tp=2), stores, monkeypatch)
    monkeypatch.setattr("tests.ranks.test_rank_slow_stores.LONG", 9.0)
    stores[1].slow = "open"
    stores[1].broken = "" if broken is None else "open"

    async def rank(number: int) -> str:
        ranks = await connect(Topology(tp=2), number, f"file://{tmp_path}/meeting", timeout=4.0)
        device = CpuDevice()
        try:
            async with make(number, device, ranks) as cache:
                await publish(cache, 0)
            return "well"
        except (RankFailure, OSError) as error:
            return str(error)
        finally:
            await ranks.aclose()
            await device.aclose()

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda number: asyncio.run(rank(number)), range(2)))
    failed = ["rank 1 could not open its cache: OSError: open is broken", "open is broken"]
    assert said == (["well", "well"] if broken is None else failed)
    assert all(store.closed for store in stores)


@pytest.mark.ranks
@pytest.mark.parametrize("comes", [True, False])
def test_who_opens_its_cache_later_is_waited_for_as_who_connects_later(comes: bool, tmp_path: Path) -> None:
    """Ranks wait four seconds for each other; one has a model to load first."""
    arrival = 60.0 if comes else 2.0

    async def rank(number: int) -> str:
        ranks = await connect(Topology(tp=2), number, f"file://{tmp_path}/meeting", timeout=4.0, arrival=arrival)
        device = CpuDevice()
        try:
            await asyncio.sleep(9.0 * number)
            async with AsyncCache(CONFIG, device=device, ranks=ranks) as cache:
                await publish(cache, 0)
            return "well"
        except RankFailure as error:
            return str(error)
        finally:
            await ranks.aclose()
            await device.aclose()

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda number: asyncio.run(rank(number)), range(2)))
    assert said[0] == ("well" if comes else "rank 1 did not answer within 2 s")
    assert (said[1] == "well") == comes
