"""The scheduler on the real cache: batching, hits from every tier, growth, retraction, priorities, aborts, failures;
and the abilities of a lease that it needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend
from asynccache_shim import Finish, Limits, Request, Scheduler, SchedulerConfig, State

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError
from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Faults
from asynccache.testing.slow_backend import SlowBackend
from tests.shim.shim_kit import PAGE, PatternModel, Served, config, continuation, hits, push_out, serving, stored, text
from tests.waiting import turns, until

KINDS: list[Any] = [{}, {"swa": 32}, {"swa": 32, "mamba": 8}, {"mamba": 8}]


@asynccontextmanager
async def held_up(served: Served) -> AsyncIterator[None]:
    """The next forward waits until the block is left; the block begins when one has begun."""
    served.model.entered.clear()
    served.model.gate = threading.Event()
    try:
        await until(served.model.entered.is_set)
        yield
    finally:
        served.model.gate.set()
        served.model.gate = None


# streams and hits


@pytest.mark.parametrize("more", KINDS)
async def test_a_prefix_is_computed_once_and_comes_back_from_the_host(more: Any) -> None:
    async with serving(config(64, 256, **more), step_tokens=16) as served:
        prompt = text(20, extra=2)
        first = await served.answer(prompt, 2 * PAGE + 2)
        computed = served.model.computed
        assert hits(await served.answer(prompt, 5)) == (20 * PAGE, 0, 0)
        assert served.model.computed - computed == 2 + 4
        turn = await served.answer([*prompt, *first.output, 5], 3)
        assert hits(turn).device == (20 if "mamba" in more else 22) * PAGE, "its own output is a prefix, too"
        await push_out(served.cache)
        again = await served.answer(prompt, 5)
        assert again.match.host_hit_length == hits(again).host == 20 * PAGE
        assert again.match.swa_host_hit_length == (2 * PAGE if "swa" in more else 0)
        assert again.match.mamba_host_hit_length == (1 if "mamba" in more else 0)


async def test_a_conversation_that_has_ended_leaves_first() -> None:
    async with serving(config(20)) as served:
        await served.answer(text(6, extra=1), 1)
        await served.answer(text(6, seed=1, extra=1), 1, ended=True)
        await served.answer(text(12, seed=2), 1)
        assert hits(await served.answer(text(6, extra=1), 1)).device == 6 * PAGE


async def test_namespaces_never_meet() -> None:
    async with serving(config()) as served:
        for key in (None, "a", "b"):
            request = await served.answer(text(8), 3, namespace=key)
            assert sum(hits(request)) == 0
        assert hits(await served.answer(text(8), 3, namespace="a")).device == 7 * PAGE


async def test_requests_at_the_same_time_share_a_step() -> None:
    async with serving(config(64), step_tokens=64) as served:
        prompts = [text(3, seed=i) for i in range(4)]
        requests = [served.ask(prompt, 6) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert await request.done() == continuation(prompt, 6)
        assert served.scheduler.steps < 4 * 6
        assert max(len(batch.chunks) for batch in served.model.batches) == 4


# chunks


@pytest.mark.parametrize("priority", [0, 1])
async def test_a_step_computes_no_more_than_its_budget_and_decoding_goes_on(priority: int) -> None:
    """Also beside the prefill of a more important one."""
    async with serving(config(64), step_tokens=20, max_running=4) as served:
        short = served.ask(text(1), 60)
        await until(lambda: len(short.output) > 2)
        await served.answer(text(30, seed=1), 2, priority=priority)
        batches = served.model.batches
        assert max(sum(chunk.stop - chunk.start for chunk in batch.chunks) for batch in batches) <= 20
        beside = [batch for batch in batches if any(chunk.request_id == 2 for chunk in batch.chunks)]
        assert len(beside) >= 6
        assert all(any(chunk.request_id == 1 for chunk in batch.chunks) for batch in beside)


def kept(served: Served) -> list[int]:
    """Where states were kept."""
    return [w.checkpoint.position for b in served.model.batches for w in b.chunks if w.checkpoint is not None]


async def test_states_are_kept_where_chunks_end_and_now_and_then_while_decoding() -> None:
    async with serving(config(64, mamba=16), step_tokens=16, max_running=4) as served:
        await served.answer(text(12), 2)
        assert kept(served) == [16, 32, 44, 48]
        assert hits(await served.answer([*text(9), 1, 2, 3], 2)).device == 32
    async with serving(config(64, mamba=16), checkpoint_every=20) as served:
        await served.answer(text(3), 80)
        assert kept(served) == [8, 12, 32, 52, 72]


async def test_a_long_output_holds_one_window() -> None:
    window = 3 * PAGE
    async with serving(config(64, swa=8, window=window), step_tokens=24) as served:
        await served.answer(text(2), 40 * PAGE)
        present = [int((w.swa_pages >= 0).sum()) for b in served.model.batches for w in b.chunks]
        assert max(present) <= 8
        assert max(present[50:]) <= 3 + 2 + 1


async def test_what_two_computed_at_once_is_kept_once() -> None:
    async with serving(config(32), max_running=2) as served:
        both = [served.ask(text(8), 30) for _ in range(2)]
        await until(lambda: all(len(request.output) > 2 for request in both))
        statistics = served.cache.statistics()
        assert statistics.core.operations["retire"] == 0
        assert statistics.device["full"].free >= 32 - 8 - 2 * 3
        for request in both:
            request.abort()


# admission


@pytest.mark.parametrize(("pools", "said"), [
    (config(8), "FULL"), (config(64, swa=4, window=4 * PAGE), "a window of 16 takes 6 pages"),
])  # fmt: skip
async def test_what_could_never_run_is_refused_before_anything_is_taken(pools: Any, said: str) -> None:
    async with serving(pools) as served:
        free = served.cache.statistics().device["full"].free
        with pytest.raises(CacheFull, match=said):
            served.ask(text(8), 2)
        assert served.cache.statistics().device["full"].free == free
        await served.answer(text(2), 4)


async def test_alone_a_request_is_admitted_beside_the_window_of_its_own_prefix() -> None:
    """An SWA pool of two windows, one of them pinned by the request's own prefix: its formula asks for more than the
    other one. Its chunk is cut, and the prefix is still a hit."""
    window = 4 * PAGE
    async with serving(config(64, swa=8, window=window), step_tokens=64) as served:
        await served.answer(text(8), 1)
        request = await served.answer([*text(8), *text(20, seed=1)], 4)
        assert hits(request).device == 8 * PAGE
        assert max(w.stop - w.start for w in served.model.batches[2].chunks) <= window


async def test_the_important_one_goes_first() -> None:
    async with serving(config(64), max_running=1, preempt=False) as served:
        first = served.ask(text(2), 4)
        async with held_up(served):
            asked = {"low": served.ask(text(2, seed=1), 1), "high": served.ask(text(2, seed=2), 1, priority=1)}
        order: list[str] = []

        async def note(name: str, request: Request) -> None:
            await request.done()
            order.append(name)

        await asyncio.gather(*(note(name, one) for name, one in {**asked, "first": first}.items()))
        assert order == ["first", "high", "low"]


@pytest.mark.parametrize("more", KINDS)
async def test_a_running_request_gives_way_to_a_more_important_one_and_goes_on_later(more: Any) -> None:
    async with serving(config(16, 64, **more), max_running=4) as served:
        low = served.ask(text(6), 24)
        await until(lambda: len(low.output) > 8)
        high = await served.answer(text(10, seed=1), 4, priority=1)
        assert high.retractions == 0
        assert await low.done() == continuation(text(6), 24)
        assert low.retractions >= 1


@pytest.mark.parametrize("more", KINDS)
async def test_growth_beyond_the_device_retracts_the_newest_which_goes_on_from_the_cache(more: Any) -> None:
    async with serving(config(16, 64, **more), max_running=2) as served:
        old, new = served.ask(text(4), 40), served.ask(text(4, seed=1), 40)
        assert await old.done() == continuation(text(4), 40)
        assert await new.done() == continuation(text(4, seed=1), 40)
        assert old.retractions == 0
        assert new.retractions >= 1
        once = 2 * (16 + 40 - 1)
        assert served.model.computed >= once
        if "mamba" not in more:  # a state is there where it was kept, not where it was taken from
            assert served.model.computed <= once + new.retractions * (PAGE + 1), "it was computed anew"


async def test_the_model_hears_who_is_gone() -> None:
    async with serving(config(16, 64), max_running=2) as served:
        requests = [served.ask(text(4, seed=i), 40) for i in range(2)]
        await asyncio.gather(*(request.done() for request in requests))
        told = [number for batch in served.model.batches for number in batch.ended]
        assert told.count(2) == requests[1].retractions
        await served.answer(text(1), 1)
        assert set(served.model.batches[-1].ended) <= {1, 2}


# storage


async def test_storage_is_read_at_arrival() -> None:
    async with stored(text(20, extra=1)) as store, serving(config(32, 64), storage=store) as served:
        assert hits(await served.answer(text(20, extra=1), 2)).storage == 20 * PAGE
        assert served.model.computed == 2


async def test_a_prefetch_that_was_refused_for_now_is_tried_again() -> None:
    """The quota lets one of these in at a time."""
    prompts = [text(10, seed=seed, extra=1) for seed in range(3)]
    async with stored(*prompts, host=128) as store:
        async with serving(config(32, 24, prefetch_quota=0.5), storage=SlowBackend(store, 0.002)) as served:
            requests = [served.ask(prompt, 1) for prompt in prompts]
            await asyncio.gather(*(request.done() for request in requests))
            assert [hits(request).storage for request in requests] == [10 * PAGE] * 3


async def test_who_waits_for_storage_is_overtaken_and_a_timeout_ends_its_waiting() -> None:
    prompt = text(20, extra=1)
    patient: Any = {"prefetch_timeout_base": 0.05, "prefetch_timeout_per_1k": 0.0}
    async with stored(prompt) as store, serving(config(32, 64, **patient), storage=SlowBackend(store, 0.2)) as served:
        waiting = served.ask(prompt, 2)
        assert waiting.state is State.PREFETCHING
        await served.answer(text(0, extra=3), 3)
        assert waiting.state is State.PREFETCHING
        assert await waiting.done() == continuation(prompt, 2)
        assert hits(waiting).storage < 20 * PAGE, "it was fetched to its end"


async def test_an_abort_gives_up_the_prefetch() -> None:
    prompt = text(20, extra=1)
    async with stored(prompt) as store, serving(config(32, 64), storage=SlowBackend(store, 0.05)) as served:
        request = served.ask(prompt, 2)
        await asyncio.sleep(0)
        request.abort()
        await until(lambda: served.cache.statistics().prefetches["cancelled"] == 1)
        assert served.cache.statistics().leases == 0


async def test_a_request_whose_pages_fail_to_arrive_enters_again() -> None:
    device = CpuDevice(faults=Faults(fail_at=frozenset({1})))
    async with serving(config(32, 64, write_policy="write_through"), device=device) as served:
        await served.answer(text(10, extra=1), 1)
        await push_out(served.cache)
        request = await served.answer(text(10, extra=1), 4)
        assert served.cache.statistics().core.failed_loads == 1
        assert request.output == continuation(text(10, extra=1), 4)
    await device.aclose()


async def test_a_prompt_whose_load_is_declined_after_admission_counted_it_is_computed_within_the_budget() -> None:
    """SGLang#39839. The match says that the host has it all; the lease declines to load so little."""
    prompt, budget = text(20, extra=1), 16
    settings = config(64, 64, write_policy="write_through", load_back_threshold=len(prompt))
    async with serving(settings, step_tokens=budget) as served:
        await served.answer(prompt, 1)
        await push_out(served.cache)
        other = served.ask(text(2, seed=1), 40)
        await until(lambda: len(other.output) > 2)
        before = len(served.model.batches)
        request = await served.answer(prompt, 4)
        assert request.match is not None
        assert request.match.host_hit_length == 20 * PAGE, "nothing was charged: this shows nothing"
        assert sum(hits(request)) == 0
        steps = [{c.request_id: c.stop - c.start for c in batch.chunks} for batch in served.model.batches[before:]]
        newest = max(number for step in steps for number in step)
        assert sum(step.get(newest, 0) for step in steps) == len(prompt) + 3
        assert max(sum(step.values()) for step in steps) <= budget
        await other.done()


