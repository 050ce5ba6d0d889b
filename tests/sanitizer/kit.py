"""A small engine of a user who has read docs/embedding.md: attention over float32 pages, one layer behind the other, so
that what is read from wrong pages is seen in what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynccache import AsyncCache, CacheConfig, Full

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 8
WIDTH = HEADS * DIM
Table = npt.NDArray[np.int32]


def config(device: int = 512, host: int = 2048, **more: Any) -> CacheConfig:
    full = Full(bytes_per_token=LAYERS * 2 * WIDTH * 4, layers=LAYERS, dtype="float32", device_tokens=device,
                host_tokens=host)
    return CacheConfig(**{"model": "sanitized", "components": (full,), "page_size": PAGE, **more})


class Model:
    """Random weights. ``compute`` writes the KV of ``tokens[begin:end]``, and reads that of all tokens before."""

    def __init__(self, cache: AsyncCache) -> None:
        draw = torch.Generator().manual_seed(1)
        layers = [cache.pools["full"].layer(i) for i in range(LAYERS)]
        self.kv = [layer.view(torch.float32).view(len(layer), PAGE, 2, WIDTH) for layer in layers]
        self.embed = torch.randn(1000, WIDTH, generator=draw)
        self.weights = torch.randn(LAYERS, 3, WIDTH, WIDTH, generator=draw) / WIDTH**0.5

    def compute(self, tokens: list[int], begin: int, end: int, table: Table) -> None:
        pages = torch.from_numpy(table.copy()).long()
        at, before = torch.arange(begin, end), torch.arange(end)
        x = self.embed[torch.tensor(tokens[begin:end]) % 1000]
        for kv, (q, k, v) in zip(self.kv, self.weights, strict=True):
            kv[pages[at // PAGE], at % PAGE] = torch.stack([x @ k, x @ v], 1)
            seen = kv[pages[before // PAGE], before % PAGE]
            scores = (x @ q) @ seen[:, 0].T / WIDTH**0.5
            scores = scores.masked_fill(before[None] > at[:, None], float("-inf"))
            x = torch.nn.functional.layer_norm(x + scores.softmax(1) @ seen[:, 1], (WIDTH,))


def text(seed: int, count: int = 100) -> list[int]:
    return [(seed * 7919 + i * 31) % 100_000 for i in range(count)]


async def serve(cache: AsyncCache, model: Model, prompt: list[int], count: int = 20, **more: Any) -> int:
    """Serve a request as one should. Returns how many of its tokens were cached."""
    async with cache.lease(prompt, new_tokens=count, **more) as lease:
        await lease.loaded()
        tokens, table = list(prompt), lease.pages
        model.compute(tokens, lease.cached, len(tokens), table)
        table = await lease.commit(tokens)
        for i in range(count):
            tokens.append(i)
            model.compute(tokens, len(tokens) - 1, len(tokens), table)
        await lease.commit(tokens)
        return lease.cached
