"""Requests that come together and begin alike compute what they share once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asynccache_hf import BatchRequest, ContinuousBatching
from asynccache_hf.ahead import UncomputedPrompts
from asynccache_shim import Finish

from asynccache import Hits
from asynccache.errors import CacheClosed
from tests.engine.engine_kit import model_of, prompt
from tests.engine.test_engine_batching import all_wanted, made, sound, wanted

pytestmark = pytest.mark.slow(0.5)

SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 2048, "host_tokens": 2048, "step_tokens": 40}
NEW = 6
SHARED = prompt(100, seed=11)
TWINS = [[*SHARED, *prompt(3 + i, seed=20 + i)] for i in range(6)]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model computes."""
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, args, given: calls.append(given["input_ids"].shape[1]),
                                           with_kwargs=True)  # fmt: skip
    try:
        yield calls
    finally:
        hook.remove()


@contextmanager
def held_back(model: Any, after: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The model computes so many steps, sets the first event, and goes on when the second is set, or the block left."""
    there, go, steps = threading.Event(), threading.Event(), [0]

    def wait(module: Any, args: Any) -> None:
        steps[0] += 1
        if steps[0] > after:
            there.set()
            go.wait(20)

    hook = model.register_forward_pre_hook(wait)
    try:
        yield there, go
    finally:
        go.set()
        hook.remove()


def has_lease(request: BatchRequest) -> Hits | None:
    """Its hits, as soon as it has any."""
    end = time.monotonic() + 20
    while request.hits is None and time.monotonic() < end:
        time.sleep(0.005)
    return request.hits


@pytest.fixture
def llama() -> Iterator[ContinuousBatching]:
    with ContinuousBatching(model_of("llama"), **SIZES, name="llama") as opened:
        yield opened
        sound(opened)
        assert not opened._prompts._alike


@pytest.mark.parametrize(("family", "step"), [("llama", 40), ("llama", 1000), ("mistral", 40), ("gpt_oss", 40)])
def test_what_requests_share_is_computed_once_however_many_come(family: str, step: int) -> None:
    """Whether they would fit one step or not; the windows of mistral and gpt_oss are shorter than what is shared."""
    sizes = {**SIZES, "step_tokens": step, "name": f"{family}-ahead"}
    with ContinuousBatching(model_of(family), **sizes) as batching, counted(batching._model) as calls:
        assert made(batching, TWINS) == all_wanted(family, TWINS)
        assert batching.counts.device == 5 * 96
        alone = sum(len(each) + NEW - 1 for each in TWINS)
        assert sum(calls) == alone - 5 * 96
        sound(batching)


def test_equal_prompts_compute_a_page_and_a_bit_each_but_the_first(llama: ContinuousBatching) -> None:
    with counted(llama._model) as calls:
        assert made(llama, [SHARED] * 8) == [wanted("llama", tuple(SHARED))] * 8
    assert sum(calls) == 100 + 7 * 4 + 8 * (NEW - 1)


def test_each_waits_for_the_one_that_it_shares_most_with(llama: ContinuousBatching) -> None:
    """A tree of prompts: every part of it is computed once."""
    one, other = [*SHARED, *prompt(40, seed=1)], [*SHARED, *prompt(48, seed=2)]
    asked = [one, other, [*one, *prompt(9, seed=3)], [*other, *prompt(9, seed=4)], prompt(20, seed=5)]
    with counted(llama._model) as calls:
        assert made(llama, asked) == all_wanted("llama", asked)
    hits = 96 + 136 + 144  # of whole pages
    assert llama.counts.device == hits
    assert sum(calls) == sum(map(len, asked)) + len(asked) * (NEW - 1) - hits


def test_nobody_waits_for_more_than_what_is_shared(llama: ContinuousBatching) -> None:
    """One that begins as a long prompt has its lease while that is still being computed."""
    long = [*SHARED, *prompt(300, seed=1)]
    with held_back(llama._model, 3) as (there, go):
        first, second = (llama.add_request(each, max_new_tokens=1, eos_token_id=-1) for each in (long, TWINS[0]))
        assert there.wait(20)  # 120 of 400 tokens are computed, and no more before `go`
        assert has_lease(second) == (96, 0, 0)
        go.set()
    assert [first.result(20), second.result(20)] == all_wanted("llama", [long, TWINS[0]], 1)


def test_namespaces_do_not_wait_for_each_other(llama: ContinuousBatching) -> None:
    with held_back(llama._model, 1) as (there, go):
        first = llama.add_request(TWINS[0], max_new_tokens=NEW, eos_token_id=-1)
        assert there.wait(20)
        other = llama.add_request(TWINS[1], max_new_tokens=NEW, eos_token_id=-1, extra_key="other")
        assert has_lease(other) == (0, 0, 0)
        go.set()
    assert [first.result(20), other.result(20)] == all_wanted("llama", TWINS[:2])


# who waits does not wait for ever


def test_when_the_one_ahead_is_aborted_the_next_computes(llama: ContinuousBatching) -> None:
    with held_back(llama._model, 1) as (there, go):
        first = llama.add_request(TWINS[0], max_new_tokens=NEW, eos_token_id=-1)
        others = [llama.add_request(each, max_new_tokens=NEW, eos_token_id=-1) for each in TWINS[1:]]
        assert there.wait(20)
        first.abort()
        others[2].abort()
        others[2].wait(20)  # one that waits ends at once, while no step is made
        go.set()
    left = [i for i in range(5) if i != 2]
    assert [others[i].result(20) for i in left] == all_wanted("llama", [TWINS[i + 1] for i in left])
    assert (first.finish, others[2].finish) == (Finish.ABORTED, Finish.ABORTED)
    first.wait(20)


def test_when_the_one_ahead_fails_the_next_computes(llama: ContinuousBatching) -> None:
    failed: list[int] = []

    def fail(module: Any, args: Any) -> None:
        failed.append(1)
        if len(failed) == 2:
            raise RuntimeError("enough")

    hook = llama._model.register_forward_pre_hook(fail)
    try:
        done = llama.generate_batch(TWINS, max_new_tokens=NEW, eos_token_id=-1)
    finally:
        hook.remove()
    assert [str(each.error) for each in done] == ["enough"] + ["None"] * 5
    assert [each.output for each in done[1:]] == all_wanted("llama", TWINS[1:])


def test_one_ahead_that_never_fits_holds_up_nobody() -> None:
    asked = [[*SHARED, *prompt(300, seed=1)], *TWINS[:2]]
    with ContinuousBatching(model_of("llama"), **{**SIZES, "device_tokens": 256}, name="llama") as batching:
        done = batching.generate_batch(asked, max_new_tokens=NEW, eos_token_id=-1)
        assert done[0].finish is Finish.FAILED
        assert [each.output for each in done[1:]] == all_wanted("llama", asked[1:])
        sound(batching)


def test_closed_it_ends_who_waits_for_another() -> None:
    batching = ContinuousBatching(model_of("llama"), **SIZES, name="llama")
    with held_back(batching._model, 1) as (there, go):
        requests = [batching.add_request(each, max_new_tokens=NEW, eos_token_id=-1) for each in TWINS]
        assert there.wait(20)
        threading.Timer(0.2, go.set).start()
        batching.close()
    for request in requests:
        with pytest.raises(CacheClosed):
            request.result(1)
    assert not batching._prompts._alike


# the rule alone


async def turn_of(
    prompts: UncomputedPrompts, tokens: list[int], key: str | None = None
) -> tuple[Any, asyncio.Task[None]]:
    entered = prompts.enter(tokens, key)
    task = asyncio.create_task(entered.turn())
    await asyncio.sleep(0)
    return entered, task


async def settled(*tasks: asyncio.Task[None]) -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


@pytest.mark.asyncio
async def test_a_prompt_waits_for_whole_pages_of_those_before_it_only() -> None:
    prompts = UncomputedPrompts(4)
    first, begins = await turn_of(prompts, list(range(12)))
    _, same = await turn_of(prompts, list(range(12)))           # 8: its last token is computed in any case
    _, half = await turn_of(prompts, [0, 1, 2, 3, 4, 5, 9])     # 4
    _, none = await turn_of(prompts, [0, 1, 2, 9])
    _, apart = await turn_of(prompts, list(range(12)), "key")
    assert await settled(begins, same, half, none, apart) == [True, False, False, True, True]
    first.reach(4)
    assert await settled(same, half) == [False, True]
    first.reach(8)
    assert await settled(same) == [True]


@pytest.mark.asyncio
async def test_a_prompt_that_leaves_is_waited_for_no_more() -> None:
    prompts = UncomputedPrompts(4)
    first, _ = await turn_of(prompts, list(range(12)))
    second, waits = await turn_of(prompts, list(range(12)))
    third, last = await turn_of(prompts, list(range(12)))
    prompts.leave(first)
    assert await settled(waits, last) == [True, False]
    waits.cancel()
    prompts.leave(second)
    assert await settled(last) == [True]
    prompts.leave(third)
    prompts.leave(third)
    assert not prompts._alike


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(20))
async def test_everybody_gets_a_turn_and_no_page_is_computed_by_two(seed: int) -> None:
    """Random trees of prompts; each computes page by page when it has its turn, some stop on the way."""
    chance, prompts, pages, twice = random.Random(seed), UncomputedPrompts(2), set[tuple[int, ...]](), []

    async def serve(tokens: list[int], stops: bool) -> None:
        own = prompts.enter(tokens, None)
        try:
            await own.turn()
            own.reach(max((n for n in range(0, len(tokens), 2) if n == 0 or tuple(tokens[:n]) in pages), default=0))
            for end in range(own.reached + 2, len(tokens) + 1, 2):
                await asyncio.sleep(0)
                if stops and chance.random() < 0.2:
                    return
                if tuple(tokens[:end]) in pages and end < len(tokens):
                    twice.append(tokens[:end])
                pages.add(tuple(tokens[:end]))
                own.reach(end)
        finally:
            prompts.leave(own)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(30):
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
            task = group.create_task(serve(tokens, chance.random() < 0.3))
            if chance.random() < 0.1:
                asyncio.get_running_loop().call_later(chance.random() / 1000, task.cancel)
    assert not twice
    assert not prompts._alike


def test_who_waits_for_whom_is_found_in_time_that_grows_with_the_prompts_and_not_with_their_pairs() -> None:
    def cost(number: int) -> float:
        prompts = UncomputedPrompts(16)
        texts = [[*range(2000), *range(5000 + i, 5100 + i)] for i in range(number)]
        before = time.process_time()
        for each in texts:
            found = prompts.ahead_of(prompts.enter(each, None))
            assert found is None or found[1] == 2000
        return time.process_time() - before

    cost(50)
    assert cost(1600) < 8 * cost(400)
