"""Calls of the head that concern all workers: to forget, to explain, to count, to tell events. An answer covers every
rank, and says nothing that holds for one rank only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccache import Sidecar
from asynccache.core.tree import Node
from asynccache.errors import BackendError
from asynccache.events.announcer import Announcer
from asynccache.events.wire import Mirror
from asynccache.metrics import CacheCollector
from asynccache.storage import BreakerState, PageKey
from asynccache.worker import Topology
from tests.group.group_kit import GUEST, GroupWorld, play, servers, settings, text
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop

SHAPES = [Topology(tp=2), Topology(tp=2, pp=2)]


def stored_keys(world: GroupWorld) -> list[list[PageKey]]:
    """What each rank's own store has."""
    return [list(backend.pages) for _, backend in sorted(world.backends.items())]


def key_of(world: GroupWorld, rank: int, pool: str, page_hash: bytes) -> PageKey:
    """What a rank's stores know a page of ``pool`` by."""
    return PageKey(pool, servers(world)[rank].local._map.key(pool, page_hash).key)


def hashes_of(world: GroupWorld, prompt: list[int]) -> list[bytes]:
    """The hashes of the prompt's whole pages, from the core's tree."""
    core = world.cache.core
    joined = b""
    node: Node = next(iter(core.world.roots.values()))
    while node.children:
        (node,) = node.children.values()
        joined += node.hashes
    pages = len(prompt) // 4
    return [joined[at * 32 : (at + 1) * 32] for at in range(pages)]


def lose(world: GroupWorld, rank: int, pool: str, page_hash: bytes) -> None:
    """One rank's store has this page no more, and nobody was told."""
    del world.backends[rank].pages[key_of(world, rank, pool, page_hash)]


# forgetting


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reset_clears_the_stores_of_all_workers(shape: Topology) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, shape, settings(16, 40, stored=True))
        async with world.opened() as cache:
            await world.serve(text(4))
            await cache.flush()
            assert [len(keys) for keys in stored_keys(world)] == [4] * shape.ranks
            await cache.reset()
            assert [len(keys) for keys in stored_keys(world)] == [0] * shape.ranks
            assert await world.serve(text(4, extra=1)) == 0
        async with world.opened() as cache:
            assert await world.serve(text(4, extra=1)) == 16, "what came after it is stored"
        await world.aclose()

    play(main)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_of_one_rank_that_cannot_be_cleared_or_made_durable_is_told_with_the_rank(rank: int) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
        backend, broken = world.backends[rank], True
        clear = backend.clear

        async def flush_or_clear() -> None:
            if broken:
                raise BackendError("the disk is read-only")
            await clear()

        backend.flush = backend.clear = flush_or_clear  # type: ignore[method-assign]
        async with world.opened() as cache:
            await world.serve(text(4))
            with pytest.raises(BackendError, match=rf"^rank {rank}: .*read-only"):
                await cache.flush()
            with pytest.raises(BackendError, match=rf"^rank {rank}: .*read-only"):
                await cache.reset()
            broken = False
            assert not world.backends[1 - rank].pages, "the other one did"
            assert await world.serve(text(4, extra=1)) == 0, "and what one has lost is no hit"
            await cache.reset()
            assert not any(stored_keys(world))
        await world.aclose()

    play(main)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_invalidate_deletes_a_namespace_on_all_workers_and_no_other(shape: Topology) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, shape, settings(16, 40, stored=True))
        async with world.opened() as cache:
            await world.serve(text(4), "mine")
            await cache.flush()
            mine = stored_keys(world)
            await world.serve(text(3), "yours")
            await cache.flush()
            await cache.invalidate("mine")
            for keys, gone in zip(stored_keys(world), mine, strict=True):
                assert len(keys) == 3
                assert not set(gone).intersection(keys)
        async with world.opened() as cache:
            assert await world.serve(text(4, extra=1), "mine") == 0
            assert await world.serve(text(3, extra=1), "yours") == 12
        await world.aclose()

    play(main)


# explaining


