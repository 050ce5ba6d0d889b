"""Slow loads, loads that fail, and stores that several processes use at once: they delay nobody else, and change no
token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend
from asynccache_hf import ContinuousBatching, Counts, PrefixCache, cached_model
from asynccache_shim import Finish

from asynccache import AsyncCache, Lease, LoadFailed, PrefetchPolicy
from asynccache.core.audit import check
from asynccache.errors import CacheClosed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Fates, Faults, Hitch
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.engine.engine_kit import Member, at_once, counted, empty_device, held_back, model_of, prompt, settled
from tests.engine.test_engine_batching import NEW, all_wanted, made, serving, texts, wanted
from tests.engine.test_engine_prefix import GIVEN, LENGTH, rows_of
from tests.stores.object_server import MotoServer
from tests.waiting import until

AHEAD: dict[str, Any] = {"device_tokens": 2048, "host_tokens": 2048}
SHARED = prompt(100, seed=11)
TWINS = [[*SHARED, *prompt(3 + i, seed=20 + i)] for i in range(6)]


class Held(WrappedBackend):
    """A store that takes as long to read as somebody says: until ``go`` is set. ``asked``: it was asked to."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.asked, self.go = threading.Event(), threading.Event()
        self.go.set()

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.asked.set()
        await until(self.go.is_set)
        return await self.inner.get(keys, records)


