"""A router in front of several OpenAI-compatible servers: each prompt goes where most of it is cached and least waits.

    python examples/openai_server.py --port 8001 --kv-events tcp://127.0.0.1:5001 --kv-events-replay tcp://127.0.0.1:6001
    python examples/openai_server.py --port 8002 --kv-events tcp://127.0.0.1:5002 --kv-events-replay tcp://127.0.0.1:6002
    python examples/router.py --server http://127.0.0.1:8001,tcp://127.0.0.1:5001,tcp://127.0.0.1:6001 \\
                              --server http://127.0.0.1:8002,tcp://127.0.0.1:5002,tcp://127.0.0.1:6002

A server is its URL and pairs of addresses: where it publishes KV events, and where it is asked for those of before. A
second pair is its machine's host process (``asynccache serve --events``), which several servers may have in common.

What a server would have to compute is counted in blocks: those of the prompt that it has nowhere, a fraction of those
that it has in host memory or storage, and all that other requests there have still to compute. The smallest sum wins. A
server that does not answer is left out until its ``/healthz`` does; a request that it had not begun to answer goes to
another.

``blocks_of`` is the only part that knows the engine: it names a prompt's blocks as that engine's KV events do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
from aiohttp import web

from asynccache import ConfigError
from asynccache.events import EventStream, Fleet, TierHits, prompt_blocks

COST_IN_HOST, COST_IN_STORAGE = 0.1, 0.4
"""What it costs to load a block, where it costs 1 to compute it."""
ANSWER = 64
"""Blocks that stand for the work of an answer, whatever its prompt: they spread prompts that nobody has."""
HEALTH_EVERY = 0.5
PROMPTS = ("/v1/completions", "/v1/chat/completions")
AWAY = (aiohttp.ClientConnectionError, TimeoutError, ConnectionError)
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
              "upgrade", "content-encoding"}  # fmt: skip


class Server:
    """One server. ``load``: the blocks that its requests have still to compute. ``healthy``: whether it answers."""

    def __init__(self, url: str, streams: Sequence[EventStream]) -> None:
        self.url = url.rstrip("/")
        self.streams = streams
        self.load = 0
        self.served = 0
        self.healthy = False

    @classmethod
    def parse(cls, text: str) -> Server:
        """The server that ``--server`` names."""
        url, *addresses = text.split(",")
        if not url.startswith("http") or len(addresses) % 2:
            raise argparse.ArgumentTypeError(f"{text!r} must be URL[,EVENTS,REPLAY[,EVENTS,REPLAY]]")
        return cls(url, [EventStream(*pair) for pair in zip(addresses[::2], addresses[1::2], strict=True)])


class Router:
    """The application's state."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.fleet = Fleet()
        self.session: aiohttp.ClientSession
        self.names: dict[str, Any] | None = None
        for server in servers:
            self.fleet.add(server.url, list(server.streams))

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """What lasts as long as the application."""
        patient = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
        async with aiohttp.ClientSession(timeout=patient, connector=aiohttp.TCPConnector(limit=0)) as self.session:
            checks = [asyncio.create_task(self.check(server)) for server in self.servers]
            yield
            for check in checks:
                check.cancel()
            await asyncio.wait(checks)
        self.fleet.close()

    async def check(self, server: Server) -> None:
        """Ask a server again and again whether it is well."""
        while True:
            try:
                async with asyncio.timeout(2.0), self.session.get(f"{server.url}/healthz") as answer:
                    server.healthy = answer.status == 200
            except (*AWAY, aiohttp.ClientError):
                server.healthy = False
            await asyncio.sleep(HEALTH_EVERY)

    # where a prompt goes

    async def blocks_of(self, raw: bytes) -> list[int]:
        """What KV events call the blocks of a request's prompt; none if no server can say. Any server tells its tokens,
        as vLLM's do, and ours tell what else goes into a block's name."""
        for server in [server for server in self.servers if server.healthy]:
            with suppress(*AWAY, aiohttp.ClientError, ConfigError, AttributeError, LookupError, TypeError, ValueError):
                body = json.loads(raw)  # if that, or what follows, cannot be read, a server says what is wrong with it
                asked = {name: body[name] for name in ("prompt", "messages") if name in body}
                async with asyncio.timeout(2.0):
                    if self.names is None:
                        async with self.session.get(f"{server.url}/v1/models") as answer:
                            self.names = (await answer.json())["data"][0]["kv_blocks"]
                    async with self.session.post(f"{server.url}/tokenize", json=asked) as answer:
                        tokens = (await answer.json())["tokens"]
                return prompt_blocks(tokens, **self.names, namespace=body.get("cache_salt"))
        return []

    def choose(self, blocks: list[int], among: Sequence[Server]) -> tuple[Server, int]:
        """The server for a prompt, and what it costs there."""
        held = self.fleet.hits(blocks)

        def cost(server: Server) -> float:
            hits = held.get(server.url, TierHits(0, 0, 0))
            return len(blocks) - sum(hits) + COST_IN_HOST * hits.host + COST_IN_STORAGE * hits.storage

        best = min(among, key=lambda server: (cost(server) + server.load, server.served))
        return best, round(cost(best)) + ANSWER

    # requests

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Have one of the servers answer."""
        raw = await request.read()
        blocks = await self.blocks_of(raw) if request.path in PROMPTS else []
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        left = [server for server in self.servers if server.healthy]
        while left:
            server, cost = self.choose(blocks, left)
            server.load += cost
            try:
                async with AsyncExitStack() as stack:
                    try:
                        asked = self.session.request(request.method, server.url + request.path_qs, data=raw,
                                                     headers=headers, allow_redirects=False)  # fmt: skip
                        answer = await stack.enter_async_context(asked)
                    except AWAY:
                        server.healthy = False
                        left.remove(server)
                    except aiohttp.ClientError as error:  # it has answered, and that is no HTTP
                        raise web.HTTPBadGateway(text=f"{server.url}: {error}") from error
                    else:
                        return await self.pass_on(request, answer, server)
            finally:
                server.load -= cost
        raise web.HTTPServiceUnavailable(text="no server answers")

    async def pass_on(self, request: web.Request, answer: aiohttp.ClientResponse, server: Server) -> web.StreamResponse:
        """Pass an answer on as it comes."""
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in HOP_BY_HOP:
                response.headers.add(name, value)
        response.headers["x-served-by"] = server.url
        await response.prepare(request)
        server.served += 1
        try:
            while piece := await answer.content.readany():
                await response.write(piece)
        except aiohttp.ClientError:  # one of the two has gone in the middle: the client sees that there is no end
            if request.transport is not None:
                request.transport.abort()
        return response

    async def status(self, request: web.Request) -> web.Response:
        """What the router knows of its servers."""
        streams = self.fleet.stats()
        return web.json_response({server.url: {
            "healthy": server.healthy, "load": server.load, "served": server.served,
            "streams": [stream._asdict() for stream in streams.get(server.url, ())],
        } for server in self.servers})  # fmt: skip


def build(router: Router) -> web.Application:
    """The application."""
    app = web.Application(client_max_size=16 << 20)
    app.cleanup_ctx.append(router.run)
    app.add_routes([web.get("/router", router.status), web.route("*", "/{path:.*}", router.forward)])
    return app


def main() -> None:
    """Run the router until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Routes prompts to the server that has most of them cached.")
    parser.add_argument("--server", type=Server.parse, action="append", required=True, metavar="URL,EVENTS,REPLAY",
                        help="a server, and its KV events; may be given several times")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="(default: %(default)s)")
    options = parser.parse_args()
    web.run_app(build(Router(options.server)), host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
