"""Schedulers in lockstep over simulated ranks: same admissions, same retractions, same batches, same tokens.

Mutations that must be caught: a scheduler that looks at what has ended on its own rank (fetches, loads), that drops an
aborted request before all ranks have heard of it, that does not step while requests only wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from asynccache_shim import (
    NO_TOKEN,
    Batch,
    Finish,
    Limits,
    Request,
    Sampling,
    Scheduler,
    Settings,
    State,
    admitting,
    scheduler,
)
from asynccache_shim.board import Board
from asynccache_shim.request import end_request

from asynccache import CacheFull, ConfigError, Lease, RankDivergence, RankFailure
from asynccache.memory.faults import Faults
from asynccache.ranks import Topology
from asynccache.runtime.lockstep import Lockstep
from asynccache.testing.simulated_backend import Hostility
from asynccache.testing.simulated_loop import Deadlock, SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import Fate
from tests.shim.shim_kit import PAGE, PatternModel, config, continuation, serving
from tests.shim.shim_rank_world import REQUESTS, TIMEOUT, Ask, Member, Report, Watched, World, draw_asks, draw_config

TP2, PP2, TP2_PP2 = Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)
SHAPES = [TP2, PP2, TP2_PP2]

pytestmark = pytest.mark.ranks


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are for every commit."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.ranks,)) for seed in range(count)]


def play(seed: int, topology: Topology, **drawn: Any) -> Report:
    async def world(loop: SimulatedLoop) -> Report:
        return await World(loop, seed, topology, **drawn).run()

    return simulate(world, seed)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("seed", worlds(12, quick=2))
def test_ranks_take_the_same_steps(seed: int, topology: Topology) -> None:
    report = play(seed, topology)
    assert not report.errors
    assert sum(report.ends.values()) >= REQUESTS
    assert report.ends["failed"] == 0


@pytest.mark.ranks
def test_the_worlds_are_worth_their_time() -> None:
    """Hits of every tier, retractions, aborts, and steps that compute nothing."""
    reports = [play(seed, SHAPES[seed % 3]) for seed in range(3, 7)]
    for tier in ("device", "host", "storage"):
        assert sum(report.hits[tier] for report in reports) > 0
    assert sum(report.retractions for report in reports) > 0
    assert sum(report.ends["aborted"] for report in reports) > 0
    assert all(report.idle > 0 for report in reports)


# one rank and several


async def alone(seed: int, asks: Sequence[Ask]) -> list[list[int]]:
    """What a scheduler without ranks answers, in the same pools."""
    async with serving(draw_config(seed)) as served:
        requests = [
            served.scheduler.submit(Request(list(a.tokens), Limits(a.new), priority=a.priority, extra_key=a.extra_key))
            for a in asks
        ]
        return [await request.done() for request in requests]


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_several_ranks_answer_as_one_does(topology: Topology) -> None:
    asks = [replace(ask, abort=None) for ask in draw_asks(3)]
    report = play(3, topology, asks=asks, has_store=False)
    assert sorted(output for output, *_ in report.outputs.values()) == sorted(asyncio.run(alone(3, asks)))


# waiting


def stored(seed: int) -> dict[str, Any]:
    """A store that takes a long time, and the same prompt twice, in two lives."""
    ask = Ask(tuple(range(8 * PAGE)), 3, 0, None, 0.0, None)
    return {
        "config": config(24, 64, prefetch_policy="wait_complete"), "faults": Faults(), "has_store": True,
        "hostility": Hostility(delay=0.5), "asks": [ask], "latency": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_ranks_go_on_stepping_while_a_request_only_waits_for_a_transfer(topology: Topology) -> None:
    report = play(1, topology, **stored(1))
    assert report.hits["storage"] == 7 * PAGE
    assert report.idle > 100  # a step a millisecond or so, while the store takes half a second a call


def test_a_scheduler_that_sleeps_while_requests_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(self: Scheduler) -> None:
        self._board.bell.clear()
        await self._board.bell.wait()

    monkeypatch.setattr(Scheduler, "_pause", pause)
    with pytest.raises(Deadlock):
        play(1, TP2, **stored(1))


def test_an_idle_group_sends_nothing() -> None:
    """Two requests, an hour apart: there are no steps in between but those that what is in flight needs."""
    ask = Ask(tuple(range(8 * PAGE)), 3, 0, None, 3600.0, None)
    report = play(1, TP2_PP2, asks=[ask, ask], has_store=False, latency=1e-3)
    assert report.hits["device"] == 7 * PAGE
    assert report.steps < 200


# a rank that is gone


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.HUNG])
@pytest.mark.parametrize("seed", worlds(8, quick=2))
def test_a_lost_rank_ends_every_request_and_a_new_group_begins(seed: int, fate: Fate) -> None:
    random = Random(f"{seed}/strike")
    topology = random.choice(SHAPES)
    victim, after = random.randrange(topology.ranks), random.random() * 0.1

    async def world(loop: SimulatedLoop) -> Report:
        return await World(loop, seed, topology).lose(victim, fate, after)

    report = simulate(world, seed)
    assert set(report.errors) == set(range(topology.ranks)) - {victim}
    assert {type(error) for error in report.errors.values()} == {RankFailure}
    assert report.told < TIMEOUT + 1
    assert report.ends["length"] > 0


@pytest.mark.parametrize("seed", [3, 13, 19])
@pytest.mark.parametrize("rank", range(4))
def test_a_model_that_fails_on_one_rank_ends_the_group(rank: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others are at: nobody closes by calls of its own, which would be a divergence."""
    forward = PatternModel.forward

    def fails(self: PatternModel, batch: Batch) -> list[int]:
        if self._salt == rank + 1 and len(self.batches) == 3:
            raise OSError("out of memory")
        return forward(self, batch)

    monkeypatch.setattr(PatternModel, "forward", fails)
    report = play(seed, TP2_PP2, has_store=False)
    assert sorted(report.errors) == [0, 1, 2, 3]
    assert {type(error) for error in report.errors.values()} == {RankFailure}
    assert "out of memory" in str(report.errors[rank])


