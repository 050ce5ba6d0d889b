"""Messages of a group to its workers, however long and odd their content is."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from asynccache import BatchFailed, RankFailure, Sidecar
from asynccache.core.plan import StoredPages
from asynccache.runtime import fetching
from asynccache.worker import Topology
from asynccache.worker import link as links
from asynccache.worker.group import WorkerGroup
from asynccache.worker.local import LocalWorker
from asynccache.worker.work import WriteOrder
from tests.group.group_kit import GroupWorld, play, settings, text
from tests.simulated.loop import SimulatedLoop

PAGES = 300


@pytest.mark.parametrize("reason", ["bad file \udcff", "x" * (17 << 20)])
def test_a_batch_fails_alone_whatever_the_reason_says(reason: str) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        async with world.cache as cache:
            assert cache.worker is not None
            number = cache.send_batch()
            (await anext(cache.worker)).end()
            (await anext(world.process(1).face)).fail(reason)
            with pytest.raises(BatchFailed) as raised:
                async with asyncio.timeout(60.0):
                    await cache.batch_ended(number)
            assert raised.value.reasons[1][:8] == reason[:8]
        await world.group.ended()
        await world.aclose()

    play(main)


def test_no_message_is_too_long_for_a_frame_however_many_pages_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked about, read and written, in windows and in full."""
    monkeypatch.setattr(links, "MOST_FRAME", 10_000)  # 39 pages in a message

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(PAGES, 2 * PAGES, swa=PAGES, window=4 * 100, stored=True))
        long = text(PAGES - 2)
        async with world.opened() as cache:
            await world.serve(long)
            unsaved = await cache.flush()
            assert unsaved.storage == 0
            told = await cache.explain(long)
            assert told.storage == len(long)
        async with world.opened() as cache:
            async with asyncio.timeout(60.0):
                assert await world.serve([*long, 1], prefetch=cache.prefetch([*long, 1])) == len(long)
        await world.aclose()

    play(main)


def test_no_message_is_too_long_for_a_frame_however_many_pools_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked about, read and written, in 34 pools with the same pages, and in windows besides."""
    monkeypatch.setattr(links, "MOST_FRAME", 20_000)  # one pool's pages fit, those of all pools do not
    monkeypatch.setattr(fetching, "BATCH_PAGES", 8)  # so many pages of all pools have to fit, as 128 do in 3,000 pools

    async def main(loop: SimulatedLoop) -> None:
        beside = tuple(Sidecar(name=f"side{i}", indices_from="full", bytes_per_page=16, layers=2) for i in range(33))
        config = replace(settings(60, 120, swa=60, window=4 * 50, stored=True), sidecars=beside)
        world = GroupWorld(loop, Topology(tp=2), config)
        long = text(58)
        async with world.opened() as cache:
            await world.serve(long)
            assert (await cache.flush()).storage == 0
            assert (await cache.explain(long)).storage == len(long)
        async with world.opened() as cache:
            prefetch = cache.prefetch([*long, 1])
            await prefetch
            assert await world.serve([*long, 1], prefetch=prefetch) == len(long)
        await world.aclose()

    play(main)


def test_a_long_operation_that_is_given_up_is_written_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_FRAME", 3000)

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40, stored=True))
        async with world.opened() as cache:
            group = cache._opened().worker
            assert isinstance(group, WorkerGroup)
            hashes = b"".join(page.to_bytes(32, "big") for page in range(40))
            slots = b"".join(page.to_bytes(4, "little") for page in range(40))
            order = WriteOrder(10**6, (StoredPages(0, hashes, slots),))
            whole = await group.store([order])
            assert (whole.failed, whole.full_pages, whole.pages) == (frozenset(), 40, 80)
            storing = asyncio.create_task(group.store([order._replace(op=10**6 + 1)]))
            while not group._storing:                  # noqa: ASYNC110  before the next turn
                await asyncio.sleep(0)
            group.give_up(10**6 + 1)
            given_up = await storing
            assert given_up.failed == {10**6 + 1}
            assert given_up.full_pages <= 11, "no more than what was under way"
            assert not group._storing
        await world.aclose()

    play(main)


def test_a_head_that_cannot_say_something_ends_the_group_and_all_are_told() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        told: list[BaseException] = []
        try:
            async with world.cache as cache:
                group = cache._opened().worker
                assert isinstance(group, WorkerGroup)
                waiting = asyncio.create_task(cache.batch_ended(cache.send_batch()))
                group.tell(LocalWorker.is_away, bytes(17 << 20))
                async with asyncio.timeout(60.0):
                    told += filter(None, await asyncio.gather(waiting, return_exceptions=True))
        except RankFailure as failure:
            told.append(failure)
        assert [str(one)[:48] for one in told] == ["rank 0: the head cannot send its is_away: it has"] * 2
        await world.group.ended()
        assert "the head cannot send its is_away" in str(world.process(1).failure)
        await world.aclose()

    play(main)
