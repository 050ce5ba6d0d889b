"""A group's memory of what is over is bounded: batches, those who waited for them, stores, pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynccache import Sidecar
from asynccache.worker import Topology
from asynccache.worker.messages import Message
from asynccache.worker.rank_server import ORDERS, decode_orders
from asynccache.worker.work import CopyKind
from tests.group.group_kit import GUEST, GroupWorld, play, servers, settings, text
from tests.simulated.loop import SimulatedLoop


def test_batches_that_commits_named_are_forgotten_when_they_are_over_also_without_a_host_tier() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8), lag=0.001)
        async with world.opened() as cache:
            for seed in range(100):
                await world.serve(text(1, seed=seed))
                await cache.batch_ended(seed + 1)
            assert len(cache._opened().batches._ready) < 70
        await world.aclose()

    play(main)


def test_a_backup_waits_for_a_batch_once_however_many_commits_named_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
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
        await world.aclose()

    play(main)


def test_the_copies_of_a_plan_leave_in_one_frame_before_anything_else_runs() -> None:
    async def main(loop: SimulatedLoop) -> None:
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
        await world.aclose()

    play(main)


def test_a_prefetch_asks_each_worker_in_one_message_for_full_and_its_sidecars_and_in_one_for_all_others() -> None:
    """How far FULL goes says which pages of the others matter; it is asked for 128 pages at a time."""
    sidecars = (
        Sidecar(name="index", indices_from="full", bytes_per_page=8, layers=2),
        Sidecar(name="latent", indices_from="swa", bytes_per_page=8, layers=2),
    )

    async def main(loop: SimulatedLoop) -> None:
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
        await world.aclose()

    play(main)


def note_messages(world: GroupWorld, rank: int, messages: list[Message]) -> None:
    """Note what the head sends to ``rank`` from now on."""
    link = world.process(rank).link.peer
    plain = link.send

    def send(frame: bytes) -> None:
        messages.extend(decode_orders(frame))
        plain(frame)

    link.send = send  # type: ignore[method-assign]


def test_a_batch_of_pages_is_given_up_by_workers_that_still_write_it_and_forgotten_by_the_others() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
        async with world.opened() as cache:
            group: Any = cache._opened().worker
            for op in range(100):
                group.give_up(op)
            await world.serve(text(2))
            await cache.flush()
            locals_: list[Any] = [server.local for server in servers(world)]
            assert not any(local._given_up for local in locals_)
            assert not group._calls
        await world.aclose()

    play(main)


def test_of_a_store_that_was_detached_nothing_is_kept() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
        async with world.opened() as cache:
            group: Any = cache._opened().worker
            for _ in range(3):
                name = await cache.attach_storage(GUEST)
                assert len(group._open_stores) == 1
                await cache.detach_storage(name)
                assert not group._open_stores
        await world.aclose()

    play(main)


def test_who_stops_waiting_for_a_batch_or_the_next_one_is_forgotten() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8))
        world.begin()
        async with world.cache as cache:
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
        await world.group.ended()
        await world.aclose()

    play(main)
