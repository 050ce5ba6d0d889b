"""What a caller says of a request: whether it may be published, how long it may take, and that it begins as others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asynccache_shim import Finish, Limits, Request

from asynccache import ConfigError
from tests.shim.shim_kit import PAGE, config, continuation, hits, serving, text
from tests.waiting import until

KINDS = [{}, {"swa": 48, "window": 8}, {"mamba": 12}]


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


async def test_a_request_that_was_retracted_is_published_again() -> None:
    async with serving(config(16), step_tokens=16) as served:
        may = [False]
        crowd = [served.ask(text(3, seed=i), 6 * PAGE, publishes=lambda: may[0]) for i in range(3)]
        await until(lambda: any(request.retractions for request in crowd))
        may[0] = True
        for request in crowd:
            await request.done()
        last = next(i for i, request in enumerate(crowd) if request.retractions)
        assert hits(await served.answer(text(3, seed=last), 1)).device


async def test_requests_that_may_not_be_published_are_retracted_and_go_on() -> None:
    async with serving(config(16), step_tokens=16) as served:
        crowd = [served.ask(text(3, seed=i), 6 * PAGE, publishes=lambda: False) for i in range(3)]
        for i, request in enumerate(crowd):
            assert await request.done() == continuation(text(3, seed=i), 6 * PAGE)
        assert sum(request.retractions for request in crowd)


async def test_the_first_token_after_the_time_is_the_last() -> None:
    async with serving(config()) as served:
        for most, count in ((0.0, 1), (60.0, 5), (None, 5)):
            request = served.scheduler.submit(Request(text(3), Limits(5, max_time=most)))
            assert await request.done() == continuation(text(3), 5)[:count]
            assert request.finish is Finish.LENGTH


@pytest.mark.parametrize("most", [-1.0, float("nan"), "soon"])
def test_a_time_that_is_none_is_refused(most: Any) -> None:
    with pytest.raises(ConfigError, match="max_time"):
        Limits(5, max_time=most)


def test_publishes_is_a_function() -> None:
    with pytest.raises(ConfigError, match="publishes=3 must be a function"):
        Request([1], publishes=3)  # type: ignore[arg-type]


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