def test_models_that_answer_differently_are_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PatternModel.forward

    def differs(self: PatternModel, batch: Batch) -> list[int]:
        answer = forward(self, batch)
        odd = self._salt == 2 and len(self.batches) > 3
        return [token + 1 if odd and token != NO_TOKEN else token for token in answer]

    monkeypatch.setattr(PatternModel, "forward", differs)
    monkeypatch.setattr(Member, "compare", lambda *_: None)
    errors = play(3, TP2, has_store=False).errors
    assert sorted(errors) == [0, 1]
    parted = [error for error in errors.values() if isinstance(error, RankDivergence)]
    assert parted, "the other may have seen this one leave before it heard why"
    assert all("here it was 'commit'" in str(error) and "other arguments" in str(error) for error in parted)
    assert all(isinstance(error, (RankDivergence, RankFailure)) for error in errors.values())


def test_settings_that_differ_are_named() -> None:
    async def world(loop: SimulatedLoop) -> list[str]:
        ranks = World(loop, 1, TP2)
        ranks.members[1].settings = Settings(step_tokens=99, max_running=2)
        ranks.members[0].settings = Settings(step_tokens=98, max_running=2)
        ends = await asyncio.gather(*(member.live(0) for member in ranks.members), return_exceptions=True)
        for member in ranks.members:
            await member.close()
        return [str(end) for end in ends]

    expected = "scheduler.step_tokens differs between ranks: 98 on rank 0; 99 on rank 1"
    assert simulate(world, 1) == [expected] * 2


# callers


def served(seed: int, ask: Callable[[World, Scheduler], Coroutine[Any, Any, None]], **drawn: Any) -> Report:
    """A group of two whose rank 0 does what ``ask`` says."""

    async def world(loop: SimulatedLoop) -> Report:
        ranks = World(loop, seed, TP2, has_store=False, **drawn)
        ranks.callers = lambda scheduler, life: ask(ranks, scheduler)  # type: ignore[method-assign]
        return await ranks.run()

    return simulate(world, seed)


def test_a_request_that_is_aborted_before_an_order_is_told_of_to_nobody() -> None:
    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = scheduler.submit(Request([1, 2, 3]))
        request.abort()
        assert request.finish is Finish.ABORTED
        assert await scheduler.submit(Request([1, 2, 3], Limits(2))).done() == continuation([1, 2, 3], 2)

    assert [number for _, number in served(1, ask).outputs] == [2]


def test_an_abort_ends_the_stream_before_the_next_step() -> None:
    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = scheduler.submit(Request([1, 2, 3], Limits(20)))
        await request.next_token(0)
        request.abort()
        request.abort()
        begun = scheduler.steps + 1
        await request.done()
        assert scheduler.steps <= begun
        assert request.finish is Finish.ABORTED

    report = served(1, ask)
    assert next(iter(report.outputs.values()))[1] is Finish.ABORTED


def test_what_is_left_when_rank_0_closes_is_aborted_everywhere() -> None:
    left: list[Request] = []

    async def ask(ranks: World, scheduler: Scheduler) -> None:
        left.extend(scheduler.submit(Request([i, 2, 3], Limits(20))) for i in range(4))
        await left[0].next_token(0)
        left.append(scheduler.submit(Request([9])))

    report = served(1, ask)
    assert {request.finish for request in left} == {Finish.ABORTED}
    assert {finish for _, finish, *_ in report.outputs.values()} == {Finish.ABORTED}
    assert not report.errors


def test_what_the_other_ranks_would_refuse_is_refused_at_once() -> None:
    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = Request([1])
        request.extra_key = "\ud800"
        with pytest.raises(ConfigError, match="extra_key"):
            scheduler.submit(request)
        assert request.finish is None
        with pytest.raises(CacheFull):
            scheduler.submit(Request([1], Limits(10_000)))
        with pytest.raises(ConfigError, match="rank 0 takes the requests"):
            ranks.members[1].scheduler.submit(Request([1]))
        await scheduler.submit(Request([1], Limits(2))).done()

    assert not served(1, ask).errors


