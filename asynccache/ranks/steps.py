"""The protocol: what every rank does once per scheduler iteration so that all of them decide the same.

    nothing in flight           no message
    first stage                 MIN over its column of (own progress folded with what the stages below reported)
    every other stage           the decision comes from above
    every stage                 judge; the decision goes down; exactly one report goes up for it; then it is applied

Laws: the replica changes by lockstep calls and by ``decide``, by nothing else. Sends are never awaited. A receive is
posted only while a frame is due. At most ``credit`` decisions are unanswered. Bad news travels up at once and down with
the next decision, and in the first stage it goes through the next MIN, so that a column fails at one step. Where more
is in flight than a frame can tell of, steps tell of it in turn: nothing waits for what hangs.

Mutable state: ``step_number``, the health of the group, the latest report from below, decisions not yet answered,
where the last window ended, and, where ranks parted, what a neighbour has done and where they were found apart.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np

from asynccache.errors import RankDivergence, RankFailure
from asynccache.ranks.chain import KEPT, Chain, parting, ring_words
from asynccache.ranks.frames import (
    HEADER,
    UNKNOWN,
    Apart,
    Frames,
    Header,
    Health,
    Kind,
    Words,
    found_apart,
    in_words,
    judge,
    tell_apart,
    told_apart,
)
from asynccache.ranks.links import Link, Links
from asynccache.ranks.progress import Progress, fold, pending


class Replica(Protocol):
    """What is replicated: a ledger, and a chain of all that was done. ``local`` is this rank's own, and monotone."""

    chain: Chain

    def in_flight(self) -> Sequence[int]:
        """The operations in the ledger, oldest first: equal on every rank at one step."""
        ...

    def local(self, op: int) -> Progress:
        """This rank's own progress."""
        ...

    def decide(self, op: int, agreed: Progress) -> None:
        """What all ranks have reached. Called for the operations of a step's window, by rising number."""
        ...


