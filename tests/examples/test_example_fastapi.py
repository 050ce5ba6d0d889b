"""The FastAPI app around a model of one's own: the cache lives as long as the app, clients get streams and may leave,
and the cache's pages are mounted beside the app's own."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastapi_app import make_app
from starlette.requests import ClientDisconnect
from tiny_llama import make_weights

from asynccache import AsyncCache
from tests.waiting import until

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
