"""Slow loads, loads that fail, and stores that several processes use at once: they delay nobody else, and change no
token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend
from asynccache_hf import BatchRequest, ContinuousBatching, Counts, PrefixCache, cached_model

from asynccache import AsyncCache, Lease, LoadFailed, PrefetchPolicy
from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Fates, Faults, Hitch
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests import warm
from tests.engine.engine_kit import model_of, prompt, settled
from tests.engine.test_engine_ahead import SIZES as AHEAD
from tests.engine.test_engine_ahead import TWINS, counted
from tests.engine.test_engine_batching import NAMED, NEW, all_wanted, empty_device, made, sound, texts, wanted
from tests.engine.test_engine_rows import GIVEN, LENGTH, rows_of
from tests.stores.object_server import MotoServer
from tests.waiting import until

pytestmark = pytest.mark.slow(0.5)

CHILD = Path(__file__).parent / "sharing_child.py"


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
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Caches that ``PrefixCache`` and ``ContinuousBatching`` open from here on have this device, or this store."""
    return lambda **given: monkeypatch.setattr(cached_model, "AsyncCache", partial(AsyncCache, **given))


# loads that take long


def test_a_load_that_takes_long_stops_no_step_of_the_others(on: Callable[..., None]) -> None:
    """Nor does it stop another load's request, or one that comes later."""
    store = Held()
    on(storage=store)
    with ContinuousBatching(model_of("llama"), **NAMED) as first:
        made(first, [prompt(45)])
        first._loop.call(settled(first._cache))
    others = [prompt(20 + i, seed=40 + i) for i in range(3)]
    with ContinuousBatching(model_of("llama"), **NAMED, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as batching:
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
        sound(batching)


def test_a_request_may_be_aborted_while_it_is_loaded(on: Callable[..., None]) -> None:
    store = Held()
    on(storage=store)
    with ContinuousBatching(model_of("llama"), **NAMED) as first:
        made(first, [prompt(45)])
        first._loop.call(settled(first._cache))
    with ContinuousBatching(model_of("llama"), **NAMED, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as batching:
        store.go.clear()
        slow = batching.add_request(prompt(45), max_new_tokens=NEW, eos_token_id=-1)
        slow.abort()
        slow.wait(20)                                  # while the store still does not answer
        assert (slow.error, slow.output) == (None, [])
        store.go.set()
        ops = batching._cache.core.world.ledger.ops
        batching.ask(lambda cache: until(lambda: not ops))
        sound(batching)


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


def every_one() -> bool:
    return True


def test_a_load_that_fails_is_tried_again_by_all_that_share_it(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device=CpuDevice(faults=Faults()))
    with ContinuousBatching(model_of("llama"), **AHEAD, name="llama") as batching, counted(batching._model) as calls:
        assert made(batching, TWINS) == all_wanted("llama", TWINS)
        empty_device(batching)
        calls.clear()
        with failing(monkeypatch, the_next(3)) as struck:
            assert made(batching, TWINS) == all_wanted("llama", TWINS)
        assert len(struck) > 6                         # all of them, and more than once
        assert sum(calls) < 96                         # and then it was there, on the host still
        sound(batching)


def test_a_load_that_always_fails_is_the_error_of_who_wants_it_and_of_nobody_else(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device=CpuDevice(faults=Faults()))
    others = [prompt(40, seed=7), prompt(50, seed=8)]
    with ContinuousBatching(model_of("llama"), **AHEAD, name="llama") as batching:
        made(batching, TWINS)
        empty_device(batching)
        with failing(monkeypatch, every_one):
            done = batching.generate_batch([*TWINS, *others], max_new_tokens=NEW, eos_token_id=-1)
        assert [type(each.error) for each in done] == [LoadFailed] * len(TWINS) + [type(None)] * 2
        assert [each.output for each in done[-2:]] == all_wanted("llama", others)
        assert made(batching, TWINS) == all_wanted("llama", TWINS)
        sound(batching)


def test_a_row_that_can_never_be_loaded_is_generated_without_the_cache(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device=CpuDevice(faults=Faults()))
    model, text = model_of("llama"), rows_of(3)
    with PrefixCache(model, name="llama", page_size=8, device_tokens=512, host_tokens=1024) as cached:
        cached.generate(text, **GIVEN)
        empty_device(cached)
        with failing(monkeypatch, every_one) as struck:
            assert cached.generate(text, **GIVEN).tolist() == model.generate(text, **GIVEN).tolist()
        assert struck
        assert cached.counts == Counts(6 * LENGTH, 0, 0, 0)
        cached._loop.call(settled(cached._cache))
        check(cached._cache.core, idle=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whatever_copies_fail_the_tokens_stay(
    family: str, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that hit what cannot be loaded now come again; the others are not disturbed."""
    on(device=CpuDevice(faults=Faults()))
    chance = Random(3)
    with ContinuousBatching(model_of(family), **{**NAMED, "name": family}) as batching:
        made(batching, texts())
        with failing(monkeypatch, lambda: chance.random() < 0.4) as struck:
            for _ in range(6):
                empty_device(batching)
                assert made(batching, texts()) == all_wanted(family, texts())
        assert struck
        sound(batching)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_rows_whose_load_has_failed_are_what_generate_makes(
    family: str, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device=CpuDevice(faults=Faults()))
    model, text = model_of(family), rows_of(3)
    right = [model.generate(text[i : i + 1], **GIVEN)[0].tolist() for i in range(3)]
    with PrefixCache(model, name=family, page_size=8, device_tokens=512, host_tokens=1024) as cached:
        assert cached.generate(text, **GIVEN).tolist() == right
        empty_device(cached)
        with failing(monkeypatch, the_next(2)) as struck:
            assert cached.generate(text, **GIVEN).tolist() == right
        assert struck
        cached._loop.call(settled(cached._cache))


# several at a time


def test_calls_from_several_threads_share_what_they_compute() -> None:
    """One begins while another is computed: it finds that one's pages."""
    found: list[list[BatchRequest]] = []
    with ContinuousBatching(model_of("llama"), **AHEAD, name="llama") as batching, counted(batching._model) as calls:
        callers = [threading.Thread(target=lambda i=i: found.append(
            batching.generate_batch(TWINS[i : i + 2], max_new_tokens=NEW, eos_token_id=-1))) for i in (0, 2, 4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        made_of = {tuple(each.tokens.tolist()): each.result(0) for done in found for each in done}
        assert [made_of[tuple(each)] for each in TWINS] == all_wanted("llama", TWINS)
        assert sum(calls) == sum(len(each) + NEW - 1 for each in TWINS) - 5 * 96
        sound(batching)


def test_processes_that_serve_at_the_same_time_share_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute some of the same, and of their own; then each is asked what the other has computed."""
    pytest.importorskip("obstore")
    common = [prompt(45, seed=i) for i in range(2)]
    own = [[prompt(45 + i, seed=10 * part + i) for i in range(3)] for part in (1, 2)]
    with MotoServer() as server:
        for name, value in server.client_environment.items():
            monkeypatch.setenv(name, value)
        processes = [started(f"{server.url}&refresh=0.02") for _ in range(2)]
        try:
            for process in processes:
                assert line(process) == "ready"
            said = turn(processes, [[*common, *each] for each in own])
            for asked, answers in zip(own, said, strict=True):
                assert [tokens for tokens, _ in answers] == all_wanted("llama", [*common, *asked])
            said = turn(processes, own[::-1])
            for asked, answers in zip(own[::-1], said, strict=True):
                assert [tokens for tokens, _ in answers] == all_wanted("llama", asked)
                assert [hits for _, hits in answers] == [[0, 0, 40]] * 3
        finally:
            for process in processes:
                process.communicate(timeout=60)


def started(url: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("", "backends", "scheduler_shim"))
    return warm.Popen([sys.executable, str(CHILD), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                      imports=warm.MODELS, env=os.environ | {"PYTHONPATH": paths})  # fmt: skip


def turn(processes: Sequence[subprocess.Popen[str]], asked: Sequence[list[list[int]]]) -> list[Any]:
    """What each says to its prompts, asked all at once."""
    for process, prompts in zip(processes, asked, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps(prompts) + "\n")
        process.stdin.flush()
    return [json.loads(line(process)) for process in processes]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
