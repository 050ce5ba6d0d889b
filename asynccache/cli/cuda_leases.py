"""A layer-wise load as an engine has it: through a cache, a lease and ``wait_layer``.

Two prompts take turns on a device that holds one of them, so each lease finds all of its prompt on the host. What is
timed begins before the lease and ends with the last layer's computation; so matching, eviction and planning are in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.cuda_compute import LAYERS, SMALL_SIDE, Products, as_long, overlap
from asynccache.memory.cuda.device import CudaDevice

PAGES, PAGE_TOKENS, PAGE_BYTES = 512, 16, 2 << 20

Figures = dict[str, Any]


async def layer_wise(device: CudaDevice, index: int, rounds: int) -> Figures:
    """The figures. Cancelling it closes the cache; what is in flight ends by itself."""
    products = Products(index, SMALL_SIDE)
    async with AsyncCache(_config(device), device=device) as cache:
        prompts = _Prompts(cache, device, products)
        for _ in range(4):  # both are computed, backed up and pushed out, then loaded: all is warm
            await prompts.serve(0)
        load = min([await prompts.load() for _ in range(rounds)])
        each, compute = as_long(products, load, LAYERS, rounds)
        turns = [await prompts.serve(each) for _ in range(rounds)]
    found = overlap(LAYERS, load, compute, min(turn.seconds for turn in turns))
    return {**found, "tokens": min(turn.loaded for turn in turns), "wait_layer": _host_time(turns, load)}


def _config(device: CudaDevice) -> CacheConfig:
    full = Full(bytes_per_token=PAGE_BYTES // PAGE_TOKENS, layers=LAYERS, device_tokens=(PAGES + 8) * PAGE_TOKENS,
                host_tokens=(2 * PAGES + 8) * PAGE_TOKENS)  # fmt: skip
    return CacheConfig(model="bench", components=(full,), page_size=PAGE_TOKENS, device=device.name)


class _Turn(NamedTuple):
    """One prompt: ``loaded`` tokens came from the host, ``waits`` is how long each ``wait_layer`` kept the caller."""

    seconds: float
    loaded: int
    waits: Sequence[float]


def _host_time(turns: Sequence[_Turn], load: float) -> Figures:
    """What ``wait_layer`` costs the thread that calls it."""
    each = sorted(wait for turn in turns for wait in turn.waits)
    all_layers = sum(each) / len(turns)
    return {"p50_us": _us(each[len(each) // 2]), "max_us": _us(each[-1]), "all_layers_us": _us(all_layers),
            "share_of_the_load": round(all_layers / load, 4)}  # fmt: skip


class _Prompts:
    """Two of them, by turns."""

    def __init__(self, cache: AsyncCache, device: CudaDevice, products: Products) -> None:
        self._cache = cache
        self._products = products
        self._engine = device.engine_stream(products.stream)
        self._tokens = [[side * 1_000_000 + i for i in range(PAGES * PAGE_TOKENS + 1)] for side in range(2)]

    async def load(self) -> float:
        """Seconds until all of a prompt is there again."""
        began = time.perf_counter()
        async with self._cache.lease(self._next()) as lease:
            await lease.loaded()
            return time.perf_counter() - began

    async def serve(self, each: int) -> _Turn:
        """A lease, and so many products in each layer, which waits for its own."""
        tokens, waits, began = self._next(), [], time.perf_counter()
        async with self._cache.lease(tokens) as lease:
            for layer in range(LAYERS):
                called = time.perf_counter()
                lease.wait_layer(self._products.stream, layer)
                waits.append(time.perf_counter() - called)
                self._products.put(each)
            await self._engine.record().wait()
            turn = _Turn(time.perf_counter() - began, lease.hits.host, waits)
            await lease.commit(tokens)
        return turn

    def _next(self) -> list[int]:
        self._tokens.reverse()
        return self._tokens[0]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
