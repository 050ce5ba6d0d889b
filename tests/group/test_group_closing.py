"""How a cache with workers closes, and that its memory of what is over is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from asynccache import CacheClosed, RankFailure, Sidecar
from asynccache.errors import BackendError
from asynccache.memory.host_copies import Faults
from asynccache.settle import completed
from asynccache.worker import RankWorker, Topology
from asynccache.worker.group import OPENING
from asynccache.worker.local import LATE
from asynccache.worker.messages import Message
from asynccache.worker.rank_server import ORDERS, PINNING, decode_orders
from asynccache.worker.work import CopyKind
from tests.group.group_kit import GUEST, GroupWorld, servers, settings, simulated, text
from tests.simulated.loop import SimulatedLoop

# How a cache with workers closes: who waits is told, a worker that lags may finish, and all ends in its time.


TIMEOUT = 3.0


@simulated
async def test_who_waits_for_a_batch_when_the_cache_closes_is_told_and_who_asks_later_too(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16))
    world.begin()
    async with world.cache as cache:
        number = cache.send_batch()
        waiting = asyncio.create_task(cache.batch_ended(number))
        await asyncio.sleep(0.1)
        await cache.aclose(1.0)
    async with asyncio.timeout(60.0):
        with pytest.raises(CacheClosed, match="closed before the batch was over"):
            await waiting
        with pytest.raises(CacheClosed, match="closed before the batch was over"):
            await cache.batch_ended(number)
    await world.group.ended()


def _raises() -> dict[str, int]:
    raise OSError("the backend cannot count")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stats", [_raises, lambda: {"puts": float("nan")}, lambda: {"puts": object()}])
@simulated
async def test_a_store_that_cannot_count_is_flushed_and_closed_like_any_other(
    loop: SimulatedLoop, stats: Any, rank: int
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
    world.backends[rank].stats = stats  # type: ignore[method-assign]
    async with world.opened() as cache:
        await world.serve(text(1, 4))
        await cache.flush()
        local, closed = world.local(rank), []
        close = local.aclose

        async def noted(patience: float) -> None:
            await close(patience)
            closed.append(patience)

        local.aclose = noted  # type: ignore[method-assign]
    assert closed, "pools and stores stayed open"


def hang_at_the_end(stores: Any) -> asyncio.Event:
    """They are not closed before the event is set."""
    go, close = asyncio.Event(), stores.aclose

    async def hang() -> None:
        await go.wait()
        await close()

    stores.aclose = hang
    return go


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("gone", [False, True])
@simulated
async def test_a_store_that_hangs_when_it_is_closed_delays_the_cache_no_longer_than_its_deadline(
    loop: SimulatedLoop, rank: int, gone: bool
) -> None:
    """The head's own store, too; also where the group has failed meanwhile."""
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=True))
    world.begin()
    cache = await world.cache.__aenter__()
    go = hang_at_the_end(world.local(rank)._tiers)
    if gone:
        world.process(2).kill()
        await asyncio.sleep(1.0)
    begun = loop.time()
    said = ""
    try:
        async with asyncio.timeout(120.0):
            said = str((await cache.aclose(timeout=5.0)).error)
    except BackendError as error:
        said = str(error)
    assert loop.time() - begun <= 5.0 + 2 * LATE + 1.0
    assert f"rank {2 if gone and rank else rank}: " in said
    if not gone:
        assert "when the cache was to be closed: it may have lost what it had stored last" in said
    go.set()
    await world.group.ended()
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("patient", [True, False])
@simulated
async def test_a_worker_that_lags_finishes_its_batches_before_the_cache_takes_its_pages_away(
    loop: SimulatedLoop, host: int, patient: bool
) -> None:
    """For as long as closing may take, and no longer."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, host))
    world.begin()
    own_done: list[int] = []
    other_done: list[int] = []

    async def engine(face: RankWorker, lag: float, done: list[int]) -> None:
        async for batch in face:
            await asyncio.sleep(lag)
            await face.layer(batch, 0)
            gate = world.devices[face.rank].gate()
            loop.call_later(lag, gate.open)
            batch.end(gate)
            done.append(batch.number)

    async with world.cache as cache:
        assert cache.worker is not None
        own = loop.create_task(engine(cache.worker, 0.0, own_done))
        other = loop.create_task(engine(world.process(1).face, 2.0, other_done))
        for _ in range(3):
            async with cache.lease(text(2)) as lease:
                number = cache.send_batch(b"", [lease])
                await lease.commit(text(2), after=number)
                lease.release(after=number)
        begun = loop.time()
        await cache.aclose(30.0 if patient else 1.0)
    if patient:
        await other
        assert other_done == [1, 2, 3]
        assert 8.0 <= loop.time() - begun <= 9.0, "no longer than the batches take"
    else:
        with pytest.raises(RankFailure, match="the worker is closed"):
            await other
        assert loop.time() - begun <= 1.0 + LATE
    await own
    assert own_done == [1, 2, 3]
    await world.group.ended()
    assert world.process(1).failure is None
    await asyncio.sleep(10.0)


@simulated
async def test_a_rank_that_is_lost_while_the_head_waits_for_its_batch_ends_the_waiting(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16))
    world.begin()
    cache = await world.cache.__aenter__()
    number = cache.send_batch()
    waiting = asyncio.create_task(cache.batch_ended(number))
    closing = asyncio.create_task(cache.aclose(30.0))
    await asyncio.sleep(1.0)
    assert not closing.done()
    begun = loop.time()
    world.process(1).kill()
    with pytest.raises(BackendError, match=r"^rank 1: .*: it may have lost what it had stored last$"):
        await closing
    assert loop.time() - begun < 1.0
    with pytest.raises(RankFailure, match="rank 1"):
        await waiting
    await world.group.ended()


@pytest.mark.parametrize("how", ["it is killed", "it raises"])
@simulated
async def test_a_rank_that_is_lost_while_it_closes_is_named_to_who_closes_the_cache(
    loop: SimulatedLoop, how: str
) -> None:
    """``aclose`` succeeded, though the rank may have lost what it had stored last."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
    world.begin()
    cache = await world.cache.__aenter__()
    world.run()
    await world.serve(text(6))
    await cache.flush()
    local = world.local(1)
    close = local.aclose

    async def end(patience: float) -> None:
        if how == "it is killed":
            world.process(1).kill()
        await close(patience)
        if how == "it raises":
            raise OSError("no room is left on the disk")

    local.aclose = end  # type: ignore[method-assign]
    reason = "OSError: no room is left on the disk" if how == "it raises" else ".*"
    with pytest.raises(BackendError, match=rf"^rank 1: {reason}: it may have lost what it had stored last$"):
        await cache.aclose()
    with pytest.raises(OSError, match="no room") if how == "it raises" else nullcontext():
        await world.group.ended()
    await asyncio.wait(world.running.values())


