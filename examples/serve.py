"""A small serving loop: many conversations at once, three tiers, and a sliding window besides full attention.

Run it: python examples/serve.py
"""

# ruff: noqa: T201
from __future__ import annotations

import asyncio
import random

import numpy as np
import torch

from asynccache import AsyncCache, CacheConfig, Full, Lease, SlidingWindow

PAGE, LAYERS, BYTES = 16, 4, 256
WORDS = BYTES // LAYERS // 8
"""Numbers of 8 bytes that a layer keeps of a token."""

CONFIG = CacheConfig(
    model="example-model",
    components=(
        Full(bytes_per_token=BYTES, layers=LAYERS, device_tokens=8192, host_tokens=32768),
        SlidingWindow(window=128, bytes_per_token=BYTES, layers=LAYERS, device_tokens=8192, host_tokens=32768),
    ),
    page_size=PAGE,
    storage="memory:",
)


def compute(cache: AsyncCache, lease: Lease, tokens: list[int], start: int) -> None:
    """Compute ``tokens[start:]``: write to both pools, where a model would write its KV. Here: the token itself."""
    at = np.arange(start, len(tokens))
    made = torch.tensor(tokens[start:], dtype=torch.int64)[:, None].expand(-1, WORDS)
    for pool in ("full", "swa"):
        pages = lease.page_table(pool)[at // PAGE]
        kept = pages >= 0  # a window has no pages before it
        for layer in range(LAYERS):
            kv = cache.pools[pool].layer(layer).view(torch.int64).view(-1, PAGE, WORDS)
            kv[pages[kept].astype(np.int64), at[kept] % PAGE] = made[torch.from_numpy(kept)]


async def serve(cache: AsyncCache, prompt: list[int], answer: list[int]) -> int:
    """Serve one turn of a conversation; returns how many of its prompt's tokens came from the cache."""
    handle = cache.prefetch(prompt)  # as soon as the request arrives
    async with cache.lease(prompt, new_tokens=len(answer), prefetch=handle) as lease:
        await lease.loaded()
        compute(cache, lease, prompt, lease.cached)
        await lease.commit(prompt)  # others can hit the prompt while this request decodes
        tokens = list(prompt)
        for token in answer[:-1]:  # the last token is never computed
            lease.advance(len(tokens))  # gives back the pages that the window has left
            tokens.append(token)
            compute(cache, lease, tokens, len(tokens) - 1)
        await lease.commit(tokens)
        return lease.cached


async def converse(cache: AsyncCache, seed: int) -> tuple[int, int]:
    """Four turns of a conversation, each of which repeats all text before it. Returns how many prompt tokens came from
    the cache, and how many there were."""
    rng = random.Random(seed)
    text, saved, total = list(range(512)), 0, 0
    for _ in range(4):
        text += [rng.randrange(50_000) for _ in range(100)]
        answer = [rng.randrange(50_000) for _ in range(60)]
        saved += await serve(cache, text, answer)
        total += len(text)
        text += answer
    return saved, total


async def main() -> None:
    async with AsyncCache(CONFIG) as cache:
        turns = await asyncio.gather(*(converse(cache, seed) for seed in range(24)))
        saved, total = (sum(column) for column in zip(*turns, strict=True))
        print(f"{saved} of {total} prompt tokens came from the cache ({saved / total:.0%})")
        await cache.flush()
        for name, stage in cache.statistics().stages.items():
            print(f"{name:15} {stage.pages:6} pages {stage.bytes:10} bytes")


asyncio.run(main())
