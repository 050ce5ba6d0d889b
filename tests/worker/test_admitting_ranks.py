"""The ranks of a group: complete when each has come once; a rank that has gone again counts as not come."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.errors import ConfigError, RankFailure
from asynccache.version import VERSION
from asynccache.worker import Topology, connect, listen
from asynccache.worker.link import Link, open_link
from asynccache.worker.messages import Hello, encode
from tests.waiting import until
from tests.worker.link_kit import ANYWHERE, SECRET


async def come(address: str, rank: int) -> Link:
    link, _ = await open_link(address, SECRET, encode(Hello(VERSION, rank)), timeout=30.0)
    return link


async def test_a_worker_that_restarts_before_all_have_come_takes_its_place_and_nobody_does_afterwards() -> None:
    async with listen(ANYWHERE, Topology(tp=3), secret=SECRET) as workers:
        arriving = asyncio.create_task(workers.arrived())
        first = await come(workers.address, 1)
        with pytest.raises(RankFailure, match="rank 1 has come before"):
            await come(workers.address, 1)
        first.abort()
        await until(lambda: "0 of 2 have come" in repr(workers), "nobody noticed that rank 1 went")
        others = [await come(workers.address, 2)]
        await asyncio.sleep(0.01)
        assert not arriving.done(), "rank 1 is not there"
        others.append(await come(workers.address, 1))
        links = await arriving
        assert sorted(links) == [1, 2]
        assert not any(link.ended for link in links.values())
        others[1].abort()
        await until(lambda: links[1].ended, "nobody noticed that rank 1 went again")
        with pytest.raises(RankFailure, match="rank 1 has come before"):
            await come(workers.address, 1)
        for link in (*others, *links.values()):
            link.abort()


@pytest.mark.slow(2)
async def test_each_worker_that_comes_gives_the_next_one_as_long_and_one_that_comes_again_does_not() -> None:
    loop, patience = asyncio.get_running_loop(), 1.0
    async with listen(ANYWHERE, Topology(tp=3), secret=SECRET, arrival=patience) as workers:
        arriving, began = asyncio.create_task(workers.arrived()), loop.time()
        await asyncio.sleep(0.6 * patience)
        links = [await come(workers.address, 1)]
        newest = loop.time()
        await asyncio.sleep(0.6 * patience)
        assert not arriving.done(), "rank 1 came in between"
        links[0].abort()
        await until(lambda: "0 of 2 have come" in repr(workers), "nobody noticed that rank 1 went")
        links.append(await come(workers.address, 1))
        with pytest.raises(RankFailure, match="rank 2: did not come within 1 s"):
            await arriving
        assert began + 1.6 * patience < loop.time() < newest + 1.55 * patience
        for link in links:
            link.abort()


async def test_a_rank_that_no_hello_can_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^rank="):
        async with connect(ANYWHERE, 1 << 64, secret=SECRET):
            pass
