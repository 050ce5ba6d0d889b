"""How several ranks agree on what happened: one tree, whatever finishes when and where.

``agreement`` is the seam to the runtime and the agreement of one rank with itself. ``steps`` is the protocol;
``progress``, ``frames`` and ``chain`` are its values; ``links`` is what it sends through, ``gloo`` the links of real
processes. Knows the core's plan values and nothing else of the cache.
"""

from __future__ import annotations

from asynccache.ranks.agreement import Agreement, Ballot, Counts, Phase, SingleRank
from asynccache.ranks.chain import Chain
from asynccache.ranks.frames import Frames
from asynccache.ranks.links import Links
from asynccache.ranks.membership import Ranks
from asynccache.ranks.progress import NEUTRAL, PENDING, Progress
from asynccache.ranks.steps import Replica, Steps
from asynccache.ranks.topology import Place, Topology
from asynccache.ranks.turns import LockstepTurns, Turns

__all__ = [
    "NEUTRAL", "PENDING", "Agreement", "Ballot", "Chain", "Counts", "Frames", "Links", "LockstepTurns", "Phase",
    "Place", "Progress", "Ranks", "Replica", "SingleRank", "Steps", "Topology", "Turns",
]
