"""``ContinuousBatching`` makes the tokens that ``model.generate`` makes, whatever is cached, waits or fails beside."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asynccache_hf import ContinuousBatching, Counts, PrefixCache, attending, continuous
from asynccache_hf.cached_model import LoopThread
from asynccache_shim import Finish
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import offloading_manager

from asynccache import AsyncCache, CacheFull, Lease, LoadFailed
from asynccache.core.audit import check
from asynccache.errors import CacheClosed, ConfigError
from tests.engine import batching_child, engine_kit
from tests.engine.engine_kit import model_of, open_caches, prompt, settled
from tests.engine.engine_models import make

pytestmark = pytest.mark.slow(0.5)

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral", "cohere2", "gpt2")
"""Eager and sdpa; full attention, one window, windows beside full attention; caps, sinks, experts, shared heads."""
NEW = 6
SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 512, "host_tokens": 1024, "step_tokens": 40}
NAMED: dict[str, Any] = {**SIZES, "name": "llama"}


def texts() -> list[list[int]]:
    """Some share what is longer than a window; some are shorter than a page."""
    shared = prompt(30, seed=1)
    return [prompt(45), prompt(46), prompt(5, seed=2), *([*shared, *prompt(3 + 9 * i, seed=3 + i)] for i in range(3))]


@cache
def beside(family: str) -> Any:
    """The same model once more: one with eager attention is not for ``generate`` while it is served."""
    return make(family)


@cache
def wanted(family: str, tokens: tuple[int, ...], new: int = NEW) -> list[int]:
    """What ``generate`` makes."""
    model = beside(family)
    out = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                         max_new_tokens=new, do_sample=False, eos_token_id=-1)  # fmt: skip
    return list(out[0, len(tokens) :].tolist())


def all_wanted(family: str, asked: list[list[int]], new: int = NEW) -> list[list[int]]:
    return [wanted(family, tuple(tokens), new) for tokens in asked]


def made(batching: ContinuousBatching, asked: list[list[int]], new: int = NEW) -> list[list[int]]:
    done = batching.generate_batch(asked, max_new_tokens=new, eos_token_id=-1)
    assert [(each.error, each.finish) for each in done] == [(None, Finish.LENGTH)] * len(asked)
    return [each.output for each in done]


def sound(batching: ContinuousBatching) -> None:
    """Nothing is held, and the books are right."""
    batching._loop.call(settled(batching._cache))
    check(batching._cache.core, idle=True)
    assert not batching._pages.held
    assert not batching._open


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("asynccache-batching")}


def empty_device(batching: ContinuousBatching | PrefixCache) -> None:
    async def taken() -> None:
        await settled(batching._cache)
        slots = batching._cache.statistics().device
        count = min(shelf.capacity for shelf in slots.values()) * batching._layout.page_size
        async with batching._cache.lease([0], new_tokens=count - 1, extra_key="filler"):
            pass

    batching._loop.call(taken())


@contextmanager
def stopped(model: Any) -> Iterator[threading.Event]:
    """The model computes three steps, and then none until the event is set, or the block left."""
    go, steps = threading.Event(), [0]

    def wait(module: Any, args: Any) -> None:
        steps[0] += 1
        if steps[0] > 3:
            go.wait(20)

    hook = model.register_forward_pre_hook(wait)
    try:
        yield go
    finally:
        go.set()
        hook.remove()


@pytest.fixture
def llama() -> Iterator[ContinuousBatching]:
    """Whatever a test does with it: nothing is held afterwards, and its threads have ended."""
    before = threads()
    with ContinuousBatching(model_of("llama"), **NAMED) as opened:
        yield opened
        sound(opened)
    assert threads() <= before


@pytest.mark.parametrize(("family", "size"), [(family, 16 if i % 3 == 1 else 8) for i, family in enumerate(FAMILIES)])
def test_the_same_tokens_from_every_tier(family: str, size: int, tmp_path: Path) -> None:
    """Cold, from the device, the host, and by another cache from a store."""
    asked, url = texts(), f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    right, whole = all_wanted(family, asked), sum((len(each) - 1) // size * size for each in asked)
    sizes = {**SIZES, "page_size": size, "name": f"{family}-{size}", "storage": url}
    with ContinuousBatching(model_of(family), **sizes) as batching:
        assert made(batching, asked) == right
        cold = batching.counts
        assert (cold.prompt, cold.host, cold.storage) == (sum(map(len, asked)), 0, 0)
        assert made(batching, asked) == right
        assert batching.counts.device - cold.device == whole
        empty_device(batching)
        before = batching.counts
        assert made(batching, asked) == right
        assert batching.counts.host > before.host
        sound(batching)
    with ContinuousBatching(model_of(family), **sizes) as batching:
        assert made(batching, asked[-1:]) == right[-1:]
        assert batching.counts == Counts(len(asked[-1]), 0, 0, (len(asked[-1]) - 1) // size * size)
        sound(batching)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_transformers_without_us_makes_the_same(family: str) -> None:
    """Its own continuous batching, which shares no prefix where there are windows: here they are shared."""
    model, asked = make(family), texts()
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    blocks = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=64)
    alone = model.generate_batch(asked, generation_config=greedy, continuous_batching_config=blocks, warmup=False)
    with ContinuousBatching(model, **SIZES, name=family) as batching:
        for _ in range(2):
            assert made(batching, asked) == [each.generated_tokens for each in alone.values()]
        assert batching.counts.device >= sum((len(each) - 1) // 8 * 8 for each in asked)


def test_a_new_process_finds_what_this_one_stored(tmp_path: Path) -> None:
    families = ("llama", "gpt_oss")
    for family in families:
        url = f"file:{tmp_path / family}?capacity=64MiB&segment=8MiB"
        with ContinuousBatching(model_of(family), page_size=8, name=family, storage=url) as batching:
            made(batching, [prompt(45)])
    said = engine_kit.run_child(tmp_path, *families, child=Path(batching_child.__file__)).splitlines()
    assert said == [f"{family} (0, 0, 40) {wanted(family, tuple(prompt(45)))}" for family in families]


def test_a_second_turn_hits_the_answer_of_the_first(llama: ContinuousBatching) -> None:
    (first,) = made(llama, [prompt(45)], 9)
    turn = [*prompt(45), *first, *prompt(4, seed=7)]
    assert made(llama, [turn]) == all_wanted("llama", [turn])
    assert llama.counts.device == (45 + 8) // 8 * 8


# room


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_under_pressure_requests_wait_and_none_fails(family: str) -> None:
    """There is room for two at a time, and a host for less than all."""
    asked = [[*prompt(20 + i, seed=i % 3), *prompt(3, seed=20 + i)] for i in range(14)]
    sizes = {**SIZES, "device_tokens": 88, "host_tokens": 160, "name": family}
    with ContinuousBatching(model_of(family), **sizes) as batching:
        for _ in range(2):
            assert made(batching, asked) == all_wanted(family, asked)
        sound(batching)


def test_what_never_fits_fails_alone() -> None:
    asked = [prompt(20), prompt(100), prompt(20, seed=1)]
    with ContinuousBatching(model_of("llama"), **{**NAMED, "device_tokens": 64}) as batching:
        done = batching.generate_batch(asked, max_new_tokens=NEW, eos_token_id=-1)
        assert isinstance(done[1].error, CacheFull)
        assert done[1].finish is Finish.FAILED
        assert [done[0].output, done[2].output] == all_wanted("llama", [asked[0], asked[2]])
        with pytest.raises(CacheFull):
            batching.add_request(prompt(100), max_new_tokens=2).result(20)
        sound(batching)


def test_a_load_that_failed_is_computed(llama: ContinuousBatching, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, failed = Lease.loaded, [True]

    async def loaded(self: Lease) -> None:
        if failed:
            failed.clear()
            raise LoadFailed(0)
        await usual(self)

    monkeypatch.setattr(Lease, "loaded", loaded)
    assert made(llama, texts()) == all_wanted("llama", texts())
    assert not failed


def test_a_store_that_is_broken_is_computed_around(tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    for broken in (False, True):
        if broken:
            for file in tmp_path.rglob("*"):
                if file.is_file() and file.stat().st_size > 4096:
                    file.write_bytes(b"\xa5" * file.stat().st_size)
        with ContinuousBatching(model_of("llama"), **NAMED, storage=url) as batching:
            assert made(batching, texts()) == all_wanted("llama", texts())
            assert batching.counts.storage == 0
            sound(batching)


# readers and callers


def test_tokens_come_as_they_are_made(llama: ContinuousBatching) -> None:
    right = wanted("llama", tuple(prompt(45)), 20)
    with stopped(llama._model):
        request = llama.add_request(prompt(45), max_new_tokens=20, eos_token_id=-1)
        reader = iter(request)
        assert next(reader) == right[0]
        assert request.finish is None                      # the first was there before the last
    assert list(reader) == right[1:]
    assert list(request) == request.result() == right      # any number of readers
    assert request.hits == (0, 0, 0)


def test_event_loops_read_them_too(llama: ContinuousBatching) -> None:
    async def read() -> None:
        requests = [llama.add_request(text, max_new_tokens=NEW, eos_token_id=-1) for text in texts()]
        streams = await asyncio.gather(*(collected(each) for each in requests))
        assert streams == all_wanted("llama", texts())
        assert await requests[0].done() == streams[0]
        long = llama.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await long.done()
        assert long.finish is None                         # its reader was cancelled, and no more
        long.abort()
        await long.done()

    async def collected(request: Any) -> list[int]:
        return [token async for token in request]

    asyncio.run(read())


def test_an_end_token_ends_an_answer(llama: ContinuousBatching) -> None:
    right = wanted("llama", tuple(prompt(45)), 20)
    request = llama.add_request(prompt(45), max_new_tokens=20, eos_token_id=[right[4], 511])
    assert request.result(20) == right[: right.index(right[4]) + 1]
    assert request.finish is Finish.STOP


def test_threads_share_one_cache(llama: ContinuousBatching) -> None:
    found: dict[int, Any] = {}
    callers = [threading.Thread(target=lambda i=i: found.update({i: made(llama, texts()[i:])})) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == {i: all_wanted("llama", texts()[i:]) for i in range(4)}


def test_namespaces_share_nothing(llama: ContinuousBatching) -> None:
    for key in (None, "a", b"b", "a"):
        done = llama.generate_batch([prompt(45)], max_new_tokens=2, extra_key=key)
    assert done[0].hits == (40, 0, 0)
    assert llama.counts == Counts(4 * 45, 40, 0, 0)


def test_sampling_is_of_a_request() -> None:
    settings = transformers.GenerationConfig(do_sample=True, temperature=1.5, top_k=50, max_new_tokens=NEW,
                                             eos_token_id=-1)  # fmt: skip
    with ContinuousBatching(model_of("llama"), **NAMED, generation_config=settings, seed=3) as batching:
        free, sure = batching.add_request(prompt(45)), batching.add_request(prompt(45), top_k=1)
        assert sure.result(20) == wanted("llama", tuple(prompt(45)))
        assert free.result(20) != sure.result()
        with pytest.raises(ConfigError, match="min_p"):
            batching.add_request(prompt(5), min_p=0.5)


# ends


def test_a_request_may_be_aborted_at_any_moment(llama: ContinuousBatching) -> None:
    for moment in range(12):
        request = llama.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
        time.sleep(moment / 4000)
        request.abort()
        request.wait(20)
        assert request.finish is Finish.ABORTED
        assert request.error is None


def test_a_cancellation_that_overtakes_its_request_waits_for_it(llama: ContinuousBatching) -> None:
    """transformers takes requests and cancellations from two queues, one after the other."""
    made(llama, [prompt(9)])                               # its thread has begun
    processor = llama._manager.batch_processor
    assert processor is not None
    planner = processor.scheduler
    with llama._manager.pause():
        planner.set_request_cancellation("request-9")
        llama._pages.held["request-9"] = continuous.RequestPages(0, {}, 0, lambda computed: None, lambda: None)
        assert planner.clear_cancelled_requests() == []
        planner.add_waiting_request(continuous.waiting("request-9", [1]))
        assert [state.request_id for state in planner.clear_cancelled_requests()] == ["request-9"]
        assert not planner._requests_to_cancel
        assert not llama._pages.held


def test_one_is_aborted_and_the_others_are_not(llama: ContinuousBatching) -> None:
    with stopped(llama._model):
        running = llama.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
        next(iter(running))
        waiting = llama.add_request(prompt(45, seed=4), max_new_tokens=400, eos_token_id=-1)  # no room beside the other
        waiting.abort()
        waiting.wait(20)                                   # in the line, while no step is made
        running.abort()
        other = llama.add_request(prompt(46), max_new_tokens=NEW, eos_token_id=-1)
    assert other.result(20) == wanted("llama", tuple(prompt(46)))
    assert running.result(20)[:9] == wanted("llama", tuple(prompt(45)), 9)[: len(running.output)]
    assert (running.finish, waiting.finish, waiting.output) == (Finish.ABORTED, Finish.ABORTED, [])
    assert 0 < len(running.output) < 400
    running.abort()
    assert running.finish is Finish.ABORTED


def test_an_error_of_the_model_fails_a_step_and_not_the_next(llama: ContinuousBatching) -> None:
    def fail(module: Any, args: Any, given: Any) -> None:
        if given["input_ids"].shape[1] == 23:
            raise RuntimeError("enough")

    hook = llama._model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        for _ in range(40):  # of pages for a dozen
            with pytest.raises(RuntimeError, match="enough"):
                llama.add_request(prompt(23), max_new_tokens=9).result(20)
    finally:
        hook.remove()
    assert made(llama, [prompt(23)]) == all_wanted("llama", [prompt(23)])


def test_if_the_thread_that_generates_dies_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        if self.scheduler.has_pending_requests():
            raise MemoryError("no more")
        return usual(self)

    usual = continuous.StepProcessor.prepare_next_batch
    with ContinuousBatching(model_of("llama"), **NAMED) as batching:
        with stopped(batching._model):
            request = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
            next(iter(request))
            monkeypatch.setattr(continuous.StepProcessor, "prepare_next_batch", broken)
        with pytest.raises(MemoryError, match="no more"):
            request.result(20)
        with pytest.raises(RuntimeError, match="thread"):
            batching.add_request(prompt(20)).result(20)
        sound(batching)


def test_closed_it_takes_no_requests_and_leaves_nothing() -> None:
    model, before = make("gpt_oss"), threads()
    batching = ContinuousBatching(model, **SIZES, name="gpt_oss")
    with stopped(model) as go:
        running = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
        next(iter(running))
        waiting = batching.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
        assert model.config._attn_implementation == "paged|eager"
        threading.Timer(0.2, go.set).start()
        batching.close()
    batching.close()
    assert threads() <= before
    assert model.config._attn_implementation == "eager"
    for request in (running, waiting):
        with pytest.raises(CacheClosed, match="closed before the request was over"):
            request.result(1)
    for call in (lambda: batching.add_request([1]), lambda: batching.generate_batch([[1]]), batching.statistics):
        with pytest.raises(CacheClosed):
            call()


def test_a_request_that_is_aborted_while_the_cache_closes_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batching = ContinuousBatching(model_of("llama"), **SIZES, name="llama")
    request = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
    next(iter(request))
    soon = LoopThread.soon

    def late(loop: LoopThread, *args: Any) -> None:
        monkeypatch.undo()
        batching.close()
        soon(loop, *args)

    monkeypatch.setattr(LoopThread, "soon", late)
    request.abort()
    with pytest.raises(CacheClosed, match="closed before the request was over"):
        request.result(1)


def test_what_was_opened_in_vain_leaves_nothing() -> None:
    model, before = make("gpt_oss"), threads()
    with pytest.raises(ConfigError):
        ContinuousBatching(model, **SIZES, storage="nothing:here")
    assert threads() <= before
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("lacking", ["memory", "thread"])
def test_an_error_after_the_cache_has_opened_closes_it(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise MemoryError("no more")

    def no_thread(thread: threading.Thread) -> None:
        if thread.name.endswith("-generates"):
            raise MemoryError("no more")
        start(thread)

    model, before, caches, start = make("gpt_oss"), threads(), open_caches(), threading.Thread.start
    with monkeypatch.context() as patched:
        if lacking == "memory":
            patched.setattr("asynccache_hf.batching.PageCache", no_memory)
        else:
            patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(MemoryError, match="no more"):
            ContinuousBatching(model, **SIZES, name="gpt_oss")
    assert threads() <= before
    assert open_caches() == caches
    assert model.config._attn_implementation == "eager"
    with ContinuousBatching(model, **SIZES, name="gpt_oss") as batching:
        assert made(batching, [prompt(23)]) == all_wanted("gpt_oss", [prompt(23)])


def test_a_setting_is_refused_before_the_model_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of several requests in a step runs the model several times over its longest window."""
    monkeypatch.setattr("asynccache_hf.batching.tried_together", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(ConfigError, match="device_tokens=-1"):
        ContinuousBatching(model_of("llama"), **{**NAMED, "device_tokens": -1})


def test_an_idle_one_uses_no_processor(llama: ContinuousBatching) -> None:
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.25


# refusals


@pytest.mark.parametrize(("given", "said"), [
    ({"tokens": []}, "tokens: .* needs at least one"),
    ({"tokens": [1.5]}, "tokens: .*no row of integers"),
    ({"tokens": [512]}, "tokens: token 512 is none of the model's 512"),
    ({"tokens": [1] * 500, "max_new_tokens": 20}, "tokens: 500 tokens and 20 new ones are more than the model's 512"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"eos_token_id": "x"}, "eos_token_id='x'"),
    ({"extra_key": 3}, "extra_key=3"),
    ({"temperature": 0.5}, "temperature"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(llama: ContinuousBatching, given: dict[str, Any], said: str) -> None:
    given = {"tokens": [1, 2, 3], **given}
    with pytest.raises(ConfigError, match=said):
        llama.add_request(given.pop("tokens"), **given)


@pytest.mark.parametrize(("option", "value"), [("temperature", 0.0), ("temperature", float("nan")), ("top_k", 0),
                                               ("top_k", 1_000_000), ("top_p", 1.5)])  # fmt: skip
def test_a_value_of_sampling_that_would_fail_a_step_is_refused(option: str, value: float) -> None:
    settings = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=50, top_p=0.9)
    with (ContinuousBatching(model_of("llama"), **NAMED, generation_config=settings) as batching,
          pytest.raises(ConfigError, match=option)):  # fmt: skip
        batching.add_request(prompt(5), max_new_tokens=2, **{option: value})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_what_continuous_batching_would_leave_out_is_refused_and_the_model_is_as_before() -> None:
    model = model_of("gemma2")
    before = model.config._attn_implementation
    for given, said in (({"repetition_penalty": 1.2}, "RepetitionPenalty"),
                        ({"do_sample": True, "temperature": 0.0}, "generation_config")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            ContinuousBatching(model, **SIZES, name="x", generation_config=transformers.GenerationConfig(**given))
        assert model.config._attn_implementation == before


def test_a_reader_whose_loop_was_closed_ends_nothing(llama: ContinuousBatching) -> None:
    with stopped(llama._model) as go:
        request = llama.add_request(prompt(45), max_new_tokens=24, eos_token_id=-1)
        loop = asyncio.new_event_loop()
        tokens = request.__aiter__()

        async def first() -> int:
            return await anext(tokens)

        loop.run_until_complete(first())
        loop.close()
        go.set()
        assert len(request.result(20)) == 24
    assert llama.closed is None


def test_a_question_beside_a_close_is_refused_and_everybody_who_closes_returns() -> None:
    batching, told = ContinuousBatching(model_of("llama"), **NAMED), []

    async def endless(cache: AsyncCache) -> None:
        await asyncio.sleep(3600)

    def asks() -> None:
        try:
            batching.ask(endless)
        except CacheClosed as error:
            told.append(error)

    asking = [threading.Thread(target=chunk, daemon=True) for chunk in (asks, batching.close, batching.close)]
    for thread in asking:
        thread.start()
        time.sleep(0.05)
    for thread in asking:
        thread.join(20)
    assert not [thread for thread in asking if thread.is_alive()]
    assert len(told) == 1
    assert batching.closed == "the cache is closed"


def test_one_prompt_that_is_none_is_named_and_none_is_begun(llama: ContinuousBatching) -> None:
    with pytest.raises(ConfigError, match=r"prompts\[1\]: token 600"):
        llama.generate_batch([[1], [600]])
    assert llama.counts == Counts()


@pytest.mark.parametrize(("family", "said"), [
    ("lfm2", "Lfm2ForCausalLM: layer 0 keeps recurrent states, and .* PrefixCache serves such a model"),
    ("gemma3n", "layer 2 keeps nothing of its own"),
    ("llama4", "no layers of type chunked_attention"),
    ("bloom", "a step of several requests raises (ValueError|AttributeError)"),
])  # fmt: skip
def test_a_model_that_it_cannot_page_is_refused_with_what_can(family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ContinuousBatching(model_of(family), page_size=8, name=family)


def test_a_model_that_computes_something_else_in_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: its caps are lost, as in transformers' own continuous batching."""
    monkeypatch.setattr(attending, "options_of", lambda given, module: {})
    model = make("gemma2", attn_logit_softcapping=1.0)
    with pytest.raises(ConfigError, match="in steps of several requests its logits differ by"):
        ContinuousBatching(model, page_size=8, name="gemma2")


@pytest.mark.parametrize(("name", "value"), [("num_beams", 3), ("num_return_sequences", 2), ("max_time", 2.0)])
def test_a_generation_configuration_for_something_else_is_refused(name: str, value: float) -> None:
    settings = transformers.GenerationConfig(**{name: value, "do_sample": True})
    with pytest.raises(ConfigError, match=rf"generation_config.{name}={value}"):
        ContinuousBatching(model_of("llama"), generation_config=settings)


def test_nobody_is_told_to_install_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers uses it for offloading only, and nothing is offloaded here. Its other warnings are let through."""
    said = list[str]()
    monkeypatch.setattr(offloading_manager, "is_psutil_available", lambda: False)
    monkeypatch.setattr(offloading_manager.logger, "level", logging.WARNING)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    offloading_manager.logger.addHandler(handler)
    try:
        with ContinuousBatching(model_of("llama"), page_size=4, device_tokens=256, host_tokens=256) as batching:
            made(batching, [prompt(9)])
        assert said == []
        offloading_manager.logger.warning("psutil is not available")
        assert said == ["psutil is not available"]
    finally:
        offloading_manager.logger.removeHandler(handler)


def test_who_does_not_attend_to_our_pages_is_served_as_before() -> None:
    """The function that is registered serves every model of the process, also one that names no arguments."""

    class Layer:
        is_causal, num_key_value_groups, training = True, 1, False

    attending.replace_attention()
    registered = transformers.AttentionInterface()["sdpa"]
    usual = registered.__closure__[0].cell_contents
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for others in ((), (0.0, 0.5)):
        assert torch.equal(registered(Layer(), query, key, value, None, *others)[0],
                           usual(Layer(), query, key, value, None, *others)[0])  # fmt: skip
