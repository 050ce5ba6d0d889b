"""What a caller says of a request, on what terms it is admitted, and that no request spoils it for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asynccache_shim import NO_TOKEN, Batch, Finish, Limits, Matched, Request, Scheduler, SchedulerConfig, State, queue
from asynccache_shim.admission import (
    CacheShape,
    LeaseOffer,
    SlotCounts,
    check_fits,
    chunk_stop,
    cut_offers,
    demand,
    offer,
    passes,
    shape_of,
    shorter,
    swa_budget,
)
from asynccache_shim.board import by_rank, victim

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError, Lease
from asynccache.runtime.prefetch import GRACE
from asynccache.runtime.save import PATIENCE
from asynccache.testing.slow_backend import SlowBackend
from tests.runtime.runtime_kit import text as numbered_text
from tests.runtime.test_hung_storage import DEAF, SOON, Hangs, serve, timed
from tests.runtime.test_hung_storage import play as over_a_store_that_hangs
from tests.shim.shim_kit import PAGE, Served, config, continuation, hits, serving, stored, text
from tests.simulated.loop import SimulatedLoop
from tests.waiting import until

# What a caller says of a request: whether it may be published, how long it may take, and that it begins as others.


KINDS: list[Any] = [{}, {"swa": 48, "window": 8}, {"mamba": 12}]


def broken() -> bool:
    raise MemoryError("no more")


@pytest.mark.parametrize("more", KINDS)
@pytest.mark.parametrize("publishes", [lambda: False, broken])
async def test_what_is_not_to_be_published_is_right_and_found_by_nobody(
    more: Any, publishes: Callable[[], bool]
) -> None:
    async with serving(config(64, **more), step_tokens=16) as served:
        for _ in range(2):
            assert hits(await served.answer(text(8), 3 * PAGE, publishes=publishes)).device == 0
        assert hits(await served.answer(text(8), 3, publishes=lambda: True)).device == 0
        assert hits(await served.answer(text(8), 3, publishes=publishes)).device == 7 * PAGE


@pytest.mark.parametrize("more", KINDS)
async def test_what_follows_something_unpublished_is_not_published_either(more: Any) -> None:
    """A commit has the whole prefix, so a later yes would publish what an earlier no kept back."""
    answers = iter([True, False])
    async with serving(config(64, **more), step_tokens=16) as served:
        await served.answer(text(16), 3, publishes=lambda: next(answers, True))
        assert hits(await served.answer(text(16), 3)).device <= 16


async def test_requests_that_may_not_be_published_are_retracted_and_go_on_and_may_be_later() -> None:
    async with serving(config(16), step_tokens=16) as served:
        may = [False]
        crowd = [served.ask(text(3, seed=i), 6 * PAGE, publishes=lambda: may[0]) for i in range(3)]
        await until(lambda: any(request.retractions for request in crowd))
        may[0] = True
        for i, request in enumerate(crowd):
            assert await request.done() == continuation(text(3, seed=i), 6 * PAGE)
        last = next(i for i, request in enumerate(crowd) if request.retractions)
        assert hits(await served.answer(text(3, seed=last), 1)).device


async def test_the_first_token_after_the_time_is_the_last() -> None:
    async with serving(config()) as served:
        for most, count in ((0.0, 1), (60.0, 5), (None, 5)):
            request = served.scheduler.submit(Request(text(3), Limits(5, max_time=most)))
            assert await request.done() == continuation(text(3), 5)[:count]
            assert request.finish is Finish.LENGTH


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Request([]), "tokens"), (lambda: Request([1, -2]), "tokens"), (lambda: Limits(0), "max_new_tokens"),
    *((lambda most=most: Limits(5, max_time=most), "max_time") for most in (-1.0, float("nan"), "soon")),
    (lambda: Request([1], publishes=3), "publishes=3 must be a function"),  # type: ignore[arg-type]
    (lambda: Request([1], namespace="\ud800"), "request: .*namespace"),
    (lambda: Request([1], namespace=5), "request: .*namespace"),  # type: ignore[arg-type]
    (lambda: Request([1], priority="high"), "request: .*priority"),  # type: ignore[arg-type]
    (lambda: Request([1], priority=None), "request: .*priority"),  # type: ignore[arg-type]
])  # fmt: skip
def test_what_nobody_could_use_is_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


async def test_a_request_is_submitted_once_and_a_step_has_room_for_more_than_decoding() -> None:
    async with serving(config(64)) as served:
        with pytest.raises(ConfigError):
            served.scheduler.submit(await served.answer(text(1), 1))
        with pytest.raises(ConfigError):
            Scheduler(served.cache, served.model, SchedulerConfig(step_tokens=8, max_running=8))


@pytest.mark.parametrize("more", KINDS[:2])
@pytest.mark.parametrize("step", [16, 512])
async def test_what_requests_share_is_computed_once_although_they_come_together(more: Any, step: int) -> None:
    async with serving(config(128, **more), step_tokens=step) as served:
        prompts = [[*text(10), 7 + i, *range(i)] for i in range(6)]
        asked = [served.ask(prompt, 2) for prompt in prompts]
        for prompt, request in zip(prompts, asked, strict=True):
            assert await request.done() == continuation(prompt, 2)
        assert served.model.computed == sum(len(prompt) + 1 for prompt in prompts) - 5 * 10 * PAGE


async def test_who_waits_for_what_another_computes_holds_up_nobody() -> None:
    async with serving(config(128), step_tokens=64) as served:
        first, twin, other = served.ask(text(30), 2), served.ask(text(30), 2), served.ask(text(2, seed=1), 2)
        await other.done()
        assert twin.finish is None
        assert await twin.done() == await first.done()
        assert hits(twin).device == 29 * PAGE


async def test_states_that_are_shared_are_kept_where_requests_part() -> None:
    """The first one leaves no state there, the second one does, and all others begin behind it."""
    async with serving(config(128, mamba=24), step_tokens=256) as served:
        asked = [served.ask([*text(10), 7 + i, 1, 2, 3, 4], 2) for i in range(6)]
        for request in asked:
            await request.done()
        assert [hits(request).device for request in asked] == [0, 0, *[10 * PAGE] * 4]


async def test_who_comes_first_does_not_wait_for_what_a_later_one_computes() -> None:
    """That one gets no tokens of a step as long as there are others between the two."""
    async with serving(config(256), step_tokens=18) as served:
        low = served.ask(text(30), 1)
        await until(lambda: low.hits is not None)
        crowd = [served.ask(text(30, seed=1 + i), 1, priority=1) for i in range(5)]
        await until(lambda: crowd[0].hits is not None)
        high = served.ask(text(30), 1, priority=2)
        assert await high.done() == continuation(text(30), 1)
        assert not low.finish
        assert not all(request.finish for request in crowd)


# Admission on numbers: the window's formula, its floor, where load_back is charged, and how an offer is cut.


SHAPE = CacheShape(page_size=4, window=16, capacity=SlotCounts(100, 40, 8))


WINDOWS = SHAPE._replace(capacity=SlotCounts(100, 8, 0))  # two of them
LOADED = Matched(0, 40, host_hit_length=9, swa_host_hit_length=5, mamba_host_hit_length=1)
NUMBERS: dict[str, tuple[Any, Any]] = {
    "the shape of a cache": (shape_of(config(64, swa=12, window=10, mamba=3)),
                             CacheShape(PAGE, 10, SlotCounts(64, 12, 3))),
    "of FULL alone": (shape_of(config(64)), CacheShape(PAGE, 0, SlotCounts(64, 0, 0))),
    "the chunk is larger than the window": (swa_budget(SHAPE, 100, 32, 50), 32 + 4),
    "the window is larger than the chunk": (swa_budget(SHAPE, 100, 8, 50), 16 + 4),
    "a short prompt will reach the window by decoding": (swa_budget(SHAPE, 6, 32, 50), 16 + 4),
    "it never will": (swa_budget(SHAPE, 6, 32, 3), 9 + 4),
    "not even while it prefills": (swa_budget(SHAPE, 6, 2, 0), 6 + 4),
    "nothing to load": (demand(SHAPE, 32, 32, 0, Matched()), SlotCounts(8, 9, 2)),
    "load-back is charged at the first gate, in whole pages": (
        demand(SHAPE, 32, 32, 0, LOADED), SlotCounts(8 + 3, 9 + 2, 2 + 1)),
    "the second gate leaves load-back to the lease": (offer(SHAPE, 100, 32, 10), LeaseOffer(32, 36, 2)),
    "of less than a chunk": (offer(SHAPE._replace(window=0, capacity=SlotCounts(9)), 3, 32, 10), LeaseOffer(3, 1, 0)),
    "alone without a match everything is offered": (
        cut_offers(SHAPE, LeaseOffer(32, 36, 2), matched=0)[0], LeaseOffer(32, 36, 2)),
    "alone the window of the own prefix is left out of the room": (
        [cut_offers(WINDOWS, offer(WINDOWS, 100, 64, 10), matched=40)[at] for at in (0, -1)],
        [LeaseOffer(16, 16, 0), LeaseOffer(4, 4, 0)]),
    "an offer is cut to one page and one state": (cut_offers(SHAPE, LeaseOffer(40, 44, 2), 0)[-1], LeaseOffer(4, 4, 1)),
    "or to less than a page": (cut_offers(SHAPE, LeaseOffer(2, 18, 2), 0)[-1], LeaseOffer(2, 2, 1)),
    "a chunk goes to the end of a page": (chunk_stop(0, 100, 18, 4, ()), 16),
    "or is all of it": (chunk_stop(0, 15, 18, 4, ()), 15),
    "no page's end in reach": (chunk_stop(14, 100, 1, 4, ()), 15),
    "not beyond a mark": ([chunk_stop(at, end, 64, 4, (20, 40)) for at, end in ((0, 100), (20, 100), (40, 43))],
                          [20, 40, 43]),
    "a chunk that does not fit is halved to a page": ([shorter(10, stop, 4) for stop in (64, 36, 20, 12)],
                                                      [36, 20, 12, 12]),
}  # fmt: skip


@pytest.mark.parametrize("law", NUMBERS)
def test_admission_on_numbers(law: str) -> None:
    found, wanted = NUMBERS[law]
    assert found == wanted


@pytest.mark.parametrize(("room", "wanted", "through"), [
    ((5, 4, 1), (7, 6, 1), True), ((5, 4, 1), (6, 6, 1), False), ((5, 4, 1), (7, 5, 1), False),
    ((5, 4, 1), (7, 6, 0), False), ((5,), (7,), True),
])  # fmt: skip
def test_the_first_gate_keeps_a_page_for_each_that_grows(room: Any, wanted: Any, through: bool) -> None:
    assert passes(SlotCounts(*room), SlotCounts(*wanted), 2) is through


@pytest.mark.parametrize(("capacity", "tokens", "said"), [
    ((100, 40, 8), 400, ""), ((100, 40, 8), 401, "FULL"), ((100, 6, 0), 400, ""), ((100, 5, 0), 400, "window"),
    ((100, 5, 0), 20, ""),
])  # fmt: skip
def test_what_could_not_run_alone_is_refused(capacity: Any, tokens: int, said: str) -> None:
    with pytest.raises(CacheFull, match=said) if said else nullcontext():
        check_fits(SHAPE._replace(capacity=SlotCounts(*capacity)), tokens)


def test_rank_and_victim() -> None:
    items: Any = [SimpleNamespace(priority=priority, id=number)
                  for priority, number in ((0, 1), (1, 4), (0, 2), (1, 3))]  # fmt: skip
    assert [item.id for item in by_rank(items)] == [3, 4, 1, 2]
    assert victim(items) is items[2]
    assert victim([]) is None


# No request spoils it for the others: bad input, models that misbehave, requests that come while another one waits.


def answering(served: Served, change: Any) -> None:
    """From now on the model's answer is ``change(batch, answer)``."""
    forward = served.model.forward

    def changed(batch: Batch) -> Any:
        return change(batch, forward(batch))

    served.model.forward = changed  # type: ignore[method-assign]


