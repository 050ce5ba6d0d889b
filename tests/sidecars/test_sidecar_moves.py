"""Derived pools: their specs, and their bytes between device and host."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, CacheConfig, ConfigError, Replicated, Sidecar, SlidingWindow
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory import mover as mover_module
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.mover import Mover
from asynccache.memory.signals import HAPPENED
from asynccache.runtime.prefetch import Fetch
from asynccache.storage.checked import pool_digest, store_layout
from asynccache.worker.pool_layout import PoolMap
from tests.memory.small_pools import device_page, fill_device, host_page, move
from tests.runtime.runtime_kit import settled
from tests.sidecars.sidecar_kit import (
    STACKS,
    deepseek,
    everything,
    indexed,
    needed,
    of,
    opened,
    push_out,
    serve,
    solid,
    spoil_device,
    stack,
    text,
    verify,
)
from tests.simulated.world import WrongBytes, draw_climate, play

# The specs of a stack of pools: what they may say, what follows from them, and what is refused before anything is
# allocated.


ALL, TRAILING = HitPolicy


def with_sidecars(*sidecars: Sidecar) -> CacheConfig:
    plain = deepseek()
    return stack(*plain.components, sidecars=sidecars, page_size=4)


def side(name: str, source: str, **more: Any) -> Sidecar:
    return Sidecar(name=name, indices_from=source, **{"bytes_per_page": 8, **more})


def test_what_derives_from_full_is_needed_everywhere_and_what_derives_from_the_others_at_the_end() -> None:
    policies = {spec.name: spec.hit_policy for spec in everything().pools()}
    assert policies == {
        "full": ALL, "y": ALL, "z.scales": ALL, "swa": TRAILING, "a-state": TRAILING,
        "mamba": TRAILING, "conv": TRAILING, "conv-tail": TRAILING,
    }  # fmt: skip


def test_a_hit_policy_that_is_given_must_be_that_of_the_component_it_leads_to() -> None:
    with_sidecars(side("a", "full", hit_policy=ALL), side("b", "swa", hit_policy=TRAILING), side("c", "a"))
    with_sidecars(side("a", "full", hit_policy="all_pages"))
    refused = [
        (TRAILING, "full", r"'a': hit_policy='trailing_pages', .* 'full', .* 'all_pages'"),
        (ALL, "swa", r"'a': hit_policy='all_pages', .* 'swa', .* 'trailing_pages'"),
        ("most", "swa", r"'a': hit_policy='most' must be one of all_pages"),
    ]
    for policy, source, message in refused:
        with pytest.raises(ConfigError, match=message):
            with_sidecars(side("a", source, hit_policy=policy))


@pytest.mark.parametrize(
    ("sidecars", "message"),
    [
        (lambda: [side("a", "b")], r"sidecar 'a': indices_from='b' is no pool"),
        (lambda: [side("a", "mamba")], r"sidecar 'a': indices_from='mamba' is no pool"),  # this stack has none
        (lambda: [side("a", "a")], r"sidecar 'a': indices_from='a' closes a cycle"),
        (lambda: [side("a", "b"), side("b", "c"), side("c", "a")], r"closes a cycle"),
        (lambda: [side("a", "b"), side("b", "c"), side("c", "b")], r"closes a cycle"),
        (lambda: [side("a", "full"), side("a", "swa")], r"names must be unique: \['full', 'swa', 'a', 'a'\]"),
        (lambda: [side("swa", "full")], r"names must be unique"),
        (lambda: [side("", "full")], r"name='.*': Expected `str` matching regex"),
        (lambda: [side("#headers", "full")], r"name='.*': Expected `str` matching regex"),
        (lambda: [side("a", "full", bytes_per_page=0)], r"'a': bytes_per_page=0 must be at least 1"),
        (lambda: [side("a", "full", layers=0)], r"'a': layers=0 must lie between 1 and 65536"),
        (lambda: [side("a", "full", layers=3)], r"'a': 8 bytes a page are not a multiple of layers=3"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_when_it_is_built(
    sidecars: Callable[[], Sequence[Sidecar]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_sidecars(*sidecars())


# storage: what a spec says of keys, sizes and who writes


def pools(config: CacheConfig) -> PoolMap:
    return PoolMap(config.pools(), config.page_size, {})


def names(specs: Sequence[PoolSpec]) -> list[str]:
    return [spec.name for spec in specs]


def test_full_is_its_own_pool_or_where_that_is_logical_all_that_derive_from_it() -> None:
    logical, solid = pools(deepseek()), pools(indexed())
    assert (names(logical.lead), names(logical.follow)) == (["c4", "c4_indexer", "c128", "draft"], [])
    assert (names(solid.lead), names(solid.follow)) == (["full"], ["indexer"])
    assert [name for name, _ in logical.named() if logical.counts(name)] == ["draft"]
    assert [name for name, _ in solid.named() if solid.counts(name)] == ["full"]


def test_a_logical_pool_has_no_stored_object() -> None:
    config = deepseek()
    assert "full" not in store_layout(config.pools()).page_bytes
    assert "full" not in dict(pools(config).named())
    assert store_layout(config.pools()).page_bytes == {s.name: s.bytes_per_page for s in config.pools()[1:]}


def test_whether_a_rank_writes_a_pool_and_under_which_key_comes_from_its_spec() -> None:
    config = stack(
        *indexed().components, page_size=4,
        sidecars=[side("shared", "full", replicated=Replicated.TP_CP), side("sharded", "full")],
    )  # fmt: skip
    ranks = [{spec.name: spec.on_rank(rank, 2) for spec in config.pools()} for rank in range(2)]
    assert [{name: spec.writes for name, spec in rank.items()} for rank in ranks] == [
        {"full": True, "shared": True, "sharded": True}, {"full": True, "shared": False, "sharded": True},
    ]  # fmt: skip
    digests = [{name: pool_digest(spec, 4) for name, spec in rank.items()} for rank in ranks]
    assert digests[0]["shared"] == digests[1]["shared"], "one rank writes what the other reads"
    assert digests[0]["sharded"] != digests[1]["sharded"], "each reads its own part"
    written = [names([*PoolMap(list(rank.values()), 4, {}).written[0][int(ComponentKind.FULL)]]) for rank in ranks]
    assert written == [["shared", "sharded"]] * 2, "who writes what all have is decided by store"


def test_one_rank_holds_whole_pages_and_writes_all_of_them() -> None:
    for spec in everything().pools():
        assert spec.on_rank(0, 1) == spec


def test_a_page_of_a_logical_full_is_announced_with_the_last_of_its_parts() -> None:
    """A router is told that storage has a page when the part that is written last comes."""
    for config, name in ((deepseek(), "draft"), (indexed(), "full"), (everything(), "full")):
        mapped = pools(config)
        key_of = mapped.key_of
        assert key_of is not None
        assert key_of(bytes(32)) == mapped.key(name, bytes(32)).key
    bare = stack(*deepseek().components, sidecars=[], page_size=4)
    assert pools(bare).key_of is None


# Between device and host: a derived pool moves when its source moves, exactly the same pages, in the same batch; and
# the memory of all pools is there or none is kept.


FULL, SWA, MAMBA = ComponentKind
SRC, DST = {FULL: [1, 4, 5], SWA: [7, 2], MAMBA: [3]}, {FULL: [9, 8, 2], SWA: [0, 6], MAMBA: [5]}


def moves_of(kinds: Sequence[ComponentKind]) -> list[Any]:
    return [move(SRC[kind], DST[kind], kind) for kind in kinds]


def pages_of(mover: Mover, tier: str) -> dict[tuple[str, int], bytes]:
    read = device_page if tier == "device" else host_page
    slots = {s: p.spec.device_pages if tier == "device" else p.spec.host_pages for s, p in mover.device_pools.items()}
    return {(n, i): read(mover, n, i) for n, c in slots.items() if mover.device_pools[n].spec.bytes_per_page
            for i in range(c)}  # fmt: skip


def fill_host(mover: Mover) -> None:
    rng = np.random.default_rng(11)
    for pool in mover.host_pools.values():
        if pool.spec.bytes_per_page:
            pool.array[:] = rng.integers(0, 256, pool.array.shape, np.uint8)


@pytest.mark.parametrize("stack", STACKS)
async def test_what_derives_from_a_component_moves_with_it_and_nothing_else_does(stack: str) -> None:
    """Every set of components in one batch, the empty one too, back and forth: every page of every pool is looked at.
    FULL alone, while SWA is where it must be, is one of them."""
    config = STACKS[stack]()
    mine = [component for component in ComponentKind if of(config, component)]
    mover = Mover(CpuDevice(), config.pools())
    for chosen in product((False, True), repeat=len(mine)):
        kinds = [kind for kind, taken in zip(mine, chosen, strict=True) if taken]
        fill_device(mover)
        fill_host(mover)
        await check_batch(mover, kinds, up=False)
        fill_host(mover)
        await check_batch(mover, kinds, up=True)
    await mover.device.aclose()


async def check_batch(mover: Mover, kinds: Sequence[ComponentKind], up: bool) -> None:
    source, target = ("host", "device") if up else ("device", "host")
    expected, given = pages_of(mover, target), pages_of(mover, source)
    for kind in kinds:
        for name in (s.spec.name for s in mover.device_pools.values() if s.spec.component is kind):
            for src, dst in zip(SRC[kind], DST[kind], strict=True):
                if (name, src) in given:
                    expected[name, dst] = given[name, src]
    event = mover.load(moves_of(kinds)).done if up else mover.backup(moves_of(kinds))
    assert (event is HAPPENED) == (not kinds)
    await event.wait()
    assert pages_of(mover, target) == expected


async def test_a_load_of_full_alone_where_only_states_have_bytes_is_no_error() -> None:
    plain = deepseek()
    config = stack(*plain.components, sidecars=[s for s in plain.sidecars if s.indices_from == "swa"], page_size=4)
    mover = Mover(CpuDevice(), config.pools())
    fill_host(mover)
    before = pages_of(mover, "device")
    load = mover.load(moves_of([FULL]))
    assert len(load.layers) == 5
    for event in load.layers:
        await event.wait()
    await mover.backup(moves_of([FULL])).wait()
    assert pages_of(mover, "device") == before
    await mover.device.aclose()


# memory


class Short(CpuDevice):
    """Runs out of memory at the ``at``-th tensor, whatever was promised."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()
        self.at = at
        self.error = error
        self.made: list[weakref.ref[torch.Tensor]] = []

    def _take(self, make: Callable[[tuple[int, ...]], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if len(self.made) == self.at:
            raise self.error
        tensor = make(shape)
        self.made.append(weakref.ref(tensor))
        return tensor

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._take(super().device_tensor, shape)

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._take(super().host_tensor, shape)


TENSORS = 2 * len(solid(deepseek()))


@pytest.mark.parametrize("at", range(TENSORS + 1))
async def test_memory_that_runs_out_on_the_way_is_given_back_at_once(at: int) -> None:
    """While the error is still held, with its traceback and every frame in it, nothing that it led to is."""
    device = Short(at, (MemoryError, RuntimeError, OSError)[at % 3]("no more"))
    gc.disable()
    try:
        cache = AsyncCache(deepseek(), device=device)
        if at == TENSORS:
            async with cache:
                assert len(device.made) == TENSORS
            return
        with pytest.raises(ConfigError, match=r"pool '.*': its memory cannot be had: no more") as error:
            await cache.__aenter__()
        assert error.value.__cause__ is device.error
        assert len(device.made) == at
        assert [made for made in device.made if made() is not None] == []
    finally:
        gc.enable()
        await device.aclose()


# Every byte of every pool of a stack, where the engine reads it: after the device was emptied, and in a cache that
# never computed anything.


PAGES = 6


async def read_back(cache: AsyncCache, stage: str, hits: tuple[int, int, int]) -> None:
    """Two prompts hit so much, and all that an engine reads of it is right and was moved by this stage."""
    config = cache.config
    read = [spec for spec, _ in needed(config, PAGES * config.page_size)]
    for seed in range(2):
        before = cache.statistics().stages[stage].bytes
        async with cache.lease(text(config, PAGES, seed, extra=1)) as lease:
            await lease.loaded()
            assert lease.hits == hits
            assert verify(cache, lease, text(config, PAGES, seed)) == Counter(spec.name for spec in read)
        assert cache.statistics().stages[stage].bytes - before == sum(spec.bytes_per_page for spec in read)


@pytest.mark.parametrize("stack", STACKS)
async def test_every_pool_comes_back_from_the_host(stack: str) -> None:
    config = STACKS[stack]()
    async with opened(config) as cache:
        for seed in range(2):
            assert await serve(cache, text(config, PAGES, seed, extra=1), chunk=1 + seed) == 0
            await settled(cache)
        await push_out(cache)
        await read_back(cache, "load_back", (0, PAGES * config.page_size, 0))


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("stack", STACKS)
async def test_every_pool_comes_back_from_storage_in_a_cache_that_never_computed_it(
    stack: str, where: str, tmp_path: Path
) -> None:
    memory = MemoryBackend() if where == "memory" else None
    config = STACKS[stack](storage=None if memory else f"file:{tmp_path}/kv?capacity=16MiB")
    async with opened(config, storage=memory) as cache:
        for seed in range(2):
            assert await serve(cache, text(config, PAGES, seed, extra=1), chunk=1 + seed) == 0
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=memory) as cache:
        spoil_device(cache)
        await read_back(cache, "prefetch", (0, 0, PAGES * config.page_size))
    if memory is not None:
        await memory.aclose()


async def test_a_window_that_the_device_gave_up_comes_back_with_its_states_and_nothing_else() -> None:
    """FULL stayed on the device, so none of what hangs on it moves."""
    config = deepseek(device=40)
    full, swa = config.components
    assert isinstance(swa, SlidingWindow)
    config = replace(config, components=(full, replace(swa, device_tokens=14 * config.page_size)))
    async with opened(config) as cache:
        for pages, seed in ((6, 0), (12, 0), (12, 1)):
            await serve(cache, text(config, pages, seed, extra=1))
            await settled(cache)
        before = cache.statistics().stages["load_back"].bytes
        hanging = {spec.name for spec in solid(config) if spec.component is ComponentKind.SWA}
        assert hanging == {"swa", "c4_state", "c4_indexer_state", "c128_state"}
        spoil_device(cache, hanging)
        match = await cache.match(text(config, 6))
        assert match.device < match.host == 6 * config.page_size
        async with cache.lease(text(config, 6, extra=1)) as lease:
            await lease.loaded()
            assert lease.cached == 6 * config.page_size
            verify(cache, lease, text(config, 6))
        moved = cache.statistics().stages["load_back"].bytes - before
        assert moved == sum(spec.bytes_per_page for spec, _ in needed(config, lease.cached) if spec.name in hanging)


# The seeded worlds of ``tests/worlds`` have sidecars in half of them. What breaks a sidecar must be noticed there.


WORLDS = 60


def hanging() -> list[int]:
    """Seeds of worlds with pools that hang on others."""
    return [seed for seed in range(WORLDS) if draw_climate(seed).config.sidecars]


def notice() -> int | None:
    """The first world in which a wrong byte is read."""
    for seed in hanging():
        try:
            play(seed)
        except WrongBytes:
            return seed
    return None


def test_worlds_have_sidecars_of_every_component_chains_and_a_logical_full() -> None:
    configs = [draw_climate(seed).config for seed in hanging()]
    assert len(configs) > WORLDS // 4
    sources = {sidecar.indices_from for config in configs for sidecar in config.sidecars}
    assert {"full", "swa", "mamba"} < sources
    assert any(source.startswith("side") for source in sources)
    assert any(config.pools()[0].bytes_per_page == 0 for config in configs)


@pytest.mark.slow(3)
def test_sidecars_that_are_not_read_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Fetch._read_run

    async def nothing(fetch: Fetch, specs: Sequence[PoolSpec], page: int, last: int) -> int:
        return last if specs is fetch._pools.follow else await usual(fetch, specs, page, last)

    monkeypatch.setattr(Fetch, "_read_run", nothing)
    assert notice() is not None


def test_a_sidecar_that_is_not_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_component = mover_module._by_component

    def without(pools: Any) -> Any:
        return {c: [s for s in specs if s.name != "side0"] for c, specs in by_component(pools).items()}

    monkeypatch.setattr(mover_module, "_by_component", without)
    assert notice() is not None
