"""The second table of ``asynccache bench ttft``: many requests at once, with transformers' continuous batching.

It is measured in two ways, by transformers alone and on the cache's pages (``asynccache_hf.ContinuousBatching``), cold
and with most of each prompt cached. Each way has two figures: seconds until all requests have their first token, and
new tokens per second of the process's CPU time, which includes computing the prompts. Both ways get the same prompts,
compute at most the same number of tokens in a step, and have room for everything that a round computes, so neither
evicts. A round opens both anew and lets each compute something before it is timed. It is an error if the two make
different tokens, or if not exactly the expected tokens are cached.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import transformers
from asynccache_hf import ContinuousBatching
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE = 16
STEP = 1024
"""Tokens that a step computes at most."""

WHO = ("transformers alone", "ContinuousBatching")

Tokens = list[list[int]]
Serve = Callable[[Tokens, int], Tokens]
"""A function that continues each prompt by a number of tokens, and returns these."""


class RequestLoad(NamedTuple):
    """Requests that are served at once: ``requests`` of them, with ``prompt`` tokens and ``new`` new tokens each."""

    requests: int
    prompt: int
    new: int

    @property
    def cached(self) -> int:
        """The tokens of a prompt that are cached in the runs with hits: seven eighths, in whole pages."""
        return self.prompt * 7 // 8 // PAGE * PAGE

    @property
    def ways(self) -> dict[str, list[str]]:
        """The names of the ways that are measured, with nothing cached and with hits."""
        hits = f"{round(100 * self.cached / self.prompt)} % cached"
        return {what: [f"{who}, {what}" for who in WHO] for what in ("cold", hits)}


class Times(NamedTuple):
    """For each way, a value of each round: seconds until all requests have their first token, and new tokens per CPU
    second."""

    first: dict[str, list[float]]
    speed: dict[str, list[float]]


def measure(model: Any, load: RequestLoad, rounds: int, took: Callable[[str, float], None]) -> Times:
    """Measure all ways in ``rounds`` rounds. ``took`` is called with the name of a way and its seconds until all
    requests have their first token, as soon as they are known.

    Raises:
        ConfigError: the model, or this version of transformers, cannot be served in this way.
        RuntimeError: two ways made different tokens, or other tokens were cached than should have been.
    """
    names = [way for both in load.ways.values() for way in both]
    times = Times({way: [] for way in names}, {way: [] for way in names})
    prompts = _RandomPrompts(load, int(model.config.vocab_size))
    for _ in range(rounds):
        with _alone(model, load) as alone, _on_pages(model, load) as ours:
            for serve in (alone, ours):
                serve(prompts.unknown(), 2)
            for new in (1, load.new):
                known = prompts.unknown()
                for texts, ways in zip((known, prompts.like(known)), load.ways.values(), strict=True):
                    for way, (wall, cpu) in _compared(texts, new, dict(zip(ways, (alone, ours), strict=True))).items():
                        if new == 1:
                            times.first[way].append(wall)
                            took(way, wall)
                        else:
                            times.speed[way].append(load.requests * new / cpu)
    return times


def _compared(texts: Tokens, new: int, serves: dict[str, Serve]) -> dict[str, tuple[float, float]]:
    """Serve the same prompts in each way; returns seconds of wall and of CPU time by way."""
    took, made = {}, []
    for way, serve in serves.items():
        wall, cpu = time.perf_counter(), time.process_time()
        made.append(serve(texts, new))
        took[way] = time.perf_counter() - wall, time.process_time() - cpu
    if made[0] != made[1]:
        raise RuntimeError(f"{' and '.join(serves)} make different tokens")
    return took


class _RandomPrompts:
    """Makes random prompts, the same ones in each run."""

    def __init__(self, load: RequestLoad, vocabulary: int) -> None:
        self._load = load
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def unknown(self) -> Tokens:
        return [self._tokens(self._load.prompt) for _ in range(self._load.requests)]

    def like(self, known: Tokens) -> Tokens:
        """Prompts that begin as those of ``known``, as far as they are to be cached."""
        cached = self._load.cached
        return [[*tokens[:cached], *self._tokens(self._load.prompt - cached)] for tokens in known]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]


def _room(load: RequestLoad) -> int:
    """The number of pages that hold everything that a round computes."""
    return 5 * load.requests * -(-(load.prompt + load.new) // PAGE)


def _generation(load: RequestLoad) -> Any:
    return transformers.GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def continued(manager: Any, texts: Tokens, new: int) -> Tokens:
    """The tokens that transformers' own ``manager`` generates after each prompt.

    Raises:
        RuntimeError: the manager has ended before that.
    """
    ids = manager.add_requests(inputs=texts, max_new_tokens=new)
    found: dict[str, list[int]] = {}
    while len(found) < len(texts):
        told = manager.get_result(timeout=1)
        if told is not None and told.is_finished():
            found[told.request_id] = told.generated_tokens
        elif told is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching has ended")
    return [found[each] for each in ids]


@contextmanager
def _alone(model: Any, load: RequestLoad) -> Iterator[Serve]:
    blocks = ContinuousBatchingConfig(page_size=PAGE, num_blocks=_room(load), max_batch_tokens=STEP)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it recommends psutil
    manager = model.init_continuous_batching(generation_config=_generation(load), continuous_batching_config=blocks)

    manager.start()
    try:
        yield partial(continued, manager)
    finally:
        manager.stop(block=True)


@contextmanager
def _on_pages(model: Any, load: RequestLoad) -> Iterator[Serve]:
    sizes: dict[str, Any] = {"page_size": PAGE, "device_tokens": _room(load) * PAGE, "host_tokens": 0,
                             "step_tokens": STEP}  # fmt: skip
    with ContinuousBatching(model, **sizes, generation_config=_generation(load), name="bench") as batching:
        known: set[tuple[int, ...]] = set()

        def serve(texts: Tokens, new: int) -> Tokens:
            expected = sum(load.cached for text in texts if tuple(text[: load.cached]) in known)
            known.update(tuple(text[: load.cached]) for text in texts)
            done = batching.generate_batch(texts, max_new_tokens=new)
            made = [request.result() for request in done]
            hits = sum(request.hits.device for request in done if request.hits is not None)
            if hits != expected:
                raise RuntimeError(f"not the expected hit: {hits} tokens, not {expected}")
            return made

        yield serve
