"""A cache on the threaded CPU device, a model whose KV and tokens are a function of the prefix, a scheduler on both.

The model checks everything it is handed: each position of FULL, of the window and of the state must hold what the
prefix says; nobody may be told to write a page that somebody else of the batch reads or writes.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from asynccache_backends.memory import MemoryBackend
from asynccache_shim import NO_TOKEN, Batch, Chunk, Limits, Request, Scheduler, SchedulerConfig

from asynccache import AsyncCache, CacheConfig, Full, Hits, Mamba, SlidingWindow
from asynccache.core.audit import check
from asynccache.core.cache import CacheCore
from tests.runtime.runtime_kit import text as text

PAGE = 4
LAYERS = 2
WORD = 8
VOCABULARY = 50

Words = npt.NDArray[np.uint64]
_A, _B, _C = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def config(
    device: int = 64, host: int = 0, *, swa: int = 0, window: int = 8, mamba: int = 0, host_swa: int = 0,
    **more: Any,
) -> CacheConfig:  # fmt: skip
    """A configuration. ``device``, ``swa``, ``mamba``: pages (of ``PAGE`` tokens) of FULL and SWA, and MAMBA states, on
    the device. ``host``: pages of FULL on the host, which has twice the device's SWA pages and states unless told."""
    components: list[Any] = [
        Full(bytes_per_token=WORD * LAYERS, device_tokens=device * PAGE, host_tokens=host * PAGE, layers=LAYERS)
    ]
    if swa:
        there = (host_swa or 2 * swa) if host else 0
        components.append(
            SlidingWindow(window=window, bytes_per_token=WORD * LAYERS, device_tokens=swa * PAGE,
                          host_tokens=there * PAGE, layers=LAYERS)
        )  # fmt: skip
    if mamba:
        components.append(
            Mamba(state_bytes=WORD * LAYERS, device_states=mamba, host_states=2 * mamba if host else 0, layers=LAYERS)
        )
    more.setdefault("prefetch_threshold", PAGE)
    return CacheConfig(model="shim", components=tuple(components), page_size=PAGE, **more)


def prefix_values(tokens: npt.NDArray[np.int32]) -> Words:
    """One value for each position, which depends on every token up to it."""
    words = tokens.astype(np.uint64) + np.arange(1, len(tokens) + 1, dtype=np.uint64) * _A
    words ^= words >> np.uint64(31)
    sums: Words = (words * _B).cumsum(dtype=np.uint64)
    sums ^= sums >> np.uint64(29)
    return sums * _C


def next_token(tokens: npt.NDArray[np.int32]) -> int:
    """The token that follows ``tokens``."""
    return int(prefix_values(tokens)[-1] >> np.uint64(20)) % VOCABULARY


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """The ``count`` tokens that a model without any cache generates."""
    out = list(tokens)
    for _ in range(count):
        out.append(next_token(np.array(out, np.int32)))
    return out[len(tokens):]


def plain(batch: Batch) -> Any:
    """What a model reads of it."""
    return batch.ended, [
        (w.request_id, w.tokens[: w.stop].tolist(), w.start, w.stop, w.pages.tolist(), w.swa_pages.tolist(),
         w.states.tolist(), w.checkpoint, w.sample, w.sampling)
        for w in batch.chunks
    ]  # fmt: skip


