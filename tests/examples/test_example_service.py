"""One model behind one scheduler, without HTTP: what its users are told when something below fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import openai_server
import pytest
from openai_serving.protocol import ApiError, Ask, parse
from openai_serving.service import Plan, Service

POISON = 255


@cache
def plan() -> Plan:
    """A model that fails of one token."""
    planned = openai_server.plan(openai_server.arguments(["--device-tokens", "256", "--host-tokens", "512"]))
    forward = planned.model.forward

    def fragile(input_ids: Any, past_key_values: Any, **options: Any) -> Any:
        if (input_ids == POISON).any():
            raise ArithmeticError("poisoned")
        return forward(input_ids=input_ids, past_key_values=past_key_values, **options)

    planned.model.forward = fragile
    return planned


@asynccontextmanager
async def served() -> AsyncIterator[Service]:
    async with Service(plan()) as service:
        yield service


def ask(prompt: Any = "Hello", **more: Any) -> Ask:
    return parse(json.dumps({"model": "random-qwen3", "temperature": 0, "prompt": prompt, **more}).encode(), chat=False)


async def text(service: Service, wanted: Ask) -> str:
    generation = service.generate(wanted)
    try:
        return "".join([piece async for piece in generation])
    finally:
        generation.abort()


@pytest.mark.asyncio
async def test_a_model_that_fails_is_told_to_whom_it_failed_and_to_nobody_else() -> None:
    async with served() as service:
        expected = await text(service, ask())
        with pytest.raises(ApiError, match="poisoned") as told:
            await text(service, ask([1, 2, POISON]))
        assert told.value.status == 500
        assert await text(service, ask()) == expected
        assert service.healthy()
        assert service.statistics()["requests"]["ended"] == {"length": 2, "failed": 1}


@pytest.mark.asyncio
async def test_a_cache_that_is_gone_is_told_and_seen() -> None:
    async with served() as service:
        assert service.healthy()
        await service._cache.aclose()
        assert not service.healthy()
        with pytest.raises(ApiError) as told:
            await text(service, ask())
        assert told.value.status == 503


@pytest.mark.asyncio
async def test_usage_counts_no_token_after_a_stop_string() -> None:
    async with served() as service:
        whole = await text(service, ask(max_tokens=40))
        generation = service.generate(ask(max_tokens=200, stop=whole[5]))
        said = "".join([piece async for piece in generation])
        assert generation.reason == "stop"
        assert said == whole[: whole.index(whole[5])]
        made = generation.usage["completion_tokens"]
        assert made < 40
        await text(service, ask("Steps go on"))
        generation.abort()
        assert generation.usage["completion_tokens"] == made


@pytest.mark.asyncio
async def test_who_is_cut_short_is_told_and_nobody_else_comes_in() -> None:
    async with served() as service:
        generation = service.generate(ask(max_tokens=200))
        pieces = aiter(generation)
        await anext(pieces)
        service.cut()
        with pytest.raises(ApiError, match="closing"):
            [piece async for piece in pieces]
        with pytest.raises(ApiError, match="closing") as told:
            service.generate(ask())
        assert told.value.status == 503
        generation.abort()
        assert service.statistics()["requests"] == {"live": 0, "ended": {"aborted": 1}}
