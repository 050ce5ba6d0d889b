"""An error in the handling of a message ends the group by the rank that had it; a device is used whatever its truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asynccache import AsyncCache, RankFailure
from asynccache.memory.cpu import CpuDevice
from asynccache.worker import Topology
from asynccache.worker.messages import StoreHealth
from tests.group.group_kit import GUEST, GroupWorld, play, settings, text
from tests.runtime import runtime_kit
from tests.simulated.loop import SimulatedLoop


def broken(*_: object, **__: object) -> None:
    raise ValueError("no such thing")


async def said_nothing(world: GroupWorld) -> None:
    """The head cannot take what rank 1 says of its stores."""
    async with world.cache:
        world.run()
        group: Any = world.cache._opened().worker
        group._shut = None  # what it notes there, it cannot
        world.process(1).server._tell(StoreHealth(True))
        await asyncio.sleep(0.1)
        assert group.failure is not None
        assert group.failure.rank == 1
        await world.serve(text(2))


async def told_nothing(world: GroupWorld) -> None:
    """Rank 1 cannot take what the head says of a store that is opened."""
    async with world.cache as cache:
        world.run()
        world.process(1).server.be_patient = broken  # type: ignore[method-assign]
        await cache.attach_storage(GUEST)


@pytest.mark.parametrize("own", [0, None])
@pytest.mark.parametrize(
    ("work", "reason"), [(said_nothing, "sent what raised AttributeError here: 'NoneType'"),
                         (told_nothing, "ValueError: no such thing")],
)  # fmt: skip
def test_an_error_while_a_message_is_taken_ends_the_group_by_the_rank_that_it_came_from_or_went_to(
    work: Callable[[GroupWorld], Coroutine[Any, Any, None]], reason: str, own: int | None
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16), own=own)
        world.begin()
        with pytest.raises(RankFailure, match=f"rank 1: {reason}"):
            await work(world)
        await ended(world)

    play(main)


async def ended(world: GroupWorld) -> None:
    await asyncio.wait([process.task for process in world.group.processes.values()])
    await asyncio.wait(world.running.values())
    await world.aclose()


class Falsy(CpuDevice):
    """A device without streams is False, as a container without items is."""

    def __bool__(self) -> bool:
        return False

    async def aclose(self) -> None:
        """See ``CpuDevice``; noted."""
        self.ended = True
        await super().aclose()

    ended = False


async def test_a_device_whose_truth_is_false_is_used_and_not_closed() -> None:
    device = Falsy()
    async with AsyncCache(runtime_kit.settings(device=8, host=8), device=device) as cache:
        assert device._streams
        await runtime_kit.serve(cache, runtime_kit.text(2))
    assert not device.ended
    await device.aclose()
