"""An OpenAI-compatible HTTP server on asynccache: a model whose KV cache has three tiers.

    python examples/openai_server.py --model Qwen/Qwen3-0.6B --storage 'file:/var/tmp/kv?capacity=10GiB'

``--model`` is a folder, or a name on Hugging Face's hub, with weights, tokenizer and chat template. ``--path`` says
what computes: our scheduler, or transformers' own ``generate`` on the cache.

Without ``--model`` the model is small and random, so its answers are noise. All else is real: prompts that share a
prefix share its KV, ``usage`` says how much of a prompt came from the cache, and after a restart the server finds the
prefixes in storage.
"""

# ruff: noqa: T201, E402
from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from types import FrameType
from typing import Any

NEEDS = ("asynccache", "jinja2", "prometheus_client", "starlette", "torch", "transformers", "uvicorn", "uvloop")
"""Modules that must be installed; the extra [server] brings all of them."""

if _missing := [name for name in NEEDS if find_spec(name) is None]:
    _root = Path(__file__).resolve().parents[1]
    sys.exit(f"openai_server: {', '.join(_missing)} is not installed: pip install -e '{_root}[server]'")

import torch
import uvicorn
import uvloop
from asynccache_shim import SchedulerConfig
from openai_serving.app import build
from openai_serving.arrival import Punctual
from openai_serving.models import FAMILIES, checkpoint, random
from openai_serving.paths import PATHS, OnEvent, PathParts
from openai_serving.service import Service, ServiceParts

from asynccache import AsyncCacheError
from asynccache.cli.entry import INTERRUPTED, TERMINATED, Termination

