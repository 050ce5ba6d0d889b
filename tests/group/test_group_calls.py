"""Calls of the head that concern all workers, and messages of any length; what is told covers all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from asynccache import AsyncCache, BatchFailed, CacheConfig, ConfigError, Full, RankFailure, Replicated, Sidecar
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import StoredPages
from asynccache.core.tree import Node
from asynccache.errors import BackendError, Unavailable
from asynccache.events.announcer import Announcer
from asynccache.events.wire import Mirror
from asynccache.metrics import CacheCollector
from asynccache.storage import BreakerState, PageKey
from asynccache.worker import Topology
from asynccache.worker import group as group_module
from asynccache.worker.group import WorkerGroup
from asynccache.worker.local import BATCH_PAGES, LocalWorker
from asynccache.worker.rank_server import ORDERS, PINNING
from asynccache.worker.ranks import Shard
from asynccache.worker.work import WriteOrder
from tests.edge.odd_values import ODD
from tests.group import group_kit
from tests.group.group_kit import GUEST, GroupWorld, random_of, servers, settings, simulated, stage_of, text
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop

# Calls of the head that concern all workers: to forget, to explain, to count, to tell events. An answer covers every
# rank, and says nothing that holds for one rank only.


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


@pytest.mark.parametrize("rank", [0, 1])
@simulated
async def test_a_store_of_one_rank_that_cannot_be_cleared_or_made_durable_is_told_with_the_rank(
    loop: SimulatedLoop, rank: int
) -> None:
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@simulated
async def test_invalidate_deletes_a_namespace_on_all_workers_and_no_other(loop: SimulatedLoop, shape: Topology) -> None:
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


# explaining


@simulated
async def test_explain_names_as_stored_what_all_workers_have_and_reads_only(loop: SimulatedLoop) -> None:
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


@pytest.mark.parametrize("own", [0, None])
@simulated
async def test_what_the_eviction_policy_has_learned_is_the_heads(loop: SimulatedLoop, own: int | None) -> None:
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


# counting


@pytest.mark.parametrize("own", [0, None])
@simulated
async def test_statistics_and_metrics_cover_the_stores_and_copies_of_all_workers(
    loop: SimulatedLoop, own: int | None
) -> None:
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


@simulated
async def test_load_back_of_a_group_counts_what_came_from_the_host_and_no_private_copy(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40, mamba=12))
    async with world.opened() as cache:

        def counted() -> tuple[int, int, int]:
            load_back = cache.statistics().stages["load_back"]
            return load_back.ops, load_back.errors, load_back.latency_ms.samples

        await world.serve(text(6))
        assert await world.serve(text(6, extra=1)) == 24, "with a private copy of the state"
        assert counted() == (0, 0, 0)
        await cache.flush()
        await world.push_out(16)
        assert await world.serve(text(6, extra=1)) == 24
        assert counted() == (1, 0, 1)


def stage_of_windows(topology: Topology, rank: int) -> Shard:
    """The second stage has layers of the window and none of full attention."""
    stage = stage_of(topology, rank)

    def shard(config: CacheConfig) -> CacheConfig:
        whole = stage(config)
        if topology.place(rank).pp == 0:
            return whole
        full, *others = whole.components
        assert isinstance(full, Full)
        return replace(whole, components=(replace(full, bytes_per_token=0, layers=1, covers=()), *others))

    return shard


@pytest.mark.parametrize("shared", [False, True])
@simulated
async def test_a_page_that_has_no_bytes_on_one_worker_is_found_where_the_others_have_it(
    loop: SimulatedLoop, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_kit, "stage_of", stage_of_windows)
    world = GroupWorld(loop, Topology(pp=2), settings(16, 40, swa=16, stored=True), shared=shared)
    async with world.opened():
        await world.serve(text(6))
    verified = world.verified
    async with world.opened() as cache:
        handle = cache.prefetch(text(6, extra=1))
        assert await world.serve(text(6, extra=1), prefetch=handle) == 24, "found"
    assert world.verified > verified


def metrics(cache: Any) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of all labels but the cache's."""
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "cache")): sample.value
        for metric in CacheCollector(cache).collect() for sample in metric.samples
    }  # fmt: skip


