"""What ``AsyncCache(debug=True)`` costs: CPU time for each MiB of KV that a lease gets, publishes and finds again.

Run it: python -m benchmarks.debug
"""

# ruff: noqa: T201
from __future__ import annotations

import asyncio
import logging
from time import process_time

import torch

from asynccache import AsyncCache, CacheConfig, Full

LAYERS, TOKENS, ROUNDS = 32, 512, 4
FULL = Full.attention(layers=LAYERS, kv_heads=8, head_dim=128, dtype="bfloat16", device="1GiB")
CONFIG = CacheConfig(model="debug", components=(FULL,))


async def measure(debug: bool) -> tuple[float, ...]:
    """Return the ms for each MiB of the best round: entering a lease, a commit, and a hit."""
    size = TOKENS * FULL.bytes_per_token / (1 << 20)
    took = []
    async with AsyncCache(CONFIG, debug=debug) as cache:
        layers = [cache.pools["full"].kv(i) for i in range(LAYERS)]
        for number in range(ROUNDS):
            prompt = [number * 10_000 + i for i in range(TOKENS)]
            begin = process_time()
            async with cache.lease(prompt) as lease:
                entered = process_time()
                for layer in layers:
                    layer[lease.pages.tolist()] = 0.5
                computed = process_time()
                await lease.commit(prompt)
                committed = process_time()
            ended = process_time()
            async with cache.lease([*prompt, 1]) as lease:
                await lease.loaded()
                took.append((entered - begin, committed - computed, process_time() - ended))
    return tuple(min(times) * 1e3 / size for times in zip(*took, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print("CPU ms for each MiB        enter   commit      hit")
    for debug in (False, True):
        print(f"debug={debug!s:<18}" + "".join(f"{ms:9.3f}" for ms in asyncio.run(measure(debug))))


if __name__ == "__main__":
    main()