async def test_a_submission_that_fails_leaves_nothing_behind() -> None:
    """Whatever the cache says to it, the loop goes on with the others."""
    async with serving(config(64)) as served:
        other = served.ask(text(3), 20)
        request = Request(text(2))
        request.namespace = "\ud800"
        with pytest.raises(ConfigError, match="namespace"):
            served.scheduler.submit(request)
        assert request.finish is None
        request.namespace = None
        assert await served.scheduler.submit(request).done() == continuation(text(2), request.limits.max_new_tokens)
        assert await other.done() == continuation(text(3), 20)
        await served.answer(text(3), 2)


async def test_a_submission_to_a_closed_cache_ends_the_request() -> None:
    async with serving(config(64), audit=False) as served:
        await served.answer(text(1), 1)
        await served.cache.aclose()
        request = Request(text(2))
        with pytest.raises(CacheClosed):
            served.scheduler.submit(request)
        assert request.finish is Finish.FAILED


# models


async def test_tokens_may_be_a_tensor_and_a_stop_token_ends_the_output() -> None:
    expected = continuation(text(3), 8)
    async with serving(config(64)) as served:
        answering(served, lambda batch, answer: torch.tensor(answer))
        request = served.scheduler.submit(Request(text(3), Limits(8, frozenset({expected[4]}))))
        output = await request.done()
        assert output == expected[: expected.index(expected[4]) + 1]
        assert all(type(token) is int for token in output)
        assert request.finish is Finish.STOP