# events


@pytest.mark.parametrize("shared", [False, True])
@simulated
async def test_events_tell_of_a_page_in_storage_when_all_have_it_until_one_has_lost_it(
    loop: SimulatedLoop, shared: bool
) -> None:
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


# stores that come and go


@simulated
async def test_a_store_is_attached_and_detached_on_all_workers_or_none_whenever_who_asks_gives_up(
    loop: SimulatedLoop
) -> None:
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


# stores that outlive a group


TP, ONE = Topology, Topology()


@pytest.mark.parametrize(
    ("shared", "before", "after", "replicated", "found"),
    [
        (False, TP(3), TP(3), Replicated.TP, 24), (False, TP(3), TP(2), Replicated.TP, 24),
        (False, TP(3), ONE, Replicated.TP, 24), (False, TP(2), TP(3), Replicated.TP, 0),
        (True, TP(2), TP(2), Replicated.TP, 24), (True, TP(2), ONE, Replicated.TP, 24),
        (True, ONE, TP(4), Replicated.TP, 24), (True, TP(3), TP(8), Replicated.TP, 24),
        (True, TP(2), TP(2), Replicated.NO, 24), (True, TP(2), ONE, Replicated.NO, 0),
        (True, TP(2), TP(cp=2), Replicated.NO, 0), (True, TP(2), TP(4), Replicated.NO, 0),
    ],
)  # fmt: skip
@simulated
async def test_a_group_of_other_replicas_finds_its_stores_warm_and_one_of_other_shards_nothing(
    loop: SimulatedLoop, shared: bool, before: Topology, after: Topology, replicated: Replicated, found: int
) -> None:
    """With any number on a store that they share; with as many or fewer on stores of their own, of which one more would
    have nothing."""
    config = settings(16, 40, stored=True, swa=16, replicated=replicated)
    first = GroupWorld(loop, before, config, shared=shared)
    async with first.opened():
        await first.serve(text(6))
    if replicated is Replicated.TP:
        assert {len(ranks) for ranks in first.writers.values()} == ({1} if shared else set())
    second = GroupWorld(loop, after, config, shared=shared)
    for rank, backend in second.backends.items():
        if shared or rank in first.backends:
            backend.pages = first.backends[0 if shared else rank].pages
    async with second.opened() as cache:
        handle = cache.prefetch(text(6, extra=1))
        await handle
        assert await second.serve(text(6, extra=1), prefetch=handle) == found
    assert second.verified >= found * after.ranks // 4


# Stores of a group: whatever is done to one is done on all workers or on none, and what is told covers all.


