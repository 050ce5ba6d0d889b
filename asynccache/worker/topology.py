"""Ranks and their coordinates: tensor-, context- and pipeline-parallel. Pure arithmetic.

Ranks are numbered as engines number them: tp fastest, then cp, then pp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asynccache import checks
from asynccache.errors import ConfigError


class RankPlace(NamedTuple):
    """One rank's coordinates, each from 0 on."""

    tp: int
    cp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The number of ranks in each direction: tensor-, context- and pipeline-parallel."""

    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1))

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.tp * self.cp * self.pp

    def place(self, rank: int) -> RankPlace:
        """Return the coordinates of ``rank``. Raises ``ConfigError``: there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"rank={rank} is not one of the {self.ranks} ranks of {self}")
        return RankPlace(rank % self.tp, rank // self.tp % self.cp, rank // (self.tp * self.cp))

    def rank(self, place: RankPlace) -> int:
        """Return the number of the rank at ``place``."""
        return place.tp + self.tp * (place.cp + self.cp * place.pp)
