"""One rank among others: where it stands and what connects it. What ``AsyncCache`` takes as ``ranks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asynccache.ranks.links import Links
from asynccache.ranks.topology import Topology


class Ranks(Protocol):
    """``rank`` of ``topology``, connected: ``ranks.gloo`` makes one, the simulated ranks another. Whoever made it
    closes it, after the cache; after a failure it is of no more use."""

    @property
    def topology(self) -> Topology:
        """The whole group."""
        ...

    @property
    def rank(self) -> int:
        """This one's number."""
        ...

    def links(self, length: int) -> Links:
        """The connections for frames of ``length`` words."""
        ...

    async def gather(self, content: bytes) -> Sequence[bytes]:
        """What every rank gives, by rank. Cancelling it leaves the ranks unable to gather again."""
        ...


def shard(ranks: Ranks) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Which part of every page a rank holds: its number and the count, by tp, cp and pp."""
    topology, place = ranks.topology, ranks.topology.place(ranks.rank)
    return place.tp, topology.tp, (place.cp, topology.cp), (place.pp, topology.pp)


def is_clocked(ranks: Ranks) -> bool:
    """Whether its clock counts: the first pipeline stage's does."""
    return ranks.topology.place(ranks.rank).pp == 0
