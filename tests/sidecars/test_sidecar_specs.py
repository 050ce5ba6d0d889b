"""The specs of a stack of pools: what they may say, what follows from them, and what is refused before anything is
allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, CacheFull, ConfigError, Full, Replicated, Sidecar
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cpu import CpuDevice
from asynccache.storage.checked import pool_digest, store_layout
from asynccache.worker.pool_layout import PoolMap
from tests.sidecars.sidecar_kit import deepseek, everything, indexed, opened, stack, text

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


class Allocations(CpuDevice):
    """Counts what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0

    def device_tensor(self, shape: tuple[int, ...]) -> Any:
        self.allocated += 1
        return super().device_tensor(shape)

    def host_tensor(self, shape: tuple[int, ...]) -> Any:
        self.allocated += 1
        return super().host_tensor(shape)


@pytest.mark.parametrize("host", [0, 16])
async def test_a_sidecar_that_does_not_fit_is_refused_before_anything_is_allocated(host: int) -> None:
    huge = 1 << 45
    full = Full(bytes_per_token=4, device_tokens=64, host_tokens=host * 4)
    config = stack(full, sidecars=[side("small", "full"), side("huge", "small", bytes_per_page=huge)], page_size=4)
    device = Allocations()
    with pytest.raises(ConfigError, match=r"'huge' on the device: device_pages=16: .* do not fit in memory"):
        async with AsyncCache(config, device=device):
            pass
    assert device.allocated == 0
    await device.aclose()


async def test_a_request_longer_than_the_pools_is_refused_and_leaves_nothing() -> None:
    async with opened(deepseek(device=8)) as cache:
        before = cache.statistics().device
        with pytest.raises(CacheFull, match="tokens are asked for, the device has room for"):
            async with cache.lease(text(cache.config, 8, extra=1)):
                pass
        assert cache.statistics().device == before


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


def test_what_is_written_before_full_is_what_follows_it_and_the_auxiliary_components() -> None:
    first, last = pools(everything()).written
    assert {c: names(specs) for c, specs in first.items()} == {
        0: ["z.scales", "y"], 1: ["swa", "a-state"], 2: ["mamba", "conv", "conv-tail"],
    }  # fmt: skip
    assert {c: names(specs) for c, specs in last.items()} == {0: ["full"]}


def test_no_two_pools_share_a_key() -> None:
    mapped = pools(everything())
    keys = [mapped.key(name, bytes(32)).key for name, _ in mapped.named()]
    assert len(set(keys)) == len(keys) == 8


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