@pytest.mark.parametrize("after", [0.0, 0.02])
def test_what_is_done_to_a_request_after_it_was_submitted_changes_nothing(after: float) -> None:
    """Before the order that tells of it, and after: rank 0 acts on what the others were told."""
    prompt = list(range(3 * PAGE))

    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = scheduler.submit(Request(prompt, Limits(3 * PAGE), extra_key="mine", sampling=Sampling(0.5)))
        asyncio.get_running_loop().call_later(after, meddle, request)
        assert await request.done() == continuation(prompt, 3 * PAGE)
        again = scheduler.submit(Request(prompt, Limits(1), extra_key="mine"))
        await again.done()
        assert again.hits is not None
        assert again.hits.device

    def meddle(request: Request) -> None:
        request.tokens[:] = 7
        request.limits = Limits(1, frozenset(range(1000)))
        request.priority, request.extra_key, request.ended = 5, "other", True
        request.sampling = Sampling(0.9)

    assert not served(1, ask, config=config(16, 64)).errors


def test_terms_are_read_as_the_other_ranks_read_them() -> None:
    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = scheduler.submit(Request([1, 2, 3], Limits(cast(int, np.int64(2)))))
        assert await request.done() == continuation([1, 2, 3], 2)

    assert not served(1, ask).errors


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_leaves_by_itself_is_lost_to_the_others(busy: bool) -> None:
    """Also while nobody has anything to say."""

    async def ask(ranks: World, scheduler: Scheduler) -> None:
        request = scheduler.submit(Request([1, 2, 3], Limits(200)))
        await request.next_token(0)
        if not busy:
            await request.done()
            await asyncio.sleep(100)
        await ranks.members[1].scheduler.begun.wait()
        leaving = ranks.loop.create_task(ranks.members[1].scheduler.aclose())
        with pytest.raises(RankFailure):
            await (request.done() if busy else scheduler.finished())
        with pytest.raises(RankFailure):
            scheduler.submit(Request([1]))
        await leaving

    assert 0 in served(1, ask, config=config(64)).errors


def test_a_rank_that_leaves_before_its_loop_has_begun_is_lost_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Scheduler.finished

    async def leaves(self: Watched) -> None:
        if not self.member.rank:
            await finished(self)

    async def ask(ranks: World, scheduler: Scheduler) -> None:
        with pytest.raises(RankFailure, match="rank 1 is gone"):
            await scheduler.finished()

    monkeypatch.setattr(Watched, "finished", leaves)
    assert 0 in served(1, ask).errors


def test_who_is_alone_comes_in_without_what_is_cached_of_it_if_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is cached takes a slot beside the one that is computed with, and there is but one."""
    last: list[bool] = []
    admit_last = admitting._admit_last

    async def noted(*args: Any) -> bool:
        last.append(await admit_last(*args))
        return last[-1]

    monkeypatch.setattr(admitting, "_admit_last", noted)
    prompt = list(range(6 * PAGE))

    async def ask(ranks: World, scheduler: Scheduler) -> None:
        for tokens in (prompt, [*prompt, 7]):
            assert await scheduler.submit(Request(tokens, Limits(1))).done() == continuation(tokens, 1)

    report = served(1, ask, config=config(16, 64, mamba=1), faults=Faults())
    assert True in last
    assert not report.errors


# what breaks it


def diverges(topology: Topology, **drawn: Any) -> None:
    """In one of some worlds: other steps, other batches, other trees, or nothing goes on."""
    for seed in range(12):
        try:
            report = play(seed, topology, **drawn)
        except (AssertionError, ExceptionGroup, Deadlock):
            return
        if any(isinstance(error, RankDivergence) for error in report.errors.values()):
            return
    raise AssertionError("nobody noticed")


def test_loads_that_are_looked_at_on_one_rank_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(self: Lease) -> bool:
        lockstep = self._parts.driver.agreement
        assert isinstance(lockstep, Lockstep)
        ledger = lockstep._ledger
        mine = [lockstep._numbers[op] for op in self._held().loads if op in lockstep._numbers]
        return any(not ledger[number].progress.status for number in mine)

    monkeypatch.setattr(Lease, "loading", property(loading))
    diverges(TP2)


def test_fetches_that_are_looked_at_on_one_rank_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(board: Board) -> None:
        ranks = board.cache._ranks
        assert ranks is not None
        for job in board.waiting.values():
            if job.request.state is State.PREFETCHING and job.handle and (ranks.rank == 1 or job.handle.done()):
                job.request.state = State.WAITING

    monkeypatch.setattr(scheduler, "note_fetched", note)
    diverges(TP2)


def test_an_abort_that_only_its_own_rank_hears_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: Scheduler, number: int) -> None:
        job = self._board.waiting.get(number) or self._board.held.get(number)
        if job is not None:
            end_request(job.request, Finish.ABORTED)

    monkeypatch.setattr(Scheduler, "_abort_everywhere", abort)
    diverges(PP2)