def test_explain_names_as_stored_what_all_workers_have_and_reads_only() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
        prompt = text(6, extra=1)
        async with world.opened() as cache:
            await world.serve(prompt)
            await cache.flush()
            told = await cache.explain(prompt)
            assert (told.device, told.host, told.storage) == (24, 24, 24)
            pages = hashes_of(world, prompt)
            lose(world, 1, "full", pages[4])
        async with world.opened() as cache:
            told = await cache.explain(prompt)
            assert (told.device, told.host, told.storage) == (0, 0, 16)
            assert await cache.explain(prompt) == told
            lose(world, 0, "full", pages[2])
            assert (await cache.explain(prompt)).storage == 8
            assert await world.serve(prompt) == 8
            told = await cache.explain(prompt)
            assert (told.device, told.host) == (24, 24)
        await world.aclose()

    play(main)


@pytest.mark.parametrize("own", [0, None])
def test_what_the_eviction_policy_has_learned_is_the_heads(own: int | None) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 0, eviction="p2c"), own=own)
        async with world.opened() as cache:
            for _ in range(3):
                await world.serve(text(4, extra=1))
            learned = cache.learned()
            assert learned is not None
            assert learned.requests == 3
            told = await cache.explain(text(4))
            assert [span.judged is not None and span.judged.kind for span in told.spans] == ["used 3 times"]
            names = {metric.name for metric in CacheCollector(cache).collect()}
            assert "asynccache_eviction_reuse_share" in names
        await world.aclose()

    play(main)


# counting


@pytest.mark.parametrize("own", [0, None])
def test_statistics_and_metrics_cover_the_stores_and_copies_of_all_workers(own: int | None) -> None:
    async def main(loop: SimulatedLoop) -> None:
        sidecar = Sidecar(name="index", indices_from="full", bytes_per_page=8, layers=2)
        world = GroupWorld(loop, Topology(tp=2, pp=2), settings(16, 40, stored=True, sidecars=(sidecar,)), own=own)
        async with world.opened() as cache:
            await world.serve(text(4))
            await cache.flush()
            statistics = cache.statistics()
            stored = sum(len(backend.pages) for backend in world.backends.values())
            assert stored == 4 * 2 * 4, "four pages of two pools on four ranks"
            assert statistics.stores["SimulatedBackend"]["pages"] == statistics.storage["pages"] == stored
            page = sum(spec.bytes_per_page for server in servers(world) for spec in server.config.pools())
            for name in ("backup_host", "backup_storage"):
                stage = statistics.stages[name]
                assert (stage.full_pages, stage.pages, stage.bytes, stage.errors) == (4, stored, 4 * page, 0), name
            found = metrics(cache)
            assert found["asynccache_storage", "SimulatedBackend", "pages"] == stored
            assert found["asynccache_stage_bytes_total", "backup_host"] == 4 * page
            breaker = servers(world)[3].local._stores[1].store.breaker
            for _ in range(5):
                breaker.failure(breaker.allow(loop.time()), loop.time() + 1000, "read")
            await cache.flush()
            await asyncio.sleep(0.1)
            assert cache.statistics().storage["breaker"] == BreakerState.OPEN, "as on the rank that is worst off"
        await world.aclose()

    play(main)


def metrics(cache: Any) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of all labels but the cache's."""
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "cache")): sample.value
        for metric in CacheCollector(cache).collect() for sample in metric.samples
    }  # fmt: skip


# events


