"""A worker that is gone, silent, or cannot go on: who waits is told which and why, the head closes, the others end."""

from __future__ import annotations

import asyncio
import errno
import re
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch

from asynccache import ConfigError, RankFailure
from asynccache.errors import BackendError, Unavailable
from asynccache.memory.pools import check_room
from asynccache.storage import Result
from asynccache.worker import Topology
from asynccache.worker.local import LATE
from tests.group.group_kit import GroupWorld, RankDevice, play, settings, text
from tests.group.striking import EFFECTS, FATES, Fate
from tests.simulated.device import SimulatedStream
from tests.simulated.loop import SimulatedLoop

VICTIM = 1
TIMEOUT = 3.0
ACCIDENTS = FATES | EFFECTS


def chosen() -> list[object]:
    """Every accident of one rank, and when it happens: at once, and in the soak later. What shows in one kind of work
    only has to come before that."""
    return [
        pytest.param(name, seed, id=f"{name}-{seed}", marks=[pytest.mark.soak] if seed else [])
        for name, fate in ACCIDENTS.items() if not fate.all for seed in ((0,) if name in EFFECTS else (0, 1, 2))
    ]  # fmt: skip


@pytest.mark.parametrize(("fate", "seed"), chosen())
@pytest.mark.parametrize("own", [0, None])
def test_who_waits_is_told_of_the_rank_and_the_reason_and_a_new_group_finds_its_stores_warm(
    fate: str, own: int | None, seed: int
) -> None:
    accident = ACCIDENTS[fate]

    async def main(loop: SimulatedLoop) -> None:
        shape = Topology(tp=2) if own == 0 else Topology(tp=3)
        world = GroupWorld(loop, shape, settings(16, 40, mamba=6, stored=True), own=own, timeout=TIMEOUT)
        async with world.opened() as cache:
            await world.serve(text(6))
            await cache.flush()
        world.begin()
        before = asyncio.all_tasks()
        told, struck = await struck_in_use(world, accident, 0.0002 * seed)
        assert len(told) >= 2
        assert all(error.rank == VICTIM and accident.reason in error.reason for error in told), told
        assert str(told[-1]).startswith(f"rank {VICTIM}: ")
        assert loop.time() - struck <= 2 * TIMEOUT + 3.0, "the head closes in its time"
        if accident.silences:
            world.process(VICTIM).task.cancel()
        for rank, process in world.group.processes.items():
            if rank != VICTIM:
                await process.ended()
                assert isinstance(process.failure, RankFailure), "the others hear of it"
                assert process.failure.rank == VICTIM
        await asyncio.wait([world.process(VICTIM).task])
        await asyncio.wait(world.running.values())
        assert asyncio.all_tasks() <= before, "a task outlives the group"
        async with world.opened() as cache:
            assert await world.serve(text(6, extra=1), prefetch=cache.prefetch(text(6, extra=1))) == 24
            world.idle()
        await world.aclose()

    play(main, seed)


async def struck_in_use(
    world: GroupWorld, accident: Fate, after: float
) -> tuple[list[RankFailure], float]:
    """What those who used the cache were told, and at last who opened it; and when it was struck."""
    cache, loop = world.cache, world.loop
    told: list[BaseException] = []
    struck = 0.0
    try:
        async with cache:
            world.run()
            await world.serve(text(3, seed=1))
            handle = cache.prefetch(text(6, extra=1))
            waiting = [
                loop.create_task(world.serve(text(6, extra=1), prefetch=handle)),
                loop.create_task(cache.flush()),
            ]
            await asyncio.sleep(after)
            accident.strike(world, VICTIM)
            struck = loop.time()
            waiting.append(loop.create_task(until_closed(world)))
            told += [error for error in await asyncio.gather(*waiting, return_exceptions=True) if error is not None
                     and not isinstance(error, int)]  # fmt: skip
            assert cache.closed is not None
            assert loop.time() - struck <= TIMEOUT + 0.1
    except RankFailure as error:
        told.append(error)
    assert all(isinstance(error, RankFailure) for error in told), told
    return [error for error in told if isinstance(error, RankFailure)], struck


async def until_closed(world: GroupWorld) -> None:
    """Serve texts until the cache is closed. Each second text continues the first one, so it finds a state and has it
    copied. The other requests may find none: a hit that needs a fourth state is given up while another request holds
    three of six."""
    while world.cache.closed is None:
        await world.serve(text(2, seed=5))
        await world.serve(text(2, seed=5, extra=1))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("own", [0, None])
def test_a_worker_that_does_not_come_is_named_and_nothing_is_open(own: int | None) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(16, 40), own=own, arrival=7.0)
        world.begin(absent=frozenset({2}))
        with pytest.raises(RankFailure, match=r"rank 2: did not come within 7 s"):
            async with world.cache:
                pass
        world.group.workers.close()
        await world.group.ended()
        await world.aclose()

    play(main)


def test_what_cannot_be_opened_on_one_worker_is_told_by_rank_and_open_nowhere() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=True))
        world.begin()
        async def locked(*_: object, **__: object) -> None:
            raise Unavailable("the folder is locked")

        world.process(2).server.open = locked  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable, match="rank 2: the folder is locked"):
            async with world.cache:
                pass
        await world.group.ended()
        assert isinstance(world.process(1).failure, RankFailure)
        assert "rank 2: the folder is locked" in str(world.process(1).failure)
        for rank in (0, 1):
            assert world.devices[rank]._streams, "it had been opened"
            assert world.backends[rank].holding == 0
        await world.aclose()

    play(main)


