"""The engine with a scheduler of its own: right, and clean when clients leave in the middle of a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import own_engine
import pytest
import torch
from own_engine import OwnEngine, answer
from tiny_llama import LAYERS, Row, TinyLlama, make_weights

from asynccache import AsyncCache, CacheClosed, CacheFull
from asynccache.core.audit import check

PROMPT = list(range(300))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[AsyncCache, OwnEngine]]:
    """An engine; at its end nothing is held any more."""
    make_weights(folder)
    async with AsyncCache(own_engine.config_of(folder)) as cache:
        async with OwnEngine(cache, folder) as engine:
            yield cache, engine
        await cache.flush()
        check(cache.core, idle=True)


async def test_the_model_computes_what_pytorch_computes_without_pages(tmp_path: Path) -> None:
    """Row by row, in chunks, and in pages in any order: the keys and values of a prompt are those of one call."""
    async with serving(tmp_path) as (cache, _):
        model, kv = TinyLlama(tmp_path, cache.pools["full"]), cache.pools["full"].kv(LAYERS - 1)
        order = torch.randperm(20)
        whole, parts = torch.arange(20).int().numpy(), (order + 20).int().numpy()
        expected = model.compute([Row(PROMPT, 0, 300, whole)])
        model.compute([Row(PROMPT, 0, 100, parts), Row(PROMPT[::-1], 0, 30, torch.arange(40, 42).numpy())])
        assert model.compute([Row(PROMPT, 100, 300, parts)]) == expected
        torch.testing.assert_close(kv[:18], kv[order + 20][:18], rtol=1e-3, atol=1e-4)


async def test_a_hit_changes_nothing_but_the_work(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, engine):
        first = await answer(engine, PROMPT, 8)
        assert engine.cached == 0
        assert await answer(engine, PROMPT, 8) == first
        assert engine.cached == 288


async def test_what_is_in_the_pages_decides(tmp_path: Path) -> None:
    """So that the same answer means the same KV."""
    async with serving(tmp_path) as (cache, engine):
        first = await answer(engine, PROMPT, 8)
        for layer in range(LAYERS):
            cache.pools["full"].layer(layer)[:] = 0
        assert await answer(engine, PROMPT, 8) != first
        assert engine.cached == 288


def test_other_weights_in_the_folder_find_none_of_these_pages(tmp_path: Path) -> None:
    models = []
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / name).mkdir()
        models.append(own_engine.config_of(make_weights(tmp_path / name, seed)).model)
    assert models[0] != models[1]
    assert models[0] == models[2]


async def test_tokens_come_as_they_are_made_and_many_requests_share_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (_, engine):
        rows: list[int] = []
        compute = engine._model.compute

        def counted(step: Sequence[Row]) -> list[int]:
            rows.append(len(step))
            return compute(step)

        monkeypatch.setattr(engine._model, "compute", counted)
        answers = await asyncio.gather(*(answer(engine, PROMPT[i:], 8) for i in range(6)))
        assert max(rows) == 6
        first = [await anext(tokens) for tokens in [engine.generate(PROMPT, 50)]]
        assert first == answers[0][:1]


async def test_a_request_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, engine):
        expected = await answer(engine, PROMPT, 8, "undisturbed")
        for hops in (1, 3, 10, 30):
            task = asyncio.create_task(answer(engine, PROMPT, 100))
            for _ in range(hops):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await answer(engine, PROMPT, 8) == expected


def room(cache: AsyncCache) -> int:
    """Pages of the device that a new request could have."""
    shelf = cache.statistics().device["full"]
    return shelf.free + shelf.evictable


async def test_nobody_gets_the_pages_of_a_client_that_left_before_its_step_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (cache, engine):
        begun, go_on, pages = threading.Event(), threading.Event(), room(cache)
        compute = engine._model.compute

        def slow(rows: Sequence[Row]) -> list[int]:
            begun.set()
            assert go_on.wait(20)
            return compute(rows)

        monkeypatch.setattr(engine._model, "compute", slow)
        task = asyncio.create_task(answer(engine, PROMPT, 8))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert room(cache) < pages, "its pages are still written"
        go_on.set()
        await answer(engine, PROMPT, 1)
        await cache.flush()
        assert room(cache) == pages


async def test_a_step_that_fails_ends_its_requests_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (_, engine):
        with monkeypatch.context() as patched:
            patched.setattr(engine._model, "compute", lambda rows: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await answer(engine, PROMPT, 8)
        assert len(await answer(engine, PROMPT, 8)) == 8
        assert engine.cached == 0, "nothing of the step was published"


async def test_what_never_fits_is_refused_and_the_end_of_the_engine_ends_its_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as (cache, engine):
        with pytest.raises(CacheFull):
            await answer(engine, PROMPT, 1_000_000)
        async with OwnEngine(cache, tmp_path) as other, aclosing(other.generate(PROMPT, 50)) as tokens:
            await anext(tokens)
            going_on = asyncio.create_task(answer(other, PROMPT, 100))
            await asyncio.sleep(0.01)
        with pytest.raises(CacheClosed):
            await going_on
        with pytest.raises(CacheClosed):
            await answer(other, PROMPT, 1)
