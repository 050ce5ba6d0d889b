"""Each rule of the protocol is left out once, and the worlds notice: so the worlds can fail.

A mutation replaces one method or function. ``caught`` runs worlds of its topology until one of them fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from asynccache.errors import RankDivergence, RankFailure
from asynccache.ranks import Frames, Progress, Steps, Topology, steps
from asynccache.ranks.frames import HEADER, Header, Health, Kind, Words, judge
from asynccache.ranks.progress import FINAL, PENDING, advances
from asynccache.testing.simulated_loop import Livelock, SimulatedLoop, simulate
from tests.ranks.rank_world import RankWorld, Toy

SEEDS = range(12)
COLUMN = Topology(tp=2, cp=2)
LINE = Topology(pp=3)
BOTH = Topology(tp=2, pp=2)

Patch = pytest.MonkeyPatch


def run(seed: int, topology: Topology, world: type[RankWorld] = RankWorld, steps: int = 30) -> RankWorld:
    async def main(loop: SimulatedLoop) -> RankWorld:
        ranks = world(loop, seed, topology, length=steps)
        await ranks.run()
        return ranks

    return simulate(main, seed, step_limit=200_000)


def caught(topology: Topology, *, world: type[RankWorld] = RankWorld) -> str:
    """What the first world that fails fails with."""
    for seed in SEEDS:
        try:
            ranks = run(seed, topology, world)
        except (AssertionError, RankFailure, RankDivergence, SystemError, KeyError, Livelock, TimeoutError) as error:
            return repr(error)
        if ranks.errors:
            return repr(ranks.errors)
        first = ranks.toys[0].commits
        if any(toy.commits != first for toy in ranks.toys):
            return "commits differ"
    raise AssertionError("no world noticed")


@pytest.mark.parametrize("topology", [COLUMN, LINE, BOTH])
def test_nothing_is_wrong_with_all_rules_in_place(topology: Topology) -> None:
    with pytest.raises(AssertionError, match="no world noticed"):
        caught(topology)


def test_what_later_stages_report_is_folded_in(monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "fold", lambda parts: next(iter(parts)))
    assert "is at it" in caught(LINE) or "began" in caught(LINE)


def test_a_transfer_nobody_has_reported_yet_is_pending(monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "pending", lambda pools: Progress(FINAL, 1, (1 << 40,) * pools))
    assert "op " in caught(LINE)


def test_a_failure_is_final_only_when_everybody_has_let_go(monkeypatch: Patch) -> None:
    """Statuses FAILED -1, PENDING 0, DONE 1 under MIN: one failure would free pages under another rank's copy."""
    plain = Frames.write

    def write(self: Frames, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        order = {PENDING: 1, 1: 0, 2: 2}
        return plain(self, kind, health, header, {op: p._replace(status=order[p.status]) for op, p in rows.items()})

    read = Frames.rows

    def rows(self: Frames, words: Words) -> dict[int, Progress]:
        back = {1: PENDING, 0: 1, 2: 2}
        return {op: p._replace(status=back[p.status]) for op, p in read(self, words).items()}

    monkeypatch.setattr(Frames, "write", write)
    monkeypatch.setattr(Frames, "rows", rows)
    assert "is at it" in caught(COLUMN)


def test_a_pool_without_a_part_here_is_neutral(monkeypatch: Patch) -> None:
    plain = Toy.local

    def local(self: Toy, op: int) -> Progress:
        found = plain(self, op)
        return found._replace(counts=tuple(0 if count == 1 << 40 else count for count in found.counts))

    monkeypatch.setattr(Toy, "local", local)
    assert "all have" in caught(LINE)


def test_decisions_ahead_of_their_reports_are_bounded(monkeypatch: Patch) -> None:
    plain = Steps.__init__

    def unbounded(self: Steps, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "credit": 10**9})

    monkeypatch.setattr(Steps, "__init__", unbounded)
    assert "are due" in caught(LINE)


def test_a_receive_is_posted_only_when_a_frame_is_due(monkeypatch: Patch) -> None:
    async def eager(self: Steps) -> None:
        below: Any = self._links.below
        while True:
            try:
                self._below = self._heard(self._frames.rows(await below.receive()))
            except RankFailure as error:
                self._bad_news(Health.FAILED, str(error))
                return
            self.due -= 1
            self._changed.set()

    monkeypatch.setattr(Steps, "read_reports", eager)
    assert "did not answer" in caught(LINE)


def test_every_decision_is_answered(monkeypatch: Patch) -> None:
    plain = Steps._pass_on

    def forgetful(self: Steps, words: Words, health: Health, mine: Header, progress: Mapping[int, Progress]) -> None:
        self._told_above = mine.step % 3 == 0
        plain(self, words, health, mine, progress)

    monkeypatch.setattr(Steps, "_pass_on", forgetful)
    assert "did not answer" in caught(LINE)


