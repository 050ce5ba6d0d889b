"""A FastAPI app with a cache in it: the cache is opened and closed in the app's lifespan, and its metrics are mounted.

    pip install fastapi uvicorn
    python examples/fastapi_app.py --port 8000
    curl -X POST localhost:8000/serve -H 'Content-Type: application/json' -d '{"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    curl localhost:8000/cache/statistics

``/serve`` does what an engine does with a request, but its "KV" is a copy of the tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.metrics import LoopLag, app

PAGE = 4
cache = AsyncCache(CacheConfig(
    model="fastapi-example", page_size=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=4096, host_tokens=16384),),
))  # fmt: skip
lag = LoopLag()


@asynccontextmanager
async def lifespan(server: FastAPI) -> AsyncIterator[None]:
    """Everything is opened on the server's own event loop, and closed when the server ends."""
    lag.start()
    try:
        async with cache:
            yield
    finally:
        lag.stop()


server = FastAPI(lifespan=lifespan)
server.mount("/cache", app(cache, lag=lag))


class Prompt(BaseModel):
    """The body of a request to ``/serve``."""

    tokens: list[int]


@server.post("/serve")
async def serve(prompt: Prompt) -> dict[str, int]:
    """Compute what the cache does not have of a prompt."""
    tokens = prompt.tokens
    async with cache.lease(tokens) as lease:
        await lease.loaded()
        whole = len(tokens) // PAGE * PAGE
        kv = torch.tensor(tokens[lease.cached:whole]).view(torch.uint8).view(-1, PAGE * 8)
        cache.pools["full"].layer(0)[lease.pages[lease.cached // PAGE:whole // PAGE].tolist()] = kv
        await lease.commit(tokens)
        return {"cached": lease.cached, "computed": len(tokens) - lease.cached}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A FastAPI app with a cache in it.")
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(server, port=parser.parse_args().port)
