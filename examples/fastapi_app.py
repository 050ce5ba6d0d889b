"""A server around a model of one's own: write ``forward(batch)``, and take the Scheduler of ``asynccache_shim``. It
batches requests, streams their tokens, and ends the requests of clients that have left. The cache lives in the app's
lifespan, and its metrics are mounted.

    pip install fastapi uvicorn
    python examples/fastapi_app.py --port 8000 --storage 'file:/var/tmp/kv?capacity=1GiB'
    curl -N localhost:8000/generate -H 'Content-Type: application/json' -d '{"tokens": [1, 2, 3], "max_new_tokens": 8}'
    curl localhost:8000/cache/statistics
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from asynccache_shim import NO_TOKEN, Batch, Limits, Request, Scheduler
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from tiny_llama import FULL, PAGE, VOCABULARY, Row, TinyLlama, make_weights

from asynccache import AsyncCache, CacheClosed, CacheConfig, CacheFull, ConfigError
from asynccache.metrics import LoopLag, app
from asynccache.storage import weights_digest


class Model:
    """What the Scheduler asks of a model: one blocking method, which is called in a thread."""

    def __init__(self, folder: Path, cache: AsyncCache) -> None:
        self._llama = TinyLlama(folder, cache.pools["full"])

    def forward(self, batch: Batch) -> list[int]:
        rows = [Row(chunk.tokens, chunk.start, chunk.stop, chunk.pages) for chunk in batch.chunks]
        made = zip(batch.chunks, self._llama.compute(rows), strict=True)
        return [token if chunk.sample else NO_TOKEN for chunk, token in made]


class Prompt(BaseModel):
    """The body of a request to ``/generate``. ``tenant``: prompts of two tenants share nothing."""

    tokens: list[int]
    max_new_tokens: int = 16
    tenant: str | None = None


class TokenStream(StreamingResponse):
    """The tokens of ``request``, as server-sent events. A client that leaves ends its request, also if it leaves before
    the first token."""

    def __init__(self, request: Request) -> None:
        self._request = request
        super().__init__(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for token in self._request:
                yield f"data: {token}\n\n"
        except Exception as error:  # the answer has begun, so its status says 200 already
            yield f"event: error\ndata: {error}\n\n"
        else:
            yield f"event: done\ndata: {sum(self._request.hits or ())} tokens of the prompt were cached\n\n"

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            self._request.abort()  # nothing happens if it has ended


def make_app(folder: Path, storage: str | None = None) -> FastAPI:
    """The app, with the weights in ``folder``. ``storage``: the URL of a store."""
    # Other weights in the folder are another model, whose KV is never mixed up with that of these.
    cache = AsyncCache(CacheConfig(model=weights_digest(folder), components=(FULL,), page_size=PAGE, storage=storage))
    lag = LoopLag()

    @asynccontextmanager
    async def lifespan(server: FastAPI) -> AsyncIterator[None]:
        """Everything is opened on the server's own event loop, and closed when the server ends."""
        lag.start()
        try:
            async with cache, Scheduler(cache, Model(folder, cache)) as server.state.scheduler:
                yield
        finally:
            lag.stop()

    server = FastAPI(lifespan=lifespan)
    server.mount("/cache", app(cache, lag=lag))

    @server.post("/generate")
    async def generate(prompt: Prompt) -> TokenStream:
        if not all(0 <= token < VOCABULARY for token in prompt.tokens):
            raise HTTPException(400, f"tokens must be from 0 to {VOCABULARY - 1}")
        try:
            request = Request(prompt.tokens, Limits(prompt.max_new_tokens), namespace=prompt.tenant)
            return TokenStream(server.state.scheduler.submit(request))
        except (ConfigError, CacheFull) as error:  # it is none, or could never run
            raise HTTPException(400, str(error)) from error
        except CacheClosed as error:
            raise HTTPException(503, str(error)) from error

    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A FastAPI app around a model of one's own.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--storage", help="the URL of a store, as file:/var/tmp/kv?capacity=1GiB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uvicorn.run(make_app(make_weights(Path(folder)), given.storage), port=given.port)