def no_room(world: GroupWorld, rank: int, patch: pytest.MonkeyPatch) -> str:
    def refuse(device: Mapping[str, int], host: Mapping[str, int]) -> None:
        check_room((*device.items(), *host.items()), 100)

    patch.setattr(world.devices[rank], "check_room", refuse)
    return r"rank 2: pool 'full' on the device: .* do not fit in memory"


def no_pinning(world: GroupWorld, rank: int, patch: pytest.MonkeyPatch) -> str:
    """The first pool of the host can be pinned, and the second one cannot."""
    plain, made = world.devices[rank].host_tensor, list[tuple[int, ...]]()

    def host_tensor(shape: tuple[int, ...]) -> torch.Tensor:
        made.append(shape)
        if len(made) > 1:
            raise RuntimeError("cudaHostRegister: out of memory")
        return plain(shape)

    patch.setattr(world.devices[rank], "host_tensor", host_tensor)
    return r"rank 2: pool 'swa': its memory cannot be had: cudaHostRegister: out of memory"


@pytest.mark.parametrize("fate", [no_room, no_pinning])
@pytest.mark.parametrize("own", [0, None])
def test_pools_that_one_worker_has_no_memory_for_are_told_by_rank_and_a_new_group_can_be_opened(
    own: int | None, fate: Callable[[GroupWorld, int, pytest.MonkeyPatch], str]
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(16, 40, swa=8, stored=True), own=own)
        made, released = streams_of(world)
        world.begin()
        before = asyncio.all_tasks() - {process.task for process in world.group.processes.values()}
        with pytest.MonkeyPatch.context() as patch:
            reason = fate(world, 2, patch)
            with pytest.raises(ConfigError, match=reason):
                async with world.cache:
                    pass
            await world.group.ended()
        for process in world.group.processes.values():
            assert isinstance(process.failure, RankFailure)
            assert re.search(reason, str(process.failure))
        assert made == released != Counter()
        assert asyncio.all_tasks() <= before
        async with world.opened():
            await world.serve(text(6))
            await world.serve(text(6))
            world.idle()
        assert made == released
        await world.aclose()

    play(main)


def streams_of(world: GroupWorld) -> tuple[Counter[str], Counter[str]]:
    """The streams that the devices of all ranks make from now on, and those that they get back."""
    made, released = Counter[str](), Counter[str]()

    def watch(rank: int, device: RankDevice) -> None:
        stream = device.stream

        def make(name: str) -> SimulatedStream:
            made[f"{name} of rank {rank}"] += 1
            return stream(name)

        def release(own: SimulatedStream) -> None:
            released[f"{own.name} of rank {rank}"] += 1

        device.stream, device.release = make, release  # type: ignore[assignment, method-assign]

    for rank, device in world.devices.items():
        watch(rank, device)
    return made, released


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_store_that_is_full_on_one_worker_fails_what_is_written_and_no_request(own: int | None, victim: int) -> None:
    """When there is room again, what comes then is stored on all workers, and found by the next group."""

    async def main(loop: SimulatedLoop) -> None:
        config = settings(16, 16, stored=True, backup_quota=1.0)
        world = GroupWorld(loop, Topology(tp=2), config, own=own, timeout=TIMEOUT)

        async def put(*_: object) -> list[Result]:
            raise OSError(errno.ENOSPC, "No space left on device")

        async with world.opened() as cache:
            backend = world.backends[victim]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "put", put)
                for seed in range(8):
                    await world.serve(text(6, seed=seed))
                await cache.flush()
                stage = cache.statistics().stages["backup_storage"]
                assert stage.errors >= 8
                assert stage.ops == 0
                assert not backend.pages
                handle = cache.prefetch(text(6, extra=1))
                assert await world.serve(text(6, extra=1), prefetch=handle) == 0, "the other worker's pages are no hit"
            await asyncio.sleep(120.0)  # for as long as the breaker of a store keeps calls away at most
            for _ in range(2):
                await world.serve(text(6, seed=20))
                await cache.flush()
            world.idle()
        async with world.opened() as cache:
            handle = cache.prefetch(text(6, seed=20, extra=1))
            assert await world.serve(text(6, seed=20, extra=1), prefetch=handle) == 24
        await world.aclose()

    play(main)


def test_a_configuration_with_other_slots_is_refused_by_name() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        world.process(1).server._shard = lambda _: settings(8, 40)
        with pytest.raises(ConfigError, match="rank 1: shard: pool 'full': device_pages is 8 here and 16 at the head"):
            async with world.cache:
                pass
        await world.group.ended()
        await world.aclose()

    play(main)


def test_an_opening_that_is_cancelled_leaves_nothing_anywhere() -> None:
    async def main(loop: SimulatedLoop) -> None:
        for turns in range(0, 40, 3):
            world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
            world.begin()
            opening = loop.create_task(world.cache.__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                await world.cache.aclose()
            world.group.workers.close()
            await world.group.ended()
            await world.aclose()

    play(main)


@pytest.mark.parametrize("stored", [False, True])
def test_a_worker_that_is_stopped_while_the_cache_closes_delays_it_no_longer_than_its_deadline(stored: bool) -> None:
    """Its link would not notice before the time-out, which may be much longer."""

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=stored), timeout=300.0)
        world.begin()
        cache = await world.cache.__aenter__()
        world.run()
        await world.serve(text(6))
        world.process(VICTIM).link.fall_silent()
        begun = loop.time()
        try:
            said = str((await cache.aclose(timeout=5.0)).error)
        except BackendError as error:  # all was saved by then
            said = str(error)
        assert "rank 1: had not answered when the cache was to be closed" in said
        assert loop.time() - begun <= 5.0 + 2 * LATE + 1.0
        world.process(VICTIM).task.cancel()
        await asyncio.wait([process.task for process in world.group.processes.values()])
        await asyncio.wait(world.running.values())
        await world.aclose()

    play(main)