@simulated
async def test_a_store_that_is_attached_beside_one_that_is_away_is_used(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
    async with world.opened() as cache:
        group: Any = cache._opened().worker
        for server in servers(world):
            breaker = server.local._stores[1].store.breaker
            for _ in range(5):
                breaker.failure(breaker.allow(loop.time()), loop.time() + 1000, "read")
        await asyncio.sleep(0.1)
        assert group.shut
        await cache.attach_storage(GUEST, name="guest")
        await asyncio.sleep(0.1)
        assert not group.shut
        await world.serve(text(2))
        await cache.flush()
        await cache.detach_storage("guest")
        await asyncio.sleep(0.1)
        assert group.shut


@pytest.mark.parametrize("well", [True, False])
@simulated
async def test_who_opens_a_store_may_be_silent_for_long_and_not_afterwards(loop: SimulatedLoop, well: bool) -> None:
    """Pinning the host's memory for it keeps an interpreter from its signs of life."""
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
    async with world.opened() as cache:
        link = world.process(1).link
        own = servers(world)[1].local
        plain, seen = own.open_store, list[tuple[float, float]]()

        async def open_store(*order: Any, **named: Any) -> Any:
            await asyncio.sleep(0.1)
            seen.append((link._patience, link.peer._patience))
            if not well:
                raise Unavailable("locked")
            return await plain(*order, **named)

        own.open_store = open_store
        if well:
            await cache.attach_storage(GUEST)
        else:
            with pytest.raises(Unavailable, match="rank 1: locked"):
                await cache.attach_storage(GUEST)
        await asyncio.sleep(0.1)
        assert seen == [(max(PINNING, world.timeout),) * 2]
        assert (link._patience, link.peer._patience) == (world.timeout, world.timeout)


# Messages of a group to its workers, however long and odd their content is.


PAGES = 300


@pytest.mark.parametrize("part", [1, 7, 297, 298, 299])
@simulated
async def test_no_message_asks_about_or_deletes_more_pages_than_a_part_however_many_there_are(
    loop: SimulatedLoop, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows and in full: every page is asked about and answered, and every page goes."""
    monkeypatch.setattr(group_module, "PART", part)
    config = settings(PAGES, 2 * PAGES, swa=PAGES, window=4 * 100, stored=True)
    world = GroupWorld(loop, Topology(tp=2), config)
    long = text(PAGES - 2)
    async with world.opened() as cache:
        await world.serve(long)
        assert (await cache.flush()).storage == 0
        most: list[int] = []
        note(cache, most)
        assert (await cache.explain(long)).storage == len(long)
        await cache.invalidate()
        assert (await cache.explain(long)).storage == 0
        assert 0 < max(most) <= max(part, PAGES - 2 if part >= PAGES - 2 else 0)
    async with world.opened() as cache:
        assert await world.serve([*long, 1], prefetch=cache.prefetch([*long, 1])) == 0


def note(cache: AsyncCache, most: list[int]) -> None:
    """Note how many pages each message is about that asks or deletes."""
    group: Any = cache._opened().worker
    plain = group._put

    def put(message: Any) -> None:
        if type(message) is ORDERS["ask"].message:
            most.append(sum(len(question.hashes) // HASH_BYTES for question in message.asked))
        elif type(message) is ORDERS["delete"].message:
            most.append(len(message.hashes))
        plain(message)

    group._put = put


@simulated
async def test_a_long_operation_that_is_given_up_is_written_no_further(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 400, stored=True))
    async with world.opened() as cache:
        group = cache._opened().worker
        assert isinstance(group, WorkerGroup)
        hashes = b"".join(page.to_bytes(32, "big") for page in range(3 * BATCH_PAGES))
        slots = b"".join(page.to_bytes(4, "little") for page in range(3 * BATCH_PAGES))
        order = WriteOrder(10**6, (StoredPages(0, hashes, slots),))
        whole = await group.store([order])
        assert (whole.failed, whole.full_pages) == (frozenset(), 3 * BATCH_PAGES)
        storing = asyncio.create_task(group.store([order._replace(op=10**6 + 1)]))
        while not group._calls:                    # noqa: ASYNC110  before the next turn
            await asyncio.sleep(0)
        group.give_up(10**6 + 1)
        given_up = await storing
        assert given_up.failed == {10**6 + 1}
        assert given_up.full_pages <= BATCH_PAGES, "no more than what was under way"


@simulated
async def test_a_head_that_cannot_say_something_ends_the_group_and_all_are_told(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    world.begin()
    told: list[BaseException] = []
    try:
        async with world.cache as cache:
            group = cache._opened().worker
            assert isinstance(group, WorkerGroup)
            waiting = asyncio.create_task(cache.batch_ended(cache.send_batch()))
            group.tell(LocalWorker.is_away, bytes(129 << 20))
            async with asyncio.timeout(60.0):
                told += filter(None, await asyncio.gather(waiting, return_exceptions=True))
    except RankFailure as failure:
        told.append(failure)
    assert [str(one)[:48] for one in told] == ["rank 0: the head cannot send its is_away: it has"] * 2
    await world.group.ended()
    assert "the head cannot send its is_away" in str(world.process(1).failure)


# The head takes numbers of batches that were sent, in place of events. All else is refused by name.


@simulated
async def test_an_event_or_a_number_that_was_not_sent_is_refused_by_name_and_the_lease_holds_what_it_held(
    loop: SimulatedLoop
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    async with world.opened() as cache:
        async with cache.lease(text(2)) as lease:
            gate = world.devices[0].gate()
            for odd, why in ((gate, "is no number of a batch"), (7, "batch 7 was not sent"), (0, "is no number")):
                calls: list[Any] = [
                    lambda odd=odd: lease.release(after=odd), lambda odd=odd: lease.advance(1, after=odd),
                    lambda odd=odd: lease.truncate(8, after=odd), lambda odd=odd: lease.adopt(after=odd),
                ]  # fmt: skip
                for call in calls:
                    with pytest.raises(ConfigError, match=why):
                        call()
                with pytest.raises(ConfigError, match=f"commit: after: .*{why}"):
                    await lease.commit(text(2), after=odd)
                with pytest.raises(ConfigError, match=why):
                    await cache.batch_ended(odd)  # type: ignore[arg-type]
            assert len(lease.pages) == 2
            gate.open()
            number = world.compute(lease, text(2))
            lease.adopt(after=number)
            lease.advance(8, after=number)
            lease.truncate(8, after=number)
            await lease.commit(text(2), after=number)
            lease.release(after=number)
        world.idle()


@simulated
async def test_a_batch_takes_bytes_and_leases_that_are_held_and_nothing_else(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    async with world.opened() as cache:
        with pytest.raises(ConfigError, match=r"payload: .* bytes are more than"):
            cache.send_batch(bytes((8 << 20) + 1))
        lease = cache.lease(text(2))
        with pytest.raises(RuntimeError, match="the lease is new"):
            cache.send_batch(b"", [lease])
        for odd in ODD:
            value = odd.make()
            if not isinstance(value, bytes):
                with pytest.raises(ConfigError, match="payload"):
                    cache.send_batch(value)
            if odd.integer is None or odd.integer > 0:
                with pytest.raises(ConfigError, match="batch"):
                    await cache.batch_ended(value)
        assert cache.worker is not None
        assert cache.worker._server.batches.last == 0, "nothing was sent"
        await world.serve(text(2))


@pytest.mark.parametrize("reason", ["out of memory", "bad file \udcff", "x" * (17 << 20)])
@simulated
async def test_a_batch_that_an_engine_cannot_run_fails_alone_and_says_where_and_why(
    loop: SimulatedLoop, reason: str
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    async with world.bare() as cache:
        own, other = cache.worker, world.process(1).face
        assert own is not None
        async with cache.lease(text(2)) as lease:
            number = cache.send_batch(b"run", [lease])
            (await anext(own)).end()
            (await anext(other)).fail(reason)
            with pytest.raises(BatchFailed, match="batch 1: rank 1: ") as raised:
                await cache.batch_ended(number)
            assert raised.value.reasons[1][:8] == reason[:8]
            lease.release(after=number)
        again = cache.send_batch()
        for face in (own, other):
            batch = await face.heard(again)
            assert batch is not None
            face.end_batch(again)
            with pytest.raises(ConfigError, match="batch 2 was ended before"):
                batch.end()
        await cache.batch_ended(again)
        world.idle()


@simulated
async def test_stores_are_urls_and_a_group_serves_one_cache(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    async with world.opened() as cache:
        with pytest.raises(ConfigError, match="workers of other processes take URLs"):
            await cache.attach_storage(SimulatedBackend(random_of(0)))
        with pytest.raises(ConfigError, match="a group serves one cache"):
            await AsyncCache(world.config, workers=world.group.workers).__aenter__()
    with pytest.raises(ConfigError, match="workers"):
        AsyncCache(world.config, workers=3)  # type: ignore[arg-type]
