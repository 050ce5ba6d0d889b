"""The logits are those of a model without a cache, whatever way the prefix took through the tree."""

from __future__ import annotations

import asyncio
import random

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.memory.host_copies import Faults
from asynccache.testing.faulty_backend import FaultyBackend
from tests.engine.engine_kit import CHUNK, PAGE, Served, prompt, served, settled
from tests.engine.engine_models import FAMILIES, WINDOW
from tests.waiting import turns

pytestmark = pytest.mark.slow(0.7)

WINDOWED = ("gemma3", "deepseek_v4")
RECURRENT = ("falcon_h1", "qwen3_next")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_prompt_shorter_than_the_window(family: str) -> None:
    storage = MemoryBackend()
    async with served(family, host=40, storage=storage) as engine:
        short = prompt(PAGE + 3)
        assert len(short) < WINDOW
        assert (await engine.check(short)).cached == 0
        assert (await engine.check(short)).cached == PAGE
        await engine.empty_device()
        assert (await engine.check(short)).hits == (0, PAGE, 0)
        await engine.empty_host()
        assert (await engine.check(short)).hits == (0, 0, PAGE)
    await storage.aclose()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_conversation_goes_on_where_its_answer_ended(family: str) -> None:
    async with served(family) as engine:
        text = prompt(20)
        for turn in range(3):
            made = await engine.check(text, 11)
            assert turn == 0 or made.cached > len(text) - 11 - 2 * PAGE
            text = [*text, *made.tokens, *prompt(3, seed=turn)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_split_inside_the_shared_prefix(family: str) -> None:
    shared, whole, storage = prompt(37), 37 // PAGE * PAGE, MemoryBackend()
    async with served(family, device=64, host=80, storage=storage) as engine:
        await engine.check([*shared, *prompt(30, seed=1)])
        made = await engine.check([*shared, *prompt(30, seed=2)])
        assert made.cached == (CHUNK if family in RECURRENT else whole)  # what FULL alone matched ends within a chunk
        assert (await engine.check([*shared, *prompt(30, seed=3)])).cached == whole
        await engine.empty_device()
        assert (await engine.check([*shared, *prompt(30, seed=4)])).hits == (0, whole, 0)
        assert (await engine.check([*shared, *prompt(30, seed=1)])).cached == (37 + 30) // PAGE * PAGE
        await engine.empty_host()
        assert (await engine.check([*shared, *prompt(30, seed=5)])).hits == (0, 0, whole)
    await storage.aclose()


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.asyncio
async def test_tombstones_in_the_middle_of_the_path(family: str) -> None:
    """What a long answer left of its window is never published: FULL is there, SWA is not."""
    storage = MemoryBackend()
    async with served(family, device=64, host=80, storage=storage) as engine:
        text = prompt(30)
        made = await engine.check(text, 70)
        text = [*text, *made.tokens]
        inside = [*text[:67], *prompt(5, seed=1)]
        match = await engine.cache.match(inside)
        assert match.full == 64 > match.device
        assert (await engine.check(text)).cached == 96
        await engine.empty_device()
        assert (await engine.check([*text, *prompt(9, seed=2)])).hits == (0, 96, 0)
        assert (await engine.check(inside)).cached == match.device
        further = [*inside, *prompt(5, seed=3)]
        assert (await engine.check(further)).cached == len(inside)
        await engine.empty_device()
        assert (await engine.check(further)).hits == (0, len(inside), 0)
        assert (await engine.check(text)).cached == 96
        await engine.empty_host()
        assert (await engine.check([*further, 1])).hits == (0, 0, len(inside))
        assert (await engine.check([*text, 1, 2])).hits.storage > 0
    await storage.aclose()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_namespaces_are_never_mixed(family: str) -> None:
    """Two sets of weights, as adapters would be, each under its own key, at the same time on the same tokens."""
    async with served(family, device=64) as engine:
        async with Served(engine.cache, family, weights=1) as other:
            for round_ in range(2):
                one, two, three = await asyncio.gather(
                    engine.check(prompt(40), namespace="one"),
                    other.check(prompt(40), namespace="two"),
                    engine.check(prompt(30)),
                )
                assert (one.cached, two.cached, three.cached) == ((32, 32, 24) if round_ else (0, 0, 0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_random_cancellations_change_nothing_for_others(family: str) -> None:
    """Requests with common prefixes on a device that holds few of them; every second one is cancelled somewhere."""
    rng = random.Random(f"cancellations {family}")
    storage = MemoryBackend()
    async with served(family, device=24, host=48, storage=storage) as engine:
        tasks = []
        for i in range(24):
            text = [*prompt(rng.randrange(10, 50), seed=rng.randrange(3)), i]
            tasks.append(asyncio.create_task(engine.check(text, 2)))
            await turns(rng.randrange(100))
            if i % 2:
                rng.choice(tasks[-4:]).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if isinstance(r, Exception)]
        assert not failures, failures[0]
        ended = [r for r in results if not isinstance(r, BaseException)]
        assert 0 < len(ended) < len(tasks)
        for seed in range(3):
            await engine.check(prompt(45, seed))
    await storage.aclose()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_failing_storage_and_copies_make_it_slower_never_different(family: str) -> None:
    inner = MemoryBackend()
    storage = FaultyBackend(inner, 0.0, seed=7)
    faults = Faults(seed=7, delayed=0.1, failing=0.1, delay=(0.001, 0.003))
    async with served(family, device=24, host=40, storage=storage, faults=faults) as engine:
        for seed in range(10):
            await engine.check(prompt(45, seed), 1)
        await settled(engine.cache)
        storage.rate, stored = 0.5, 0
        for i in range(80):
            made = await engine.check([*prompt(45, seed=i % 10), *prompt(5, seed=i)], 2)
            stored += made.hits.storage
            if i > 10 and stored and storage.faults["failed"] and storage.faults["corrupted"]:
                break
        else:
            pytest.fail(f"no fault struck: {storage.faults}")
    await inner.aclose()


@pytest.mark.asyncio
async def test_a_byte_that_is_wrong_shows_in_the_logits() -> None:
    """Every other test of this folder compares logits; so this is what they would see."""
    async with served("qwen3") as engine:
        await engine.check(prompt(40))
        async with engine.cache.lease(prompt(40)) as lease:
            page = engine.cache.pools["full"].layer(1)[int(lease.pages[2])]
            page += 1
        with pytest.raises(AssertionError, match="qwen3: "):
            await engine.check(prompt(40))
