"""A served model, and the same model without a cache to compare with."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch
from asynccache_hf import Layout, PagedModel, describe
from asynccache_hf.call import run
from asynccache_shim import Chunk, Limits, Request, Scheduler, SchedulerConfig
from transformers import DynamicCache

from asynccache import AsyncCache, CacheConfig, Hits
from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Faults
from asynccache.storage import StorageBackend
from tests import warm
from tests.engine.engine_models import VOCABULARY, make
from tests.waiting import until

CHILD = Path(__file__).parent / "engine_child.py"
PAGE = 8
CHUNK = 24
LIMIT = 1e-4
LIMITS = {"nemotron_h": 1e-3, "zamba2": 2e-3}
"""Families whose decoding in transformers differs from their prefill by more than this."""


@cache
def model_of(family: str, weights: int = 0) -> Any:
    return make(family, weights)


@cache
def layout_of(family: str, page_size: int = PAGE) -> Layout:
    return describe(model_of(family), page_size)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens; a shorter prompt of the same seed is a prefix of a longer one."""
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(VOCABULARY) for _ in range(length)]


class Generated(NamedTuple):
    """New tokens, and the logits that each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor
    hits: Hits

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hits)


class Heard(PagedModel):
    """A model of which the logits are known that a token was drawn from, by the tokens before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: dict[bytes, torch.Tensor] = {}

    def compute_all(self, chunks: Sequence[Chunk], keep: int = 1) -> list[torch.Tensor]:
        made = super().compute_all(chunks, keep)
        for chunk, logits in zip(chunks, made, strict=True):
            if chunk.sample:
                self.heard[chunk.tokens[: chunk.stop].tobytes()] = logits[-1:]
        return made


