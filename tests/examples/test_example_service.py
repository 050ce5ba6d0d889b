"""The service of the example server, without HTTP: the errors that its users are told when something below it fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import openai_server
import pytest
from openai_serving.paths import SchedulerPath
from openai_serving.protocol import ApiError, ParsedRequest, parse
from openai_serving.service import Choices, Service, ServiceParts

from asynccache import AsyncCache

POISON = 255


@cache
def poisonable() -> ServiceParts:
    """A model that fails of one token."""
    planned = openai_server.served(openai_server.arguments(["--device-tokens", "256", "--host-tokens", "512"]))
    path = planned.path
    assert isinstance(path, SchedulerPath)
    forward = path.model.forward

    def fragile(input_ids: Any, **options: Any) -> Any:
        if (input_ids == POISON).any():
            raise ArithmeticError("poisoned")
        return forward(input_ids=input_ids, **options)

    path.model.forward = fragile
    return planned


@asynccontextmanager
async def served() -> AsyncIterator[Service]:
    async with Service(poisonable()) as service:
        yield service


def ask(prompt: Any = "Hello", **more: Any) -> ParsedRequest:
    return parse(json.dumps({"model": "random-qwen3", "temperature": 0, "prompt": prompt, **more}).encode(), chat=False)


async def start(service: Service, wanted: ParsedRequest) -> Choices:
    return service.generate(wanted, await service.tokens(wanted.prompt))


async def text(service: Service, wanted: ParsedRequest) -> str:
    choices = await start(service, wanted)
    try:
        return "".join([piece or "" async for _, piece in choices.pieces()])
    finally:
        choices.abort()


async def test_a_model_that_fails_is_told_to_whom_it_failed_and_to_nobody_else() -> None:
    async with served() as service:
        expected = await text(service, ask())
        with pytest.raises(ApiError, match="poisoned") as told:
            await text(service, ask([1, 2, POISON]))
        assert told.value.status == 500
        assert await text(service, ask()) == expected
        assert service.failure is None
        assert (await service.statistics())["requests"]["ended"] == {"length": 2, "failed": 1}


async def test_a_cache_that_is_gone_is_told_and_seen() -> None:
    async with served() as service:
        assert service.failure is None
        await service.served.path.ask(AsyncCache.aclose)
        assert service.failure == "the cache is closed"
        with pytest.raises(ApiError) as told:
            await text(service, ask())
        assert told.value.status == 503


async def test_usage_counts_no_token_after_a_stop_string() -> None:
    async with served() as service:
        whole = await text(service, ask(max_tokens=40))
        choices = await start(service, ask(max_tokens=200, stop=whole[5]))
        (generation,) = choices.all
        said = "".join([piece async for piece in generation])
        assert generation.reason == "stop"
        assert said == whole[: whole.index(whole[5])]
        made = choices.usage["completion_tokens"]
        assert made < 40
        await text(service, ask("Steps go on"))
        choices.abort()
        assert choices.usage["completion_tokens"] == made


async def test_who_is_cut_short_is_told_and_nobody_else_comes_in() -> None:
    async with served() as service:
        choices = await start(service, ask(max_tokens=200))
        pieces = choices.pieces()
        await anext(pieces)
        service.cut()
        with pytest.raises(ApiError, match="closing"):
            [piece async for piece in pieces]
        with pytest.raises(ApiError, match="closing") as told:
            await start(service, ask())
        assert told.value.status == 503
        choices.abort()
        assert (await service.statistics())["requests"] == {"live": 0, "ended": {"aborted": 1}}
