"""Several ranks: what this one has in flight, what it reports of it, and what all of them decided.

Law: a transfer enters by a lockstep call or a decision and leaves by a decision alone; its progress here is created
with it, in the same turn, and is this rank's own. One operation of the core is one transfer; a prefetch is one for each
of its phases, numbered as they begin. The order of numbers is the order of decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from asynccache.core.plan import Outcome, Status
from asynccache.errors import RankFailure
from asynccache.ranks import NEUTRAL, Chain, Counts, Frames, LockstepTurns, Phase, Progress, Ranks, Steps, Turns
from asynccache.ranks.frames import Header, Health
from asynccache.ranks.membership import is_clocked
from asynccache.ranks.progress import FINAL, PENDING

FAREWELL = 2.0


class Transfer:
    """One entry of the ledger. ``op``: the core's operation, 0 for a phase of a prefetch."""

    __slots__ = ("op", "progress")

    def __init__(self, op: int, progress: Progress) -> None:
        self.op = op
        self.progress = progress

    def stop(self) -> None:
        """``go_on`` falls, here."""
        if self.progress.status == PENDING and self.progress.go_on:
            self.progress = self.progress._replace(go_on=0)

    def refresh(self) -> None:
        """Look at the clock, if it has one."""

    def hear(self, agreed: Progress) -> None:
        """What all ranks have reached; not final."""