@pytest.fixture
def faulty(on: Callable[..., None]) -> None:
    """Copies of the caches that are opened can fail."""
    on(device=CpuDevice(faults=Faults()))
    on(device=CpuDevice(faults=Faults()))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Caches that ``PrefixCache`` and ``ContinuousBatching`` open from here on have this device, or this store."""
    return lambda **given: monkeypatch.setattr(cached_model, "AsyncCache", partial(AsyncCache, **given))


# loads that take long


@pytest.fixture
def store(on: Callable[..., None]) -> Held:
    """In which a prompt is stored."""
    held = Held()
    on(storage=held)
    with serving() as first:
        made(first, [prompt(45)])
    return held


def test_a_load_that_takes_long_stops_no_step_of_the_others(store: Held) -> None:
    """Nor does it stop another load's request, or one that comes later."""
    others = [prompt(20 + i, seed=40 + i) for i in range(3)]
    with serving(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as batching:
        running = batching.add_request(others[0], max_new_tokens=60, eos_token_id=-1)
        store.asked.clear()
        store.go.clear()
        try:
            slow = batching.add_request(prompt(45), max_new_tokens=NEW, eos_token_id=-1)
            assert store.asked.wait(20)
            assert made(batching, others[1:], 30) == all_wanted("llama", others[1:], 30)
            assert running.result(20) == wanted("llama", tuple(others[0]), 60)
            assert (slow.finish, slow.hits, slow.output) == (None, None, [])
        finally:
            store.go.set()
        assert slow.result(20) == wanted("llama", tuple(prompt(45)))
        assert slow.hits == (0, 0, 40)


def test_a_request_may_be_aborted_while_it_is_loaded(store: Held) -> None:
    with serving(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as batching:
        store.go.clear()
        slow = batching.add_request(prompt(45), max_new_tokens=NEW, eos_token_id=-1)
        slow.abort()
        slow.wait(20)                                  # while the store still does not answer
        assert (slow.error, slow.output) == (None, [])
        store.go.set()
        ops = batching._cache.core.world.ledger.ops
        batching.ask(lambda cache: until(lambda: not ops))


# loads that fail


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> Iterator[list[int]]:
    """Of the copies of a device that was made with ``Faults()``, those fail of which ``fails`` says so. What the leases
    had found that this has struck."""
    struck: list[int] = []
    usual = Lease.loaded

    async def loaded(self: Lease) -> None:
        try:
            await usual(self)
        except LoadFailed:
            struck.append(self.cached)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "loaded", loaded)
        patch.setattr(Fates, "draw", lambda self, steps: {0: Hitch(0.0, 0.0, True)} if fails() else {})
        yield struck


def the_next(copies: int) -> Callable[[], bool]:
    numbers = count(1)
    return lambda: next(numbers) <= copies


@pytest.mark.usefixtures("faulty")
def test_a_load_that_fails_is_tried_again_by_all_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(**AHEAD) as batching, counted(batching._model) as calls:
        assert made(batching, TWINS) == all_wanted("llama", TWINS)
        batching.ask(empty_device)
        calls.clear()
        with failing(monkeypatch, the_next(3)) as struck:
            assert made(batching, TWINS) == all_wanted("llama", TWINS)
        assert len(struck) > 6                         # all of them, and more than once
        assert sum(calls) < 96                         # and then it was there, on the host still


@pytest.mark.usefixtures("faulty")
def test_a_load_that_always_fails_is_the_error_of_who_wants_it_and_of_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [prompt(40, seed=7), prompt(50, seed=8)]
    with serving(**AHEAD) as batching:
        made(batching, TWINS)
        batching.ask(empty_device)
        with failing(monkeypatch, lambda: True):
            done = batching.generate_batch([*TWINS, *others], max_new_tokens=NEW, eos_token_id=-1)
        assert [type(each.error) for each in done] == [LoadFailed] * len(TWINS) + [type(None)] * 2
        assert [each.output for each in done[-2:]] == all_wanted("llama", others)
        assert made(batching, TWINS) == all_wanted("llama", TWINS)


@pytest.mark.usefixtures("faulty")
def test_a_row_that_can_never_be_loaded_is_generated_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of("llama"), rows_of(3)
    with PrefixCache(model, name="llama", page_size=8, device_tokens=512, host_tokens=1024) as cached:
        cached.generate(text, **GIVEN)
        cached.ask(empty_device)
        with failing(monkeypatch, lambda: True) as struck:
            assert cached.generate(text, **GIVEN).tolist() == model.generate(text, **GIVEN).tolist()
        assert struck
        assert cached.counts == Counts(6 * LENGTH, 0, 0, 0)
        cached._loop.call(settled(cached._cache))
        check(cached._cache.core, idle=True)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whatever_copies_fail_the_tokens_stay(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that hit what cannot be loaded now come again; the others are not disturbed."""
    chance = Random(3)
    with serving(family) as batching:
        made(batching, texts())
        with failing(monkeypatch, lambda: chance.random() < 0.4) as struck:
            for _ in range(6):
                batching.ask(empty_device)
                assert made(batching, texts()) == all_wanted(family, texts())
        assert struck


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_rows_whose_load_has_failed_are_what_generate_makes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of(family), rows_of(3)
    right = [model.generate(text[i : i + 1], **GIVEN)[0].tolist() for i in range(3)]
    with PrefixCache(model, name=family, page_size=8, device_tokens=512, host_tokens=1024) as cached:
        assert cached.generate(text, **GIVEN).tolist() == right
        cached.ask(empty_device)
        with failing(monkeypatch, the_next(2)) as struck:
            assert cached.generate(text, **GIVEN).tolist() == right
        assert struck
        cached._loop.call(settled(cached._cache))


# what is shared is computed once


@pytest.fixture
def llama() -> Iterator[ContinuousBatching]:
    with serving(**AHEAD) as opened:
        yield opened


@pytest.mark.parametrize(("family", "step"), [("llama", 40), ("llama", 1000), ("mistral", 40), ("gpt_oss", 40)])
def test_what_requests_share_is_computed_once_however_many_come(family: str, step: int) -> None:
    """Whether they would fit one step or not; the windows of mistral and gpt_oss are shorter than what is shared."""
    with serving(family, **AHEAD, step_tokens=step) as batching, counted(batching._model) as calls:
        assert made(batching, TWINS) == all_wanted(family, TWINS)
        assert batching.counts.device == 5 * 96
        alone = sum(len(each) + NEW - 1 for each in TWINS)
        assert sum(calls) == alone - 5 * 96


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
    with serving(**AHEAD, step_tokens=1000) as batching, counted(batching._model) as calls:
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
    with serving(**{**AHEAD, "device_tokens": 256}) as batching:
        done = batching.generate_batch(asked, max_new_tokens=NEW, eos_token_id=-1)
        assert done[0].finish is Finish.FAILED
        assert [each.output for each in done[1:]] == all_wanted("llama", asked[1:])


def test_closed_it_ends_who_waits_for_another() -> None:
    batching = ContinuousBatching(model_of("llama"), page_size=8, step_tokens=40, name="llama")
    with held_back(batching._model, 1) as (there, go):
        requests = [batching.add_request(each, max_new_tokens=NEW, eos_token_id=-1) for each in TWINS]
        assert there.wait(20)
        threading.Timer(0.2, go.set).start()
        batching.close()
    for request in requests:
        with pytest.raises(CacheClosed):
            request.result(1)


# several at a time


def test_calls_from_several_threads_share_what_they_compute(llama: ContinuousBatching) -> None:
    """One begins while another is computed: it finds that one's pages."""
    with counted(llama._model) as calls:
        found = at_once(*(partial(made, llama, TWINS[i : i + 2]) for i in (0, 2, 4)))
    assert [output for outputs in found for output in outputs] == all_wanted("llama", TWINS)
    assert sum(calls) == sum(len(each) + NEW - 1 for each in TWINS) - 5 * 96


def test_processes_that_serve_at_the_same_time_share_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute some of the same, and of their own; then each is asked what the other has computed."""
    pytest.importorskip("obstore")
    common = [prompt(45, seed=i) for i in range(2)]
    own = [[prompt(45 + i, seed=10 * part + i) for i in range(3)] for part in (1, 2)]
    with MotoServer() as server:
        for name, value in server.client_environment.items():
            monkeypatch.setenv(name, value)
        processes = [Member("share", "llama", f"{server.url}&refresh=0.02") for _ in range(2)]
        try:
            said = turn(processes, [[*common, *each] for each in own])
            for asked, answers in zip(own, said, strict=True):
                assert [tokens for tokens, _ in answers] == all_wanted("llama", [*common, *asked])
            said = turn(processes, own[::-1])
            for asked, answers in zip(own[::-1], said, strict=True):
                assert answers == [[tokens, [0, 0, 40]] for tokens in all_wanted("llama", asked)]
        finally:
            for process in processes:
                process.end()


def turn(processes: Sequence[Member], asked: Sequence[list[list[int]]]) -> list[Any]:
    """What each says to its prompts, asked all at once."""
    for process, prompts in zip(processes, asked, strict=True):
        process.tell(prompts)
    return [process.hear("answer", 120) for process in processes]