class Served:
    """A cache, and a model that a scheduler serves on it: a step computes ``CHUNK`` tokens, and so recurrent states are
    kept at the multiples of these, too."""

    def __init__(
        self, cache: AsyncCache, family: str, page_size: int = PAGE, weights: int = 0, model: Heard | None = None
    ) -> None:
        self.cache = cache
        self.family = family
        self.weights = weights
        self.model = model or Heard(model_of(family, weights), layout_of(family, page_size), cache.pools)
        step = max(CHUNK, page_size + 1)
        settings = SchedulerConfig(step_tokens=step, max_running=step - page_size, checkpoint_every=page_size)
        self.scheduler = Scheduler(cache, self.model, settings)
        self.worst = 0.0

    async def __aenter__(self) -> Self:
        await self.scheduler.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.scheduler.__aexit__(*raised)

    async def generate(self, tokens: Sequence[int], new_tokens: int = 4, **terms: Any) -> Generated:
        """Generate. If this is cancelled, the request is aborted."""
        request = self.scheduler.submit(Request(list(tokens), Limits(new_tokens), **terms))
        try:
            made = await request.done()
        except asyncio.CancelledError:
            request.abort()
            raise
        text = Request([*tokens, *made]).tokens
        logits = [self.model.heard[text[:stop].tobytes()] for stop in range(len(tokens), len(text))]
        assert request.hits is not None
        return Generated(made, torch.cat(logits), request.hits)

    async def check(self, tokens: Sequence[int], new_tokens: int = 4, **terms: Any) -> Generated:
        """Generate, and compare with one call of the model without a cache."""
        made = await self.generate(tokens, new_tokens, **terms)
        error, wanted = self.difference(tokens, made)
        self.worst = max(self.worst, error)
        assert made.tokens == wanted, f"{self.family}: other tokens, {made.cached} cached"
        assert error <= LIMITS.get(self.family, LIMIT), f"{self.family}: logits differ by {error}, {made.cached} cached"
        return made

    def difference(self, tokens: Sequence[int], made: Generated) -> tuple[float, list[int]]:
        """The largest difference of a logit from one call without a cache, and the tokens that this would make."""
        logits, wanted = judged(self.family, tokens, made.tokens, self.weights)
        return float((made.logits - logits).abs().max()), wanted

    async def empty_device(self) -> None:
        """Take every page of the device for a moment, so that whatever is cached leaves it."""
        await empty_device(self.cache)

    async def empty_host(self) -> None:
        """Publish other pages until nothing of what was there before is left on device or host."""
        config = self.cache.config
        device = self.cache.statistics().device["full"].capacity * config.page_size // 2
        total = self.cache.statistics().host["full"].capacity * config.page_size
        for seed in range(-(-2 * total // device)):
            filler = prompt(device, seed=-1 - seed)
            async with self.cache.lease(filler, namespace="filler") as lease:
                checkpoint = (device, int(lease.states[1])) if self.model.layout.recurrent else None
                await lease.commit(filler, checkpoint=checkpoint)
            await settled(self.cache)


async def empty_device(cache: AsyncCache) -> None:
    """Take every page of the device for a moment, so that whatever is cached leaves it."""
    await settled(cache)
    slots = cache.statistics().device
    states = slots["mamba"].capacity if "mamba" in slots else None
    count = min(shelf.capacity for name, shelf in slots.items() if name != "mamba") * cache.config.page_size
    async with cache.lease([0], new_tokens=count - 1, namespace="filler", states=states):
        pass


@cache
def alone(family: str, weights: int, tokens: tuple[int, ...]) -> torch.Tensor:
    """All logits of one call without a cache, ``[tokens, vocabulary]``."""
    with torch.inference_mode():
        return torch.as_tensor(model_of(family, weights)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0])


def judged(
    family: str, tokens: Sequence[int], made: Sequence[int], weights: int = 0
) -> tuple[torch.Tensor, list[int]]:
    """One call without a cache over ``tokens`` and what is said to follow them: the logits that each token of ``made``
    is to be chosen from, and the likeliest tokens. Those are ``made``, if it is what the model makes by itself."""
    logits = alone(family, weights, (*tokens, *made[:-1]))[-len(made) :]
    return logits, logits.argmax(-1).tolist()


def own_decoding(family: str, tokens: Sequence[int]) -> float:
    """The largest difference of a logit between transformers' own decoding, token by token, and one call."""
    model, logits = model_of(family), []
    held = DynamicCache(config=model.config)
    with torch.inference_mode():
        for at, token in enumerate(tokens):
            logits.append(run(model, torch.tensor([token]), held, 1, at))
    return float((torch.cat(logits) - alone(family, 0, tuple(tokens))).abs().max())


@asynccontextmanager
async def served(
    family: str, *, device: int = 32, host: int = 128, storage: StorageBackend | None = None, page_size: int = PAGE,
    faults: Faults | None = None, storage_url: str | None = None, **more: Any,
) -> AsyncIterator[Served]:
    """``device``, ``host``: pages. At the end: nothing leaked, and the audit passes."""
    more.setdefault("prefetch_threshold", page_size)
    config: CacheConfig = layout_of(family, page_size).cache_config(
        device_tokens=device * page_size, host_tokens=host * page_size, host_states=32, storage=storage_url, **more
    )
    own = CpuDevice(faults=faults)
    try:
        async with AsyncCache(config, device=own, storage=storage) as cache:
            async with sound_at_the_end(Served(cache, family, page_size)) as served:
                yield served
    finally:
        await own.aclose()


@asynccontextmanager
async def sound_at_the_end(served: Served) -> AsyncIterator[Served]:
    """When the block is left, everything comes to rest, and the audit must hold."""
    async with served:
        yield served
    await settled(served.cache)
    check(served.cache.core, idle=True)


def open_caches() -> list[AsyncCache]:
    """The caches of this process that are open."""
    return [each for each in gc.get_objects() if type(each) is AsyncCache and each.closed is None]


async def settled(cache: AsyncCache) -> None:
    """Return when all published pages are saved and nothing is in flight."""
    await cache.flush(timeout=20)
    await until(lambda: not cache.core.world.ledger.ops)  # a prefetch that nobody waits for ends by itself


ROOT = Path(__file__).parents[2]


def run_child(folder: Path, *families: str, inherit: bool = True) -> list[str]:
    """What a process of its own says of what is stored in ``folder``, a line a family: its name and cached tokens by
    tier. ``inherit``: with this process's PYTHONPATH, too."""
    ran = warm.run([sys.executable, str(CHILD), "serve", str(folder), *families], capture_output=True, text=True,
                   timeout=120, imports=warm.MODELS, env=os.environ | {"PYTHONPATH": paths(inherit)})  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [line.rpartition(" ")[0] for line in ran.stdout.splitlines()]


def paths(inherit: bool = True) -> str:
    """PYTHONPATH of a child."""
    own = [str(ROOT), str(ROOT / "backends"), str(ROOT / "scheduler_shim")]
    return os.pathsep.join(own + [os.environ.get("PYTHONPATH", "")] * inherit)


class Member:
    """A child that answers: ``share FAMILY URL`` or ``rank``."""

    def __init__(self, *words: str) -> None:
        self.process = warm.Popen(
            [sys.executable, "-W", "error", str(CHILD), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths()}, imports=warm.MODELS,
        )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def tell(self, job: Any) -> None:
        """Begin a job, or a turn with prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, seconds: float) -> Any:
        """The value of ``key`` in the next line that has it."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = json.loads(self._lines.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                raise AssertionError(f"no {key} within {seconds} s; exit {self.process.poll()}") from None
            if key in line:
                return line[key]

    def end(self, seconds: float = 60.0) -> int | None:
        """Give the process no more jobs. Returns its exit status; None if it did not end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model computes."""
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, given: calls.append(given["input_ids"].shape[1]),
                                           with_kwargs=True)  # fmt: skip
    try:
        yield calls
    finally:
        hook.remove()


@contextmanager
def held_back(model: Any, after: int = 3) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The model computes so many steps, sets the first event, and goes on when the second is set, or the block left."""
    there, go, steps = threading.Event(), threading.Event(), count(1)

    def wait(*_: Any) -> None:
        if next(steps) > after:
            there.set()
            go.wait(20)

    hook = model.register_forward_pre_hook(wait)
    try:
        yield there, go
    finally:
        go.set()
        hook.remove()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result(60) for made in [pool.submit(call) for call in calls]]
