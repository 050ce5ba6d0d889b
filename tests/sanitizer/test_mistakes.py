"""A cache with ``debug`` names mistakes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asynccache import AsyncCache, CacheConfig, Full, Lease, Mamba, Sidecar, SlidingWindow, WrongPages
from asynccache.worker import Topology
from tests.group import random_worlds
from tests.group.group_kit import GroupWorld, play, settings
from tests.group.group_kit import text as group_text
from tests.simulated.loop import SimulatedLoop
from tests.simulated.world import play as play_world

torch.set_num_threads(1)  # the machine is shared, and tensors are small

# A small engine of a user who has read docs/embedding.md: attention over float32 pages, one layer behind the other, so
# that what is read from wrong pages is seen in what is written.


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


@asynccontextmanager
async def held(cache: AsyncCache, tokens: list[int], **more: Any) -> AsyncIterator[Lease]:
    """A lease whose pages have all come."""
    async with cache.lease(tokens, **more) as lease:
        await lease.loaded()
        yield lease


async def serve(cache: AsyncCache, model: Model, prompt: list[int], count: int = 20, **more: Any) -> int:
    """Serve a request as one should. Returns how many of its tokens were cached."""
    async with held(cache, prompt, new_tokens=count, **more) as lease:
        tokens, table = list(prompt), lease.pages
        model.compute(tokens, lease.cached, len(tokens), table)
        table = await lease.commit(tokens)
        for i in range(count):
            tokens.append(i)
            model.compute(tokens, len(tokens) - 1, len(tokens), table)
        await lease.commit(tokens)
        return lease.cached


# The mistakes that ``debug=True`` names, each made by a program as a user would write it.


Program = Callable[[AsyncCache, Model], Awaitable[object]]
MISTAKES: list[tuple[str, Program]] = []


def says(mistake: str) -> Callable[[Program], Program]:
    """Enter a program, which is to end with this mistake."""

    def enter(program: Program) -> Program:
        MISTAKES.append((mistake, program))
        return program

    return enter


@says("committed without computing")
async def commits_what_nobody_computed(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1)) as lease:
        await lease.commit(text(1))


@says("committed without computing")
async def forgets_the_last_layer(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1)) as lease:
        model.kv.pop()
        model.weights = model.weights[:-1]
        model.compute(text(1), lease.cached, 100, lease.pages)
        await lease.commit(text(1))


@says("computed from cached + 1")
async def begins_behind_the_first_token(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1, 64), 0)
    async with held(cache, text(1)) as lease:
        model.compute(text(1), lease.cached + 1, 100, lease.pages)
        await lease.commit(text(1))


@says("committed tokens that were not computed")
async def commits_the_last_sampled_token(cache: AsyncCache, model: Model) -> None:
    tokens = text(1, 90)
    async with held(cache, tokens, new_tokens=6) as lease:
        model.compute(tokens, lease.cached, 90, lease.pages)
        pages = await lease.commit(tokens)
        for token in range(6):
            tokens.append(token)
            if len(tokens) < 96:
                model.compute(tokens, len(tokens) - 1, len(tokens), pages)
        await lease.commit(tokens)


@says("committed tokens that were not computed")
async def commits_a_second_chunk_too_early(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1, 128)) as lease:
        model.compute(text(1, 128), 0, 100, lease.pages)
        await lease.commit(text(1, 128))


@says("computed too early")
async def computes_before_it_waits(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    for seed in range(2, 9):
        await serve(cache, model, text(seed), 0)
    async with cache.lease(text(1)) as lease:
        assert lease.loading
        model.compute(text(1), lease.cached, 100, lease.pages)
        await lease.loaded()
        await lease.commit(text(1))


@says("wrote after the lease's end")
async def writes_when_the_lease_has_ended(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1)) as lease:
        pages = lease.pages
    model.compute(text(1), 0, 100, pages)
    await serve(cache, model, text(2))


@says("wrote after the lease's end")
async def leaves_while_a_thread_writes(cache: AsyncCache, model: Model) -> None:
    go, thread = threading.Event(), None
    async with held(cache, text(1)) as lease:
        pages = lease.pages

        def step() -> None:
            go.wait()
            model.compute(text(1), 0, 100, pages)

        thread = threading.Thread(target=step)
        thread.start()
    go.set()
    thread.join()
    await serve(cache, model, text(2))


@says("used an old page table")
async def keeps_writing_by_the_old_table(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1)) as lease:
        old = lease.pages
        await serve(cache, model, text(1), 0)
        model.compute(text(1), 0, 100, old)
        await lease.commit(text(1))
        lease.adopt()
        await asyncio.sleep(0.01)
        model.compute(text(1), 0, 100, old)
        await serve(cache, model, text(2))


@says("used an old page table")
async def reads_by_the_old_table(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1, 96), new_tokens=40) as lease:
        old, tokens = lease.pages, text(1, 96)
        await serve(cache, model, tokens, 0)
        model.compute(tokens, 0, 96, old)
        await lease.commit(tokens)
        lease.adopt()
        await asyncio.sleep(0.01)
        for token in range(32):
            tokens.append(token)
            model.compute(tokens, len(tokens) - 1, len(tokens), old)
        await lease.commit(tokens)


@says("two tasks on one lease")
async def shares_a_lease_between_two_requests(cache: AsyncCache, model: Model) -> None:
    async with held(cache, text(1), new_tokens=40) as lease:
        model.compute(text(1), 0, 100, lease.pages)

        async def answer(first: int) -> None:
            tokens = text(1)
            for i in range(30):
                tokens.append(first + i)
                model.compute(tokens, len(tokens) - 1, len(tokens), lease.pages)
                await asyncio.sleep(0)
            await lease.commit(tokens)
            await asyncio.sleep(0.05)

        await asyncio.gather(answer(1), answer(500))


@says("wrote published pages")
async def pads_its_table_with_page_0(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with held(cache, text(2)) as lease:
        pages = lease.pages.copy()
        model.compute(text(2), 0, 100, pages)
        await lease.commit(text(2))
    for kv in model.kv:  # a step for a batch of fixed size: rows without a request write to page 0
        kv[0, 3] = 1.0
    await serve(cache, model, text(1))


@says("wrote pages of somebody else")
async def pads_its_table_with_a_free_page(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(1)):
        pass
    for kv in model.kv:
        kv[20, 3] = 1.0
    for seed in range(2, 6):
        await serve(cache, model, text(seed))


@says("wrote published pages")
async def writes_into_its_prefix(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with held(cache, text(1)) as lease:
        model.compute(text(2), 0, 100, lease.pages)
        await lease.commit(text(1))


@says("computed from pages that are not the lease's")
async def reads_a_page_of_nobody(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(2)) as lease:
        free = lease.pages[:1].copy()
    async with held(cache, text(1, 64), namespace="other") as lease:
        taken = set(lease.pages.tolist())
        pages = lease.pages.copy()
        model.compute(text(1, 64), 0, 32, pages)
        wrong = pages.copy()
        wrong[0] = next(page for page in [*free.tolist(), *range(6, 16)] if page not in taken)
        model.compute(text(1, 64), 32, 64, wrong)
        await lease.commit(text(1, 64))


def run(body: Callable[[AsyncCache], Awaitable[object]], settings: CacheConfig) -> None:
    async def main() -> None:
        async with AsyncCache(settings, debug=True) as cache:
            await body(cache)

    asyncio.run(main())


@pytest.mark.parametrize(("mistake", "program"), MISTAKES, ids=[one.__name__ for _, one in MISTAKES])
def test_a_mistake_is_named(mistake: str, program: Program) -> None:
    with pytest.raises(WrongPages) as caught:
        run(lambda cache: program(cache, Model(cache)), config())
    assert caught.value.mistake == mistake, caught.value
    assert str(caught.value).startswith(mistake)
    places = ("test_mistakes.py", "no lease has had it")
    assert any(place in str(caught.value) for place in places), caught.value


def test_bytes_a_token_and_a_view_that_do_not_fit() -> None:
    full = Full(bytes_per_token=2 * LAYERS * 2 * WIDTH * 4, layers=LAYERS, dtype="float32", device_tokens=512)

    async def body(cache: AsyncCache) -> None:
        async with held(cache, text(1, 64)) as lease:
            for i in range(LAYERS):
                kv = cache.pools["full"].layer(i).view(torch.float32).view(-1, PAGE, 2, HEADS, DIM)
                kv[lease.pages.tolist()] = torch.randn(4, PAGE, 2, HEADS, DIM)
            await lease.commit(text(1, 64))

    with pytest.raises(WrongPages) as caught:
        run(body, CacheConfig(model="twice", components=(full,)))
    assert caught.value.mistake == "bytes and view do not fit"


def test_a_right_program_is_not_accused() -> None:
    async def body(cache: AsyncCache) -> None:
        model, hits = Model(cache), 0
        for seed in [*range(6)] * 3:
            hits += await serve(cache, model, text(seed))
        hits += sum(await asyncio.gather(*(serve(cache, model, text(seed)) for seed in range(12))))
        assert hits > 1000
        assert cache.statistics().lookups.hits["host"] > 0

    run(body, config())


# ``debug=True`` for windows, states, sidecars and typed pools, behind events, and on every rank.


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
        async with held(self.cache, prompt) as lease:
            self.compute(lease, lease.cached, len(prompt))
            end = len(prompt) // PAGE * PAGE
            self.save_state(int(lease.states[1]))
            await lease.commit(prompt, checkpoint=(end, int(lease.states[1])))
            lease.advance(len(prompt))
            return lease.cached


def test_all_components_served_rightly_are_not_accused() -> None:
    async def body(cache: AsyncCache) -> None:
        engine, hits = Hybrid(cache), 0
        for more in ([], [], text(99, 50)):
            for seed in range(8):
                hits += await engine.serve([*text(seed, 100), *more])
        assert hits >= 8 * 96
        assert cache.statistics().stages["load_back"].pages > 0

    run(body, ALL)


def test_pages_that_a_lease_gives_back_and_gets_again_are_fresh_again() -> None:
    """A window goes round in few pages: ``advance`` frees them, and ``extend`` takes them again."""
    async def body(cache: AsyncCache) -> None:
        engine, tokens = Hybrid(cache), text(1, 40)
        async with held(cache, tokens, states=1) as lease:
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
        run(body, ALL)
    assert says in str(caught.value)


def test_a_state_that_is_written_after_its_commit_is_found_by_the_next_hit() -> None:
    async def body(cache: AsyncCache) -> None:
        engine = Hybrid(cache)
        async with held(cache, text(1, 100)) as lease:
            engine.compute(lease, 0, 100)
            slot = int(lease.states[1])
            engine.save_state(slot)
            await lease.commit(text(1, 100), checkpoint=(96, slot))
            engine.save_state(slot)
        await engine.serve([*text(1, 100), 5])

    with pytest.raises(WrongPages) as caught:
        run(body, ALL)
    assert caught.value.mistake == "wrote published pages"
    assert "'mamba'" in str(caught.value)


def test_a_commit_after_an_event_is_judged_when_that_has_fired(caplog: pytest.LogCaptureFixture) -> None:
    async def body(cache: AsyncCache) -> None:
        device: Any = cache.device
        model, gate, late = Model(cache), device.gate(), device.gate()
        async with held(cache, text(1)) as lease:
            await lease.commit(text(1), after=gate)
            model.compute(text(1), 0, 100, lease.pages)
            gate.open()
            await gate.wait()
        assert await serve(cache, model, text(1)) == 96
        async with held(cache, text(2)) as lease:
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


# The random worlds with ``debug=True``: whoever uses the cache rightly is never accused, whatever happens meanwhile:
# cancelled requests, batches that fail or end late, torn copies, stores that lie, windows, states and sidecars.


SEEDS = (*range(12), 30, 82)  # the last two have sidecars whose pages are too small to be judged


def test_a_right_program_is_never_accused_in_any_world() -> None:
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        ends += play_world(seed, debug=True).met
    assert ends["served"] > 3 * len(SEEDS), ends


@pytest.mark.parametrize("seed", [
    337,  # pages are looked at, and in the next message filled anew: a rank looks before it hears that
    152,  # a batch is heard to have failed between a grant and its return
    1, 4, 19,
])  # fmt: skip
def test_a_right_group_is_never_accused_in_any_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCACHE_DEBUG", "1")
    assert random_worlds.play(seed).met["served"]
