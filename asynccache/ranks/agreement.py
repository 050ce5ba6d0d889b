"""How several ranks agree on outcomes: the seam, and the agreement of one rank with itself.

Law: an outcome changes the core only after every rank has reported it. What a rank's own workers found out is a
*report*; what all of them found out is a *decision*. Only decisions reach the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asynccache.core.plan import Outcome


class Agreement(Protocol):
    """Turns this rank's reports into decisions that are the same, in the same order, on every rank."""

    def report(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Take this rank's reports; return those that are decided already (with several ranks: none)."""
        ...

    async def step(self) -> Sequence[Outcome]:
        """Exchange reports with the other ranks and return what they decided, in one order everywhere.

        Every rank calls it once per scheduler iteration. Cancelling it leaves the group unusable.

        Raises:
            RankFailure: another rank died, hung or reported bad health.
            RankDivergence: ranks hold different trees.
        """
        ...


class SingleRank:
    """One rank: every report is a decision."""

    def report(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """All of them, at once."""
        return outcomes

    async def step(self) -> Sequence[Outcome]:
        """Nothing is ever left to agree on."""
        return ()
