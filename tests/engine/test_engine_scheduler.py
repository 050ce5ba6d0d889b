"""Real models under the scheduler: many requests at once, few pages, and every token as without a cache."""

from __future__ import annotations

import asyncio
import random

import pytest
from asynccache_backends.memory import MemoryBackend
from asynccache_shim.board import SchedulerConfig
from asynccache_shim.request import Finish, Limits, Request
from asynccache_shim.scheduler import Scheduler

from tests.engine.engine_kit import judged, prompt, served
from tests.engine.engine_models import FAMILIES

NEW = 6


def requests(rng: random.Random, count: int) -> list[Request]:
    """Three prefixes, many ends."""
    made = []
    for i in range(count):
        text = [*prompt(rng.randrange(8, 60), seed=rng.randrange(3)), *prompt(rng.randrange(1, 9), seed=i + 10)]
        made.append(Request(text, Limits(NEW), priority=rng.randrange(2)))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_scheduler_serves_the_tokens_of_the_model_alone(family: str) -> None:
    rng = random.Random(f"scheduler {family}")
    storage = MemoryBackend()
    async with served(family, device=28, host=48, storage=storage) as engine:
        async with Scheduler(engine.cache, engine.model, SchedulerConfig(step_tokens=40, max_running=8)) as scheduler:
            asked = [scheduler.submit(request) for request in requests(rng, 16)]
            dropped = rng.sample(asked, 4)
            for request in dropped:
                for _ in range(rng.randrange(200)):
                    await asyncio.sleep(0)
                request.abort()
            outputs = await asyncio.gather(*(request.done() for request in asked))
        assert any(request.hits is not None and sum(request.hits) for request in asked)
        for request, output in zip(asked, outputs, strict=True):
            if request in dropped:
                assert request.finish is Finish.ABORTED
            else:
                assert len(output) == NEW
                assert output == judged(family, request.tokens.tolist(), output)[1]
    await storage.aclose()
