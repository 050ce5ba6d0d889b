"""Messages of a group to its workers, however long and odd their content is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccache import AsyncCache, BatchFailed, RankFailure
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import StoredPages
from asynccache.worker import Topology
from asynccache.worker import group as group_module
from asynccache.worker.group import WorkerGroup
from asynccache.worker.local import BATCH_PAGES, LocalWorker
from asynccache.worker.rank_server import ORDERS
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


@pytest.mark.parametrize("part", [1, 7, 297, 298, 299])
def test_no_message_asks_about_or_deletes_more_pages_than_a_part_however_many_there_are(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows and in full: every page is asked about and answered, and every page goes."""
    monkeypatch.setattr(group_module, "PART", part)

    async def main(loop: SimulatedLoop) -> None:
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
        await world.aclose()

    play(main)


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


def test_a_long_operation_that_is_given_up_is_written_no_further() -> None:
    async def main(loop: SimulatedLoop) -> None:
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
                group.tell(LocalWorker.is_away, bytes(129 << 20))
                async with asyncio.timeout(60.0):
                    told += filter(None, await asyncio.gather(waiting, return_exceptions=True))
        except RankFailure as failure:
            told.append(failure)
        assert [str(one)[:48] for one in told] == ["rank 0: the head cannot send its is_away: it has"] * 2
        await world.group.ended()
        assert "the head cannot send its is_away" in str(world.process(1).failure)
        await world.aclose()

    play(main)