@simulated
async def test_links_that_a_cache_has_taken_stay_when_nobody_may_come_in_any_more(loop: SimulatedLoop) -> None:
    """``listen`` may end before its cache: that aborted what the cache uses, and neither end was told."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
    async with world.opened():
        world.group.workers.close()
        async with asyncio.timeout(60.0):
            assert await world.serve(text(3)) == 0
            assert await world.serve(text(3, extra=1)) == 12


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("opening", [False, True])
@simulated
async def test_a_rank_that_does_not_let_go_of_what_was_cancelled_is_given_up(
    loop: SimulatedLoop, rank: int, opening: bool
) -> None:
    """Its link stands, and says that it is alive: who had cancelled waited for ever. A store that is being opened may
    take longer."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40), timeout=TIMEOUT)
    world.begin()
    go = asyncio.Event()
    told: list[str] = []
    try:
        async with world.cache as cache:
            local = world.local(rank)

            async def hang(*_: object, **__: object) -> None:
                await completed(as_coroutine(go.wait()))

            local.flush = local.open_store = hang  # type: ignore[assignment]
            group = cache._opened().worker
            begun = loop.time()
            calling = asyncio.create_task(cache.attach_storage(GUEST) if opening else group.flush())
            await asyncio.sleep(0.1)
            calling.cancel()
            async with asyncio.timeout(2 * OPENING):
                await asyncio.wait([calling])
            took = loop.time() - begun
            assert calling.cancelled() or isinstance(calling.exception(), RankFailure)
            bound = OPENING if opening else TIMEOUT
            assert bound <= took <= bound + 1.0
            go.set()
    except RankFailure as failure:
        told.append(str(failure))
    assert told == [f"rank {rank}: did not let go of what was cancelled within {bound:g} s"]
    await world.group.ended()


