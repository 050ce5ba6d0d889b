"""A call that each rank makes for itself has one end for all, also where a rank takes back what it has said."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache
from asynccache.errors import Unavailable
from asynccache.ranks import Topology
from tests.ranks.test_rank_slow_stores import SHAPES, Group, Store, attach, cancelled, publish


class Stubborn(Store):
    """It opens, whoever has given it up meanwhile."""

    async def open(self, url: Any, layout: Any) -> Store:
        opening = asyncio.ensure_future(super().open(url, layout))
        while not opening.done():
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                continue
        return self


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("gone", [0, 1])
def test_what_went_well_everywhere_and_was_given_up_on_one_rank_is_undone_on_all(
    topology: Topology, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank whose store is open at once is cancelled; all others open theirs well, and later."""
    group = Group(topology)
    group.stores = [Store(Random(rank)) if rank == gone else Stubborn(Random(rank)) for rank in range(topology.ranks)]
    for rank, store in enumerate(group.stores):
        store.closed = True
        store.slow = "" if rank == gone else "open"

    async def script(rank: int, cache: AsyncCache) -> str:
        if rank == gone:
            said = await cancelled(attach(rank, cache), 0.5)
        else:
            with pytest.raises(Unavailable, match="was cancelled there"):
                await attach(rank, cache)
            said = "refused"
        assert not cache.stores
        assert group.stores[rank].closed
        await publish(cache, 0)
        return said

    said = group.run(script, monkeypatch)
    assert said == ["cancelled" if rank == gone else "refused" for rank in range(topology.ranks)]
