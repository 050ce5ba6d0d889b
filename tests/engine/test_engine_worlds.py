"""Random worlds around real models: every policy, small pools, failing storage and copies, retractions, aborts."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend
from asynccache_shim.board import SchedulerConfig
from asynccache_shim.request import Finish, Limits, Request
from asynccache_shim.scheduler import Scheduler

from asynccache.memory.host_copies import Faults
from asynccache.testing.faulty_backend import FaultyBackend
from tests.engine.engine_kit import Served, judged, prompt, served
from tests.engine.engine_models import FAMILIES

REQUESTS = 24


async def play(engine: Served, rng: random.Random) -> list[Request]:
    """Requests that share prefixes, some at once and some one after the other; some are aborted."""
    asked: list[Request] = []
    settings = SchedulerConfig(step_tokens=rng.choice([16, 40]), max_running=8, checkpoint_every=8)
    async with Scheduler(engine.cache, engine.model, settings) as scheduler:
        for i in range(REQUESTS):
            text = [*prompt(rng.randrange(1, 70), seed=rng.randrange(4)), *prompt(rng.randrange(1, 5), seed=i + 10)]
            request = Request(text, Limits(rng.randrange(1, 24)), priority=rng.randrange(2),
                              namespace=rng.choice([None, "other"]))  # fmt: skip
            asked.append(scheduler.submit(request))
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(asked).abort()
            if rng.random() < 0.5:
                await request.done()
        await asyncio.gather(*(request.done() for request in asked))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_world_changes_no_token(family: str) -> None:
    await changes_no_token(family, 0)


async def changes_no_token(family: str, seed: int) -> None:
    """Every request that was not aborted says what the model says alone, whatever else happens in this world."""
    rng = random.Random(f"world {family} {seed}")
    inner = MemoryBackend()
    storage = FaultyBackend(inner, rng.choice([0.0, 0.3, 0.8]), seed)
    faults = Faults(seed=seed, delayed=0.2, failing=rng.choice([0.0, 0.1]), delay=(0.001, 0.003))
    options: dict[str, Any] = {
        "device": rng.choice([16, 28]),
        "host": rng.choice([20, 40, 64]),
        "prefetch_policy": rng.choice(["timeout", "best_effort", "wait_complete"]),
        "write_policy": rng.choice(["write_through", "write_back", "write_through_selective"]),
    }
    async with served(family, storage=storage, faults=faults, **options) as engine:
        asked = await play(engine, rng)
    served_tokens = 0
    for request in asked:
        if request.finish is not Finish.ABORTED:
            assert len(request.output) == request.limits.max_new_tokens
            wanted = judged(family, request.tokens.tolist(), request.output)[1]
            assert request.output == wanted, f"{request}, {request.retractions} retractions, {request.hits}"
            served_tokens += sum(request.hits) if request.hits is not None else 0
    assert served_tokens > 0
    await inner.aclose()
