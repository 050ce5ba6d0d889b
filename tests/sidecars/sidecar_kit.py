"""Stacks of pools with hand-made specs, and an engine that fills and reads every one of them: DeepSeek-V4's shape with
small pages and with pages of 256 tokens, FULL with an indexer, sidecars of sidecars."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from asynccache import AsyncCache, CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.config import Component, PoolSpec
from asynccache.core.settings import ComponentKind
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.runtime.lease import Lease
from tests.runtime import runtime_kit

MODEL = "test"
GARBAGE = 0xEE


def deepseek(page: int = 4, window: int = 8, device: int = 16, host: int = 32, **more: Any) -> CacheConfig:
    """Pages of each pool on each tier. FULL is logical; compressed KV hangs on it, compressor states on SWA."""
    entries = max(1, page // 4)
    sidecars = [
        Sidecar(name="c4", indices_from="full", bytes_per_page=entries * 8 * 2, layers=2),
        Sidecar(name="c4_indexer", indices_from="c4", bytes_per_page=entries * 3 * 2, layers=2),
        Sidecar(name="c128", indices_from="full", bytes_per_page=max(1, page // 128) * 24, layers=3),
        Sidecar(name="c4_state", indices_from="swa", bytes_per_page=40, layers=2),
        Sidecar(name="c4_indexer_state", indices_from="swa", bytes_per_page=10, layers=2),
    ]
    if page % 128:
        sidecars.append(Sidecar(name="c128_state", indices_from="swa", bytes_per_page=21, layers=3))
    sidecars.append(Sidecar(name="draft", indices_from="full", bytes_per_page=page * 4, layers=1))
    swa = SlidingWindow(
        window=window, bytes_per_token=10, layers=5, device_tokens=device * page, host_tokens=host * page
    )
    return stack(Full(bytes_per_token=0, device_tokens=device * page, host_tokens=host * page), swa,
                 sidecars=sidecars, page_size=page, **more)  # fmt: skip


def indexed(page: int = 4, device: int = 16, host: int = 32, **more: Any) -> CacheConfig:
    """FULL and one sidecar of fewer layers."""
    full = Full(bytes_per_token=16, layers=4, device_tokens=device * page, host_tokens=host * page)
    return stack(full, sidecars=[Sidecar(name="indexer", indices_from="full", bytes_per_page=page * 6, layers=2)],
                 page_size=page, **more)  # fmt: skip


def everything(page: int = 4, device: int = 16, host: int = 32, **more: Any) -> CacheConfig:
    """All three components with bytes of their own, a sidecar on each, and sidecars of those; names out of order."""
    sidecars = [
        Sidecar(name="z.scales", indices_from="y", bytes_per_page=7),
        Sidecar(name="y", indices_from="full", bytes_per_page=page * 3, layers=3),
        Sidecar(name="conv", indices_from="mamba", bytes_per_page=12, layers=4),
        Sidecar(name="a-state", indices_from="swa", bytes_per_page=9, layers=9),
        Sidecar(name="conv-tail", indices_from="conv", bytes_per_page=5),
    ]
    tokens: dict[str, Any] = {"device_tokens": device * page, "host_tokens": host * page}
    return stack(
        Full(bytes_per_token=8, layers=2, **tokens), SlidingWindow(window=6, bytes_per_token=4, layers=2, **tokens),
        Mamba(state_bytes=32, layers=2, device_states=device, host_states=host),
        sidecars=sidecars, page_size=page, **more,
    )  # fmt: skip


def stack(*components: Component, sidecars: Sequence[Sidecar], page_size: int, **more: Any) -> CacheConfig:
    more.setdefault("prefetch_threshold", page_size)
    return CacheConfig(model=MODEL, components=components, sidecars=tuple(sidecars), page_size=page_size, **more)


@asynccontextmanager
async def opened(config: CacheConfig, **more: Any) -> AsyncIterator[AsyncCache]:
    """``runtime_kit.opened``; a test that hangs fails."""
    async with asyncio.timeout(60), runtime_kit.opened(config, **more) as cache:
        yield cache


STACKS = {"deepseek": deepseek, "deepseek-256": lambda **more: deepseek(256, 128, **more),
          "indexed": indexed, "everything": everything}  # fmt: skip


def solid(config: CacheConfig) -> list[PoolSpec]:
    """The pools that have bytes."""
    return [spec for spec in config.pools() if spec.bytes_per_page]


def of(config: CacheConfig, kind: ComponentKind) -> list[str]:
    return [spec.name for spec in solid(config) if spec.component is kind]


def window(config: CacheConfig) -> int:
    return next((c.window for c in config.components if isinstance(c, SlidingWindow)), 0)


def text(config: CacheConfig, pages: int, seed: int = 0, extra: int = 0) -> list[int]:
    """Tokens of so many whole pages and ``extra`` more; different seeds share no page."""
    return [seed * 100_000 + i for i in range(pages * config.page_size + extra)]


def page_hashes(config: CacheConfig, tokens: Sequence[int]) -> list[bytes]:
    key = np.array(tokens, "<i4").tobytes()
    size = config.page_size
    stop = len(tokens) // size * size * 4
    hashes = extend_chain(namespace_digest(MODEL, size, None), key, 0, stop, size * 4)
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


value = lru_cache(1 << 16)(runtime_kit.value)


def put(cache: AsyncCache, pool: str, slot: int, page_hash: bytes) -> None:
    """Compute a page of ``pool``: its bytes follow from all that comes before its end."""
    for i in range(cache.pools[pool].spec.layers):
        layer = cache.pools[pool].layer(i)
        layer[slot] = torch.from_numpy(value(page_hash, pool, i, layer.shape[1]))


def holds(cache: AsyncCache, pool: str, slot: int, page_hash: bytes) -> bool:
    layers = [cache.pools[pool].layer(i) for i in range(cache.pools[pool].spec.layers)]
    return all(
        np.array_equal(layer[slot].cpu().numpy(), value(page_hash, pool, i, layer.shape[1]))
        for i, layer in enumerate(layers)
    )


def needed(config: CacheConfig, end: int) -> Iterator[tuple[PoolSpec, int]]:
    """Every page (position) of every pool that an engine reads when a prompt is cached up to ``end`` (tokens)."""
    pages = end // config.page_size
    for spec in solid(config):
        match spec.component:
            case ComponentKind.FULL:
                first = 0
            case ComponentKind.SWA:
                first = max(0, end - window(config)) // config.page_size
            case _:
                first = max(0, pages - 1)
        for page in range(first, pages):
            yield spec, page


def verify(cache: AsyncCache, lease: Lease, tokens: Sequence[int]) -> Counter[str]:
    """Compare every page of every pool that the engine would read. Returns how many there were, by pool."""
    hashes, seen = page_hashes(cache.config, tokens), Counter[str]()
    for spec, page in needed(cache.config, lease.cached):
        if spec.component is ComponentKind.MAMBA:
            slot = int(lease.states[0])
        else:
            slot = int(lease.page_table("swa" if spec.component is ComponentKind.SWA else "full")[page])
        assert slot >= 0, f"{spec.name} page {page} is missing"
        assert holds(cache, spec.name, slot, hashes[page]), f"{spec.name} page {page} has wrong bytes"
        seen[spec.name] += 1
    return seen


async def serve(cache: AsyncCache, tokens: Sequence[int], chunk: int = 0, **terms: Any) -> int:
    """One request: verify what is cached, compute the rest in every pool in chunks of so many pages (0: all at once),
    commit each. Returns how many tokens were cached."""
    size = cache.config.page_size
    hashes = page_hashes(cache.config, tokens)
    async with cache.lease(tokens, **terms) as lease:
        await lease.loaded()
        verify(cache, lease, tokens)
        start = lease.cached // size
        for first in range(start, len(hashes), chunk or len(hashes)):
            await compute(cache, lease, tokens, hashes, range(first, min(len(hashes), first + (chunk or len(hashes)))))
        return lease.cached


async def compute(
    cache: AsyncCache, lease: Lease, tokens: Sequence[int], hashes: Sequence[bytes], pages: range
) -> None:
    end, size = pages.stop, cache.config.page_size
    last = end == len(hashes) and of(cache.config, ComponentKind.MAMBA)
    states = lease.states[:2].tolist() if last else []
    for spec in solid(cache.config):
        if spec.component is ComponentKind.MAMBA:
            for slot in states:
                put(cache, spec.name, slot, hashes[end - 1])
        else:
            table = lease.page_table("swa" if spec.component is ComponentKind.SWA else "full")
            for page in pages:
                if table[page] >= 0:
                    put(cache, spec.name, int(table[page]), hashes[page])
    checkpoint = (end * size, states[1]) if states else None
    await lease.commit(tokens[: end * size], checkpoint=checkpoint)


def spoil_device(cache: AsyncCache, pools: Collection[str] | None = None) -> None:
    """Overwrite everything in the device pools (all, or these)."""
    for spec in solid(cache.config):
        for i in range(spec.layers if pools is None or spec.name in pools else 0):
            cache.pools[spec.name].layer(i).fill_(GARBAGE)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the streams of a CUDA device do not wait for torch's


async def push_out(cache: AsyncCache) -> None:
    """Evict everything from the device."""
    slots = {name: shelf.capacity for name, shelf in cache.statistics().device.items()}
    async with cache.lease(text(cache.config, slots["full"], seed=999), states=slots.get("mamba")):
        pass
    spoil_device(cache)