class Steps:
    """One rank's part. ``read_reports`` must run for as long as there is a stage below."""

    def __init__(self, replica: Replica, links: Links, frames: Frames, *, credit: int = 2) -> None:
        self.step_number = 0
        self.health = Health.OK
        self.due = 0
        self.messages = 0
        self._replica = replica
        self._links = links
        self._frames = frames
        self._credit = credit
        self._below: Mapping[int, Progress] = {}
        self._window_end = 0
        self._strange: Words | None = None
        self._apart: Apart = UNKNOWN
        self._told_above = False
        self._error: RankFailure | RankDivergence | None = None
        self._cause = ""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Steps(step {self.step_number}, {self.health.name}, {self.due} due, {self._replica.chain!r})"

    @property
    def has_below(self) -> bool:
        """Whether there is a stage below."""
        return self._links.below is not None

    async def step(self) -> None:
        """Agree, and apply what was decided. Cancelling it leaves the group unusable.

        Raises:
            RankFailure: a rank is gone, hung, or was told so.
            RankDivergence: ranks have done different things.
        """
        if self._error is not None:
            raise self._error
        self.step_number += 1
        window = self._window()
        if not window:
            return
        while self.due >= self._credit and self.health is Health.OK:
            self._changed.clear()
            await self._changed.wait()
        mine = self._header()
        progress = self._progress(window)
        words = await self._agree(mine, progress)
        health = judge(words, mine)
        if health is Health.DIVERGED and self._apart == UNKNOWN:
            self._apart = found_apart(words, mine)
        self._pass_on(words, health, mine, progress)
        if health is not Health.OK:
            await self._fail(health)
        for op, agreed in self._frames.rows(words).items():
            self._replica.decide(op, agreed)

    async def read_reports(self) -> None:
        """Take in the reports of the stage below, for ever, or until one is bad."""
        below = self._links.below
        assert below is not None
        while self.health is Health.OK:
            if not self.due:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                words = await below.receive()
            except RankFailure as error:
                self._bad_news(Health.FAILED, str(error))
                return
            self.due -= 1
            self._changed.set()
            kind = int(words[0])
            if kind != Kind.REPORT:
                self._listen(words)
                health = Health.DIVERGED if kind == Kind.DIVERGED else Health.FAILED
                self._bad_news(health, "a later stage said so")
                return
            self._below = self._heard(self._frames.rows(words))

    async def reports_in(self) -> None:
        """Wait until no report is due: what a rank that ends in good health does before its reader ends."""
        while self.due and self.health is Health.OK:
            self._changed.clear()
            await self._changed.wait()

    def _heard(self, rows: Mapping[int, Progress]) -> Mapping[int, Progress]:
        """What earlier reports said of operations that were not in this one's window still holds."""
        ops, before = self._replica.in_flight(), self._below
        if len(ops) <= self._frames.window:
            return rows
        return {op: before[op] for op in ops if op in before} | dict(rows)

    # one step

    def _window(self) -> Sequence[int]:
        """Everything; or as much as fits of what comes after the last window, and then from the oldest on."""
        ops, size = self._replica.in_flight(), self._frames.window
        if len(ops) <= size:
            return ops
        start = bisect_right(ops, self._window_end)
        chosen = (*ops[start:], *ops[:start])[:size]
        self._window_end = chosen[-1]
        return sorted(chosen)

    def _header(self) -> Header:
        return Header(self.step_number, self._replica.chain.digest, len(self._replica.in_flight()))

    def _progress(self, window: Sequence[int]) -> dict[int, Progress]:
        local = self._replica.local
        if self._links.below is None:
            return dict(zip(window, map(local, window), strict=True))
        unheard = pending(self._frames.pools)
        return {op: fold((local(op), self._below.get(op, unheard))) for op in window}

    async def _agree(self, mine: Header, progress: Mapping[int, Progress]) -> Words:
        """The frame that decides this step: the column's, or the one from above."""
        try:
            if self._links.above is not None:
                words = await self._links.above.receive()
                self._listen(words)
                return words
            words = self._frames.write(Kind.VECTOR, self.health, mine, progress)
            for group in self._links.groups:
                words = await group.minimum(words)
                self.messages += 1
            return words
        except RankFailure as error:
            self._cause = str(error)
            return self._frames.bad(Health.FAILED, mine)

    def _pass_on(self, words: Words, health: Health, mine: Header, progress: Mapping[int, Progress]) -> None:
        """The decision goes down, one report goes up."""
        frames, good = self._frames, health is Health.OK
        if self._links.below is not None:
            if good:
                words = words.copy()
                words[0] = Kind.DECIDE
            self._send(self._links.below, words if good else self._bad(health, mine))
            self.due += 1
            self._changed.set()
        if self._links.above is not None and not self._told_above:
            report = frames.write(Kind.REPORT, Health.OK, mine, progress) if good else self._bad(health, mine)
            self._told_above = not good
            self._send(self._links.above, report)

    def _send(self, link: Link, words: Words) -> None:
        link.send(words)
        self.messages += 1

    # bad news

    def _bad(self, health: Health, mine: Header) -> Words:
        """FAIL; or DIVERGED, with what was done here last, and by those of whom that was heard."""
        words = self._frames.bad(health, mine)
        if health is Health.DIVERGED:
            ring = np.array(ring_words(self._replica.chain, self._frames.length - HEADER), np.int64)
            words[HEADER:] = ring if self._strange is None else np.minimum(ring, self._strange)
            tell_apart(words, self._apart)
        return words

    def _listen(self, words: Words) -> None:
        """A neighbour may say what it has done."""
        if words[0] == Kind.DIVERGED:
            self._strange = words[HEADER:]
            self._apart = told_apart(words)

    def _bad_news(self, health: Health, cause: str) -> None:
        """A stage below has failed: those above are told at once, in place of the next report."""
        self.health = health
        self._cause = cause
        self._changed.set()
        if self._links.above is not None and not self._told_above:
            self._told_above = True
            self._send(self._links.above, self._bad(health, self._header()))

    async def _fail(self, health: Health) -> NoReturn:
        self.health = health
        self._changed.set()
        if health is Health.DIVERGED:
            self._error = RankDivergence(f"step {self.step_number}: {await self._parting()}")
        else:
            self._error = RankFailure(f"step {self.step_number}: {self._cause or 'another rank failed'}")
        raise self._error

    async def _parting(self) -> str:
        """Where ranks parted. A column, which learns of it at one step, compares what its ranks did last, and what
        they have heard of stages below; a stage below, what it did with what it has heard."""
        chain = self._replica.chain
        if not self._links.groups and self._strange is None:
            last = chain.at(chain.count)
            apart = in_words(self._apart) or "another stage has done something else"
            return f"{apart}; here the last was {last.what if last else 'nothing'!r}"
        words = self._bad(Health.DIVERGED, self._header())
        try:
            for group in self._links.groups:
                words = await group.minimum(words)
        except RankFailure as error:
            return str(error)
        said = in_words(told_apart(words)), parting(chain, words[HEADER:].tolist())
        return "; ".join(filter(None, said)) or f"found apart elsewhere; here the last {KEPT} entries are alike"