@pytest.mark.parametrize("shared", [False, True])
def test_events_tell_of_a_page_in_storage_when_all_have_it_until_one_has_lost_it(shared: bool) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True), shared=shared)
        announcer, mirror = Announcer(), Mirror()

        def blocks() -> tuple[int, int, int]:
            return len(mirror.blocks["GPU"]), len(mirror.blocks["CPU"]), len(mirror.blocks["STORAGE"])

        def hear(notice: Any) -> None:
            for event in announcer.announce([notice]):
                mirror.note(event)

        late: Any = world.backends[1]
        plain, go = late.put, asyncio.Event()

        async def put(*pages: Any) -> Any:
            await go.wait()
            return await plain(*pages)

        late.put = put
        async with world.opened(on_event=hear) as cache:
            await world.serve(text(4))
            await asyncio.sleep(1.0)
            assert blocks() == (4, 4, 0), "rank 1 has not stored its part"
            go.set()
            await cache.flush()
            assert blocks() == (4, 4, 4)
            page = hashes_of(world, text(4))[3]
            await servers(world)[1].local._tiers.delete([key_of(world, 1, "full", page)])
            await asyncio.sleep(0.1)
            assert blocks() == (4, 4, 3), "rank 1 has lost its part"
            await cache.reset()
            await asyncio.sleep(0.1)
            assert blocks() == (0, 0, 0)
        async with world.opened(on_event=hear) as cache:
            await world.serve(text(5))
            await cache.flush()
            assert blocks() == (5, 5, 5)
        await world.aclose()

    play(main)


# stores that come and go


def test_a_store_is_attached_and_detached_on_all_workers_or_none_whenever_who_asks_gives_up() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
        seen = set()
        async with world.opened() as cache:
            await world.serve(text(2))
            for at in range(50):
                there = "guest" in cache.stores
                asking: asyncio.Task[Any] = loop.create_task(
                    cache.detach_storage("guest") if there else cache.attach_storage(GUEST, name="guest")
                )
                await asyncio.sleep(at / 1000)
                asking.cancel()
                await asyncio.wait([asking])
                await asyncio.sleep(1.0)
                for server in servers(world):
                    assert [entry.options.name for entry in server.local.stores] == list(cache.stores)
                    assert len(server.local._stores) == len(cache.stores), "nothing is open that is not used"
                seen.add((there, asking.cancelled(), "guest" in cache.stores))
                await world.serve(text(3, seed=at % 3))
        assert seen >= {(False, True, False), (False, False, True), (True, True, True), (True, False, False)}, seen
        await world.aclose()

    play(main)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.slow(2)
def test_stores_come_and_go_while_requests_run_on_all_workers_at_the_same_place(shared: bool) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2, pp=2), settings(8, 24, stored=True), shared=shared)
        over = False

        async def requests(seed: int) -> int:
            served = 0
            while not over:
                await world.serve(text(2 + served % 4, seed=seed + served % 5, extra=1))
                served += 1
            return served

        async with world.opened() as cache:
            running = [loop.create_task(requests(seed)) for seed in (0, 3)]
            for turn in range(6):
                await cache.attach_storage(GUEST, name="guest", position=turn % 2)
                await asyncio.sleep(0.2)
                await cache.detach_storage("guest", timeout=None if turn % 3 else 0)
                assert not any(backend.holding for backend in world.guests.values())
            await cache.detach_storage()
            assert [len(server.local.stores) for server in servers(world)] == [0] * 4
            await cache.attach_storage(GUEST, name="guest")
            over = True
            assert sum([await task for task in running]) > 30
            await cache.flush()
            assert all(backend.pages for backend in world.guests.values())
        assert world.verified > 100
        await world.aclose()

    play(main)


# stores that outlive a group


def inherit(world: GroupWorld, before: GroupWorld, *, shared: bool) -> None:
    """``world`` has what the stores of ``before`` hold: of one store all of it, of own ones each rank its own."""
    for rank, backend in world.backends.items():
        if shared or rank in before.backends:
            backend.pages = before.backends[0 if shared else rank].pages


@pytest.mark.parametrize(
    ("shared", "before", "after", "warm"),
    [
        (False, 3, 3, True), (False, 3, 2, True), (False, 3, 1, True), (False, 2, 3, False),
        (True, 2, 2, True), (True, 2, 1, True), (True, 1, 4, True), (True, 3, 8, True),
    ],
)  # fmt: skip
def test_a_group_of_other_replicas_finds_its_stores_warm(shared: bool, before: int, after: int, warm: bool) -> None:
    """With any number on a store that they share; with as many or fewer on stores of their own, of which one more would
    have nothing."""
    from asynccache import Replicated

    async def main(loop: SimulatedLoop) -> None:
        config = settings(16, 40, stored=True, swa=16, replicated=Replicated.TP)
        first = GroupWorld(loop, Topology(tp=before), config, shared=shared)
        async with first.opened():
            await first.serve(text(6))
        writers = {len(ranks) for ranks in first.writers.values()}
        assert writers == ({1} if shared else set())
        second = GroupWorld(loop, Topology(tp=after), config, shared=shared)
        inherit(second, first, shared=shared)
        async with second.opened() as cache:
            handle = cache.prefetch(text(6, extra=1))
            await handle
            assert await second.serve(text(6, extra=1), prefetch=handle) == (24 if warm else 0)
        assert second.verified >= (24 * after if warm else 0) // 4
        await first.aclose()
        await second.aclose()

    play(main)


