"""Ranks that have parted say in what: in steps, where one has taken more of them than another."""

from __future__ import annotations

import asyncio
import re
from random import Random

import pytest

from asynccache import AsyncCache
from asynccache.errors import RankDivergence
from asynccache.ranks import Topology
from asynccache.ranks.frames import UNKNOWN, Frames, Header, Health, Kind, found_apart, in_words, tell_apart, told_apart
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.test_rank_closing import CONFIG, TEXT


async def step_on(cache: AsyncCache) -> None:
    while True:
        await cache.step()


def parted(topology: Topology, odd: int) -> list[tuple[str, int]]:
    """What each rank is told when ``odd`` has taken one step more than the others while nothing was in flight, and at
    which step that was."""

    async def world(loop: SimulatedLoop) -> list[tuple[str, int]]:
        net = SimulatedRanks(topology, Random(1))

        async def live(rank: int) -> tuple[str, int]:
            device = SimulatedDevice(seed=rank)
            cache = await AsyncCache(CONFIG, device=device, ranks=net.member(rank)).__aenter__()
            await cache.step()
            if rank == odd:
                await cache.step()
            async with cache.lease(TEXT, wait=False) as lease:
                await lease.commit(TEXT)
            with pytest.raises(RankDivergence) as error:
                await step_on(cache)
            report = await cache.aclose()
            assert isinstance(report.error, RankDivergence)
            await device.aclose()
            lockstep = cache._opened().lockstep
            assert lockstep is not None
            return str(error.value), lockstep.steps.step_number

        return list(await asyncio.gather(*map(live, range(topology.ranks))))

    return simulate(world, 1)


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2), Topology(pp=3), Topology(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("odd", [0, -1])
def test_the_steps_that_ranks_are_at_are_named(topology: Topology, odd: int) -> None:
    """By those who found it, and by those who were told, but for a later stage beside them."""
    said = parted(topology, odd % topology.ranks)
    found = [re.search(r"ranks are at steps (\d+) and (\d+)", text) for text, _ in said]
    assert all(one is None or int(one[2]) - int(one[1]) == 1 for one in found), said
    beside = [rank for rank, one in enumerate(found) if one is None]
    assert not beside or (topology.tp > 1 and topology.tp <= beside[0]), said
    assert all("found apart elsewhere" in said[rank][0] for rank in beside)
    assert not any("entry" in text for text, _ in said)


FRAMES = Frames(1, 4)
MINE = Header(7, 99, 3)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (Header(8, 99, 3), "ranks are at steps 7 and 8"),
        (Header(6, 99, 3), "ranks are at steps 6 and 7"),
        (Header(7, 99, 5), "they have 3 and 5 operations in flight"),
        (Header(9, 1, 2), "ranks are at steps 7 and 9, they have 2 and 3 operations in flight"),
        (Header(7, 98, 3), None),
        (MINE, None),
    ],
)
def test_what_a_frame_says_beside_this_ranks_header(theirs: Header, words: str | None) -> None:
    frame = FRAMES.write(Kind.DECIDE, Health.OK, theirs, {})
    assert in_words(found_apart(frame, MINE)) == words


def test_what_was_found_is_passed_on_and_what_nobody_knows_changes_nothing() -> None:
    found = found_apart(FRAMES.write(Kind.VECTOR, Health.OK, Header(8, 99, 3), {}), MINE)
    frames = [FRAMES.bad(Health.DIVERGED, MINE) for _ in range(2)]
    for frame, known in zip(frames, (found, UNKNOWN), strict=True):
        tell_apart(frame, known)
    lowest = [min(pair) for pair in zip(*(told_apart(frame) for frame in frames), strict=True)]
    assert in_words(tuple(lowest)) == "ranks are at steps 7 and 8"
    assert found_apart(FRAMES.bad(Health.FAILED, Header(9, 1, 1)), MINE) == UNKNOWN
    assert in_words(UNKNOWN) is None
