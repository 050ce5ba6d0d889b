"""New tokens per CPU second of a transformers model, by the way to run it: ``generate`` in a batch and row by row, the
continuous batching of transformers by itself and on our pages (``ContinuousBatching``), our scheduler on
``PagedModel``, and ``PrefixCache``. Ways that cache are measured cold, and with most of each prompt cached.

    python benchmarks/transformers_models.py

A random Llama of 52 million parameters, one thread, eight requests of 128 + 24 tokens. Ways take turns, each round all
of them, so that they meet the same machine; the table has the medians. What counts is the process's CPU time, in which
a busy machine shows less than on a clock. If the ways do not make the same tokens, an error ends the benchmark.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from asynccache_hf import ContinuousBatching, PagedModel, PrefixCache, describe
from asynccache_shim import Limits, Request, Scheduler, SchedulerConfig

from asynccache import AsyncCache

REQUESTS, PROMPT, NEW, PAGE = 8, 128, 24, 16
SHARED = PROMPT * 7 // 8

Tokens = list[list[int]]


def make() -> Any:
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=1024, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


def prompts(seed: int) -> Tokens:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(1, 32000, (REQUESTS, PROMPT), generator=made).tolist()


class Timed:
    """CPU seconds of each way, a figure a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(self, way: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        self.seconds.setdefault(way, []).append(time.process_time() - start)
        return made


def batched(generate: Callable[..., Any], texts: Tokens) -> Tokens:
    out = generate(torch.tensor(texts), max_new_tokens=NEW, do_sample=False)
    return [row[PROMPT:] for row in out.tolist()]


def one_by_one(generate: Callable[..., Any], texts: Tokens) -> Tokens:
    return [generate(torch.tensor([t]), max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist() for t in texts]


def on_pages(batching: ContinuousBatching, texts: Tokens) -> Tokens:
    return [request.result() for request in batching.generate_batch(texts, max_new_tokens=NEW)]


def continued(manager: Any, texts: Tokens) -> Tokens:
    """The tokens that transformers' own ``manager`` generates after each prompt.

    Raises:
        RuntimeError: the manager has ended before that.
    """
    ids = manager.add_requests(inputs=texts, max_new_tokens=NEW)
    found: dict[str, list[int]] = {}
    while len(found) < len(texts):
        told = manager.get_result(timeout=1)
        if told is not None and told.is_finished():
            found[told.request_id] = told.generated_tokens
        elif told is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching has ended")
    return [found[each] for each in ids]


async def scheduled(scheduler: Scheduler, texts: Tokens) -> Tokens:
    asked = [scheduler.submit(Request(text, Limits(NEW))) for text in texts]
    return list(await asyncio.gather(*(request.done() for request in asked)))


async def measure(rounds: int) -> dict[str, float]:
    model = make()
    layout = describe(model, PAGE)
    timed = Timed()
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = transformers.generation.configuration_utils.ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=256, max_batch_tokens=1024
    )
    config = layout.cache_config(device_tokens=16384, host_tokens=0)
    prefix = PrefixCache(model, page_size=PAGE, device_tokens=16384, host_tokens=0)
    batching = ContinuousBatching(model, page_size=PAGE, device_tokens=16384, host_tokens=0, generation_config=greedy)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=blocks)
    manager.start()
    try:
        async with AsyncCache(config) as cache:
            settings = SchedulerConfig(step_tokens=1024)
            async with Scheduler(cache, PagedModel(model, layout, cache.pools), settings) as ours:
                for number in range(-1, rounds):
                    texts = prompts(2 * number + 2)
                    again = [[*t[:SHARED], *u[SHARED:]] for t, u in zip(texts, prompts(2 * number + 3), strict=True)]
                    wanted = timed.take("generate, batch of 8", lambda texts=texts: batched(model.generate, texts))
                    known = batched(model.generate, again)
                    made = {
                        "generate, one by one": lambda texts=texts: one_by_one(model.generate, texts),
                        "continuous batching": lambda texts=texts: continued(manager, texts),
                        "ContinuousBatching, cold": lambda texts=texts: on_pages(batching, texts),
                        "PrefixCache, batch of 8, cold": lambda texts=texts: batched(prefix.generate, texts),
                    }
                    for way, work in made.items():
                        assert timed.take(way, work) == wanted, way
                    start = time.process_time()
                    assert await scheduled(ours, texts) == wanted
                    timed.seconds.setdefault("scheduler, cold", []).append(time.process_time() - start)
                    start = time.process_time()
                    assert await scheduled(ours, again) == known
                    timed.seconds.setdefault("scheduler, 88 % cached", []).append(time.process_time() - start)
                    made = {
                        "continuous batching, 88 % cached": lambda again=again: continued(manager, again),
                        "ContinuousBatching, 88 % cached": lambda again=again: on_pages(batching, again),
                        "PrefixCache, batch of 8, 88 % cached": lambda again=again: batched(prefix.generate, again),
                    }
                    for way, work in made.items():
                        assert timed.take(way, work) == known, way
                    if number < 0:
                        timed.seconds.clear()
    finally:
        manager.stop(block=True)
        batching.close()
        prefix.close()
    return {way: REQUESTS * NEW / median(seconds) for way, seconds in timed.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speeds = asyncio.run(measure(args.rounds))
    print("| who runs it | new tokens per CPU second | beside continuous batching |\n|---|---:|---:|")
    for way, speed in speeds.items():
        print(f"| {way} | {speed:.1f} | {speed / speeds['continuous batching']:.2f} × |")


if __name__ == "__main__":
    main()
