"""The time to first token of a prompt with a shared prefix, by the tier that has it: ``python -m benchmarks.ttft``.

A random model of about 50 million parameters (Qwen3's architecture, float32) runs on the CPU under the scheduler shim.
The time counts from ``submit`` to the first token. Each request has the shared prefix and some tokens of its own. A
round measures each way to get the prefix once, so that other work of the machine slows all of them alike. For L3 the
cache is a new one, on a store that another cache has filled. It is checked that the whole prefix was a hit in the tier
that is measured. "No cache" is transformers alone, which computes in chunks of the same size. Every thread that
computes has computed something before it is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import torch
import transformers
import uvloop
from asynccache_hf import Layout, PagedModel, describe
from asynccache_shim import Limits, Request, Scheduler, SchedulerConfig

from asynccache.cli.output import Tell
from asynccache.config import CacheConfig
from asynccache.core.settings import PrefetchPolicy
from asynccache.errors import ConfigError
from asynccache.runtime.cache import AsyncCache
from benchmarks.parsing import integer
from benchmarks.tables import Chart, Row, bench

PAGE = 16
CHUNK = 512
VOCABULARY = 32_000
WAYS = ("no cache", "miss", "L1", "L2", "L3")

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("--prefix", type=integer(PAGE), default=4096, metavar="N",
                        help=f"tokens of the shared prefix, a multiple of {PAGE} (default: %(default)s)")
    parser.add_argument("--own", type=integer(1), default=32, metavar="N",
                        help="tokens of its own at the end of each prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=integer(1), default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--layers", type=integer(1), default=8, metavar="N",
                        help="layers of the model (default: %(default)s)")
    parser.add_argument("--width", type=integer(64), default=512, metavar="N",
                        help="hidden size of the model, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--storage", metavar="URL", help="L3 (default: a file store in a temporary folder)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure and return the figures.

    Raises:
        ConfigError: an option cannot be used.
        Unavailable: the store cannot be opened.
    """
    for name, unit in (("prefix", PAGE), ("width", 64)):
        if getattr(args, name) % unit:
            raise ConfigError(f"--{name}={getattr(args, name)} must be a multiple of {unit}")
    numbers = count(1)

    def took(way: str, seconds: float) -> None:
        tell(f"[{next(numbers):>2}/{args.repeats * len(WAYS)}] {way:<32} {seconds * 1e3:8.1f} ms")

    tell("filling the store")
    with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
        bench = Bench(args, args.storage or f"file:{folder}/store?capacity={_store_bytes(args)}")
        times = uvloop.run(bench.measure(took))
    return bench.figures(times)


def make_model(layers: int, width: int, context: int) -> Any:
    """A model with random weights, the same ones each time."""
    transformers.logging.set_verbosity_error()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=context, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation="sdpa", dtype=torch.float32).eval()