def test_a_group_of_another_shape_finds_nothing_of_sharded_pools() -> None:
    async def main(loop: SimulatedLoop) -> None:
        config = settings(16, 40, stored=True)
        first = GroupWorld(loop, Topology(tp=2), config, shared=True)
        async with first.opened():
            await first.serve(text(6))
        for shape in (Topology(), Topology(cp=2), Topology(tp=4)):
            second = GroupWorld(loop, shape, config, shared=True)
            inherit(second, first, shared=True)
            async with second.opened():
                assert await second.serve(text(6, extra=1)) == 0, shape
            first.backends[0].pages = dict(first.backends[0].pages)
            await second.aclose()
        await first.aclose()

    play(main)


# prefetches


def fails_at(backend: SimulatedBackend, lost: PageKey) -> None:
    """The page is said to be there, and cannot be read."""
    plain = backend._get

    async def get(keys: Any, records: Any) -> Any:
        backend.pages.pop(lost, None)
        return await plain(keys, records)

    backend._get = get  # type: ignore[method-assign]


async def stored_but_for(
    world: GroupWorld, prompt: list[int], rank: int, pool: str, page: int, when: str
) -> None:  # fmt: skip
    """Have ``prompt`` in storage, and a rank lack one page of a pool: it says so when it is ``asked``, or fails when
    the page is ``read``."""
    async with world.opened() as cache:
        await world.serve(prompt)
        await cache.flush()
        lost = key_of(world, rank, pool, hashes_of(world, prompt)[page])
    if when == "asked":
        del world.backends[rank].pages[lost]
    else:
        fails_at(world.backends[rank], lost)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("when", ["asked", "read"])
def test_a_window_that_one_rank_cannot_have_whole_is_fetched_by_none(rank: int, when: str) -> None:
    """Pages 4 and 5 are the window of the prompt's end; page 5 is lost on one rank. So all end at page 5, where the
    window is pages 3 and 4, and the host holds no more of SWA than that."""

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2, pp=2), settings(16, 40, swa=16, window=8, stored=True))
        prompt = text(6, extra=1)
        await stored_but_for(world, prompt, rank, "swa", 5, when)
        async with world.opened() as cache:
            handle = cache.prefetch(prompt)
            assert (await handle).tokens == 20
            free = cache.statistics().host["swa"].free
            assert free == cache.core.world.shelves[3].slots.capacity - 2
            assert await world.serve(prompt, prefetch=handle) == 20
        await world.aclose()

    play(main)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("pool", ["full", "index", "tail"])
@pytest.mark.parametrize("when", ["asked", "read"])
def test_what_follows_full_ends_on_all_ranks_where_the_first_of_them_lacks_a_page(
    rank: int, pool: str, when: str
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        sidecars = (
            Sidecar(name="index", indices_from="full", bytes_per_page=8, layers=2),
            Sidecar(name="tail", indices_from="index", bytes_per_page=8, layers=2),
        )
        world = GroupWorld(loop, Topology(tp=2, pp=2), settings(16, 40, sidecars=sidecars, stored=True))
        prompt = text(6, extra=1)
        await stored_but_for(world, prompt, rank, pool, 3, when)
        async with world.opened() as cache:
            handle = cache.prefetch(prompt)
            assert (await handle).tokens == 12
            assert cache.statistics().host["full"].free == 40 - 3
            assert await world.serve(prompt, prefetch=handle) == 12
        await world.aclose()

    play(main)
