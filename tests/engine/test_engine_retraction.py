"""Retracted and resumed, drawn or greedy: the tokens are those of a request that was left alone."""

from __future__ import annotations

import asyncio

import pytest
from asynccache_shim import Limits, Request, Sampling, Scheduler, SchedulerConfig

from tests.engine.engine_kit import PAGE, judged, prompt, served
from tests.engine.engine_models import FAMILIES

pytestmark = pytest.mark.slow(2)

NEW = 5 * PAGE


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=11)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_request_that_was_retracted_goes_on_as_it_would_have(family: str, sampling: Sampling) -> None:
    async with served(family, device=14, host=64) as engine:
        async with Scheduler(engine.cache, engine.model, SchedulerConfig(step_tokens=24, max_running=4)) as scheduler:

            def ask(seed: int) -> Request:
                return scheduler.submit(Request(prompt(2 * PAGE + 3, seed), Limits(NEW), sampling=sampling))

            crowd = [ask(seed) for seed in range(3)]
            outputs = await asyncio.gather(*(request.done() for request in crowd))
            assert crowd[-1].retractions >= 1
            await engine.cache.reset()
            for seed, output in enumerate(outputs):
                assert len(output) == NEW
                if sampling.temperature:
                    assert output == await ask(seed).done()
                else:
                    assert output == judged(family, prompt(2 * PAGE + 3, seed), output)[1]
                await engine.cache.reset()
