"""What must be the same on all ranks is refused at the handshake by the name of the field, each field by itself; what
ranks may have of their own is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

import asynccache
from asynccache import AsyncCache, CacheConfig, Full, Mamba, Replicated, Sidecar, SlidingWindow
from asynccache.errors import ConfigError, RankDivergence
from asynccache.ranks import Topology
from asynccache.ranks.handshake import Description, differing
from asynccache.runtime.description import description
from asynccache.storage import StoreOptions
from asynccache.testing.simulated_backend import SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks

PAGE = 4
FULL = Full(bytes_per_token=8, device_tokens=8 * PAGE, host_tokens=16 * PAGE, layers=2)
SWA = SlidingWindow(window=2 * PAGE, bytes_per_token=8, device_tokens=8 * PAGE, host_tokens=16 * PAGE)
STATES = Mamba(state_bytes=16, device_states=4, host_states=8)
SCALES, INDEX = (Sidecar(name=name, indices_from="full", bytes_per_page=8) for name in ("scales", "index"))
CONFIG = CacheConfig(
    model="m", page_size=PAGE, prefetch_threshold=PAGE, components=(FULL, SWA, STATES), sidecars=(SCALES, INDEX)
)

SETTINGS: Sequence[tuple[str, dict[str, Any]]] = [
    ("model", {"model": "other"}),
    ("pools.full.dtype", {"components": (replace(FULL, dtype="bfloat16"), SWA, STATES)}),
    ("pools.mamba.component", {"components": (FULL, SWA)}),
    ("pools.scales.component", {"sidecars": (replace(SCALES, indices_from="swa"), INDEX)}),
    ("pools.scales.from", {"sidecars": (replace(SCALES, indices_from="index"), INDEX)}),
    ("pools.scales.replicated", {"sidecars": (replace(SCALES, replicated=Replicated.TP_CP), INDEX)}),
    ("order[3]", {"sidecars": (INDEX, SCALES)}),
    ("core.page_size", {"page_size": 2}),
    ("core.components", {"components": (replace(FULL, device_tokens=9 * PAGE), SWA, STATES)}),
    ("core.components", {"components": (replace(FULL, host_tokens=17 * PAGE), SWA, STATES)}),
    ("core.components", {"components": (FULL, replace(SWA, window=PAGE), STATES)}),
    ("core.components", {"components": (FULL, SWA, replace(STATES, device_states=5))}),
    ("core.write_policy", {"write_policy": "write_back"}),
    ("core.prefetch_threshold", {"prefetch_threshold": 2 * PAGE}),
    ("core.load_back_threshold", {"load_back_threshold": PAGE}),
    ("core.max_backup_ops", {"max_backup_ops": 7}),
    ("core.max_prefetch_pages", {"prefetch_quota": 0.25}),
    ("core.write_back_watermark", {"write_back_watermark": 0.2}),
    ("prefetch_policy", {"prefetch_policy": "wait_complete"}),
    ("backup_quota", {"backup_quota": 0.5}),
    ("kept_fraction", {"kept_fraction": 0.5}),
]

OWN: Sequence[dict[str, Any]] = [
    {"components": (replace(FULL, bytes_per_token=16, layers=4, covers=(4, 5, 6, 7)), SWA, STATES)},
    {"sidecars": (replace(SCALES, bytes_per_page=16), INDEX)},
    {"close_deadline": 1.0},
    {"prefetch_timeout_max": 2.0},
    {"freeze_gc": True},
]


def described(
    config: CacheConfig = CONFIG, topology: Topology = Topology(tp=2), events: bool = False,  # noqa: B008
    stores: Sequence[StoreOptions | None] = (StoreOptions("a"), StoreOptions("b")),
) -> Description:  # fmt: skip
    return description(config, topology, events, stores)


def refused(other: Description) -> str:
    """The name of the field."""
    sentence = differing({0: described(), 1: other})
    return (sentence or "").partition(" differs between ranks: ")[0]


@pytest.mark.parametrize(("name", "change"), SETTINGS, ids=str)
def test_a_setting_that_differs_is_refused_by_its_name(name: str, change: dict[str, Any]) -> None:
    assert refused(described(replace(CONFIG, **change))) == name


@pytest.mark.parametrize("change", OWN, ids=str)
def test_what_ranks_may_have_of_their_own_is_not_refused(change: dict[str, Any]) -> None:
    assert refused(described(replace(CONFIG, **change))) == ""


def test_so_is_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setattr(asynccache, "__version__", "0.0.0")
    assert str(differing({0: before, 1: described()})).startswith("version differs between ranks: ")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("topology.tp", {"topology": Topology(tp=1, pp=2)}),
        ("topology.cp", {"topology": Topology(tp=2, cp=2)}),
        ("topology.pp", {"topology": Topology(tp=2, pp=2)}),
        ("events", {"events": True}),
        ("stores", {"stores": (StoreOptions("a"),)}),
        ("store[1].name", {"stores": (StoreOptions("a"), StoreOptions("c"))}),
        ("store[0].write", {"stores": (StoreOptions("a", write=False), StoreOptions("b"))}),
        ("store[0].name", {"stores": (None, StoreOptions("b"))}),
    ],
    ids=str,
)
def test_so_is_what_is_given_beside_the_settings(name: str, given: dict[str, Any]) -> None:
    assert refused(described(**given)) == name


def test_how_long_a_store_may_take_is_its_own_affair() -> None:
    assert refused(described(stores=(StoreOptions("a", timeout=1.0, concurrency=2), StoreOptions("b")))) == ""


def together(configs: Sequence[CacheConfig], script: Any) -> list[BaseException | None]:
    """What each rank meets."""

    async def world(loop: SimulatedLoop) -> list[BaseException | None]:
        net = SimulatedRanks(Topology(tp=2), Random(1))

        async def lived(rank: int) -> None:
            device = SimulatedDevice(seed=rank)
            try:
                async with AsyncCache(configs[rank], device=device, ranks=net.member(rank)) as cache:
                    await script(rank, cache)
            finally:
                await device.aclose()

        return list(await asyncio.gather(lived(0), lived(1), return_exceptions=True))

    return simulate(world, 1)


async def nothing(rank: int, cache: AsyncCache) -> None:
    raise AssertionError("it has opened")


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        (("memory:", "memory:?write=no"), "store[0].write differs between ranks: true on rank 0; false on rank 1"),
        (
            ("memory:?name=a&capacity=1MiB", "memory:?name=b"),
            'store[0].name differs between ranks: "a" on rank 0; "b" on rank 1',
        ),
        (("memory:", None), "stores differs between ranks: 1 on rank 0; 0 on rank 1"),
    ],
)
def test_ranks_whose_stores_differ_open_none(urls: tuple[str | None, str | None], sentence: str) -> None:
    for said in together([replace(CONFIG, storage=url) for url in urls], nothing):
        assert isinstance(said, ConfigError)
        assert str(said) == sentence


def test_what_is_told_of_a_store_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    gather = SimulatedRanks.gather

    async def overheard(self: SimulatedRanks, rank: int, content: bytes) -> list[bytes]:
        told.append(content)
        return await gather(self, rank, content)

    async def steps(rank: int, cache: AsyncCache) -> None:
        await cache.step()

    monkeypatch.setattr(SimulatedRanks, "gather", overheard)
    config = replace(CONFIG, storage="memory:secret-path?capacity=1MiB", storage_options={"name": "safe"})
    together([config, config], steps)
    assert any(b"safe" in content for content in told)
    assert not any(b"secret-path" in content for content in told)


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"name": "b"}, "elsewhere it was another call"),
        ({"options": {"write": "no"}}, "elsewhere it had other arguments"),
        ({"backfill": False}, "elsewhere it had other arguments"),
    ],
    ids=str,
)
def test_a_store_that_is_attached_otherwise_on_one_rank_is_noticed(differs: dict[str, Any], sentence: str) -> None:
    async def script(rank: int, cache: AsyncCache) -> None:
        store = SimulatedBackend(Random(rank))
        await cache.attach_storage(store, **{"name": "a", **(differs if rank else {})})
        async with cache.lease(list(range(PAGE)), wait=False) as lease:
            await lease.commit(list(range(PAGE)))
        while cache.in_flight:
            await cache.step()

    said = together([CONFIG, CONFIG], script)
    assert all(isinstance(error, RankDivergence) for error in said), said
    assert "here it was \"attach_storage 'a'\"" in str(said[0])
    assert all(sentence in str(error) for error in said)
