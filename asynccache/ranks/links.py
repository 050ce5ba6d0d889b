"""What the protocol sends through. An implementation owns its threads and its sends in flight; the loop never waits
for a peer.

Law: frames of one link arrive whole and in order. A peer that is gone, or silent for longer than the time-out, is a
``RankFailure`` from ``minimum`` or ``receive``, on every group within that time; and what failed once stays failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asynccache.ranks.frames import Words


class Group(Protocol):
    """Ranks that reduce together."""

    async def minimum(self, words: Words) -> Words:
        """The MIN, word by word, over what every rank of the group hands in; every rank calls it once for each of the
        others' calls. Cancelling it leaves the group unusable.

        Raises:
            RankFailure: a rank is gone or silent.
        """
        ...


class Link(Protocol):
    """A neighbour in the pipeline."""

    def send(self, words: Words) -> None:
        """Hand a frame over; never waits. Its failure is the next ``receive``'s, here or at the peer."""
        ...

    async def receive(self) -> Words:
        """The next frame. To be awaited only while one is due: an idle receive times out.

        Raises:
            RankFailure: the peer is gone or silent. Cancelling it leaves the link unusable.
        """
        ...


@dataclass(frozen=True, slots=True)
class Links:
    """One rank's connections. ``groups``: of its column, to be reduced over one after the other, and empty in all but
    the first pipeline stage; ``above`` and ``below``: the neighbouring stages, where there are any."""

    groups: Sequence[Group] = ()
    above: Link | None = None
    below: Link | None = None
