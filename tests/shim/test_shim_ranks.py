"""A scheduler whose model has shards on several ranks, over simulated links: the same batches everywhere, right bytes
on every shard, and failures that end as much as they must and no more.

Mutations that must be caught: a scheduler that publishes what it has computed before the others have, that takes a load
to be there when it has ended on its own rank, that names no batch when it gives back.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from asynccache_shim import Batch, Finish, Limits, Request, Sampling, Scheduler, SchedulerConfig, follow
from asynccache_shim.board import Board
from asynccache_shim.payload import PayloadWriter
from asynccache_shim.shards import Shards

from asynccache import AsyncCache, BatchFailed, ConfigError, Lease, RankFailure
from asynccache.memory.host_copies import Faults
from asynccache.runtime import cache as cache_module
from asynccache.worker import Topology
from tests.shim.shim_kit import LAYERS, PAGE, PatternModel, config, continuation, serving
from tests.shim.shim_rank_world import REQUESTS, TIMEOUT, Ask, Report, World, draw_asks, draw_config, look_closely
from tests.simulated.links import SimulatedGroup
from tests.simulated.loop import SimulatedLoop, simulate

pytestmark = pytest.mark.slow(0.5)

TP2, PP2, TP2_PP2 = Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)
SHAPES = [TP2, PP2, TP2_PP2]


def worlds(count: int, quick: int) -> list[Any]:
    """Seeds, of which the first are for every commit, the others for ``make soak``."""
    return [pytest.param(seed, marks=() if seed < quick else (pytest.mark.soak,)) for seed in range(count)]


def play(seed: int, topology: Topology, **drawn: Any) -> Report:
    async def world(loop: SimulatedLoop) -> Report:
        return await World(loop, seed, topology, **drawn).run()

    return simulate(world, seed)


def looked_at(seed: int, topology: Topology, monkeypatch: pytest.MonkeyPatch, **drawn: Any) -> Report:
    """What becomes of a world that is looked at closely."""

    async def world(loop: SimulatedLoop) -> Report:
        with monkeypatch.context() as patch:
            made = World(loop, seed, topology, **drawn)
            look_closely(made, patch.setattr)
            return await made.run()

    return simulate(world, seed)


@pytest.mark.parametrize("topology", SHAPES, ids=str)
@pytest.mark.parametrize("seed", worlds(40, quick=2))
def test_every_shard_computes_what_the_scheduler_says(
    seed: int, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = looked_at(seed, topology, monkeypatch)
    assert sum(report.ends.values()) >= REQUESTS
    assert report.ends["failed"] == 0
    assert report.named > 0
    assert report.unnamed == 0


@pytest.mark.parametrize("seed", worlds(6, quick=0))
def test_eight_shards_compute_what_the_scheduler_says(seed: int) -> None:
    report = play(seed, Topology(tp=2, cp=2, pp=2))
    assert sum(report.ends.values()) >= REQUESTS
    assert report.ends["failed"] == 0


@pytest.mark.soak
def test_the_worlds_are_worth_their_time() -> None:
    """Hits of every tier, retractions, aborts."""
    reports = [play(seed, SHAPES[seed % 3]) for seed in range(3, 9)]
    for tier in ("device", "host", "storage"):
        assert sum(report.hits[tier] for report in reports) > 0
    assert sum(report.retractions for report in reports) > 0
    assert sum(report.ends["aborted"] for report in reports) > 0


def test_a_scheduler_that_names_no_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "batch", None)
    assert looked_at(3, TP2, monkeypatch).unnamed > 0


def test_a_load_that_is_taken_to_be_there_when_it_has_ended_on_one_rank_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one of some worlds a shard elsewhere finds wrong bytes, or a token leaves too early."""
    monkeypatch.setattr(Lease, "loaded", _loaded_here)

    def play_some() -> None:
        for seed in range(12):
            looked_at(seed, TP2, monkeypatch, faults=Faults(delayed=0.3), latency=1e-2)  # copies take long

    with pytest.raises(BaseException, match=r"wrong KV|leaves before|wrong state|TaskGroup") as seen:
        play_some()
    found = seen.value
    assert not isinstance(found, BaseExceptionGroup) or found.subgroup(AttributeError) is None, "a mistake in this test"


