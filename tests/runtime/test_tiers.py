"""Pages go out and come back with the bytes that they left with: over all tiers, in a new life, where others failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, Full, LoadFailed, Mamba, PrefetchPolicy, SlidingWindow
from asynccache.config import Component
from asynccache.core.audit import check
from asynccache.core.plan import Clone, Copy
from asynccache.memory.host_copies import Fates, Faults
from asynccache.runtime.lease import Lease
from asynccache.storage import PageKey
from tests.runtime.runtime_kit import (
    PAGE,
    Attended,
    assert_cached_bytes,
    compute,
    fence_all,
    gate,
    holds,
    on_the_host,
    opened,
    page_hashes,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    write,
)

# Pages go out and come back with the bytes that they left with, once for everybody who wants them.


async def test_an_engine_waits_layer_by_layer() -> None:
    async with opened(settings(device=8, host=16)) as cache:
        await on_the_host(cache, text(4))
        device: Any = cache.device
        event, engine = gate(cache), device.stream("engine")
        fence_all(cache, event)
        async with cache.lease(text(4, extra=1)) as lease:
            lease.wait_layer(engine, 0)
            computed = engine.record()
            layer = asyncio.create_task(lease.layer(1))
            await asyncio.sleep(0)
            assert not computed.done()
            assert not layer.done()
            event.open()
            await computed.wait()
            await layer
            assert_cached_bytes(cache, lease, text(4))
            await lease.loaded()
            await lease.layer(0)
        check(parts(cache).core)


# Pages that come back from storage have, byte for byte, what was computed: pages of FULL and SWA, states of MAMBA, in
# a cache that never computed them. However many requests want a page, it is read once.


WINDOW = 8
TABLES = ("full", "swa")


class Reads(Attended):
    """Counts how often each page is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[PageKey] = Counter()

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if verb == "get":
            self.read.update(keys)
            await asyncio.sleep(0)  # others come meanwhile


def all_three(**more: object) -> CacheConfig:
    options = {"device": 32, "host": 64, "swa": 24, "mamba": 36, "window": WINDOW} | more
    return settings(**options)  # type: ignore[arg-type]


