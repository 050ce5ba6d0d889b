"""A worker that reports something impossible ends the group as soon as it reports it, and not only when the report is
used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynccache import RankFailure
from asynccache.core.plan import StoredPages
from asynccache.worker import Topology
from asynccache.worker.messages import StoreCounters
from asynccache.worker.rank_server import ORDERS
from asynccache.worker.work import StoredBatch, WriteOrder
from tests.group.group_kit import GroupWorld, play, settings
from tests.simulated.loop import SimulatedLoop

Lie = Callable[[Any], Any]

OPENED: dict[str, dict[str, Any]] = {
    "layers that are fewer than none": {"layers": -1}, "a pool that nobody named": {"weights": {"nobody's": 4}},
    "a page without bytes": {"weights": {"full": 0}}, "no digest": {"digest": b"short"},
}  # fmt: skip
WRITTEN = {
    "an operation of another batch": StoredBatch(frozenset({8}), 1, 1, 64),
    "fewer pages than none": StoredBatch(frozenset(), -1, 0, 64),
}  # fmt: skip
COUNTED: dict[str, tuple[Any, Any]] = {
    "a breaker's state": ({"breaker": 99}, {}), "no number": ({}, {"sim": {"puts": float("nan")}}),
}  # fmt: skip


def told_by_name(tell: Callable[[GroupWorld], None], why: str) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
        world.begin()
        try:
            tell(world)
            async with world.cache as cache:
                group: Any = cache._opened().worker
                await group.store([WriteOrder(7, (StoredPages(0, bytes(32), bytes(4)),))])
                await world.process(1).ended()
                cache.statistics()
        finally:
            await world.group.ended()

    with pytest.raises(RankFailure, match=f"rank 1.*{why}"):
        play(main)


def answers(world: GroupWorld, name: str, lie: Lie) -> None:
    """Rank 1 answers a call with what ``lie`` makes of its answer."""
    server: Any = world.process(1).server
    plain = server._tell

    def tell(message: Any) -> None:
        if type(message) is ORDERS[name].answer:
            message.value = lie(message.value)
        plain(message)

    server._tell = tell


@pytest.mark.parametrize("lie", OPENED)
def test_pools_that_cannot_be_end_the_opening(lie: str) -> None:
    told_by_name(
        lambda world: answers(world, "open", lambda said: said._replace(**OPENED[lie])), "opened other pools"
    )


@pytest.mark.parametrize("lie", WRITTEN)
def test_pages_that_cannot_have_been_written_end_the_group(lie: str) -> None:
    told_by_name(
        lambda world: answers(world, "store", lambda said: WRITTEN[lie]), "wrote a batch of other operations"
    )


@pytest.mark.parametrize("lie", COUNTED)
def test_counters_that_cannot_be_end_the_group(lie: str) -> None:
    def tell(world: GroupWorld) -> None:
        def lying(said: Any) -> Any:
            world.process(1).server._tell(StoreCounters(*COUNTED[lie]))
            return said

        answers(world, "store", lying)

    told_by_name(tell, "counted what nobody can")
