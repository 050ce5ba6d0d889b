"""Pages of one and two tokens: the trial that ``describe`` makes takes as many as it needs."""

from __future__ import annotations

import pytest

from tests.engine.engine_kit import prompt, served


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "falcon_h1"])
@pytest.mark.asyncio
async def test_pages_of_a_token_or_two(family: str, page_size: int) -> None:
    async with served(family, page_size=page_size) as engine:
        await engine.check(prompt(11))
        assert (await engine.check(prompt(18))).cached >= 10
