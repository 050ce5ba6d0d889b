"""Where a request's recurrent state is kept, so that the next request finds it."""

from __future__ import annotations

import pytest

from tests.shim.shim_kit import PAGE, config, continuation, serving, text


@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
async def test_the_same_prompt_again_computes_no_more_than_its_last_page(extra: int) -> None:
    prompt = text(6, extra=extra)
    async with serving(config(64, mamba=16), step_tokens=64) as served:
        for _ in range(2):
            request = served.ask(prompt, 3)
            assert [token async for token in request] == continuation(prompt, 3)
        assert request.hits is not None
        assert request.hits.device == (len(prompt) - 1) // PAGE * PAGE


async def test_a_prompt_that_goes_on_finds_all_whole_pages_of_the_one_before() -> None:
    prompt = text(6)
    async with serving(config(64, mamba=16), step_tokens=64) as served:
        await served.ask(prompt, 1).done()
        request = served.ask(prompt + text(2), 2)
        await request.done()
        assert request.hits is not None
        assert request.hits.device == len(prompt)
