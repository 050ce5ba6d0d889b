"""After a restart, what a prompt hits does not depend on who came before it: where the host has FULL and lacks a
window or a state, that comes back from storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheConfig, Full, Mamba, PrefetchPolicy, SlidingWindow
from asynccache.config import Component

PAGE = 16
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
        model=name, components=MODELS[name], page_size=PAGE, storage=f"file:{folder}/kv?capacity=64MiB",
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold=PAGE,
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
