"""Requests that come together and begin alike compute what they share once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asynccache_hf import ContinuousBatching
from asynccache_shim import Finish

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


@pytest.fixture
def llama() -> Iterator[ContinuousBatching]:
    with ContinuousBatching(model_of("llama"), **SIZES, name="llama") as opened:
        yield opened
        sound(opened)


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


def test_namespaces_do_not_wait_for_each_other() -> None:
    sizes = {**SIZES, "step_tokens": 1000, "name": "llama"}
    with ContinuousBatching(model_of("llama"), **sizes) as batching, counted(batching._model) as calls:
        with held_back(batching._model, 0) as (there, go):
            before = batching.add_request(prompt(5, seed=9), max_new_tokens=1)
            assert there.wait(20)
            twins = [batching.add_request(each, max_new_tokens=NEW, eos_token_id=-1, namespace=key)
                     for each, key in zip(TWINS, ("a", "b", "a"), strict=False)]  # fmt: skip
            go.set()
        assert [twin.result(20) for twin in twins] == all_wanted("llama", TWINS[:3])
        before.wait(20)
        assert calls[:3] == [5, len(TWINS[0]) + len(TWINS[1]), 2 + len(TWINS[2]) - 96]


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