def assert_everything(cache: AsyncCache, lease: Lease, tokens: Sequence[int]) -> None:
    """FULL up to the end, SWA over the whole window, the request's own copy of the state at the end."""
    hashes, end = page_hashes(tokens), lease.cached // PAGE
    full, swa = lease.page_table("full"), lease.page_table("swa")
    for i in range(end):
        assert holds(cache, "full", int(full[i]), hashes[i]), f"full page {i}"
    for i in range(max(0, lease.cached - WINDOW) // PAGE, end):
        assert swa[i] >= 0, f"swa page {i} is missing"
        assert holds(cache, "swa", int(swa[i]), hashes[i]), f"swa page {i}"
    assert holds(cache, "mamba", int(lease.states[0]), hashes[end - 1]), "the state"


async def serve_all(cache: AsyncCache, tokens: Sequence[int]) -> int:
    """One request that takes a checkpoint at its last whole page; how much was cached, every byte of it verified."""
    hashes = page_hashes(tokens)
    async with cache.lease(tokens, states=2) as lease:
        await lease.loaded()
        if lease.cached:
            assert_everything(cache, lease, tokens)
        compute(cache, lease, tokens, TABLES)
        for slot in lease.states[:2]:
            write(cache, "mamba", int(slot), hashes[-1])
        if lease.cached < len(hashes) * PAGE:
            await lease.commit(tokens, checkpoint=(len(hashes) * PAGE, int(lease.states[1])))
        return lease.cached


@pytest.mark.parametrize("where", ["memory", "file"])
async def test_pages_and_states_come_back_from_storage_in_a_cache_that_never_computed_them(
    where: str, tmp_path: Path
) -> None:
    memory = MemoryBackend() if where == "memory" else None
    config = all_three(storage=None if memory else f"file:{tmp_path}/kv?capacity=16MiB")
    async with opened(config, storage=memory) as cache:
        for seed in range(3):
            assert await serve_all(cache, text(6, seed, extra=1)) == 0
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=memory) as cache:
        for seed in range(3):
            async with cache.lease(text(6, seed, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, 0, 6 * PAGE)
                assert_everything(cache, lease, text(6, seed))
        stages = cache.statistics().stages
        for name in ("prefetch", "load_back"):
            assert stages[name].pages == 3 * (6 + WINDOW // PAGE + 1), name
    if memory is not None:
        await memory.aclose()


async def test_what_a_request_makes_of_its_state_is_not_what_the_next_one_gets() -> None:
    async with opened(all_three()) as cache:
        await serve_all(cache, text(4, extra=1))
        for seed in (8, 9):  # each decodes on from the state, in the copy that is its own
            async with cache.lease(text(4, extra=1)) as lease:
                await lease.loaded()
                assert_everything(cache, lease, text(4))
                write(cache, "mamba", int(lease.states[0]), page_hashes(text(1, seed))[0])


async def test_a_conversation_goes_on_after_a_restart_and_the_next_restart_has_all_of_it() -> None:
    storage = MemoryBackend()
    for turn in range(1, 4):
        async with opened(all_three(), storage=storage) as cache:
            assert await serve_all(cache, text(4 * turn, extra=1)) == 4 * (turn - 1) * PAGE
            assert await cache.flush() == (0, 0)
    assert storage.stats()["pages"] == 12 + 12 + 3  # every page of FULL and SWA, and a state a turn; none twice


@pytest.mark.parametrize("own", [0, 1])
async def test_ten_requests_for_a_stored_prefix_read_each_page_and_state_once(own: int) -> None:
    """``own``: pages that each of them has behind the shared ones, which nothing has stored."""
    storage = Reads()
    async with opened(all_three(), storage=storage) as cache:
        await serve_all(cache, text(6, extra=1))
        assert await cache.flush() == (0, 0)
    storage.read.clear()
    async with opened(all_three(device=64, swa=64), storage=storage) as cache:
        clones = spy_on_clones(cache)

        async def one(seed: int) -> tuple[int, ...]:
            prompt = text(6) + text(own, seed, extra=1)
            async with cache.lease(prompt) as lease:
                await lease.loaded()
                assert_everything(cache, lease, prompt)
                await everybody.wait()
                return tuple(lease.hits)

        everybody = asyncio.Barrier(10)
        assert await asyncio.gather(*(one(seed) for seed in range(1, 11))) == [(0, 0, 6 * PAGE)] * 10
        needed = {"full": 6, "swa": WINDOW // PAGE, "mamba": 1}
        assert Counter(key.pool for key in storage.read) == needed
        assert set(storage.read.values()) == {1}
        stages = cache.statistics().stages
        assert stages["prefetch"].pages == 9
        assert own or stages["prefetch"].ops == 1
        assert (stages["load_back"].ops, stages["load_back"].pages) == (1, 9)
        assert len(clones) == 10, "everybody has a state of their own"
    await storage.inner.aclose()


async def test_ten_requests_for_an_evicted_prefix_load_each_page_and_state_once() -> None:
    async with opened(all_three(device=24, swa=24)) as cache:
        await serve_all(cache, text(6, extra=1))
        await settled(cache)
        await push_out(cache, 24)
        assert (await cache.match(text(6))).device == 0
        everybody = asyncio.Barrier(10)

        async def one(seed: int) -> int:
            prompt = [*text(6), seed]
            async with cache.lease(prompt) as lease:
                await lease.loaded()
                assert_everything(cache, lease, prompt)
                await everybody.wait()
                return lease.cached

        assert await asyncio.gather(*(one(seed) for seed in range(10))) == [6 * PAGE] * 10
        load_back = cache.statistics().stages["load_back"]
        assert (load_back.ops, load_back.pages) == (1, 6 + WINDOW // PAGE + 1)


async def test_load_back_counts_what_came_from_the_host_and_no_private_copy() -> None:
    async with opened(all_three(device=24, swa=24)) as cache:

        def counted() -> tuple[int, int, int, int]:
            load_back = cache.statistics().stages["load_back"]
            return load_back.ops, load_back.pages, load_back.errors, load_back.latency_ms.samples

        clones = spy_on_clones(cache)
        await serve_all(cache, text(6, extra=1))
        assert await serve_all(cache, text(6, extra=2)) == 6 * PAGE
        assert clones
        assert counted() == (0, 0, 0, 0)
        await settled(cache)
        await push_out(cache, 24)
        device: Any = cache.device
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "_fates", Fates(Faults(failing=1.0)))
            async with cache.lease(text(6, extra=1)) as lease:
                with pytest.raises(LoadFailed):
                    await lease.loaded()
            await settled(cache)
        assert counted() == (0, 0, 1, 1)
        assert await serve_all(cache, text(6, extra=1)) == 6 * PAGE
        assert counted() == (1, 6 + WINDOW // PAGE + 1, 1, 2)


def spy_on_clones(cache: AsyncCache) -> list[Clone]:
    """The private copies that are started from now on."""
    clones: list[Clone] = []
    head = parts(cache)
    copy = head.copy

    def spy(copies: Sequence[Copy]) -> None:
        clones.extend(effect for effect in copies if isinstance(effect, Clone))
        copy(copies)

    head.copy = spy  # type: ignore[method-assign]
    return clones


# After a restart, what a prompt hits does not depend on who came before it: where the host has FULL and lacks a
# window or a state, that comes back from storage.


BLOCK = 16
SYSTEM, TEMPLATE = list(range(64)), list(range(1000, 1064))
LONG = SYSTEM + TEMPLATE + list(range(2000, 2096))
QUESTION = SYSTEM + TEMPLATE + list(range(3000, 3032))
FULL = Full(bytes_per_token=8, device_tokens=1024, host_tokens=1024)

MODELS: dict[str, tuple[Component, ...]] = {
    "gemma2": (FULL, SlidingWindow(window=64, bytes_per_token=8, device_tokens=1024, host_tokens=1024)),
    "gpt_oss": (FULL, SlidingWindow(window=16, bytes_per_token=8, device_tokens=1024, host_tokens=1024)),
    "olmo_hybrid": (FULL, Mamba(state_bytes=64, device_states=16, host_states=16)),
}


def configured(name: str, folder: Path) -> CacheConfig:
    return CacheConfig(
        model=name, components=MODELS[name], page_size=BLOCK, storage=f"file:{folder}/kv?capacity=64MiB",
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold=BLOCK,
    )  # fmt: skip


async def answer(cache: AsyncCache, name: str, prompt: list[int]) -> int:
    """Serve a request, with a state at the prompt's end; how many tokens were there."""
    states = 2 if name == "olmo_hybrid" else 0
    async with cache.lease(prompt, prefetch=cache.prefetch(prompt), states=states) as lease:
        await lease.loaded()
        checkpoint = (len(prompt), int(lease.states[1])) if states else None
        await lease.commit(prompt, checkpoint=checkpoint)
        return int(lease.cached)


async def second_life(folder: Path, name: str, *prompts: list[int]) -> list[int]:
    async with AsyncCache(configured(name, folder)) as cache:
        return [await answer(cache, name, prompt) for prompt in prompts]


@pytest.mark.parametrize("name", MODELS)
async def test_a_prompt_hits_the_same_whoever_came_first(name: str, tmp_path: Path) -> None:
    for folder in ("alone", "after"):
        async with AsyncCache(configured(name, tmp_path / folder)) as cache:
            for prompt in (SYSTEM, LONG):
                await answer(cache, name, prompt)
    alone = await second_life(tmp_path / "alone", name, QUESTION)
    after = await second_life(tmp_path / "after", name, LONG, QUESTION)
    assert after[-1] == alone[-1] >= len(SYSTEM)


# Situations in which SGLang, whose cache has these tiers, too, lost hits or served what it should not have. The issue
# or change there that tells of one stands at its test. Bytes are compared wherever pages come back.


async def ends_at(cache: AsyncCache, tokens: list[int], *ends: int) -> None:
    """Serve one request that takes a checkpoint at each of ``ends``, in pages."""
    hashes = page_hashes(tokens)
    async with cache.lease(tokens, states=1 + len(ends)) as lease:
        await lease.loaded()
        compute(cache, lease, tokens, TABLES)
        for end, slot in zip(ends, lease.states[1:], strict=True):
            write(cache, "mamba", int(slot), hashes[end - 1])
            await lease.commit(tokens[: end * PAGE], checkpoint=(end * PAGE, int(slot)))


@pytest.mark.parametrize("components", ["full", "full+swa", "full+swa+mamba"])
async def test_a_prompt_of_exactly_n_pages_that_only_storage_has_hits_all_but_the_page_that_it_computes(
    components: str,
) -> None:
    """SGLang#27291: the length that was prefetched was not the length that could match, so a full hit became none."""
    config = {"full": settings(32, 64), "full+swa": settings(32, 64, swa=24), "full+swa+mamba": all_three()}[components]
    storage, whole = MemoryBackend(), text(6)
    async with opened(config, storage=storage) as cache:
        if components == "full+swa+mamba":
            await ends_at(cache, whole, 5, 6)
        else:
            await serve(cache, whole, ("full", "swa") if "swa" in components else ("full",))
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=storage) as cache:
        async with cache.lease(whole) as lease:
            await lease.loaded()
            assert (lease.cached, lease.hits) == (5 * PAGE, (0, 0, 5 * PAGE))
            if components == "full+swa+mamba":
                assert_everything(cache, lease, whole)
            else:
                assert_cached_bytes(cache, lease, whole, ("full", "swa") if "swa" in components else ("full",))


async def test_of_a_first_seen_prompt_that_leaves_between_two_chunks_every_chunk_so_far_is_found_on_each_tier() -> None:
    """SGLang#39444: prefixes of a prompt in chunks were written when the prompt ended, and it never did."""
    storage, prompt = MemoryBackend(), text(9)
    async with opened(settings(12, 32), storage=storage) as cache:
        async with cache.lease(prompt, chunk=4 * PAGE) as lease:
            compute(cache, lease, prompt[: 4 * PAGE])
            await lease.commit(prompt[: 4 * PAGE])
            await lease.extend(2 * PAGE)
            compute(cache, lease, prompt[: 6 * PAGE])
            await lease.commit(prompt[: 6 * PAGE])     # and before the last chunk it has to give way
        await settled(cache)
        await push_out(cache, 12)
        assert (await cache.match(prompt)).device == 0
        async with cache.lease(prompt) as lease:
            await lease.loaded()
            assert lease.hits == (0, 6 * PAGE, 0)
            assert_cached_bytes(cache, lease, prompt)
        assert await cache.flush() == (0, 0)
    async with opened(settings(12, 32), storage=storage) as cache:
        async with cache.lease(prompt) as lease:
            await lease.loaded()
            assert lease.hits == (0, 0, 6 * PAGE)
            assert_cached_bytes(cache, lease, prompt)


async def test_state_and_kv_of_one_end_are_those_of_that_end_after_the_host_and_after_storage() -> None:
    """SGLang#39830: a state of one end beside the KV of another. Two ends on one path, each through L2, then L3."""
    storage, long = MemoryBackend(), text(8, extra=1)
    async with opened(all_three(device=12, swa=12, mamba=4), storage=storage) as cache:
        await ends_at(cache, long, 4, 8)
        await settled(cache)
        for pages in (4, 8):
            await push_out(cache, 12)
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, pages * PAGE, 0)
                assert_everything(cache, lease, text(pages, extra=1))
        assert await cache.flush() == (0, 0)
    for pages in (4, 8):
        async with opened(all_three(), storage=storage) as cache:
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, 0, pages * PAGE)
                assert_everything(cache, lease, text(pages, extra=1))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_an_inner_state_that_the_device_gave_up_while_its_kv_stayed_comes_from_the_host(policy: str) -> None:
    """SGLang#40680: an inner state was dropped under write_back, and nothing below it could be served any more."""
    more: dict[str, Any] = {"device": 64, "swa": 64, "mamba": 6, "write_policy": policy}
    async with opened(all_three(**more)) as cache:
        await ends_at(cache, text(8, extra=1), 4, 8)
        await ends_at(cache, text(10, extra=1), 10)    # write_through_selective copies what two have committed
        for seed in range(1, 5):
            await serve_all(cache, text(2, seed, extra=1))
            await settled(cache)
        match = await cache.match(text(4, extra=1))
        assert (match.device, match.host_hit_length) == (0, 0), "the state is on the device, or its KV is not"
        assert match.mamba_host_hit_length == 1
        for pages in (4, 8):
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.cached == pages * PAGE
                assert_everything(cache, lease, text(pages, extra=1))
