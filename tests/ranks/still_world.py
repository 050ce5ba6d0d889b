"""A world of whole caches in which nothing happens but what a test says: one group after another, over one store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple, TypeVar

from asynccache.config import CacheConfig
from asynccache.memory.faults import Faults
from asynccache.ranks import Topology
from asynccache.runtime.lease import Hits, Lease
from asynccache.runtime.prefetch import PrefetchResult
from asynccache.storage import PageKey
from asynccache.testing.simulated_backend import HONEST
from asynccache.testing.simulated_loop import Order, SimulatedLoop
from asynccache.testing.simulated_world import Climate
from tests.ranks.cache_world import CacheWorld, Member
from tests.ranks.engine_bytes import EngineBytes

T = TypeVar("T")
Pages = dict[PageKey, tuple[bytes, bytes]]


class Served(NamedTuple):
    """What a request met. ``state``: what must be equal on all ranks afterwards."""

    prefetched: PrefetchResult
    hits: Hits
    state: tuple[object, ...]


class StillWorld(CacheWorld):
    """``pages``: the store, which outlives it."""

    def __init__(
        self, loop: SimulatedLoop, topology: Topology, config: CacheConfig, pages: Pages | None = None
    ) -> None:
        climate = Climate(
            config=config, order=Order.SHUFFLED, faults=Faults(), latency=0.001, hostility=replace(HONEST, delay=0.005),
            requests=0, concurrency=0, cancel=0.0, alphabet=2, disturb=False,
        )  # fmt: skip
        super().__init__(loop, loop.seed, topology, climate=climate)
        self.has_store = True
        if pages is not None:
            self.pages = pages
        self.members = [Member(self, rank) for rank in range(topology.ranks)]

    async def group(self, script: Callable[[Member], Awaitable[T]]) -> list[T]:
        """``script`` on every rank of a new group, from open to close; what it says, by rank."""
        try:
            return list(await asyncio.gather(*(_lived(member, script) for member in self.members)))
        finally:
            self.net.reconnect()

    async def close(self) -> None:
        for member in self.members:
            await member.close()


async def _lived(member: Member, script: Callable[[Member], Awaitable[T]]) -> T:
    member.begin(0)
    async with member.cache:
        member.bytes = EngineBytes(member.cache, member.config, member.place)
        return await script(member)


async def publish(member: Member, text: list[int]) -> None:
    """Compute ``text``, whatever is cached, and save it everywhere."""
    await serve(member, text)
    await member.cache.flush()


async def serve(member: Member, text: list[int]) -> Served:
    """One request, from its prefetch to its release; bytes are verified, of what was cached and of all."""
    handle = member.cache.prefetch(text)
    while not handle.done():
        await member.cache.step()
        await asyncio.sleep(member.local.random() * 0.002)
    result = await handle
    match = await member.cache.match(text)
    lease = member.cache.lease(text, prefetch=handle, wait=False)
    async with lease:
        await lease.loaded()
        await compute(member, lease, text)
        hits = lease.hits
    await member.cache.step()
    core = member.cache.core
    free = tuple(shelf.free for shelf in (*core.statistics().device, *core.statistics().host))
    return Served(result, hits, (member.digest(), match, free))


async def compute(member: Member, lease: Lease, text: list[int]) -> None:
    """Verify what was cached, and publish the rest."""
    engine = member.bytes
    engine.verify(lease, None, text, lease.cached, state=True)
    engine.write(lease, None, text, lease.cached // member.page)
    whole = text[: len(text) // member.page * member.page]
    await lease.commit(whole, checkpoint=engine.checkpoint(lease, None, whole))
    await lease.commit(text)
    lease.adopt()
    engine.verify(lease, None, text, len(text))


def text_of(pages: int, name: str = "text", page_size: int = 4) -> list[int]:
    """So many pages, and a token to compute."""
    random = Random(name)
    return [random.randrange(1000) for _ in range(pages * page_size + 1)]
