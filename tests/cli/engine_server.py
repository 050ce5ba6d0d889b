"""The example server in a thread of this process, so that tests can make it wrong on purpose."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai_server
import uvicorn
from asynccache_shim import Batch
from openai_serving.app import build
from openai_serving.protocol import ParsedRequest
from openai_serving.scores import ScoredModel
from openai_serving.service import Choices, Service, ServiceParts

from asynccache.cli.main import main

DEVICE, HOST = 1024, 4096
"""Room in tokens."""


def parts(family: str = "qwen3", **options: object) -> ServiceParts:
    """The parts of a server whose device and host memory are small."""
    given = {"device-tokens": DEVICE, "host-tokens": HOST, "storage": "memory:", "model-family": family, **options}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return openai_server.served(openai_server.arguments(words))


@contextmanager
def serving(planned: ServiceParts, kind: type[Service] = Service) -> Iterator[str]:
    """A server, and its address."""
    listens, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with kind(planned) as service:
            server = uvicorn.Server(uvicorn.Config(build(service), port=0, log_level="critical", lifespan="off"))
            running = asyncio.create_task(server._serve())
            while not server.started:  # noqa: ASYNC110  uvicorn sets no asyncio.Event
                await asyncio.sleep(0.01)
            found.extend((asyncio.get_running_loop(), server.servers[0].sockets[0].getsockname()[1]))
            listens.set()
            await stop.wait()
            server.should_exit = True
            await running

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            found.append(error)
            raise
        finally:
            listens.set()

    thread = threading.Thread(target=run, name="engine-server")
    thread.start()
    listens.wait()
    assert len(found) == 2, found
    try:
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        found[0].call_soon_threadsafe(stop.set)
        thread.join()


ADAPTERS = ("a", "b")


class Adapting(Service):
    """A server of two adapters of one model. ``apart``: whether their KV is kept apart."""

    apart = True

    def check_model(self, name: str) -> None:
        assert name in ADAPTERS

    def generate(self, ask: ParsedRequest, tokens: list[int]) -> Choices:
        """Mark the request with its adapter, in an option that greedy requests do not use."""
        salt = f"{ask.model}/{ask.cache_salt}" if self.apart else ask.cache_salt
        sampling = ask.sampling._replace(top_k=ADAPTERS.index(ask.model))
        return super().generate(replace(ask, cache_salt=salt, sampling=sampling), tokens)


class Mixing(Adapting):
    """The same, and wrong: what one adapter computed is found by the other."""

    apart = False


class AdaptedModel(ScoredModel):
    """A model whose second adapter is a changed matrix."""

    def forward(self, batch: Batch) -> list[int]:
        found: dict[int, int] = {}
        weight = self._model.model.layers[0].self_attn.v_proj.weight.data
        plain = weight.clone()
        for adapter in range(len(ADAPTERS)):
            chunks = tuple(chunk for chunk in batch.chunks if chunk.sampling.top_k == adapter)
            weight.copy_(plain * (1 - 2 * adapter))
            made = super().forward(Batch(chunks, () if adapter else batch.ended))
            found |= zip((chunk.request_id for chunk in chunks), made, strict=True)
        weight.copy_(plain)
        return [found[chunk.request_id] for chunk in batch.chunks]


FEW = ("--prompts", "6", "--length", "160", "--new-tokens", "8", "--at-once", "3", "--pause", "0.2")
FLUSHES = ("--flush-device", str(DEVICE), "--flush-host", str(DEVICE + HOST + 1024))


def verified(url: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command on the server; returns its status and its report."""
    file = folder / "report.json"
    status = main(["verify-engine", url, "--json", str(file), *FEW, *options])
    return status, json.loads(file.read_text())


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {tier["tier"]: tier["verdict"] for tier in report["tiers"]}
