"""What one rank alone meets, and how all hear of it: a worker that dies, storage that is late, garbage, time."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from asynccache.config import CacheConfig, Full
from asynccache.core.settings import WritePolicy
from asynccache.errors import CacheClosed, CacheFull, RankFailure
from asynccache.ranks import Topology
from asynccache.runtime import claims
from asynccache.runtime.lockstep import Lockstep
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from tests.ranks.cache_world import TIMEOUT, Member
from tests.ranks.engine_bytes import EngineBytes
from tests.ranks.still_world import StillWorld, publish, serve, text_of
from tests.ranks.test_rank_windows import CONFIG, PAGE, TEXT

SHAPES = [Topology(tp=2), Topology(tp=2, cp=2), Topology(pp=3), Topology(tp=2, pp=2)]
HOLDS = 100.0
Ends = tuple[tuple[int, tuple[int, int]], ...]


def lockstep_of(member: Member) -> Lockstep:
    lockstep = member.cache._opened().lockstep
    assert lockstep is not None
    return lockstep


# a worker dies


async def _bug() -> None:
    raise ZeroDivisionError("a bug in a worker")


async def _held_open(member: Member) -> None:
    """A backup that does not end: something is in flight for as long as anybody steps."""
    gate = member.device.gate()
    async with member.cache.lease(TEXT, wait=False) as lease:
        member.bytes.write(lease, None, TEXT, 0)
        await lease.commit(TEXT, ready=gate)
        lease.release(after=gate)


def after_a_death(topology: Topology, victim: int, steps: int, pause: float = 0.002) -> list[tuple[type, float]]:
    """What every rank hears, and how long after the death."""

    async def main(loop: SimulatedLoop) -> list[tuple[type, float]]:
        world = StillWorld(loop, topology, CONFIG)
        died: list[float] = []

        async def script(member: Member) -> tuple[type, float]:
            try:
                await _held_open(member)
                for number in range(10**6):
                    if number == steps and member.rank == victim:
                        died.append(loop.time())
                        member.cache._opened().supervisor.spawn(_bug(), "bug")
                    await asyncio.sleep(member.local.random() * pause)
                    await member.cache.step()
                raise AssertionError("nobody said anything")
            except (RankFailure, CacheClosed) as error:
                return type(error), loop.time() - died[0]

        async def lived(member: Member) -> tuple[type, float]:
            try:
                async with member.cache:
                    member.bytes = EngineBytes(member.cache, member.config, member.place)
                    said = await script(member)
            except (CacheClosed, RankFailure):
                pass  # leaving says of what it was closed
            return said

        for member in world.members:
            member.begin(0)
        said = list(await asyncio.gather(*map(lived, world.members)))
        await world.close()
        return said

    return simulate(main, 5)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_everybody_hears_at_once_of_a_rank_whose_worker_died(topology: Topology) -> None:
    for victim in range(topology.ranks):
        said = after_a_death(topology, victim, steps=10 + victim)
        assert said.pop(victim)[0] is CacheClosed
        assert {kind for kind, _ in said} == {RankFailure}
        assert max(after for _, after in said) < 1.0, f"rank {victim} of {topology}: the time-out is {TIMEOUT}"


def test_without_a_word_they_would_hear_at_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lockstep, "resign", lambda self: None)
    said = after_a_death(Topology(tp=2), 1, steps=10)
    assert said[0][1] > TIMEOUT - 1


# storage is late


SLOW = CacheConfig(
    model="slow", page_size=PAGE, prefetch_threshold=1, write_policy=WritePolicy.WRITE_THROUGH, backup_quota=1.0,
    components=(Full(bytes_per_token=16, device_tokens=8 * PAGE, host_tokens=8 * PAGE, layers=2),),
)  # fmt: skip


async def _served(member: Member, text: list[int]) -> bool:
    try:
        await serve(member, text)
    except CacheFull:
        return False
    return True


def lateness(topology: Topology, slow: int) -> tuple[list[list[bool]], list[float]]:
    """What cores were told of storage, by rank, and how long requests took while one rank's store was slow."""

    async def main(loop: SimulatedLoop) -> tuple[list[list[bool]], list[float]]:
        world = StillWorld(loop, topology, SLOW)
        store = world.members[slow].backend
        assert store is not None
        store.hostility = replace(store.hostility, delay=1.0)
        told: list[list[bool]] = [[] for _ in world.members]

        async def script(member: Member) -> float:
            lockstep = lockstep_of(member)
            plain = lockstep.on_late

            def on_late(late: bool) -> None:
                told[member.rank].append(late)
                plain(late)

            lockstep.on_late = on_late
            began = loop.time()
            for number in range(4):
                while not await _served(member, text_of(6, f"{number}")):
                    await member.cache.step()
                    await asyncio.sleep(0.005)
                for _ in range(10):
                    await asyncio.sleep(0.02)
                    await member.cache.step()
            took = loop.time() - began
            await member.cache.flush()
            assert not lockstep.overdue
            assert not member.cache.core.world.storage_is_late
            return took

        took = await world.group(script)
        await world.close()
        return told, took

    return simulate(main, 6)


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2)], ids=str)
@pytest.mark.parametrize("slow", [0, 1])
def test_that_storage_is_late_on_one_rank_is_agreed(topology: Topology, slow: int) -> None:
    told, _ = lateness(topology, slow)
    assert told[0] == told[1]
    assert told[0][:2] == [True, False]


# time and garbage


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2)], ids=str)
def test_what_is_kept_and_claimed_for_a_time_ends_at_one_step_whatever_clocks_and_collectors_do(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "HELD_FOR", 8.0)

    async def main(loop: SimulatedLoop) -> list[Ends]:
        world = StillWorld(loop, topology, CONFIG)
        await world.group(lambda member: publish(member, TEXT))

        async def script(member: Member) -> Ends:
            await publish(member, TEXT[: 4 * PAGE + 1])
            kept = await member.cache.keep(TEXT[: 4 * PAGE + 1], ttl=5.0)
            assert kept.tokens == 4 * PAGE
            handle = member.cache.prefetch(TEXT)
            while not handle.done():
                await member.cache.step()
            held = member.cache._opened().claims
            assert len(held._timers) == 1
            if member.rank:
                handle = None  # type: ignore[assignment]
                gc.collect()
            await asyncio.sleep(HOLDS * member.rank)
            assert len(held._timers) == 1, "neither a clock nor a collector ends it"
            ends: list[tuple[int, tuple[int, int]]] = []
            for number in range(850):
                state = member.cache.statistics().kept_tokens, len(held._timers)
                if not ends or ends[-1][1] != state:
                    ends.append((number, state))
                await member.cache.step()
            del handle
            return tuple(ends)

        said = await world.group(script)
        await world.close()
        return said

    said = simulate(main, 7)
    assert len(set(said)) == 1
    assert [state for _, state in said[0]] == [(4 * PAGE, 1), (0, 1), (0, 0)]
