"""The scheduler on the real cache: batching, hits from every tier, growth, retraction, priorities, aborts."""

from __future__ import annotations

import pytest
from asynccache_shim import Finish

from tests.shim.shim_kit import PAGE, config, continuation, hits, push_out, serving, text


@pytest.mark.asyncio
async def test_a_request_streams_what_the_model_says() -> None:
    async with serving(config()) as served:
        request = served.ask(text(3, extra=1), 6)
        assert [token async for token in request] == continuation(text(3, extra=1), 6)
        assert request.finish is Finish.LENGTH


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [{}, {"swa": 32}, {"swa": 32, "mamba": 8}, {"mamba": 8}])
async def test_a_prefix_is_computed_once(more: dict[str, int]) -> None:
    async with serving(config(64, **more), step_tokens=16) as served:
        prompt = text(20, extra=2)
        first = await served.answer(prompt, 5)
        computed = served.model.computed
        second = await served.answer(prompt, 5)
        assert hits(first).device == 0
        assert hits(second).device == 20 * PAGE
        assert served.model.computed - computed == 2 + 4


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [{}, {"swa": 32}, {"swa": 32, "mamba": 8}, {"mamba": 8}])
async def test_a_prefix_comes_back_from_the_host(more: dict[str, int]) -> None:
    async with serving(config(64, 256, **more), step_tokens=16) as served:
        prompt = text(20, extra=2)
        await served.answer(prompt, 5)
        await push_out(served.cache)
        again = await served.answer(prompt, 5)
        assert again.match.needs_load_back
        assert again.match.host_hit_length == 20 * PAGE
        assert hits(again).host == 20 * PAGE