@pytest.mark.parametrize(("change", "error"), [
    (lambda answer: next(iter(())), "StopIteration"),  # which asyncio cannot carry in a future: a hang
    *((lambda answer, token=token: [token] * len(answer), "model: token") for token in (-1, -5, 2**31)),
    (lambda answer: [-5 for _ in answer], "sample=False"),
])  # fmt: skip
async def test_a_model_that_misbehaves_ends_the_batch_and_not_the_scheduler(change: Any, error: str) -> None:
    async with serving(config(64), step_tokens=12) as served:
        forward = served.model.forward
        answering(served, lambda batch, answer: change(answer))
        async with asyncio.timeout(10):
            with pytest.raises((RuntimeError, ConfigError), match=error):
                await served.ask(text(8 if error == "sample=False" else 3), 2).done()
        served.model.forward = forward  # type: ignore[method-assign]
        await served.answer(text(3), 2)


# who comes while another one waits in the cache's line


async def test_who_waits_alone_in_line_is_overtaken_by_a_more_important_one() -> None:
    async with serving(config(16)) as served:
        async with served.cache.lease(text(12)):  # another user of the cache
            low = served.ask(text(10, seed=1), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            equal = served.ask(text(2, seed=3), 1)
            high = served.ask(text(2, seed=2), 1, priority=1)
            assert await high.done() == continuation(text(2, seed=2), 1)
            assert low.finish is equal.finish is None
            await until(lambda: served.cache.statistics().waiting == 1)
        assert await low.done() == continuation(text(10, seed=1), 1)
        assert await equal.done() == continuation(text(2, seed=3), 1)


async def test_who_waits_alone_is_overtaken_when_the_more_important_one_has_been_fetched() -> None:
    async with (stored(text(3, extra=1)) as store,
                serving(config(16, 64), storage=SlowBackend(store, 0.01)) as served):  # fmt: skip
        async with served.cache.lease(text(12, seed=5)):
            high = served.ask(text(3, extra=1), 1, priority=1)
            low = served.ask(text(10, seed=1), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            await high.done()
            assert hits(high).storage == 3 * PAGE
            assert low.finish is None
        assert await low.done() == continuation(text(10, seed=1), 1)


async def test_an_abort_behind_one_that_waits_alone_takes_effect_at_once() -> None:
    async with (stored(text(8, extra=1)) as store,
                serving(config(16, 64), storage=SlowBackend(store, 0.05)) as served):  # fmt: skip
        async with served.cache.lease(text(12, seed=5)):
            low = served.ask(text(10, seed=1), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            behind = served.ask(text(8, extra=1), 1)
            behind.abort()
            await until(lambda: served.cache.statistics().prefetches["cancelled"] == 1)
            assert low.finish is None
        await low.done()


@pytest.mark.parametrize("error", [None, CacheClosed("over")])
async def test_closing_does_not_wait_for_room_that_a_request_waits_for(error: CacheClosed | None) -> None:
    async with serving(config(16)) as served, served.cache.lease(text(12, seed=5)):
        request = served.ask(text(10), 1)
        await until(lambda: served.cache.statistics().waiting == 1)
        async with asyncio.timeout(5):
            await served.scheduler.aclose(error)
        assert (request.finish, request.error) == (Finish.FAILED if error else Finish.ABORTED, error)


async def test_nothing_is_added_to_an_output_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it ends while the pages of its last step are published."""
    commit = Lease.commit

    async def aborted(lease: Lease, *args: Any, **more: Any) -> Any:
        request.abort()
        return await commit(lease, *args, **more)

    monkeypatch.setattr(Lease, "commit", aborted)
    async with serving(config(16)) as served:
        request = served.ask(text(3), 4)
        assert await request.done() == []
        await until(lambda: not served.cache.statistics().leases)
        assert (request.output, request.finish) == ([], Finish.ABORTED)


@pytest.mark.parametrize("pages", [2, 10])
async def test_an_abort_between_the_gates_takes_nothing_and_nobody_elses_pages(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it would have come in, or would have had another one retracted."""
    match = queue._match

    async def aborted(board: Any, request: Any) -> Any:
        found = await match(board, request)
        if request.priority:
            request.submitted.abort()
        return found

    monkeypatch.setattr(queue, "_match", aborted)
    async with serving(config(16)) as served:
        low = served.ask(text(6), 24)
        await until(lambda: len(low.output) > 2)
        high = served.ask(text(pages, seed=1), 4, priority=1)
        assert await high.done() == []
        await low.done()
        assert low.retractions == 0
        assert (high.state, high.hits) == (State.FINISHED, None)


# forgetting


@pytest.mark.parametrize("more", [{}, {"swa": 32}, {"swa": 32, "mamba": 8}])
@pytest.mark.parametrize("everything", [False, True])
async def test_forgetting_while_requests_run_changes_no_token(more: Any, everything: bool) -> None:
    """Retractions among them: what they come back for is gone."""
    async with serving(config(16, 64, **more), max_running=2) as served:
        requests = [served.ask(text(4, seed=i), 40) for i in range(2)]
        for length in (5, 15, 25):

            def is_so_long(length: int = length) -> bool:
                return len(requests[0].output) >= length

            await until(is_so_long)
            await (served.cache.reset() if everything else served.cache.invalidate())
        for i, request in enumerate(requests):
            assert await request.done() == continuation(text(4, seed=i), 40)
        assert requests[1].retractions >= 1


# A store that hangs holds up no request of the scheduler but those that ask for its pages, and those for no longer
# than the prefetch policy allows.


class OneToken:
    """A model that always says the same."""

    def forward(self, batch: Batch) -> Sequence[int]:
        return [1 if chunk.sample else NO_TOKEN for chunk in batch.chunks]


def play(
    body: Callable[[AsyncCache, Scheduler, Hangs], Coroutine[Any, Any, None]], verb: str, deaf: float, **more: Any
) -> None:
    """Run ``body`` with a scheduler over a cache whose store will hang in ``verb`` alone."""

    async def scheduled(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        async with Scheduler(cache, OneToken(), SchedulerConfig(max_running=4, step_tokens=64)) as scheduler:
            await body(cache, scheduler, backend)

    over_a_store_that_hangs(scheduled, verb, deaf, **more)


def ended(request: Request) -> Coroutine[Any, Any, float]:
    """Return how many seconds ``request`` takes. To be awaited."""
    return timed(request.done())


@DEAF
def test_requests_that_decode_get_their_pages_while_a_write_hangs(deaf: float) -> None:
    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs) -> None:
        go, ready = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with cache.lease(numbered_text(10, seed=1)) as lease:
                await lease.commit(numbered_text(10, seed=1))
                ready.set()
                await go.wait()

        backend.hung.set()
        holder = asyncio.ensure_future(hold())
        await ready.wait()
        for tokens, count in ((numbered_text(6, seed=2), 5), (numbered_text(2, seed=3), 1)):
            await scheduler.submit(Request(tokens, Limits(max_new_tokens=count))).done()
        requests = [scheduler.submit(Request([n, n, n], Limits(max_new_tokens=14))) for n in (7, 8)]
        assert max(await asyncio.gather(*map(ended, requests))) < 2 * PATIENCE + SOON
        assert [len(request.output) for request in requests] == [14, 14]
        go.set()
        await holder

    play(body, "put", deaf, host=10, prefetch_policy="best_effort", write_back_watermark=0.0)


@DEAF
@pytest.mark.parametrize("verb", ["get", "exists"])
@pytest.mark.parametrize(("policy", "patience"), [("best_effort", 0.0), ("timeout", 1.0)])
def test_a_request_whose_own_prefetch_hangs_is_computed_when_its_patience_and_a_grace_are_over(
    policy: str, patience: float, verb: str, deaf: float
) -> None:
    """All of them beside each other; and one that storage has nothing of does not wait for them."""

    async def body(cache: AsyncCache, scheduler: Scheduler, backend: Hangs) -> None:
        for seed in range(4):
            await serve(cache, numbered_text(4, seed=seed))
        await cache.flush()
        for seed in range(200, 220):
            await serve(cache, numbered_text(10, seed=seed))
        await cache.flush()
        backend.hung.set()
        before = cache.statistics().lookups.requests
        needy = [scheduler.submit(Request([*numbered_text(4, seed=n), 7], Limits(max_new_tokens=3))) for n in range(4)]
        await asyncio.sleep(0.01)
        other = scheduler.submit(Request([7, 8, 9], Limits(max_new_tokens=3)))
        assert await ended(other) < SOON
        assert max(await asyncio.gather(*map(ended, needy))) < patience + GRACE + PATIENCE + SOON
        assert all(len(request.output) == 3 for request in needy)
        assert cache.statistics().lookups.requests == before + 5, "each is looked up once"

    play(body, verb, deaf, device=60, host=60, prefetch_policy=policy)
