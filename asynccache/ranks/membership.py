"""One rank among others: where it stands and what connects it."""

from __future__ import annotations

from dataclasses import dataclass

from asynccache.ranks.links import Links
from asynccache.ranks.topology import Place, Topology


@dataclass(frozen=True, slots=True)
class Ranks:
    """``rank`` of ``topology``. ``credit``: decisions that a pipeline stage may be ahead of the reports of the next; by
    default twice as many as there are stages."""

    topology: Topology
    rank: int
    links: Links
    credit: int = 0

    @property
    def place(self) -> Place:
        """Its coordinates."""
        return self.topology.place(self.rank)

    @property
    def shard(self) -> tuple[int, int]:
        """Which part of every page of its layers it holds, of how many."""
        place = self.place
        return place.tp + self.topology.tp * place.cp, self.topology.tp * self.topology.cp

    @property
    def ahead(self) -> int:
        """The credit."""
        return self.credit or 2 * self.topology.pp