async def _loaded_here(self: Lease) -> None:
    worker: Any = self._head.worker
    own = worker.own
    for op in self._held().loads:
        for i in range(LAYERS):
            await own.local.layer(op, i)


# one rank and several


async def alone(seed: int, asks: Sequence[Ask]) -> list[list[int]]:
    """What a scheduler without other ranks answers, in the same pools."""
    async with serving(draw_config(seed)) as served:
        requests = [
            served.scheduler.submit(Request(list(a.tokens), Limits(a.new), priority=a.priority, namespace=a.namespace))
            for a in asks
        ]
        return [await request.done() for request in requests]


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_several_ranks_answer_as_one_does(topology: Topology) -> None:
    asks = [replace(ask, abort=None) for ask in draw_asks(3)]
    report = play(3, topology, asks=asks, has_store=False)
    assert sorted(report.outputs) == sorted(asyncio.run(alone(3, asks)))


def test_one_rank_sends_no_batch_and_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(*_: object) -> int:
        raise AssertionError("a batch was sent")

    monkeypatch.setattr(AsyncCache, "send_batch", sent)

    async def ask() -> None:
        async with serving(config(16, 64)) as served:
            for _ in range(2):
                await served.answer(list(range(5 * PAGE)), 5)
            assert served.scheduler._board.batch is None

    asyncio.run(ask())


def served(
    seed: int, ask: Callable[[World], Coroutine[Any, Any, None]], topology: Topology = TP2, **drawn: Any
) -> Report:  # fmt: skip
    """A group whose callers do what ``ask`` says."""

    async def world(loop: SimulatedLoop) -> Report:
        made = World(loop, seed, topology, **({"has_store": False} | drawn))
        await made.live(lambda: ask(made))
        gc.collect()  # an exception that nobody looked at is told of now, while the world looks
        return made.report

    return simulate(world, seed)


def test_an_idle_group_sends_nothing() -> None:
    async def ask(world: World) -> None:
        prompt = list(range(8 * PAGE))
        await world.scheduler.submit(Request(prompt, Limits(3))).done()
        await world.cache.flush()
        await asyncio.sleep(1)
        links = [end for process in world.group.processes.values() for end in (process.link, process.link.peer)]
        frames = [link.frames for link in links]
        await asyncio.sleep(4)  # what stores count is told now and then, if it has changed
        assert [link.frames for link in links] == frames
        again = world.scheduler.submit(Request(prompt, Limits(3)))
        await again.done()
        assert again.hits is not None
        assert again.hits.device == 7 * PAGE

    assert not served(1, ask, TP2_PP2, config=config(24, 64), faults=Faults()).errors


# a model that fails


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("seed", worlds(12, quick=1))
def test_a_model_that_fails_on_one_rank_fails_the_requests_of_that_step_and_nothing_else(seed: int, rank: int) -> None:
    """The others end well, with right bytes in all that they find cached."""
    report = play(seed, TP2_PP2, fails={rank: lambda number: number in (3, 7)})
    kind = OSError if rank == 0 else BatchFailed
    assert report.failures
    assert {type(error) for error in report.failures} == {kind}
    assert all("out of memory" in str(error) for error in report.failures)
    assert not report.errors
    assert report.ends["length"] > 0


def test_what_a_rank_has_not_computed_is_not_found_cached() -> None:
    prompt = list(range(6 * PAGE))

    async def ask(world: World) -> None:
        with pytest.raises(BatchFailed, match="rank 1: OSError"):
            await world.scheduler.submit(Request(prompt, Limits(1))).done()
        request = world.scheduler.submit(Request(prompt, Limits(2)))
        assert await request.done() == continuation(prompt, 2)
        assert request.hits is not None
        assert not any(request.hits)

    assert not served(
        1, ask, config=config(16, 64), settings=SchedulerConfig(step_tokens=8 * PAGE, max_running=2),
        fails={1: lambda number: number == 0}, faults=Faults(),
    ).errors  # fmt: skip


def test_a_scheduler_that_does_not_wait_for_the_other_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(self: Shards, own: asyncio.Future[Any]) -> Any:
        await asyncio.wait([own])
        assert self.sent is not None
        await self._end_own(self.sent, own.exception())
        return own.result()

    monkeypatch.setattr(Shards, "everywhere", here)
    with pytest.raises(BaseException, match=r"DID NOT RAISE|wrong KV"):
        test_what_a_rank_has_not_computed_is_not_found_cached()