# aborts and ends


async def test_an_abort_while_the_model_runs_gives_back_when_it_has_run() -> None:
    async with serving(config(64)) as served:
        request = served.ask(text(3), 30)
        async with held_up(served):
            request.abort()
            assert [token async for token in request] == request.output
            await asyncio.sleep(0.002)
            assert served.cache.statistics().leases == 1
        await until(lambda: served.cache.statistics().leases == 0)
        assert request.finish is Finish.ABORTED
        assert hits(await served.answer(text(3, extra=1), 1)).device == 3 * PAGE  # what it had computed is not lost


async def test_an_abort_in_the_queue_and_before_a_step() -> None:
    async with serving(config(16), max_running=1) as served:
        never = served.ask(text(3), 3)
        never.abort()
        never.abort()
        assert await never.done() == []
        first, second = served.ask(text(3), 8), served.ask(text(3, seed=1), 8)
        second.abort()
        await first.done()
        assert second.output == []
    assert served.model.computed == 12 + 7


async def test_an_abort_while_it_waits_alone_in_line_lets_the_next_one_in() -> None:
    async with serving(config(16)) as served:
        async with served.cache.lease(text(12)):  # another user of the cache
            big, small = served.ask(text(10, seed=1), 1), served.ask(text(2, seed=2), 1)
            await until(lambda: served.cache.statistics().waiting == 1)
            big.abort()
            assert await small.done() == continuation(text(2, seed=2), 1)
        assert big.finish is Finish.ABORTED