def test_frames_have_one_length(monkeypatch: Patch) -> None:
    plain = Frames.write

    def short(self: Frames, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        words = plain(self, kind, health, header, rows)
        return words[: HEADER + len(rows) * self.row] if kind is Kind.VECTOR else words

    read = Frames.rows

    def rows(self: Frames, words: Words) -> dict[int, Progress]:
        whole = np.zeros(self.length, np.int64)
        whole[: len(words)] = words
        return read(self, whole)

    class Differs(RankWorld):
        def act(self, toy: Toy) -> None:
            super().act(toy)
            if toy.rank == 1 and len(toy.ledger) == 2:
                self.act(toy)

    monkeypatch.setattr(Frames, "write", short)
    monkeypatch.setattr(Frames, "rows", rows)
    assert "aborts" in caught(COLUMN, world=Differs)


class Strays(RankWorld):
    """A rank that once does what the others do not do."""

    def act(self, toy: Toy) -> None:
        super().act(toy)
        if toy.rank == 1 and toy.next == 6:
            toy.chain.add(toy.steps.step_number, "stray", b"")
            self.digests = _Blind()


class _Blind(dict[int, int]):
    def setdefault(self, key: int, default: int = 0, /) -> int:
        return default


@pytest.mark.parametrize("field", ["step", "digest", "size"])
def test_every_field_of_the_header_is_judged(monkeypatch: Patch, field: str) -> None:
    """What a rank that parted from the others meets with the check, and does not meet without it."""
    plain = judge

    def blind(words: Words, mine: Header) -> Health:
        at = 2 + 2 * Header._fields.index(field)
        value = getattr(mine, field)
        words = words.copy()
        words[at : at + 2] = (value, -value)
        return plain(words, mine)

    class Parted(RankWorld):
        """Its ranks differ in this field alone."""

        def act(self, toy: Toy) -> None:
            super().act(toy)
            if toy.rank == 1 and toy.next == 6:
                part(toy)

    def part(toy: Toy) -> None:
        real = toy.steps._header

        def header() -> Header:
            found = real()
            return found._replace(**{field: getattr(found, field) + 1})

        monkeypatch.setattr(toy.steps, "_header", header)

    assert "RankDivergence" in caught(COLUMN, world=Parted)
    monkeypatch.setattr(steps, "judge", blind)
    with pytest.raises(AssertionError, match="no world noticed"):
        caught(COLUMN, world=Parted)


def test_a_negation_beside_each_field_is_what_tells_the_higher_rank(monkeypatch: Patch) -> None:
    """MIN alone equals the lowest rank's own value: it would notice nothing and go on while the others stop."""
    plain = judge

    def one_sided(words: Words, mine: Header) -> Health:
        words = words.copy()
        words[3:8:2] = [-mine.step, -mine.digest, -mine.size]
        return plain(words, mine)

    async def world(loop: SimulatedLoop) -> RankWorld:
        ranks = Strays(loop, 3, COLUMN)
        await ranks.run()
        return ranks

    def ends() -> set[str]:
        return {str(error).split(":")[0] for error in simulate(world, 3).errors.values()}

    assert len(ends()) == 1
    monkeypatch.setattr(steps, "judge", one_sided)
    assert len(ends()) > 1


class Loses(RankWorld):
    """The last stage stops for good; everybody must hear of it before ``patience`` is over."""

    patience = 20.0

    async def run(self) -> None:
        self.length, self.idle = 10**6, False
        self.loop.call_later(0.3, self.net.kill, self.topology.ranks - 1)
        async with asyncio.timeout(self.patience):
            await super().run()


def lost(topology: Topology) -> RankWorld:
    ranks = run(1, topology, Loses)
    assert set(ranks.errors) >= set(range(topology.ranks - 1)), f"not everybody was told: {ranks.errors}"
    return ranks


def test_bad_news_travels_up(monkeypatch: Patch) -> None:
    lost(LINE)

    def silent(self: Steps, health: Health, cause: str) -> None:
        self.health = health
        self._changed.set()

    monkeypatch.setattr(Steps, "_bad_news", silent)
    with pytest.raises((AssertionError, TimeoutError, Livelock)):
        lost(LINE)


def test_bad_news_goes_through_the_next_reduction(monkeypatch: Patch) -> None:
    """So that a column fails at one step, and nobody is left waiting for a partner that has gone."""
    good = lost(BOTH)
    assert len({str(good.errors[rank]).split(":")[0] for rank in (0, 1)}) == 1
    plain = Frames.write

    def cheerful(self: Frames, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        return plain(self, kind, Health.OK if kind is Kind.VECTOR else health, header, rows)

    monkeypatch.setattr(Frames, "write", cheerful)
    with pytest.raises((AssertionError, TimeoutError, Livelock)):
        lost(BOTH)


def test_bad_news_travels_down(monkeypatch: Patch) -> None:
    """Without it the stages below hear nothing until a receive of theirs times out."""

    class LosesFirst(Loses):
        async def run(self) -> None:
            self.length, self.idle = 10**6, False
            self.loop.call_later(0.3, self.net.kill, 0)
            await RankWorld.run(self)
            self.ended = self.loop.time()

    world: Callable[[], Any] = lambda: run(1, Topology(pp=4), LosesFirst)  # noqa: E731
    soon = world().ended
    plain = Steps._send

    def upwards(self: Steps, link: Any, words: Words) -> None:
        if link is not self._links.below or words[0] == Kind.DECIDE:
            plain(self, link, words)

    monkeypatch.setattr(Steps, "_send", upwards)
    assert world().ended > soon + 2.0


def test_progress_of_one_rank_is_monotone() -> None:
    """What the worlds assert of every report."""
    begun = Progress(PENDING, 1, (3, 0))
    good: Iterable[Progress] = [begun, Progress(PENDING, 0, (3, 1)), Progress(FINAL, 1, (4, 0))]
    bad: Iterable[Progress] = [Progress(PENDING, 1, (2, 0)), Progress(FINAL, 1, (3, -1))]
    assert all(advances(begun, after) for after in good)
    assert not any(advances(begun, after) for after in bad)
    assert not advances(Progress(1, 1, (3, 0)), Progress(FINAL, 1, (3, 0)))
    assert not advances(Progress(FINAL, 1, (3, 0)), Progress(FINAL, 1, (4, 0)))
