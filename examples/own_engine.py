"""The smallest asyncio engine that embeds the cache: two layers of attention whose KV is in the cache's pages.

Run it: python examples/own_engine.py
"""

# ruff: noqa: T201
from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from asynccache import AsyncCache, CacheConfig, Full, LoadFailed

PAGE, LAYERS, WIDTH, VOCABULARY = 16, 2, 32, 1000

CONFIG = CacheConfig(
    model="own-engine",  # stands for the weights: change it whenever the weights change
    components=(
        Full(bytes_per_token=LAYERS * 2 * WIDTH * 4, layers=LAYERS, device_tokens=8192, host_tokens=32768,
             dtype="float32"),
    ),
    page_size=PAGE,
    storage="memory:",
)  # fmt: skip


class RandomModel:
    """A model with random weights. It reads and writes KV only in the pages that it is called with."""

    def __init__(self, cache: AsyncCache) -> None:
        rng = torch.Generator().manual_seed(0)
        self._embedding, self._head = torch.randn(2, VOCABULARY, WIDTH, generator=rng)
        self._weights = [torch.randn(3, WIDTH, WIDTH, generator=rng) / WIDTH**0.5 for _ in range(LAYERS)]
        pools = [cache.pools["full"].layer(i) for i in range(LAYERS)]
        self._kv = [pool.view(torch.float32).view(len(pool), PAGE, 2, WIDTH) for pool in pools]

    @torch.inference_mode()
    def step(self, tokens: list[int], start: int, table: np.ndarray) -> int:
        """Compute ``tokens[start:]``; the KV of the tokens before is in the pages of ``table`` already. Returns the
        next token."""
        at = torch.arange(len(tokens))
        pages, slots = torch.from_numpy(table.astype(np.int64))[at // PAGE], at % PAGE
        x = self._embedding[tokens[start:]] + torch.sin(at[start:, None] / torch.arange(1, WIDTH + 1))
        ahead = at[start:, None] < at[None]
        for kv, (query, key, value) in zip(self._kv, self._weights, strict=True):
            kv[pages[start:], slots[start:]] = torch.stack((x @ key, x @ value), 1)
            keys, values = kv[pages, slots].unbind(1)
            scores = (x @ query @ keys.T).masked_fill(ahead, -torch.inf)
            x = torch.tanh(x + 4 * scores.softmax(-1) @ values)
        return int((self._head @ x[-1]).argmax())


class OwnEngine:
    """Generates tokens for many requests at once. The model runs in a thread of its own."""

    def __init__(self, cache: AsyncCache) -> None:
        self._cache = cache
        self._model = RandomModel(cache)
        self._thread = ThreadPoolExecutor(1)

    async def generate(self, prompt: list[int], count: int, tenant: str | None = None) -> tuple[list[int], int]:
        """Generate ``count`` tokens. Returns them, and how many of the prompt's tokens came from the cache. Cancelling
        gives all pages back."""
        handle = self._cache.prefetch(prompt, namespace=tenant)  # from storage, as soon as the request arrives
        attempts = 3
        while True:
            lease = self._cache.lease(prompt, new_tokens=count, namespace=tenant, prefetch=handle)
            try:
                async with lease:  # takes all pages that the request will need, or waits in line for them
                    await lease.loaded()  # what is cached is on the device
                    tokens, done, pages = list(prompt), lease.cached, lease.pages
                    while len(tokens) < len(prompt) + count:
                        token = await self._step(tokens, done, pages)
                        done = len(tokens)
                        if done == len(prompt):
                            pages = await lease.commit(tokens)  # others can hit the prompt from now on
                        tokens.append(token)
                    await lease.commit(tokens[:done])
                    return tokens[len(prompt) :], lease.cached
            except LoadFailed:  # the pages that failed to load are forgotten, and computed this time
                attempts -= 1
                if not attempts:
                    raise

    async def _step(self, tokens: list[int], done: int, table: np.ndarray) -> int:
        """Run one step in the thread; returns the next token. A cancellation takes effect when the step has ended,
        because its pages must not be given back while they are written."""
        step = asyncio.get_running_loop().run_in_executor(self._thread, self._model.step, tokens, done, table)
        try:
            await asyncio.wait([step])
        finally:
            while not step.done():
                try:
                    await asyncio.wait([step])
                except asyncio.CancelledError:
                    continue  # the first cancellation is raised when the step has ended
        return step.result()


async def main() -> bool:
    rng = random.Random(1)
    system = [rng.randrange(VOCABULARY) for _ in range(500)]
    prompts = [system + [rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(16)]
    async with AsyncCache(CONFIG) as cache:
        engine = OwnEngine(cache)
        first = await engine.generate(prompts[0], 24)
        answers = [first, *await asyncio.gather(*(engine.generate(prompt, 24) for prompt in prompts[1:]))]
        alone = await asyncio.gather(*(engine.generate(prompt, 24, tenant=str(i)) for i, prompt in enumerate(prompts)))
    saved, total = sum(cached for _, cached in answers), sum(map(len, prompts))
    same = [answer for answer, _ in answers] == [answer for answer, _ in alone]
    print(f"{saved} of {total} prompt tokens came from the cache ({saved / total:.0%}); "
          f"without it, the answers are {'the same' if same else 'different'}")  # fmt: skip
    return same and not any(cached for _, cached in alone)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if asyncio.run(main()) else 1)
