"""How several ranks agree on outcomes: the seam, and the agreement of one rank with itself.

Law: an outcome changes the core only after every rank has reported it. What a rank's own workers found out is a
*report*; what all of them found out is a *decision*. Only decisions reach the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from asynccache.core.plan import Outcome
from asynccache.ranks.turns import Turns

Counts = Mapping[str, int]


class Phase(Protocol):
    """A part of a prefetch that ranks agree on before the next one begins."""

    async def meet(self, counts: Counts) -> Counts:
        """This rank has got so far, by pool, and its I/O has let go; how far all ranks have got. A pool of which this
        rank has nothing is left out of ``counts``; one of which no rank has anything, of the answer."""
        ...


class Ballot(Protocol):
    """A vote of all ranks. ``said``: whether all said yes; None until a step brought the answer."""

    @property
    def said(self) -> bool | None: ...

    def cast(self, ok: bool) -> None:
        """This rank's own."""
        ...

    def withdraw(self) -> None:
        """It is to be no, whatever was cast here; in vain if the answer is on its way."""
        ...


class Agreement(Protocol):
    """Turns this rank's reports into decisions that are the same, in the same order, on every rank."""

    turns: Turns

    def opened(self, op: int, *, storing: bool = False) -> None:
        """An operation has begun, of which ``report`` will be told. ``storing``: storage takes it, and may be late."""
        ...

    def report(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Take this rank's reports; return those that are decided already (with several ranks: none)."""
        ...

    def phase(self, late: Callable[[], bool], stop: Callable[[], None]) -> Phase:
        """Begin one. ``late``: whether its time is over, by this rank's clock; ``stop`` is called when some rank's
        said so, on all of them at one step."""
        ...

    def vote(self, give_up: Callable[[], object]) -> Ballot:
        """Begin to ask all ranks whether what each does for itself goes well. ``give_up`` is called, here too, when
        one has withdrawn while others have not voted."""
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

    def __init__(self) -> None:
        self.turns = Turns()

    def opened(self, op: int, *, storing: bool = False) -> None:
        """Nobody else need know."""

    def report(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """All of them, at once."""
        return outcomes

    def phase(self, late: Callable[[], bool], stop: Callable[[], None]) -> Phase:
        """There is nobody to meet."""
        return _ALONE

    def vote(self, give_up: Callable[[], object]) -> Ballot:
        """As it says."""
        return _Own()

    async def step(self) -> Sequence[Outcome]:
        """Nothing is ever left to agree on."""
        return ()


class _Own:
    said: bool | None = None

    def cast(self, ok: bool) -> None:
        if self.said is None:
            self.said = ok

    def withdraw(self) -> None:
        self.cast(False)


class _Alone:
    async def meet(self, counts: Counts) -> Counts:
        return counts


_ALONE = _Alone()
