"""A batch that one rank could not run: what it was to compute leaves the cache of all ranks as soon as the head hears
of it, and its pages come back when all have let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asynccache import BatchFailed, LoadFailed
from asynccache.worker import EngineBatch, RankWorker, Topology
from tests.group.group_kit import PAGE, GroupWorld, play, servers, settings, text
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop

End = Callable[[EngineBatch, SimulatedDevice], object]


def by_word(batch: EngineBatch, device: SimulatedDevice) -> None:
    batch.fail("out of memory")


def by_event(batch: EngineBatch, device: SimulatedDevice) -> None:
    gate = device.gate()
    batch.end(gate)
    asyncio.get_running_loop().call_later(0.01, gate.fire, RuntimeError("out of memory"))


def by_an_event_that_has_fired(batch: EngineBatch, device: SimulatedDevice) -> None:
    gate = device.gate()
    gate.fire(RuntimeError("out of memory"))
    batch.end(gate)


def faces(world: GroupWorld) -> list[RankWorker]:
    found = [process.face for process in world.group.processes.values()]
    return found if world.cache.worker is None else [world.cache.worker, *found]


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize("end", [by_word, by_event, by_an_event_that_has_fired])
def test_a_batch_that_fails_on_one_rank_leaves_at_once_and_its_pages_when_all_have_let_go(
    end: End, own: int | None
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(4, 24, stored=True), own=own)
        world.begin()
        async with world.cache as cache:
            lagging, failing = faces(world)
            tokens = text(4)
            async with cache.lease(tokens) as lease:
                number = cache.send_batch(b"", [lease])
                await lease.commit(tokens, after=number)
                lease.release(after=number)
            batch = await failing.heard(number)
            assert batch is not None
            assert (await cache.match([*tokens, 7])).device == 4 * PAGE
            end(batch, world.devices[failing.rank])
            await asyncio.sleep(0.5)
            assert (await cache.match([*tokens, 7])).host == 0
            with pytest.raises(TimeoutError):
                async with cache.lease(text(4, seed=2), timeout=1.0):
                    pass
            await lagging.heard(number)
            lagging.end_batch(number)
            with pytest.raises(BatchFailed, match=f"rank {failing.rank}.*out of memory"):
                await cache.batch_ended(number)
            async with cache.lease(text(4, seed=2), timeout=5.0) as other:
                assert other.pages.size == 4
            await cache.flush()
            assert all(not backend.pages for backend in world.backends.values())
            world.idle()
        await world.group.ended()
        await world.aclose()

    play(main)


def test_whoever_has_heard_of_the_failure_finds_nothing_and_holders_learn_of_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 24, stored=True))
        world.begin()
        async with world.cache as cache:
            tokens = text(2)
            async with cache.lease(tokens) as lease:
                number = cache.send_batch(b"", [lease])
                await lease.commit(tokens, after=number)
                lease.release(after=number)
            async with cache.lease(text(2, extra=1)) as holder:
                assert holder.cached == 2 * PAGE
                for server in servers(world):
                    batch = await faces(world)[server.rank].heard(number)
                    assert batch is not None
                    batch.fail("no") if server.rank else batch.end()
                with pytest.raises(BatchFailed):
                    await cache.batch_ended(number)
                async with cache.lease(text(2, extra=1)) as other:
                    assert other.cached == 0
                with pytest.raises(LoadFailed):
                    await holder.loaded()
                with pytest.raises(LoadFailed):
                    await lease_again(world, number)
            await cache.flush()
            world.idle()
        await world.group.ended()
        await world.aclose()

    play(main)


async def lease_again(world: GroupWorld, number: int) -> None:
    """Commit with a batch that is known to have failed."""
    async with world.cache.lease(text(2, seed=3)) as lease:
        await lease.commit(text(2, seed=3), after=number)