class PatternModel:
    """A model that verifies the bytes that it reads, writes its own, and keeps nothing between steps but counters."""

    def __init__(self, cache: AsyncCache, window: int = 0, salt: int = 0) -> None:
        """``salt``: makes the bytes differ from those of other ranks."""
        self._salt = salt
        self._pools = {name: [_words(pool.layer(i)) for i in range(LAYERS)] for name, pool in cache.pools.items()}
        self._window = window
        self.computed = 0
        self.batches: list[Batch] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.threads: set[int] = set()
        self.fail: Exception | None = None

    def forward(self, batch: Batch) -> list[int]:
        """Compute the batch. Raises ``AssertionError`` if anything in it, or in the pages that it names, is wrong."""
        self.threads.add(threading.get_ident())
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.fail is not None:
            raise self.fail
        _check_apart(batch)
        self.batches.append(batch)
        return [self._compute(chunk) for chunk in batch.chunks]

    def _compute(self, chunk: Chunk) -> int:
        values = prefix_values(chunk.tokens[: chunk.stop])
        assert 0 <= chunk.start < chunk.stop <= len(chunk.tokens)
        assert chunk.stop <= len(chunk.pages) * PAGE, "the page table is too short"
        positions = np.arange(chunk.stop)
        self._part("full", chunk.pages, values, positions[: chunk.start], positions[chunk.start :])
        if "swa" in self._pools:
            low = max(0, chunk.start - self._window)
            self._part("swa", chunk.swa_pages, values, positions[low : chunk.start], positions[chunk.start :])
        if "mamba" in self._pools:
            self._state(chunk, values)
        self.computed += chunk.stop - chunk.start
        return next_token(chunk.tokens[: chunk.stop]) if chunk.sample else NO_TOKEN

    def _part(self, name: str, table: Any, values: Words, read: Any, write: Any) -> None:
        for layer, words in enumerate(self._pools[name]):
            salt = np.uint64(10_000 * self._salt + 1000 * layer + len(name))
            for which, verify in ((read, True), (write, False)):
                pages = table[which // PAGE]
                assert (pages >= 0).all(), f"{name}: no page at {which[pages < 0]}"
                if verify:
                    found = words[pages, which % PAGE]
                    assert (found == values[which] ^ salt).all(), f"{name}: wrong KV"
                else:
                    words[pages, which % PAGE] = values[which] ^ salt

    def _state(self, chunk: Chunk, values: Words) -> None:
        for layer, words in enumerate(self._pools["mamba"]):
            salt = np.uint64(10_000 * self._salt + layer + 100)
            slot = int(chunk.states[0])
            if chunk.start:
                assert words[slot, 0] == values[chunk.start - 1] ^ salt, "mamba: wrong state"
            words[slot, 0] = values[chunk.stop - 1] ^ salt
            if chunk.checkpoint is not None:
                assert chunk.checkpoint.position == chunk.stop
                assert chunk.checkpoint.slot != slot
                words[chunk.checkpoint.slot, 0] = values[chunk.stop - 1] ^ salt


def _words(layer: torch.Tensor) -> Any:
    """The layer as 64-bit numbers: an array if its memory is the host's, or an object that can be used like one."""
    return _OnGpu(layer) if layer.is_cuda else layer.numpy().view(np.uint64)


class _OnGpu:
    """Reads and writes words of a layer on a GPU, and waits for it."""

    def __init__(self, layer: torch.Tensor) -> None:
        self._words = layer.view(torch.int64)

    def __getitem__(self, at: tuple[Any, Any]) -> Words:
        found: Words = self._words[_indices(at)].cpu().numpy().view(np.uint64)
        return found

    def __setitem__(self, at: tuple[Any, Any], values: Any) -> None:
        words = np.ascontiguousarray(np.asarray(values, np.uint64)).view(np.int64)
        self._words[_indices(at)] = torch.from_numpy(words).to(self._words.device)
        torch.cuda.synchronize()


def _indices(at: tuple[Any, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.array(i, np.int64)) for i in at)


def _check_apart(batch: Batch) -> None:
    """Check that a page which one request writes is in no other request's table."""
    for name in ("pages", "swa_pages"):
        seen: dict[int, int] = {}
        for chunk in batch.chunks:
            table = getattr(chunk, name)
            written = set(table[chunk.start // PAGE : -(-chunk.stop // PAGE)].tolist())
            for other in batch.chunks:
                if other is not chunk:
                    assert not written & set(getattr(other, name).tolist()) - {-1}, f"{name}: shared and written"
            for page in written:
                assert seen.setdefault(page, chunk.request_id) == chunk.request_id


class Served:
    """A cache with a model and a scheduler; yielded by ``serving``."""

    def __init__(self, cache: AsyncCache, model: PatternModel, scheduler: Scheduler) -> None:
        self.cache = cache
        self.model = model
        self.scheduler = scheduler

    def ask(self, tokens: Sequence[int], new: int = 4, **more: Any) -> Request:
        """Submit a request."""
        return self.scheduler.submit(Request(list(tokens), Limits(new), **more))

    async def answer(self, tokens: Sequence[int], new: int = 4, **more: Any) -> Request:
        """Submit a request, and check its output."""
        request = self.ask(tokens, new, **more)
        assert await request.done() == continuation(tokens, new)
        return request


@asynccontextmanager
async def serving(
    settings: CacheConfig, *, audit: bool = True, storage: Any = None, device: Any = None, **limits: Any
) -> AsyncIterator[Served]:
    """A scheduler on an open cache. At the end: no lease is left, and the audit passes."""
    limits.setdefault("step_tokens", 64)
    limits.setdefault("max_running", 8)
    window = max((c.window for c in settings.components if isinstance(c, SlidingWindow)), default=0)
    async with AsyncCache(settings, storage=storage, device=device) as cache:
        model = PatternModel(cache, window)
        async with Scheduler(cache, model, SchedulerConfig(**limits)) as scheduler:
            yield Served(cache, model, scheduler)
        assert cache.statistics().leases == 0
        if audit:
            await cache.flush()
            core: CacheCore = cache.core
            check(core)


@asynccontextmanager
async def stored(*prompts: Sequence[int], host: int = 64) -> AsyncIterator[MemoryBackend]:
    """A store that has the pages of requests with these prompts."""
    store = MemoryBackend()
    async with serving(config(32, host), storage=store) as served:
        for tokens in prompts:
            await served.answer(tokens, 2)
    yield store
    await store.aclose()


def hits(request: Request) -> Hits:
    """The tiers that the request's prefix was on when it was admitted for the first time."""
    assert request.hits is not None
    return request.hits


async def push_out(cache: AsyncCache) -> None:
    """Empty the device; cached pages stay on the host."""
    await cache.flush()
    tiers = cache.statistics().device
    states = tiers["mamba"].capacity if "mamba" in tiers else None
    tokens = min(shelf.capacity for name, shelf in tiers.items() if name != "mamba") * PAGE
    everything = tiers["full"].capacity * PAGE
    async with cache.lease([7], new_tokens=everything - 1, chunk=everything, swa_chunk=tokens, states=states):
        pass
