"""The shipped backends that fail, wait and lie do it as often as they say, and again for the same seed."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, Result
from asynccache.testing.backend_suite import LAYOUT, blank, keys_of, put_all, record_of
from asynccache.testing.faulty_backend import Fault, FaultyBackend, draw_fault
from asynccache.testing.slow_backend import SlowBackend
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate


def test_faults_come_in_their_shares() -> None:
    rng = Random(1)
    drawn = Counter(draw_fault(rng, 0.4) for _ in range(20_000))
    for fault, share in ((Fault.NONE, 0.6), (Fault.DELAYED, 0.2), (Fault.FAILED, 0.1), (Fault.CORRUPTED, 0.1)):
        assert drawn[fault] / 20_000 == pytest.approx(share, abs=0.01)


def test_without_a_rate_there_are_no_faults() -> None:
    assert {draw_fault(Random(seed), 0.0) for seed in range(100)} == {Fault.NONE}


async def _use(loop: SimulatedLoop) -> tuple[Counter[str], list[list[Result]]]:
    """Four pages, put and read many times over a faulty store."""
    faulty = FaultyBackend(MemoryBackend(), 0.8, loop.seed)
    store = CheckedStore(faulty, LAYOUT, threads=0)
    keys = keys_of(4, "odd")
    answers = []
    for _ in range(30):
        answers.append(await store.put(keys, [record_of(key).payload for key in keys]))
        pages = [blank(key).payload for key in keys]
        answers.append(await store.get(keys, pages))
        for key, page, result in zip(keys, pages, answers[-1], strict=True):
            assert result is not Result.HIT or page == record_of(key).payload
    return faulty.faults, answers


def test_what_a_faulty_backend_corrupts_is_never_served() -> None:
    faults, answers = simulate(_use, 7)
    assert min(faults["delayed"], faults["failed"], faults["corrupted"]) > 0
    assert sum(answer.count(Result.CORRUPT) for answer in answers) == faults["corrupted"]


def test_a_seed_gives_the_same_faults_again() -> None:
    assert simulate(_use, 7) == simulate(_use, 7)
    assert simulate(_use, 7) != simulate(_use, 8)


def test_a_slow_backend_takes_latency_and_bandwidth() -> None:
    async def world(loop: SimulatedLoop) -> None:
        slow = SlowBackend(MemoryBackend(), latency=2.0, bandwidth=1000.0)
        began = loop.time()
        await put_all(slow, keys_of(3, "odd"))
        assert loop.time() - began == pytest.approx(5.0, abs=0.01)
        await slow.exists(keys_of(3, "odd"))
        assert loop.time() - began == pytest.approx(7.0, abs=0.01)

    simulate(world, 1)


def test_a_page_that_changes_while_it_is_written_shows() -> None:
    """The simulated backend reads payloads in two halves: who lets go of a buffer early stores a torn page."""

    async def world(loop: SimulatedLoop) -> int:
        backend = SimulatedBackend(Random(loop.seed), Hostility(delay=1.0))
        store = CheckedStore(backend, LAYOUT, threads=0)
        key, page = keys_of(1, "odd"), [record_of(keys_of(1, "odd")[0]).payload]
        putting = asyncio.ensure_future(store.put(key, page))
        await asyncio.sleep(loop.random.uniform(0, 1))
        page[0][0] ^= 1
        page[0][999] ^= 1
        await putting
        return (await store.get(key, page))[0]

    assert Result.CORRUPT in {simulate(world, seed) for seed in range(10)}


def test_an_unavailable_backend_raises() -> None:
    async def world(loop: SimulatedLoop) -> None:
        backend = SimulatedBackend(Random(1), Hostility(unavailable=1.0))
        with pytest.raises(Unavailable):
            await backend.exists(keys_of(1))

    simulate(world, 1)