class Lockstep:
    """One rank's agreement. ``pools``: of the whole model in configured order; ``here``: those with bytes on this
    rank."""

    def __init__(self, ranks: Ranks, pools: Sequence[str], here: Collection[str]) -> None:
        self._frames = frames = Frames(len(pools))
        self._links = ranks.links(frames.length)
        self._turns = LockstepTurns()
        self.turns: Turns = self._turns
        self.chain = Chain()
        self.steps = Steps(self, self._links, frames, credit=2 * ranks.topology.pp)
        self.pools = tuple(pools)
        self.clocked = is_clocked(ranks)
        self._start = Progress(PENDING, 1, tuple(0 if name in here else NEUTRAL for name in pools))
        self._ledger: dict[int, Transfer] = {}
        self._numbers: dict[int, int] = {}
        self._next = 1
        self._decided: list[Outcome] = []
        self._stepping = False
        self._resigned = False
        self._farewell: asyncio.Task[None] | None = None
        self.storage_is_late = False
        self.overdue: dict[int, None] = {}
        self.on_late: Callable[[bool], None] = _nothing

    def __repr__(self) -> str:
        return f"Lockstep({len(self._ledger)} in flight, {self.steps!r})"

    # the agreement

    def opened(self, op: int, *, storing: bool = False) -> None:
        """An operation has begun. The pages that it moves are counted by nobody: it is done everywhere or failed."""
        self._numbers[op] = self._open(Storing(self, op, self._start) if storing else Transfer(op, self._start))

    def report(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """This rank's I/O of these operations has let go."""
        for op, status in outcomes:
            transfer = self._ledger[self._numbers[op]]
            transfer.progress = transfer.progress._replace(status=int(status))
        return ()

    def phase(self, late: Callable[[], bool], stop: Callable[[], None]) -> Phase:
        """Begin one."""
        phase = LockstepPhase(self, self._start, late, stop)
        self._open(phase)
        return phase

    def vote(self, give_up: Callable[[], object]) -> Vote:
        """Ask all ranks; see ``ranks.Agreement``."""
        vote = Vote(self._start, give_up)
        self._open(vote)
        return vote

    async def step(self) -> Sequence[Outcome]:
        """Every rank calls it once per scheduler iteration; see ``ranks.steps``."""
        for transfer in self._ledger.values():
            transfer.refresh()
        was_late, self._stepping = bool(self.overdue), True
        try:
            await self.steps.step()
        finally:
            self._stepping = False
            if self._resigned:
                self._say_farewell()
        if was_late is not bool(self.overdue):
            self.on_late(not was_late)
        decided, self._decided = self._decided, []
        return decided

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the group is over."""
        return self.steps.health is not Health.OK

    def resign(self) -> None:
        """This rank steps no more, because of something of its own. The others are told now or, where a step is under
        way, by it or after it; those whose ledger is empty, when it is not any more."""
        self._resigned = True
        self.steps._bad_news(Health.FAILED, "this rank has resigned")
        if not self._stepping:
            self._say_farewell()

    def _say_farewell(self) -> None:
        if self._farewell is None:
            self._farewell = asyncio.get_running_loop().create_task(self._last_words(), name="asynccache-farewell")

    async def _last_words(self) -> None:
        """To the stage below, and to the column in place of the next step's."""
        header = Header(self.steps.step_number, self.chain.digest, len(self._ledger))
        if self._links.below is not None:
            self._links.below.send(self._frames.bad(Health.FAILED, header))
        words = self._frames.bad(Health.FAILED, header)
        with suppress(RankFailure):
            for group in self._links.groups:
                words = await group.minimum(words)

    async def aclose(self) -> None:
        """Give the others ``FAREWELL`` seconds to hear; who closes the connections tells the rest. Cancelling it leaves
        that to them."""
        if self._farewell is not None:
            try:
                await asyncio.wait([self._farewell], timeout=FAREWELL)
            finally:
                self._farewell.cancel()
            await asyncio.wait([self._farewell])

    async def read_reports(self) -> None:
        """What the stage below sends, for as long as there is one."""
        if self.steps.has_below:
            await self.steps.read_reports()

    def record(self, name: str, arguments: bytes, result: bytes = b"") -> None:
        """A lockstep call, or one in a turn."""
        self.chain.add(self.steps.step_number, name, arguments, result)

    def _open(self, transfer: Transfer) -> int:
        number, self._next = self._next, self._next + 1
        self._ledger[number] = transfer
        return number

    @property
    def busy(self) -> bool:
        """Whether the next step has anything to do."""
        return bool(self._ledger) or self._turns.earned

    # the replica

    def in_flight(self) -> Sequence[int]:
        """Oldest first."""
        return tuple(self._ledger)

    def local(self, op: int) -> Progress:
        """This rank's own."""
        return self._ledger[op].progress

    def decide(self, op: int, agreed: Progress) -> None:
        """What all ranks have reached."""
        transfer = self._ledger[op]
        if agreed.status == PENDING:
            transfer.hear(agreed)
            return
        del self._ledger[op]
        self.chain.add(self.steps.step_number, f"decided {op}", b"", repr(agreed).encode())
        if transfer.op:
            del self._numbers[transfer.op]
            self.overdue.pop(transfer.op, None)
            self._decided.append(Outcome(transfer.op, Status(agreed.status)))
        else:
            transfer.hear(agreed)


class Storing(Transfer):
    """Pages on their way to storage. ``go_on`` falls where storage is late; agreed, it is late everywhere, until all
    that was late by then is decided."""

    __slots__ = ("_lockstep",)

    def __init__(self, lockstep: Lockstep, op: int, progress: Progress) -> None:
        super().__init__(op, progress)
        self._lockstep = lockstep

    def refresh(self) -> None:
        """Ask this rank's storage."""
        if self._lockstep.storage_is_late:
            self.stop()

    def hear(self, agreed: Progress) -> None:
        """It is late somewhere."""
        if not agreed.go_on:
            self._lockstep.overdue[self.op] = None


class Vote(Transfer):
    """``go_on`` falls when a rank withdraws, also after it was cast."""

    __slots__ = ("_give_up", "_withdrawn", "said")

    def __init__(self, progress: Progress, give_up: Callable[[], object]) -> None:
        super().__init__(0, progress)
        self._give_up = give_up
        self._withdrawn = False
        self.said: bool | None = None

    def cast(self, ok: bool) -> None:
        """This rank's own."""
        self.progress = self.progress._replace(status=int(Status.DONE if ok else Status.FAILED))

    def withdraw(self) -> None:
        """It is to be no."""
        self.progress = self.progress._replace(go_on=0)

    def hear(self, agreed: Progress) -> None:
        """What all said; or that it is in vain."""
        if agreed.status != PENDING:
            self.said = agreed.status == FINAL and bool(agreed.go_on)
        elif not agreed.go_on and not self._withdrawn:
            self._withdrawn = True
            self._give_up()


class LockstepPhase(Transfer):
    """A phase of a prefetch. ``go_on`` falls when this rank's clock says so, and counts if it is clocked."""

    __slots__ = ("_late", "_lockstep", "_met", "_stop", "_stopped")

    def __init__(
        self, lockstep: Lockstep, progress: Progress, late: Callable[[], bool], stop: Callable[[], None]
    ) -> None:
        super().__init__(0, progress)
        self._lockstep = lockstep
        self._late = late
        self._stop = stop
        self._stopped = False
        self._met: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()

    def refresh(self) -> None:
        """Look at the clock."""
        if self.progress.status == PENDING and self.progress.go_on and self._lockstep.clocked and self._late():
            self.stop()

    def hear(self, agreed: Progress) -> None:
        """A clock said stop, or everybody has let go: whoever waits in ``meet`` earns a turn."""
        if not agreed.go_on and not self._stopped:
            self._stopped = True
            self._stop()
        if agreed.status != PENDING:
            self._lockstep.turns.wake(self._met, agreed)

    async def meet(self, counts: Counts) -> Counts:
        """See ``ranks.Phase``."""
        pools = self._lockstep.pools
        mine = tuple(counts.get(name, NEUTRAL) for name in pools)  # what this phase does not move speaks for nobody
        self.progress = Progress(FINAL, self.progress.go_on, mine)
        agreed = await self._lockstep.turns.sleep(self._met)
        return {name: count for name, count in zip(pools, agreed.counts, strict=True) if count != NEUTRAL}


def _nothing(late: bool) -> None:
    pass