SPARE_CONNECTIONS = 64
"""Connections besides one for each request: for clients that keep theirs open, and for metrics and health checks."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server with a hierarchical KV cache.")
    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="PATH|NAME", help="a folder that has a checkpoint with its tokenizer, or its "
                       "name on the hub (default: a random model)")  # fmt: skip
    model.add_argument("--revision", metavar="NAME", help="which revision of a model on the hub")
    model.add_argument("--dtype", default="auto", help="dtype to compute in, as float32 (default: the checkpoint's)")
    model.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda:0, ... (default: %(default)s)")
    model.add_argument("--served-model-name", metavar="NAME", help="what requests call the model (default: as --model)")
    model.add_argument("--model-family", choices=FAMILIES, default="qwen3", help="architecture of a random model "
                       "(default: %(default)s)")  # fmt: skip
    model.add_argument("--seed", type=int, default=0, metavar="N", help="seed of a random model's weights (default: 0)")
    model.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's own)")
    cache = parser.add_argument_group("the cache")
    cache.add_argument("--storage", metavar="URL", help="L3: file:PATH, memory:, ... (default: none)")
    cache.add_argument("--device-tokens", type=int, default=32768, metavar="N",
                       help="room in L1, in tokens (default: %(default)s)")
    cache.add_argument("--host-tokens", type=int, default=131072, metavar="N",
                       help="room in L2, in tokens (default: %(default)s)")
    cache.add_argument("--states", type=int, default=64, metavar="N",
                       help="recurrent states on the device; four times as many on the host (default: %(default)s)")
    cache.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page (default: %(default)s)")
    cache.add_argument("--kv-events", metavar="ENDPOINT",
                       help="publish where pages are, for routers, at for example tcp://*:5557")
    cache.add_argument("--kv-events-replay", metavar="ENDPOINT", help="where routers can ask for missed events")
    cache.add_argument("--kv-events-topic", default="", metavar="TEXT", help="topic of the events (default: none)")
    work = parser.add_argument_group("requests")
    work.add_argument("--path", choices=list(PATHS), default="scheduler", help="what computes answers (default: "
                      "%(default)s)")  # fmt: skip
    work.add_argument("--step-tokens", type=int, default=512, metavar="N",
                      help="tokens in one step of the scheduler at most (default: %(default)s)")
    work.add_argument("--max-running", type=int, default=32, metavar="N",
                      help="requests in one step of the scheduler at most (default: %(default)s)")
    work.add_argument("--max-live", type=int, default=1024, metavar="N",
                      help="answers at a time, also waiting ones; more get status 429 (default: %(default)s)")
    work.add_argument("--chat-tokens", type=int, default=1024, metavar="N",
                      help="tokens of an answer in a chat that has no max_tokens (default: %(default)s)")
    work.add_argument("--drain", type=float, default=30, metavar="S",
                      help="seconds that running requests may take after SIGTERM (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free port (default: %(default)s)")
    parser.add_argument("--log-level", default="warning", metavar="LEVEL", help="uvicorn's (default: %(default)s)")
    return parser.parse_args(argv)


def served(args: argparse.Namespace, on_event: OnEvent | None = None) -> ServiceParts:
    """Return the parts of the service: the model, its tokenizer and its path. ``on_event``: called with KV events.

    Raises:
        ConfigError: a setting cannot be used, or the model cannot be loaded or served.
    """
    if args.model is None:
        served = random(args.model_family, args.seed)
    else:
        served = checkpoint(args.model, dtype=args.dtype, device=args.device, revision=args.revision)
    cache: dict[str, Any] = {
        "device_tokens": args.device_tokens, "host_tokens": args.host_tokens, "device_states": args.states,
        "host_states": 4 * args.states, "storage": args.storage, "prefetch_threshold": args.page_size,
        "device": args.device,
    }  # fmt: skip
    path = PATHS[args.path](PathParts(
        model=served.model, page_size=args.page_size, cache=cache, on_event=on_event,
        scheduler=SchedulerConfig(step_tokens=args.step_tokens, max_running=args.max_running),
    ))  # fmt: skip
    return ServiceParts(
        name=args.served_model_name or args.model or f"random-{args.model_family}",
        words=served.words,
        path=path,
        context=min(n for n in (args.device_tokens, served.context, path.limit) if n is not None),
        chat_tokens=args.chat_tokens,
        max_live=args.max_live,
    )


@contextmanager
def announced(args: argparse.Namespace) -> Iterator[OnEvent | None]:
    """The publisher of KV events, open as long as the block runs; None if ``--kv-events`` was not given.

    Raises:
        AsyncCacheError: the publisher cannot listen at that endpoint, or a library that it needs is not installed.
    """
    with ExitStack() as stack:
        publisher = None
        if args.kv_events is not None:
            try:
                from asynccache.events import ZmqPublisher
            except ModuleNotFoundError as error:
                raise AsyncCacheError(f"--kv-events: {error}") from None
            publisher = stack.enter_context(
                ZmqPublisher(args.kv_events, args.kv_events_replay, topic=args.kv_events_topic)
            )
        yield publisher


class OpenAIServer(uvicorn.Server):
    """A server that prints its address when it listens. When it is told to stop, requests may run for ``drain``
    seconds; those that are left then are ended. A second SIGTERM ends the process at once."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain = drain

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(greeting(f"http://{host}:{port}", self._service.served.name), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain, self._service.cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def greeting(url: str, model: str) -> str:
    """The line that is printed at the start: the address, and a command to try."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    return f"{url}  try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


@contextmanager
def told_once() -> Iterator[None]:
    """Ignore the signal that uvicorn was stopped with, which it raises again when it has stopped. After this block
    everything is being closed, and SIGTERM ends the process at once."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def serve(args: argparse.Namespace, planned: ServiceParts) -> int:
    """Open everything, serve until SIGINT or SIGTERM, close everything; returns the exit status."""
    async with Service(planned) as service:
        app = build(service)
        config = uvicorn.Config(app, host=args.host, port=args.port, log_level=args.log_level, lifespan="off",
                                http=Punctual, limit_concurrency=args.max_live + SPARE_CONNECTIONS)  # fmt: skip
        server = OpenAIServer(config, service, args.drain)
        with told_once():
            await server.serve()
    return 0 if server.started else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server. Returns the exit status: 0 after serving until Ctrl-C or SIGTERM, 1 if it could not listen, 2 if
    a setting cannot be used; if a signal comes before the server serves, 130 for Ctrl-C and 143 for SIGTERM."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    termination = Termination()
    signal.signal(signal.SIGTERM, termination)
    try:
        with announced(args) as on_event:
            return uvloop.run(serve(args, served(args, on_event)))
    except AsyncCacheError as error:
        print(f"openai_server: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return TERMINATED if termination.came else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
