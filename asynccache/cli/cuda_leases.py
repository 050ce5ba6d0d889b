"""A layer-wise load as an engine has it: through a cache, a lease and ``wait_layer``.

Two prompts take turns on a device that holds one of them, so each lease finds all of its prompt on the host. What is
timed begins before the lease and ends with the last layer's computation; so matching, eviction and planning are in it.
"""

from __future__ import annotations

import time
from typing import Any

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.cuda_compute import Products
from asynccache.cli.meter import spread
from asynccache.memory.cuda.device import CudaDevice

LAYERS, SIDE = 32, 2048
PAGES, PAGE_TOKENS, PAGE_BYTES = 512, 16, 2 << 20

Figures = dict[str, Any]


async def layer_wise(device: CudaDevice, index: int, rounds: int) -> Figures:
    """Measure a load of all layers, a computation that takes as long, and both together, where the computation of each
    layer waits for the layer's load. Returns the figures, in seconds unless a name says otherwise. Cancelling it closes
    the cache; what is in flight ends by itself."""
    products = Products(index, SIDE)
    full = Full(bytes_per_token=PAGE_BYTES // PAGE_TOKENS, layers=LAYERS, device_tokens=(PAGES + 8) * PAGE_TOKENS,
                host_tokens=(2 * PAGES + 8) * PAGE_TOKENS)  # fmt: skip
    config = CacheConfig(model="bench", components=(full,), page_size=PAGE_TOKENS, device=device.name)
    async with AsyncCache(config, device=device) as cache:
        prompts = _Prompts(cache, device, products)
        for _ in range(4):  # both are computed, backed up and pushed out, then loaded: all is warm
            await prompts.serve(0)
        load = min([await prompts.serve(0) for _ in range(rounds)])
        one = min(products.seconds(64) for _ in range(rounds)) / 64
        each = max(1, round(load / LAYERS / one))
        compute = min(products.seconds(each * LAYERS) for _ in range(rounds))
        prompts.waits.clear()
        together = min([await prompts.serve(each) for _ in range(rounds)])
    waits = spread(prompts.waits, 1e6)
    return {"layers": LAYERS, "load_s": round(load, 6), "compute_s": round(compute, 6),
            "together_s": round(together, 6), "ratio": round(together / max(load, compute), 3),
            "tokens": min(prompts.loaded), "wait_layer_p50_us": round(waits.p50, 2),
            "wait_layer_max_us": round(waits.max, 2)}  # fmt: skip


class _Prompts:
    """Two prompts that are served by turns. ``waits``: how many seconds each ``wait_layer`` kept the caller.
    ``loaded``: how many tokens each of the last two leases had from the host."""

    def __init__(self, cache: AsyncCache, device: CudaDevice, products: Products) -> None:
        self._cache = cache
        self._products = products
        self._engine: Any = device.engine_stream(products.stream)
        self._tokens = [[side * 1_000_000 + i for i in range(PAGES * PAGE_TOKENS + 1)] for side in range(2)]
        self.waits: list[float] = []
        self.loaded: list[int] = []

    async def serve(self, each: int) -> float:
        """Serve the next prompt with ``each`` products in each layer, which wait for the layer's load; 0: the load
        alone. Returns how many seconds it took, from before the lease to the end of the last layer's products."""
        self._tokens.reverse()
        tokens, began = self._tokens[0], time.perf_counter()
        async with self._cache.lease(tokens) as lease:
            for layer in range(LAYERS):
                called = time.perf_counter()
                lease.wait_layer(self._products.stream, layer)
                self.waits.append(time.perf_counter() - called)
                self._products.put(each)
            await self._engine.record().wait()
            taken = time.perf_counter() - began
            self.loaded = [*self.loaded, lease.hits.host][-2:]
            await lease.commit(tokens)
        return taken
