"""Engines of one's own: with a scheduler, behind FastAPI, and what a first token takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import own_engine
import pytest
import pytest_asyncio
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastapi_app import make_app
from own_engine import OwnEngine, answer
from starlette.requests import ClientDisconnect
from tiny_llama import LAYERS, Row, TinyLlama, make_weights

from asynccache import AsyncCache, CacheClosed, CacheFull
from asynccache.cli import output
from asynccache.core.audit import check
from benchmarks import ttft
from benchmarks.tables import bench
from benchmarks.ttft import Bench, add_arguments, run
from tests.waiting import until

# The engine with a scheduler of its own: right, and clean when clients leave in the middle of a step.


PROMPT = list(range(300))
Serving = tuple[AsyncCache, OwnEngine]


@pytest_asyncio.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """A cache and an engine on it; at its end nothing is held any more."""
    make_weights(tmp_path)
    async with AsyncCache(own_engine.config_of(tmp_path)) as cache:
        async with OwnEngine(cache, tmp_path) as engine:
            yield cache, engine
        await cache.flush()
        check(cache.core, idle=True)


async def test_the_model_computes_what_pytorch_computes_without_pages(serving: Serving, tmp_path: Path) -> None:
    """Row by row, in chunks, and in pages in any order: the keys and values of a prompt are those of one call."""
    cache, _ = serving
    model, kv = TinyLlama(tmp_path, cache.pools["full"]), cache.pools["full"].kv(LAYERS - 1)
    order = torch.randperm(20)
    whole, parts = torch.arange(20).int().numpy(), (order + 20).int().numpy()
    expected = model.compute([Row(PROMPT, 0, 300, whole)])
    model.compute([Row(PROMPT, 0, 100, parts), Row(PROMPT[::-1], 0, 30, torch.arange(40, 42).numpy())])
    assert model.compute([Row(PROMPT, 100, 300, parts)]) == expected
    torch.testing.assert_close(kv[:18], kv[order + 20][:18], rtol=1e-3, atol=1e-4)


async def test_what_is_in_the_pages_decides(serving: Serving) -> None:
    """So that the same answer means the same KV."""
    cache, engine = serving
    first = await answer(engine, PROMPT, 8)
    for layer in range(LAYERS):
        cache.pools["full"].layer(layer)[:] = 0
    assert await answer(engine, PROMPT, 8) != first
    assert engine.cached == 288


async def test_tokens_come_as_they_are_made_and_many_requests_share_the_steps(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = serving
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


async def test_a_request_that_is_cancelled_leaves_nothing_behind(serving: Serving) -> None:
    _, engine = serving
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
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, engine = serving
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
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = serving
    with monkeypatch.context() as patched:
        patched.setattr(engine._model, "compute", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await answer(engine, PROMPT, 8)
    assert len(await answer(engine, PROMPT, 8)) == 8
    assert engine.cached == 0, "nothing of the step was published"


async def test_what_never_fits_is_refused_and_the_end_of_the_engine_ends_its_requests(
    serving: Serving, tmp_path: Path
) -> None:
    cache, engine = serving
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


# The FastAPI app around a model of one's own: the cache lives as long as the app, clients get streams and may leave,
# and the cache's pages are mounted beside the app's own.


TOKENS = list(range(410))


def ask(client: TestClient, **body: Any) -> tuple[list[int], str]:
    """The tokens of an answer, and what its end says."""
    answer = client.post("/generate", json={"tokens": TOKENS, "max_new_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    *tokens, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end.startswith("event: done\n")
    return [int(token.removeprefix("data: ")) for token in tokens], end.partition("data: ")[2]


def test_the_cache_lives_in_the_lifespan_and_its_pages_are_mounted(tmp_path: Path) -> None:
    with TestClient(make_app(make_weights(tmp_path))) as client:
        first, again, other = ask(client), ask(client), ask(client, tenant="another")
        assert len(first[0]) == 8
        assert again[0] == other[0] == first[0]
        assert [end for _, end in (first, again, other)] == [
            f"{cached} tokens of the prompt were cached" for cached in (0, 400, 0)
        ]
        assert client.get("/cache/healthz").text == "ok\n"
        assert client.get("/cache/statistics").json()["leases"] == 0
        assert "asynccache_loop_lag_seconds_bucket" in client.get("/cache/metrics").text
        assert client.post("/cache/explain", json={"tokens": TOKENS}).json()["device"] == 400
        assert client.get("/cache/nothing").status_code == 404
        assert client.get("/metrics").status_code == 404, "the cache has its own place only"
    assert client.get("/cache/healthz").status_code == 503


def test_after_a_restart_the_pages_are_in_the_store_but_not_for_other_weights(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("weights", "others")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        make_weights(folder, seed)
    storage = f"file:{tmp_path / 'kv'}?capacity=64MiB"
    said = []
    for folder in (folders[0], folders[0], folders[1]):
        with TestClient(make_app(folder, storage)) as client:
            said.append(ask(client))
    assert said[0][0] == said[1][0]
    assert [end.split()[0] for _, end in said] == ["0", "400", "0"]


def test_a_request_that_can_never_run_is_refused_before_the_answer_begins(tmp_path: Path) -> None:
    with TestClient(make_app(make_weights(tmp_path))) as client:
        for body, said in (
            ({"tokens": []}, "at least one"), ({"tokens": [512]}, "from 0 to 511"), ({"tokens": [-1]}, "from 0"),
            ({"tokens": [1], "max_new_tokens": 0}, "max_new_tokens"), ({"tokens": [1] * 100_000}, "FULL"),
        ):  # fmt: skip
            answer = client.post("/generate", json=body)
            assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text


async def leave(server: FastAPI, version: str, after: int) -> int:
    """A client that leaves after so many messages, as both versions of ASGI say it. Returns how many it was sent."""
    left, sent = asyncio.Event(), 0
    asked = [{"type": "http.request", "body": json.dumps({"tokens": TOKENS, "max_new_tokens": 5000}).encode()}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal sent
        if sent == after:
            left.set()
            if version == "2.4":
                raise OSError("the client has left")
        sent += 1
        await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": version}, "http_version": "1.1", "method": "POST",
        "path": "/generate", "raw_path": b"/generate", "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    with suppress(ClientDisconnect):
        await asyncio.wait_for(server(scope, receive, send), 20)
    return sent


@pytest.mark.parametrize("version", ["2.3", "2.4"])
@pytest.mark.parametrize("after", [0, 4])
async def test_a_client_that_leaves_ends_its_request(tmp_path: Path, version: str, after: int) -> None:
    server = make_app(make_weights(tmp_path))
    async with server.router.lifespan_context(server):
        scheduler = server.state.scheduler
        cache: AsyncCache = scheduler._board.cache
        assert await leave(server, version, after) < 50
        await until(lambda: not cache.statistics().leases and not scheduler._board.requests())
        assert scheduler.steps < 1000, "it was not computed to its end"


# ``python -m benchmarks.ttft``, small: every way is measured in every round, and a hit in another tier than was
# meant is no figure.


SMALL = ["--prefix", "64", "--own", "4", "--repeats", "2", "--layers", "1", "--width", "64"]


def test_every_way_is_measured_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("QUIET_FOR", "EVERY"):               # every line of the progress is shown
        monkeypatch.setattr(output, pause, 0.0)
    report = tmp_path / "ttft.json"
    assert bench(ttft, [*SMALL, "--json", str(report)], prog="ttft") == 0
    figures = json.loads(report.read_text())
    assert list(figures["ttft_ms"]) == ["no cache", "miss", "L1", "L2", "L3"]
    assert all(len(times) == 2 and min(times) > 0 for times in figures["all_ms"].values())
    assert figures["prefix_bytes"] == 64 * 2 * 64 * 4
    shown = capsys.readouterr()
    assert "[10/10]" in shown.err
    assert "\nL3 " in shown.out
    assert max(map(len, (shown.out + shown.err).splitlines())) <= 80


def test_a_hit_in_another_tier_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(SMALL)

    async def nothing(*args: object) -> None:
        """The device keeps what it has."""

    monkeypatch.setattr(Bench, "_empty_device", nothing)
    with pytest.raises(RuntimeError, match=r"not the expected hit: Hits\(device=64, .*\), not \(0, 64, 0\)"):
        run(options, lambda line: None)