def test_a_batch_that_is_too_large_to_be_sent_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(world: World) -> None:
        with pytest.raises(ConfigError, match="payload"):
            await world.scheduler.submit(Request(list(range(12 * PAGE)), Limits(1))).done()
        assert await world.scheduler.submit(Request([1, 2, 3], Limits(2))).done() == continuation([1, 2, 3], 2)

    monkeypatch.setattr(cache_module, "MOST_PAYLOAD", 150)
    settings = SchedulerConfig(step_tokens=16 * PAGE, max_running=2)
    assert not served(1, ask, config=config(16, 64), settings=settings, faults=Faults()).errors


# a rank that is gone


@pytest.mark.parametrize("fate", ["kill", "hang"])
@pytest.mark.parametrize("seed", worlds(20, quick=2))
def test_a_lost_rank_ends_every_request_and_a_new_group_begins(seed: int, fate: str) -> None:
    random = Random(f"{seed}/strike")
    topology = random.choice(SHAPES)
    victim, after = random.randrange(1, topology.ranks), random.random() * 0.1

    async def world(loop: SimulatedLoop) -> Report:
        made = World(loop, seed, topology)
        return await made.lose(lambda: getattr(made, fate)(victim), after)

    report = simulate(world, seed)
    assert set(report.errors) >= set(range(topology.ranks)) - {victim}
    assert {type(error) for error in report.errors.values()} == {RankFailure}
    assert report.ends["length"] > 0


@pytest.mark.parametrize("fate", ["kill", "hang"])
def test_requests_are_told_at_once_whatever_the_model_is_busy_with(fate: str) -> None:
    """A shard's group may hold its call for as long as its own time-out says."""

    async def ask(world: World) -> None:
        model, loop = world.models[0], world.loop
        begun = loop.create_future()
        run = loop.run_in_executor

        def slow(executor: Any, function: Any, *args: Any) -> Any:
            if getattr(args[0] if args else None, "__self__", None) is not model:
                return run(executor, function, *args)
            if not begun.done():
                begun.set_result(None)
            future = loop.create_future()
            loop.call_later(1000.0, lambda: future.set_exception(OSError("the model's group has timed out")))
            return future

        loop.run_in_executor = slow  # type: ignore[assignment, method-assign]
        try:
            request = world.scheduler.submit(Request([1, 2, 3], Limits(2)))
            await begun
            struck = loop.time()
            getattr(world, fate)(1)
            with pytest.raises(RankFailure, match="rank 1"):
                await request.done()
            assert loop.time() - struck < TIMEOUT + 1
            assert request.finish is Finish.FAILED
            with pytest.raises(RankFailure, match="rank 1"):
                world.scheduler.submit(Request([1]))
            raise RankFailure("told")
        finally:
            loop.run_in_executor = run  # type: ignore[method-assign]

    assert 0 in served(1, ask, config=config(16)).errors


def test_a_model_that_fails_for_want_of_another_rank_fails_as_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is noticed first, by the model's own groups or by the cache, and whoever is told first."""

    async def told_later(self: Shards) -> None:
        await asyncio.sleep(1)

    monkeypatch.setattr(Shards, "_watch_group", told_later)

    async def ask(world: World) -> None:
        def fails(number: int) -> bool:
            if number == 2:
                world.kill(1)
            return number == 2

        world.models[0].fails = fails
        with pytest.raises(RankFailure, match="rank 1"):
            await world.scheduler.submit(Request([1, 2, 3], Limits(20))).done()

    assert isinstance(served(1, ask, config=config(16)).errors[0], RankFailure)


def test_an_idle_scheduler_hears_that_a_rank_is_gone() -> None:
    async def ask(world: World) -> None:
        world.kill(1)
        await asyncio.sleep(1)
        with pytest.raises(RankFailure, match="rank 1"):
            world.scheduler.submit(Request([1]))

    assert isinstance(served(1, ask).errors[0], RankFailure)


# callers, and what they cannot do