def _store_bytes(args: argparse.Namespace) -> int:
    """Bytes of a store that has room for the prefix and for the prompts that miss in each round."""
    heads = max(1, int(args.width) // 128)
    token = 2 * 4 * 64 * heads * int(args.layers)
    return 2 * int(args.repeats + 2) * int(args.prefix + args.own) * token + (256 << 20)


@dataclass(frozen=True, slots=True)
class Served:
    """A cache and its scheduler."""

    cache: AsyncCache
    scheduler: Scheduler


class Bench:
    """Measures one model with one store."""

    def __init__(self, args: argparse.Namespace, storage: str) -> None:
        self._args = args
        self._storage = storage
        self._length = args.prefix + args.own
        self._model = make_model(args.layers, args.width, self._length + PAGE)
        self._layout: Layout = describe(self._model, PAGE)
        self._random = random.Random(0)
        self._prefix = self._tokens(args.prefix)
        self._thread = ThreadPoolExecutor(1)

    async def _alone(self, work: Callable[[], float]) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self) -> list[int]:
        return self._prefix + self._tokens(self._args.own)

    def _config(self) -> CacheConfig:
        """The cache's configuration: a device with room for two prompts and a host with room for four."""
        device = 2 * (-(-self._length // PAGE) + 1) * PAGE
        return self._layout.cache_config(
            device_tokens=device, host_tokens=2 * device, storage=self._storage, prefetch_threshold=PAGE,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        )  # fmt: skip

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Served]:
        async with AsyncCache(self._config()) as cache:
            model = PagedModel(self._model, self._layout, cache.pools)
            async with Scheduler(cache, model, SchedulerConfig(step_tokens=CHUNK)) as scheduler:
                await scheduler.submit(Request(self._tokens(PAGE), Limits(max_new_tokens=1), namespace="warm")).done()
                yield Served(cache, scheduler)

    # measuring

    async def measure(self, tell: Callable[[str, float], None]) -> dict[str, list[float]]:
        """Measure all rounds; returns the seconds of each round by way. Cancelling closes everything that is open."""
        times: dict[str, list[float]] = {way: [] for way in WAYS}

        def took(way: str, seconds: float) -> None:
            times[way].append(seconds)
            tell(way, seconds)

        await self._alone(self._without)
        async with self._served() as served:
            await self._first_token(served, (0, 0, 0))
            await served.cache.flush()
        for number in range(self._args.repeats):
            took("no cache", await self._alone(self._without))
            await self._round(f"round {number}", took)
        return times

    async def _round(self, unknown: str, took: Callable[[str, float], None]) -> None:
        """Measure each way once. ``unknown``: a namespace that was not used before. No page is moved in the background
        while a time is taken."""
        shared = self._args.prefix
        async with self._served() as served:
            took("L3", await self._first_token(served, (0, 0, shared)))
            took("L1", await self._first_token(served, (shared, 0, 0)))
            await self._empty_device(served.cache)
            took("L2", await self._first_token(served, (0, shared, 0)))
            took("miss", await self._first_token(served, (0, 0, 0), unknown))

    async def _first_token(self, served: Served, expected: tuple[int, int, int], namespace: str | None = None) -> float:
        request = Request(self._prompt(), Limits(max_new_tokens=1), namespace=namespace)
        start = time.perf_counter()
        await served.scheduler.submit(request).next_token(0)
        seconds = time.perf_counter() - start
        if request.hits != expected:
            raise RuntimeError(f"not the expected hit: {request.hits}, not {expected}")
        await served.cache.flush()
        return seconds

    async def _empty_device(self, cache: AsyncCache) -> None:
        """Evict everything from the device, by taking every page for a moment."""
        pages = cache.statistics().device["full"].capacity
        async with cache.lease([0], new_tokens=pages * PAGE - 1, namespace="filler"):
            pass

    @torch.inference_mode()
    def _without(self) -> float:
        """The time to first token with the model alone; its cache is transformers' own and ends with the request."""
        ids, state = torch.tensor([self._prompt()]), transformers.DynamicCache(config=self._model.config)
        start = time.perf_counter()
        for at in range(0, self._length, CHUNK):
            part = ids[:, at : at + CHUNK]
            out = self._model(input_ids=part, past_key_values=state, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        return time.perf_counter() - start

    def figures(self, times: dict[str, list[float]]) -> Figures:
        """The figures as plain values; the medians are shown."""
        return {
            "bench": "ttft",
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "prefix_tokens": self._args.prefix,
            "own_tokens": self._args.own,
            "prefix_bytes": sum(pool.page_bytes for pool in self._layout.pools) * self._args.prefix // PAGE,
            "cores": len(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "ttft_ms": {way: round(median(seconds) * 1e3, 1) for way, seconds in times.items()},
            "all_ms": {way: [round(s * 1e3, 1) for s in seconds] for way, seconds in times.items()},
        }


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield the times of each way."""
    medians, every = figures["ttft_ms"], figures["all_ms"]
    yield Chart("Time to first token by the tier that has the prefix: ms",
                ("median", "best", "worst", "times as fast"), [
        Row(way, [median, min(every[way]), max(every[way]), round(medians["no cache"] / median, 1)])
        for way, median in medians.items()
    ], [
        f"{figures['prefix_tokens']} shared tokens and {figures['own_tokens']} more, "
        f"{figures['parameters'] / 1e6:.0f} M parameters, {figures['torch_threads']} threads",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(bench(sys.modules[__name__], sys.argv[1:], prog="python -m benchmarks.ttft"))
