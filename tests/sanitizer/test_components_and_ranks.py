"""``debug=True`` for windows, states, sidecars and typed pools, behind events, and on every rank."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asynccache import AsyncCache, CacheConfig, Full, Lease, Mamba, Sidecar, SlidingWindow, WrongPages
from asynccache.worker import Topology
from tests.group.group_kit import GroupWorld, play, settings
from tests.group.group_kit import text as group_text
from tests.sanitizer.kit import Model, config, serve, text
from tests.simulated.loop import SimulatedLoop

PAGE = 16
ALL = CacheConfig(
    model="all",
    components=(
        Full.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32", device=1024, host=2048),
        SlidingWindow.attention(window=40, layers=2, kv_heads=2, head_dim=8, dtype="float32", device=1024, host=2048),
        Mamba.recurrent(layers=2, parts=[(4, 8), (3,)], device=24, host=24),
    ),
    sidecars=(Sidecar(name="index", indices_from="full", bytes_per_page=PAGE * 16),),
    page_size=PAGE,
)


class Hybrid:
    """Writes random KV and states. ``without``: what it forgets."""

    def __init__(self, cache: AsyncCache, without: str = "nothing") -> None:
        self.cache = cache
        self.without = without

    def compute(self, lease: Lease, begin: int, end: int) -> None:
        pools = self.cache.pools
        for name in ("full", "swa"):
            table = torch.from_numpy(lease.page_table(name).copy()).long()
            at = torch.arange(begin, end)
            for layer in range(0 if (name, self.without) == ("swa", "window") else 2):
                kv = pools[name].kv(layer)
                for part in range(1 if (name, self.without) == ("full", "values") else 2):
                    kv[table[at // PAGE], part, at % PAGE] = torch.randn(len(at), 2, 8)
        if self.without != "sidecar":
            pages = lease.pages[begin // PAGE : -(-end // PAGE)].tolist()
            pools["index"].layer(0)[pages] = torch.randint(0, 255, (len(pages), PAGE * 16), dtype=torch.uint8)

    def save_state(self, slot: int) -> None:
        if self.without != "state":
            for layer in range(2):
                for part in self.cache.pools["mamba"].states(layer):
                    part[slot] = torch.randn(part.shape[1:])

    async def serve(self, prompt: list[int]) -> int:
        async with self.cache.lease(prompt) as lease:
            await lease.loaded()
            self.compute(lease, lease.cached, len(prompt))
            end = len(prompt) // PAGE * PAGE
            self.save_state(int(lease.states[1]))
            await lease.commit(prompt, checkpoint=(end, int(lease.states[1])))
            lease.advance(len(prompt))
            return lease.cached


def run(body: Callable[[AsyncCache], Awaitable[object]], settings: CacheConfig = ALL) -> None:
    async def main() -> None:
        async with AsyncCache(settings, debug=True) as cache:
            await body(cache)

    asyncio.run(main())


def test_all_components_served_rightly_are_not_accused() -> None:
    async def body(cache: AsyncCache) -> None:
        engine, hits = Hybrid(cache), 0
        for _ in range(2):
            for seed in range(8):
                hits += await engine.serve(text(seed, 100))
        for seed in range(8):
            hits += await engine.serve([*text(seed, 100), *text(99, 50)])
        assert hits >= 8 * 96
        assert cache.statistics().stages["load_back"].pages > 0

    run(body)


def test_pages_that_a_lease_gives_back_and_gets_again_are_fresh_again() -> None:
    """A window goes round in few pages: ``advance`` frees them, and ``extend`` takes them again."""
    async def body(cache: AsyncCache) -> None:
        engine, tokens = Hybrid(cache), text(1, 40)
        async with cache.lease(tokens, states=1) as lease:
            await lease.loaded()
            engine.compute(lease, 0, 40)
            had: set[int] = set()
            for _ in range(12):
                lease.advance(len(tokens))
                had |= set(lease.page_table("swa").tolist())
                await lease.extend(16)
                tokens += text(len(tokens), 16)
                engine.compute(lease, len(tokens) - 16, len(tokens))
            assert len(had) <= 8  # with -1
        await engine.serve(text(2, 100))

    small = SlidingWindow.attention(window=20, layers=2, kv_heads=2, head_dim=8, dtype="float32", device=112, host=112)
    full = Full.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32", device=1024, host=1024)
    run(body, CacheConfig(model="few", components=(full, small, *ALL.components[2:]), sidecars=ALL.sidecars,
                          page_size=PAGE))


@pytest.mark.parametrize(("without", "says"), [
    ("values", "bytes and view do not fit: full"), ("window", "committed without computing: swa"),
    ("sidecar", "index, layer 0"), ("state", "committed without computing: mamba"),
])  # fmt: skip
def test_a_component_that_is_forgotten_is_named(without: str, says: str) -> None:
    async def body(cache: AsyncCache) -> None:
        await Hybrid(cache, without).serve(text(1, 100))

    with pytest.raises(WrongPages) as caught:
        run(body)
    assert says in str(caught.value)


def test_a_state_that_is_written_after_its_commit_is_found_by_the_next_hit() -> None:
    async def body(cache: AsyncCache) -> None:
        engine = Hybrid(cache)
        async with cache.lease(text(1, 100)) as lease:
            await lease.loaded()
            engine.compute(lease, 0, 100)
            slot = int(lease.states[1])
            engine.save_state(slot)
            await lease.commit(text(1, 100), checkpoint=(96, slot))
            engine.save_state(slot)
        await engine.serve([*text(1, 100), 5])

    with pytest.raises(WrongPages) as caught:
        run(body)
    assert caught.value.mistake == "wrote published pages"
    assert "'mamba'" in str(caught.value)


def test_a_commit_after_an_event_is_judged_when_that_has_fired(caplog: pytest.LogCaptureFixture) -> None:
    async def body(cache: AsyncCache) -> None:
        device: Any = cache.device
        model, gate, late = Model(cache), device.gate(), device.gate()
        async with cache.lease(text(1)) as lease:
            await lease.loaded()
            await lease.commit(text(1), after=gate)
            model.compute(text(1), 0, 100, lease.pages)
            gate.open()
            await gate.wait()
        assert await serve(cache, model, text(1)) == 96
        async with cache.lease(text(2)) as lease:
            await lease.loaded()
            await lease.commit(text(2), after=late)
            late.open()
            await late.wait()
        await asyncio.sleep(0.05)

    with caplog.at_level(logging.ERROR, "asynccache"), pytest.raises(WrongPages) as caught:
        run(body, config())
    assert caught.value.mistake == "committed without computing"
    assert str(caught.value) in caplog.text


def test_opening_says_that_it_is_slow(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(debug: bool | None = None) -> bool:
        caplog.clear()
        async with AsyncCache(config(), debug=debug):
            return "debug=True" in caplog.text

    with caplog.at_level(logging.WARNING, "asynccache"):
        assert not asyncio.run(opened())
        assert asyncio.run(opened(debug=True))
        monkeypatch.setenv("ASYNCCACHE_DEBUG", "1")
        assert asyncio.run(opened())
        assert not asyncio.run(opened(debug=False))


KINDS = settings(16, 40, swa=16, mamba=12,
                 sidecars=(Sidecar(name="index", indices_from="full", bytes_per_page=16, layers=2),))


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("mistake", ["", "committed without computing", "wrote published pages",
                                     "wrote pages of somebody else"])  # fmt: skip
def test_every_rank_looks_at_its_own_bytes(topology: Topology, mistake: str) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, topology, KINDS)
        try:
            async with world.opened(debug=True) as cache:
                assert await world.serve(group_text(6)) == 0
                assert await world.serve(group_text(6, extra=1)) == 24
                last = world.local(topology.ranks - 1).pools["full"].layer(0)
                if mistake == "wrote published pages":
                    last[0] = 9
                    await world.serve(group_text(6, extra=1))
                elif mistake == "wrote pages of somebody else":
                    last[15] = 9
                elif mistake:
                    async with cache.lease(group_text(4, seed=3)) as lease:
                        await lease.commit(group_text(4, seed=3))
                await world.push_out(16)
                assert await world.serve(group_text(6, extra=1)) == 24
        finally:
            for running in world.running.values():
                running.cancel()

    if not mistake:
        play(main)
        return
    with pytest.raises(WrongPages) as caught:
        play(main)
    assert caught.value.mistake == mistake, caught.value