async def test_the_loop_is_never_blocked_by_the_model() -> None:
    async with serving(config(64)) as served:
        request = served.ask(text(3), 2)
        async with held_up(served):
            for _ in range(100):
                await asyncio.sleep(0)
            assert request.output == []
        await request.done()
        assert served.model.threads.isdisjoint({threading.get_ident()})
        assert len(served.model.threads) == 1


async def test_a_model_that_raises_ends_its_requests_and_nothing_else() -> None:
    async with serving(config(64)) as served:
        served.model.fail = RuntimeError("no more memory on this card")
        request = served.ask(text(8), 2)
        with pytest.raises(RuntimeError, match="this card"):
            await request.done()
        assert request.finish is Finish.FAILED
        served.model.fail = None
        assert sum(hits(await served.answer(text(8), 2))) == 0


async def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    async with serving(config(64), max_running=1) as served:
        running, waiting = served.ask(text(3), 200 - 12), served.ask(text(3, seed=1), 3)
        await until(lambda: len(running.output) > 2)
        await served.scheduler.aclose()
        assert running.finish is waiting.finish is Finish.ABORTED
        with pytest.raises(CacheClosed):
            served.ask(text(3), 1)
        await served.scheduler.aclose()


async def test_a_close_that_is_cancelled_goes_on_and_ends_the_models_thread() -> None:
    before = set(threading.enumerate())
    async with serving(config(64)) as served:
        request = served.ask(text(3), 200)
        async with held_up(served):
            closing = asyncio.create_task(served.scheduler.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            (thread,) = [one for one in set(threading.enumerate()) - before if one.name.startswith("model")]
        await until(lambda: not thread.is_alive())
        assert request.finish is Finish.ABORTED


async def test_a_cache_that_is_closed_below_ends_the_requests_with_its_error() -> None:
    async with AsyncCache(config(64)) as cache:
        scheduler = Scheduler(cache, PatternModel(cache), SchedulerConfig(step_tokens=64, max_running=2))
        await scheduler.__aenter__()
        request = scheduler.submit(Request(text(3), Limits(200)))
        await until(lambda: len(request.output) > 1)
        await cache.aclose()
        with pytest.raises(CacheClosed):
            await request.done()
        with pytest.raises(CacheClosed):
            await scheduler.__aexit__(None, None, None)


@pytest.mark.parametrize("more", KINDS)
async def test_steps_by_hand_and_a_cancelled_step_loses_nothing(more: Any) -> None:
    async with AsyncCache(config(64, **more)) as cache:
        model = PatternModel(cache, 8)
        scheduler = Scheduler(cache, model, SchedulerConfig(step_tokens=16, max_running=2))
        assert not await scheduler.step()
        request = scheduler.submit(Request(text(10), Limits(6)))
        while request.finish is None:
            model.entered.clear()
            model.gate = threading.Event()
            step = asyncio.create_task(scheduler.step())
            await until(model.entered.is_set)
            step.cancel()
            await asyncio.sleep(0)
            assert not step.done()
            assert cache.statistics().leases == 1
            model.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await step
        assert request.output == continuation(text(10), 6)
        assert model.computed == 40 + 5
        await scheduler.aclose()
        assert cache.statistics().leases == 0


async def test_a_step_that_is_cancelled_in_the_caches_line_gives_up_its_place() -> None:
    async with AsyncCache(config(8)) as cache:
        scheduler = Scheduler(cache, PatternModel(cache, 8), SchedulerConfig())
        async with cache.lease(text(7), new_tokens=PAGE):
            request = scheduler.submit(Request(text(3, seed=1), Limits(2)))
            step = asyncio.create_task(scheduler.step())
            await until(lambda: cache.statistics().waiting == 1)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert cache.statistics().waiting == 0
        assert cache.statistics().leases == 0
        while request.finish is None:
            await scheduler.step()
        assert request.output == continuation(text(3, seed=1), 2)
        await scheduler.aclose()


async def test_a_loop_that_is_cancelled_gives_everything_back() -> None:
    async with serving(config(64)) as served:
        running, waiting = served.ask(text(3), 200), served.ask(text(3, seed=1), 200)
        async with held_up(served):
            loop = served.scheduler._loop
            assert loop is not None
            loop.cancel()
            await asyncio.sleep(0.002)
            assert not loop.done()
        await asyncio.wait([loop])
        assert running.finish is waiting.finish is Finish.ABORTED
        assert served.cache.statistics().leases == 0
        with pytest.raises(CacheClosed):
            served.ask(text(1), 1)


# The abilities of a lease that the scheduler needs: a chunk at a time, states on demand, waiting for backups and
# nothing else.


@asynccontextmanager
async def holding(*put: list[int], device: int = 32, storage: Any = None, **more: Any) -> AsyncIterator[AsyncCache]:
    """A cache that has these tokens, and whose books are right at the end."""
    async with AsyncCache(config(device, **more), storage=storage) as cache:
        for tokens in put:
            async with cache.lease(tokens) as lease:
                await lease.loaded()
                await lease.commit(tokens)
            await cache.flush()
        yield cache
        check(cache.core)


async def test_a_chunk_is_counted_from_where_the_cache_ends() -> None:
    async with holding(text(5), swa=32, window=8) as cache:
        async with cache.lease(text(20), new_tokens=8, chunk=6, swa_chunk=13) as lease:
            assert lease.cached == 5 * PAGE
            assert len(lease.pages) == 5 + 2
            before = cache.statistics().device
            assert len(await lease.extend(8)) == 5 + 4
            after = cache.statistics().device
            assert before["full"].free - after["full"].free == 2
            assert before["swa"].free == after["swa"].free  # four pages were there already
            assert (lease.page_table("swa")[5:] >= 0).all()
            await lease.commit(text(9))


async def test_a_chunk_is_cut_to_what_is_asked_for_in_all() -> None:
    async with holding(swa=32) as cache:
        async with cache.lease(text(3), new_tokens=2, chunk=100, swa_chunk=200) as lease:
            assert len(lease.pages) == 4
            assert cache.statistics().device["swa"].free == 32 - 4


async def test_prompt_and_output_must_fit_whatever_the_chunk() -> None:
    async with holding(device=8) as cache:
        with pytest.raises(CacheFull):
            async with cache.lease(text(8), new_tokens=1, chunk=4):
                pass
        with pytest.raises(ConfigError):
            await cache.lease(text(1), chunk=0).__aenter__()


async def test_a_window_that_begins_inside_a_node_pins_no_more_than_itself() -> None:
    """One node of six pages, a window of three: matched in its middle, two pages of it must be free to go."""
    tokens = text(6)
    async with holding(tokens, swa=6, window=2 * PAGE) as cache:
        async with cache.lease([*tokens[: 5 * PAGE], 1, 2], chunk=4 * PAGE, new_tokens=3 * PAGE, wait=False) as lease:
            assert lease.cached == 5 * PAGE
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 3 + [True] * 6


async def test_all_that_is_cached_or_nothing() -> None:
    async with holding(text(8), device=12, host=64) as cache:
        await push_out(cache)
        async with cache.lease(text(6, seed=1)):
            with pytest.raises(CacheFull):
                await cache.lease(text(8, extra=1), chunk=1, wait=False, shorter=False).__aenter__()
            async with cache.lease(text(8, extra=1), chunk=1, wait=False) as lease:
                assert lease.cached == 0
        async with cache.lease(text(8, extra=1), chunk=1, wait=False, shorter=False) as lease:
            assert lease.cached == 8 * PAGE


async def test_states_on_demand() -> None:
    async with holding(mamba=3) as cache:
        async with cache.lease(text(2), states=1) as lease:
            assert len(lease.states) == 1
            await lease.extend(0, states=2)
            assert len(np.unique(lease.states)) == 3
            with pytest.raises(CacheFull):
                await lease.extend(0, states=1)
        assert cache.statistics().device["mamba"].free == 3
    async with holding() as cache, cache.lease(text(2)) as lease:
        with pytest.raises(ConfigError):
            await lease.extend(0, states=1)


async def test_growing_never_waits_for_another_lease() -> None:
    async with (holding(device=12, host=64) as cache, cache.lease(text(1), new_tokens=PAGE) as growing,
                cache.lease(text(10, seed=1)), asyncio.timeout(5)):  # fmt: skip
        with pytest.raises(CacheFull):
            await growing.extend(PAGE, wait=True)


async def test_growing_never_waits_for_storage_that_cannot_help() -> None:
    pages = MemoryBackend()
    async with holding(text(8, seed=3), device=12, host=64, storage=pages):
        pass
    store = SlowBackend(pages, 0.0, bandwidth=1.0)
    async with AsyncCache(config(12, 64), storage=store) as cache:
        handle = cache.prefetch(text(8, seed=3))
        async with cache.lease(text(1), new_tokens=11 * PAGE, wait=False) as growing:
            await turns()
            assert cache.statistics().core.operations["prefetch"] == 1
            async with asyncio.timeout(5):
                with pytest.raises(CacheFull):
                    await growing.extend(PAGE, wait=True)
        handle.cancel()
        await cache.aclose(timeout=0.01)
    await store.aclose()


async def test_growing_gives_up_what_a_pin_covers_before_the_window() -> None:
    """Matched at the end of a node of four, with a window of two: two pages are pinned until somebody needs them."""
    async with holding(text(6), swa=6, window=2 * PAGE) as cache:
        async with cache.lease([*text(4), 1, 2], chunk=2 * PAGE, new_tokens=6 * PAGE) as lease:
            assert (lease.page_table("swa") >= 0).tolist() == [True] * 6
            await lease.extend(2 * PAGE)
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 2 + [True] * 6
            with pytest.raises(CacheFull):
                await lease.extend(PAGE)


async def test_growing_gives_up_what_decoding_has_left_behind() -> None:
    async with holding(swa=6, window=2 * PAGE) as cache:
        async with cache.lease(text(4), new_tokens=6 * PAGE, chunk=6 * PAGE, swa_chunk=6 * PAGE) as lease:
            await lease.commit(text(4))
            lease.advance(6 * PAGE)
            await lease.extend(3 * PAGE)
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 3 + [True] * 6


# Where a request's recurrent state is kept, so that the next request finds it.


@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
async def test_the_same_prompt_again_computes_no_more_than_its_last_page(extra: int) -> None:
    prompt = text(6, extra=extra)
    async with serving(config(64, mamba=16), step_tokens=64) as served:
        for _ in range(2):
            request = served.ask(prompt, 3)
            assert [token async for token in request] == continuation(prompt, 3)
        assert hits(request).device == (len(prompt) - 1) // PAGE * PAGE
        assert hits(await served.answer(prompt + text(2), 2)).device == len(prompt) // PAGE * PAGE, "whole pages"