@simulated
async def test_a_store_that_is_attached_after_a_call_was_cancelled_gives_that_call_its_time_too(
    loop: SimulatedLoop
) -> None:
    """To attach it pins the host's memory, so a rank may come late to everything else."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40), timeout=TIMEOUT)
    async with world.opened() as cache:
        local, group = world.local(1), cache._opened().worker
        plain = local.open_store

        async def pins(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(10 * TIMEOUT)
            return await plain(*args, **named)

        async def late() -> None:
            await completed(as_coroutine(asyncio.sleep(9 * TIMEOUT)))

        local.open_store, local.flush = pins, late  # type: ignore[method-assign]
        calling = asyncio.create_task(group.flush())
        await asyncio.sleep(0.1)
        calling.cancel()
        await asyncio.sleep(0.1)
        await cache.attach_storage(GUEST)
        await asyncio.wait([calling])
        assert calling.cancelled()


async def as_coroutine(work: Coroutine[Any, Any, Any]) -> None:
    await work


@pytest.mark.parametrize("gone", ["head closes", "head is gone"])
@simulated
async def test_a_worker_whose_store_hangs_while_it_is_closed_ends_within_the_time_out(
    loop: SimulatedLoop, gone: str
) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True), own=None, timeout=TIMEOUT)
    world.begin()
    cache = await world.cache.__aenter__()
    go = hang_at_the_end(world.local(1)._tiers)
    if gone == "head is gone":
        world.process(1).link.peer.cut()
    else:
        with suppress(BackendError):
            await cache.aclose(timeout=1.0)
    begun = loop.time()
    async with asyncio.timeout(120.0):
        await world.process(1).ended()
    assert loop.time() - begun <= TIMEOUT + 1.0
    go.set()
    with suppress(BackendError):
        await cache.aclose(timeout=1.0)
    await world.group.ended()
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("victim", [1, 2])
@simulated
async def test_a_rank_that_falls_silent_while_a_store_is_opened_is_found_by_the_time_out(
    loop: SimulatedLoop, victim: int
) -> None:
    """Memory is pinned in pieces, so nothing keeps a rank that is well from saying that it is alive."""
    world = GroupWorld(loop, Topology(tp=3), settings(16, 40), timeout=TIMEOUT)
    world.begin()
    told: RankFailure | None = None
    try:
        async with world.cache as cache:

            async def hang(*_: object, **__: object) -> None:
                await asyncio.Event().wait()

            world.local(victim).open_store = hang  # type: ignore[assignment]
            attaching = asyncio.create_task(cache.attach_storage(GUEST))
            await asyncio.sleep(0.1)
            world.process(victim).link.fall_silent()
            begun = loop.time()
            await asyncio.wait([attaching])
            assert loop.time() - begun <= max(TIMEOUT, PINNING) + 1.0
            attaching.exception()
    except RankFailure as failure:
        told = failure
    assert told is not None
    assert told.rank == victim
    world.process(victim).task.cancel()
    await asyncio.wait([process.task for process in world.group.processes.values()])


# A group's memory of what is over is bounded: batches, those who waited for them, stores, pages.


@simulated
async def test_a_groups_books_are_empty_when_all_is_over(loop: SimulatedLoop) -> None:
    """Failed backups, batches that were given up or that commits named, and stores that came and went leave nothing."""
    world = GroupWorld(loop, Topology(tp=2), settings(16, 64, stored=True), lag=0.001, faults={1: Faults(failing=0.5)})
    async with world.opened() as cache:
        group: Any = cache._opened().worker
        for op in range(100):
            group.give_up(op)
        for seed in range(100):
            await world.serve(text(1, seed=seed))
            await cache.batch_ended(seed + 1)
        for _ in range(3):
            await cache.detach_storage(await cache.attach_storage(GUEST))
        await cache.flush()
        assert group.meters()["backup_host"].errors
        books = [group._to_forget, group._calls, *(server.local._given_up for server in servers(world))]
        assert not any(books)
        assert len(group._open_stores) == 1
        assert len(cache._opened().batches._ready) < 70


@simulated
async def test_a_backup_waits_for_a_batch_once_however_many_commits_named_it(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
    async with world.opened() as cache:
        worker = cache._opened().worker
        plain, after = worker.perform, list[tuple[int, ...]]()

        def perform(plan: Any) -> None:
            after.extend(work.after for work in plan if work.kind is CopyKind.BACKUP)
            plain(plan)

        worker.perform = perform  # type: ignore[method-assign]
        async with cache.lease(text(3)) as lease:
            number = world.compute(lease, text(3))
            for pages in (1, 2, 3):
                await lease.commit(text(pages), after=number)
            lease.release(after=number)
        await cache.flush()
        assert after == [(number,)] * len(after)
        assert len(after) == 3


@simulated
async def test_the_copies_of_a_plan_leave_in_one_frame_before_anything_else_runs(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
    async with world.opened() as cache:
        worker, link = cache._opened().worker, world.process(1).link.peer
        plain, frames = worker.perform, list[int]()

        def perform(plan: Any) -> None:
            before = link.frames
            plain(plan)
            frames.append(link.frames - before)

        worker.perform = perform  # type: ignore[method-assign]
        for _ in range(2):
            await world.serve(text(3))
            await cache.flush()
            await world.push_out(8)
        assert len(frames) > 1
        assert set(frames) == {1}


@simulated
async def test_a_prefetch_asks_each_worker_in_one_message_for_full_and_its_sidecars_and_in_one_for_all_others(
    loop: SimulatedLoop
) -> None:
    """How far FULL goes says which pages of the others matter; it is asked for 128 pages at a time."""
    sidecars = (
        Sidecar(name="index", indices_from="full", bytes_per_page=8, layers=2),
        Sidecar(name="latent", indices_from="swa", bytes_per_page=8, layers=2),
    )
    config = settings(16, 40, swa=16, mamba=12, sidecars=sidecars, stored=True)
    world = GroupWorld(loop, Topology(tp=2), config, own=None)
    async with world.opened():
        await world.serve(text(6))
    sent: dict[int, list[Message]] = {0: [], 1: []}
    async with world.opened() as cache:
        for rank, messages in sent.items():
            note_messages(world, rank, messages)
        assert (await cache.prefetch(text(6, extra=1))).tokens == 24
    for messages in sent.values():
        asked = [[question.pool for question in message.asked] for message in messages  # type: ignore[attr-defined]
                 if type(message) is ORDERS["ask"].message]  # fmt: skip
        assert [sorted(pools) for pools in asked] == [["full", "index"], ["latent", "mamba", "swa"]]


def note_messages(world: GroupWorld, rank: int, messages: list[Message]) -> None:
    """Note what the head sends to ``rank`` from now on."""
    link = world.process(rank).link.peer
    plain = link.send

    def send(frame: bytes) -> None:
        messages.extend(decode_orders(frame))
        plain(frame)

    link.send = send  # type: ignore[method-assign]


@simulated
async def test_who_stops_waiting_for_a_batch_or_the_next_one_is_forgotten(loop: SimulatedLoop) -> None:
    world = GroupWorld(loop, Topology(tp=2), settings(8))
    async with world.bare() as cache:
        number = cache.send_batch()
        group: Any = cache._opened().worker
        face = world.process(1).face
        (await anext(face)).end()
        waits: list[Callable[[], Awaitable[Any]]] = [
            lambda: cache.batch_ended(number), lambda: anext(face), lambda: face.heard(2),
        ]  # fmt: skip
        for wait in waits:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(wait(), 0.01)
        assert not group._sent[number]._changed._event._waiters
        assert len(face._server.batches._came._event._waiters) == 1, "its process waits for the end"
        waiting = [asyncio.ensure_future(cache.batch_ended(number)) for _ in range(2)]
        await asyncio.sleep(0)
        group.own.batches.find(number).end()
        await asyncio.gather(*waiting)
