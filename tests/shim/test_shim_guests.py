"""No request spoils it for the others: bad input, models that misbehave, requests that come while another one waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from asynccache_backends.memory import MemoryBackend
from asynccache_shim import Batch, Finish, Limits, Request, State, queue

from asynccache import CacheClosed, CacheFull, ConfigError, Lease
from asynccache.testing.slow_backend import SlowBackend
from tests.shim.shim_kit import PAGE, Served, config, continuation, hits, serving, text
from tests.waiting import until

KINDS: list[Any] = [{}, {"swa": 32}, {"swa": 32, "mamba": 8}]


def answering(served: Served, change: Any) -> None:
    """From now on the model's answer is ``change(batch, answer)``."""
    forward = served.model.forward

    def changed(batch: Batch) -> Any:
        return change(batch, forward(batch))

    served.model.forward = changed  # type: ignore[method-assign]


# bad input


@pytest.mark.parametrize("terms", [{"namespace": "\ud800"}, {"namespace": 5}, {"priority": "high"}, {"priority": None}])
def test_terms_that_nobody_could_use_are_refused(terms: Any) -> None:
    with pytest.raises(ConfigError, match=f"request: .*{next(iter(terms))}"):
        Request([1], **terms)


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


async def test_a_model_that_stops_an_iteration_is_an_error_and_no_hang() -> None:
    """asyncio cannot carry StopIteration in a future; whoever waited for it would wait for ever."""
    async with serving(config(64)) as served:
        answering(served, lambda batch, answer: next(iter(())))
        request = served.ask(text(3), 2)
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await request.done()


async def test_tokens_may_be_a_tensor() -> None:
    expected = continuation(text(3), 8)
    async with serving(config(64)) as served:
        answering(served, lambda batch, answer: torch.tensor(answer))
        request = served.scheduler.submit(Request(text(3), Limits(8, frozenset({expected[4]}))))
        output = await request.done()
        assert output == expected[: expected.index(expected[4]) + 1]
        assert all(type(token) is int for token in output)


@pytest.mark.parametrize("token", [-1, -5, 2**31])
async def test_a_token_that_is_none_ends_the_batch_and_not_the_scheduler(token: int) -> None:
    async with serving(config(64)) as served:
        forward = served.model.forward
        answering(served, lambda batch, answer: [token] * len(answer))
        with pytest.raises(ConfigError, match="model: token"):
            await served.ask(text(3), 2).done()
        served.model.forward = forward  # type: ignore[method-assign]
        await served.answer(text(3), 2)


async def test_a_token_that_was_not_asked_for_is_an_error() -> None:
    async with serving(config(64), step_tokens=12) as served:
        answering(served, lambda batch, answer: [-5 for _ in answer])
        with pytest.raises(ConfigError, match="sample=False"):
            await served.ask(text(8), 2).done()


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
    store = MemoryBackend()
    async with serving(config(32, 64), storage=store) as served:
        await served.answer(text(3, extra=1), 2)
        await served.cache.flush()
    async with serving(config(16, 64), storage=SlowBackend(store, 0.01)) as served:
        async with served.cache.lease(text(12, seed=5)):
            high = served.ask(text(3, extra=1), 1, priority=1)
            low = served.ask(text(10, seed=1), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            await high.done()
            assert hits(high).storage == 3 * PAGE
            assert low.finish is None
        assert await low.done() == continuation(text(10, seed=1), 1)
    await store.aclose()


async def test_an_abort_behind_one_that_waits_alone_takes_effect_at_once() -> None:
    store = MemoryBackend()
    async with serving(config(32, 64), storage=store) as served:
        await served.answer(text(8, extra=1), 2)
        await served.cache.flush()
    async with serving(config(16, 64), storage=SlowBackend(store, 0.05)) as served:
        async with served.cache.lease(text(12, seed=5)):
            low = served.ask(text(10, seed=1), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            behind = served.ask(text(8, extra=1), 1)
            behind.abort()
            await until(lambda: served.cache.statistics().prefetches["cancelled"] == 1)
            assert low.finish is None
        await low.done()
    await store.aclose()


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


@pytest.mark.parametrize("more", KINDS)
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


async def test_a_window_longer_than_its_pool_is_refused_before_anything_is_taken() -> None:
    async with serving(config(64, swa=4, window=4 * PAGE)) as served:
        with pytest.raises(CacheFull, match="a window of 16 takes 6 pages"):
            served.ask(text(8), 1)
        assert served.cache.statistics().device["full"].free == 64
        await served.answer(text(2), 4)