def test_an_abort_ends_the_stream_at_once_and_the_pages_go_back_when_all_have_computed() -> None:
    async def ask(world: World) -> None:
        request = world.scheduler.submit(Request([1, 2, 3], Limits(20)))
        await request.next_token(0)
        request.abort()
        assert request.finish is Finish.ABORTED
        assert await world.scheduler.submit(Request([4, 5], Limits(3))).done() == continuation([4, 5], 3)
        assert world.cache.statistics().leases == 0

    assert not served(1, ask, config=config(16)).errors


def test_what_is_left_when_the_scheduler_closes_is_aborted() -> None:
    left: list[Request] = []

    async def ask(world: World) -> None:
        left.extend(world.scheduler.submit(Request([i, 2, 3], Limits(20))) for i in range(4))
        await left[0].next_token(0)

    assert not served(1, ask).errors
    assert {request.finish for request in left} == {Finish.ABORTED}


def test_sampling_travels_to_every_shard() -> None:
    async def ask(world: World) -> None:
        await world.scheduler.submit(Request([1, 2, 3], Limits(2), sampling=Sampling(0.5, 0.9, -(2**64) + 1))).done()
        world._alike()
        assert world.models[1].batches[0].chunks[0].sampling == Sampling(0.5, 0.9, -(2**64) + 1)

    assert not served(1, ask).errors


def test_a_scheduler_runs_where_a_shard_of_the_model_does() -> None:
    async def world(loop: SimulatedLoop) -> None:
        group = SimulatedGroup(Random(1), TP2, own=None)
        async with AsyncCache(config(16), workers=group.workers) as cache:
            with pytest.raises(ConfigError, match="this cache has no worker here"):
                async with Scheduler(cache, PatternModel(cache)):
                    pass
        await group.ended()

    simulate(world, 1)


# followers


def test_a_follower_that_is_cancelled_waits_for_its_model() -> None:
    """So whoever cancels it may close the worker: no page is in use then."""
    ended: list[bool] = []

    async def ask(world: World) -> None:
        await asyncio.sleep(1)
        face, model, busy = world.group.processes[1].face, world.models[1], world.loop.create_future()
        forward = model.forward

        def slow(batch: Batch) -> list[int]:
            answer = forward(batch)
            ended.append(True)
            return answer

        model.forward = slow  # type: ignore[method-assign]
        world.followers[1].cancel()
        await asyncio.wait([world.followers[1]])
        again = world.loop.create_task(follow(face, model))
        request = world.scheduler.submit(Request([1, 2, 3], Limits(50)))
        run = world.loop.run_in_executor
        world.loop.run_in_executor = lambda *given: _noted(busy, model, run, *given)  # type: ignore[method-assign]
        await busy
        assert not ended
        again.cancel()
        await asyncio.wait([again])
        assert again.cancelled()
        assert ended == [True]
        world.loop.run_in_executor = run  # type: ignore[method-assign]
        world.kill(1)
        await request.done()

    assert isinstance(served(1, ask, config=config(16)).errors[0], RankFailure)


def _noted(busy: asyncio.Future[None], model: Any, run: Any, executor: Any, function: Any, *args: Any) -> Any:
    """``run_in_executor`` that says when ``model`` is called."""
    if args and args[0] is model.forward and not busy.done():
        busy.set_result(None)
    return run(executor, function, *args)


def test_a_payload_that_is_no_batch_ends_the_follower() -> None:
    class Odd(PayloadWriter):
        def write(self, batch: Batch) -> bytes:
            return b"odd"

    async def ask(world: World) -> None:
        await asyncio.sleep(1)
        assert world.scheduler._board.shards is not None
        world.scheduler._board.shards._writer = Odd()
        request = world.scheduler.submit(Request([1, 2, 3], Limits(2)))
        await asyncio.wait([world.followers[1]])
        assert "no batch that follows" in str(world.report.errors[1])
        await request.done()

    errors = served(1, ask).errors
    assert isinstance(errors[1], ConfigError)
    assert isinstance(errors[0], RankFailure)


@pytest.mark.parametrize(("name", "value"), [("worker", None), ("worker", object()), ("model", object())])
def test_arguments_of_follow_are_checked(name: str, value: object) -> None:
    async def ask(world: World) -> None:
        await asyncio.sleep(1)
        arguments: dict[str, Any] = {"worker": world.group.processes[1].face, "model": world.models[1], name: value}
        with pytest.raises(ConfigError, match=name):
            await follow(**arguments)

    assert not served(1, ask).errors
