"""SWA prefetch is all or nothing across ranks, and auxiliary pages belong to the end that all agree on.

Ranks that share a store lose different pages of it: some are gone, some are there and do not verify, which shows only
when they are read. What a rank takes then, and where the agreed end is, is told in each test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from asynccache.config import CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.settings import PrefetchPolicy
from asynccache.ranks import Topology
from asynccache.runtime.hashing import extend_chain, namespace_digest
from asynccache.runtime.prefetch import PrefetchStatus
from asynccache.runtime.tokens import as_key
from asynccache.storage import PageKey
from asynccache.storage.records import pool_digest, storage_key
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from tests.ranks.cache_world import Member
from tests.ranks.still_world import Pages, Served, StillWorld, publish, serve, text_of

PAGE, PAGES = 4, 8
TEXT = text_of(PAGES)
ROOM = 40 * PAGE
CONFIG = CacheConfig(
    model="windows", page_size=PAGE, prefetch_threshold=1, prefetch_quota=1.0,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    components=(
        Full(bytes_per_token=16, device_tokens=ROOM, host_tokens=ROOM, layers=2),
        SlidingWindow(window=2 * PAGE, bytes_per_token=16, device_tokens=ROOM, host_tokens=ROOM, layers=2),
    ),
    sidecars=(
        Sidecar(name="index", indices_from="full", bytes_per_page=24),
        Sidecar(name="scales", indices_from="swa", bytes_per_page=12),
    ),
)  # fmt: skip
STATES = CacheConfig(
    model="states", page_size=PAGE, prefetch_threshold=1, prefetch_quota=1.0,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    components=(
        Full(bytes_per_token=16, device_tokens=ROOM, host_tokens=ROOM, layers=2),
        Mamba(state_bytes=48, device_states=8, host_states=8, layers=2),
    ),
)  # fmt: skip

Damage = Callable[[Pages, PageKey], None]
Loss = tuple[int, str, int]  # by which rank, in which pool, which page


def gone(pages: Pages, key: PageKey) -> None:
    del pages[key]


def torn(pages: Pages, key: PageKey) -> None:
    """It is there, and does not verify."""
    header, payload = pages[key]
    pages[key] = header, payload[:-1] + bytes([payload[-1] ^ 1])


def key_of(member: Member, pool: str, page: int) -> PageKey:
    """Where this rank's part of a page of TEXT is stored."""
    space = namespace_digest(member.config.model, PAGE)
    hashes = extend_chain(space, as_key(TEXT), 0, PAGES * PAGE * 4, PAGE * 4)
    (spec,) = (spec for spec in member.cache._pools() if spec.name == pool)
    return PageKey(pool, storage_key(hashes[page * 32 : page * 32 + 32], pool_digest(spec, PAGE)))


def served(losses: Iterable[Loss], damage: Damage, config: CacheConfig = CONFIG, tp: int = 2) -> list[Served]:
    """A group stores TEXT; some of it is lost; a new group asks for it. Equal trees and bytes are asserted."""

    async def main(loop: SimulatedLoop) -> list[Served]:
        world = StillWorld(loop, Topology(tp=tp), config)
        await world.group(lambda member: publish(member, TEXT))
        for rank, pool, page in losses:
            damage(world.pages, key_of(world.members[rank], pool, page))
        found = await world.group(lambda member: serve(member, TEXT))
        await world.close()
        return found

    found = simulate(main, 1)
    assert len({one.state for one in found}) == 1, "trees and free slots are equal"
    assert len({one.prefetched for one in found}) == 1
    return found


def reached(found: list[Served]) -> int:
    """Pages that came from storage, on every rank."""
    (hits,) = {one.hits for one in found}
    assert (hits.device, hits.host) == (0, 0)
    assert found[0].prefetched.tokens == hits.storage
    return hits.storage // PAGE


@pytest.mark.parametrize("tp", [2, 3])
def test_everything_comes_back_where_nothing_is_lost(tp: int) -> None:
    found = served([], gone, tp=tp)
    assert reached(found) == PAGES
    assert found[0].prefetched.status is PrefetchStatus.COMPLETE


@pytest.mark.parametrize("damage", [gone, torn])
def test_windows_belong_to_the_agreed_end_where_one_rank_loses_its_last_full_page(damage: Damage) -> None:
    """Both hold full windows at their own ends, 8 and 7; the window at 7 is what both take."""
    assert reached(served([(1, "full", PAGES - 1)], damage)) == PAGES - 1


@pytest.mark.parametrize("damage", [gone, torn])
def test_so_do_the_pages_of_sidecars(damage: Damage) -> None:
    assert reached(served([(0, "index", PAGES - 1)], damage)) == PAGES - 1
    assert reached(served([(1, "scales", PAGES - 1)], damage)) == PAGES - 1


@pytest.mark.parametrize("damage", [gone, torn])
def test_no_rank_takes_a_window_of_which_one_rank_is_short_by_a_page(damage: Damage) -> None:
    """An end at which both windows are whole is taken instead."""
    assert reached(served([(1, "swa", PAGES - 2)], damage)) == PAGES - 2


def test_ends_that_suit_one_rank_each_suit_nobody() -> None:
    """Rank 0 has the window at 8 alone, rank 1 the one at 7 alone; both have the one at 3."""
    losses = [(0, "swa", page) for page in range(3, 6)] + [(1, "full", 7), (1, "swa", 3), (1, "swa", 4)]
    assert reached(served(losses, gone)) == 3


def test_where_no_end_suits_everybody_nothing_is_taken_by_anybody() -> None:
    found = served([(rank, "swa", page) for rank in range(2) for page in range(rank, PAGES, 2)], gone)
    assert reached(found) == 0
    assert found[0].prefetched.status is PrefetchStatus.MISS


@pytest.mark.parametrize("damage", [gone, torn])
def test_a_state_that_one_rank_lost_is_no_ranks(damage: Damage) -> None:
    assert reached(served([], gone, STATES)) == PAGES
    assert reached(served([(1, "mamba", PAGES - 1)], damage, STATES)) == 0
