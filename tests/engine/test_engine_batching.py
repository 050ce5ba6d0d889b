"""``ContinuousBatching`` makes the tokens that ``model.generate`` makes, whatever is cached, waits or fails beside."""

from __future__ import annotations

import asyncio
import re
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
from asynccache_hf import ContinuousBatching, Counts, attention
from asynccache_shim import Finish, Scheduler

from asynccache import AsyncCache, CacheFull, Lease, LoadFailed
from asynccache.core.audit import check
from asynccache.errors import CacheClosed, ConfigError
from tests.engine.engine_kit import Member, empty_device, held_back, model_of, open_caches, prompt, settled
from tests.engine.engine_models import make
from tests.waiting import until

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral", "cohere2", "gpt2",
    "jamba", "bamba", "olmo_hybrid", "lfm2", "mamba", "deepseek_v3", "deepseek_v4", "gemma3n", "llama4", "bloom",
)  # fmt: skip
"""Eager and sdpa; full attention, one window, windows beside full attention; caps, sinks, experts, shared heads. Then
those that are computed request by request: recurrent states and convolutions, latent attention, compressed entries,
shared layers, chunks."""
NEW = 6
SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 512, "host_tokens": 1024, "step_tokens": 40}


def texts() -> list[list[int]]:
    """Some share what is longer than a window; some are shorter than a page."""
    shared = prompt(30, seed=1)
    return [prompt(45), prompt(46), prompt(5, seed=2), *([*shared, *prompt(3 + 9 * i, seed=3 + i)] for i in range(3))]


@cache
def beside(family: str) -> Any:
    """The same model once more, so that hooks of the served one do not count it."""
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
    batching.ask(lambda cache: until(lambda: not batching._scheduler._board.requests()))
    batching._loop.call(settled(batching._cache))
    check(batching._cache.core, idle=True)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("asynccache-batching")}


@contextmanager
def serving(family: str = "llama", **sizes: Any) -> Iterator[ContinuousBatching]:
    """Whatever is done with it: nothing is held afterwards, and its threads have ended."""
    before = threads()
    with ContinuousBatching(model_of(family), **{**SIZES, "name": family, **sizes}) as opened:
        yield opened
        sound(opened)
    assert threads() <= before


@pytest.fixture
def llama() -> Iterator[ContinuousBatching]:
    with serving() as opened:
        yield opened


@pytest.mark.parametrize(("family", "size"), [(family, 16 if i % 3 == 1 else 8) for i, family in enumerate(FAMILIES)])
def test_the_same_tokens_from_every_tier(family: str, size: int, tmp_path: Path) -> None:
    """Cold, from the device, the host, and by another cache from a store."""
    asked, url = texts(), f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    right, whole = all_wanted(family, asked), sum((len(each) - 1) // size * size for each in asked)
    sizes = {"page_size": size, "name": f"{family}-{size}", "storage": url}
    with serving(family, **sizes) as batching:
        assert made(batching, asked) == right
        cold = batching.counts
        assert (cold.prompt, cold.host, cold.storage) == (sum(map(len, asked)), 0, 0)
        assert made(batching, asked) == right
        assert batching.counts.device - cold.device == whole
        batching.ask(empty_device)
        before = batching.counts
        assert made(batching, asked) == right
        assert batching.counts.host > before.host
    with serving(family, **sizes) as batching:
        assert made(batching, asked[-1:]) == right[-1:]
        assert batching.counts == Counts(len(asked[-1]), 0, 0, (len(asked[-1]) - 1) // size * size)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_new_process_finds_what_this_one_stored(family: str, tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    with serving(family, storage=url) as batching:
        made(batching, [prompt(45)])
    child = Member("share", family, url)
    child.tell([prompt(45)])
    assert child.hear("answer", 120) == [[wanted(family, tuple(prompt(45))), [0, 0, 40]]]
    assert child.end() == 0


def test_a_second_turn_hits_the_answer_of_the_first(llama: ContinuousBatching) -> None:
    (first,) = made(llama, [prompt(45)], 9)
    turn = [*prompt(45), *first, *prompt(4, seed=7)]
    assert made(llama, [turn]) == all_wanted("llama", [turn])
    assert llama.counts.device == (45 + 8) // 8 * 8


# room


@pytest.mark.parametrize("family", ["llama", "gemma2", "bamba", "jamba"])
def test_under_pressure_requests_wait_and_none_fails(family: str) -> None:
    """There is room for two at a time, and a host for less than all."""
    asked = [[*prompt(20 + i, seed=i % 3), *prompt(3, seed=20 + i)] for i in range(14)]
    with serving(family, device_tokens=88, host_tokens=160) as batching:
        for _ in range(2):
            assert made(batching, asked) == all_wanted(family, asked)


def test_what_never_fits_fails_alone() -> None:
    asked = [prompt(20), prompt(100), prompt(20, seed=1)]
    with serving(device_tokens=64) as batching:
        done = batching.generate_batch(asked, max_new_tokens=NEW, eos_token_id=-1)
        assert isinstance(done[1].error, CacheFull)
        assert done[1].finish is Finish.FAILED
        assert [done[0].output, done[2].output] == all_wanted("llama", [asked[0], asked[2]])
        with pytest.raises(CacheFull):
            batching.add_request(prompt(100), max_new_tokens=2).result(20)


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
        with serving(storage=url) as batching:
            assert made(batching, texts()) == all_wanted("llama", texts())
            assert batching.counts.storage == 0


# readers and callers


def test_tokens_come_as_they_are_made(llama: ContinuousBatching) -> None:
    right = wanted("llama", tuple(prompt(45)), 20)
    with held_back(llama._model):
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


def test_namespaces_share_nothing(llama: ContinuousBatching) -> None:
    for key in (None, "a", b"b", "a"):
        done = llama.generate_batch([prompt(45)], max_new_tokens=2, namespace=key)
    assert done[0].hits == (40, 0, 0)
    assert llama.counts == Counts(4 * 45, 40, 0, 0)


def test_sampling_is_of_a_request() -> None:
    settings = transformers.GenerationConfig(do_sample=True, temperature=1.5, top_k=50, max_new_tokens=NEW,
                                             eos_token_id=-1)  # fmt: skip
    with serving(generation_config=settings, seed=3) as batching:
        free, sure = batching.add_request(prompt(45)), batching.add_request(prompt(45), top_k=1)
        assert sure.result(20) == wanted("llama", tuple(prompt(45)))
        assert free.result(20) != sure.result()
        one, two, other = (batching.add_request(prompt(45), seed=seed).result(20) for seed in (7, 7, 8))
        assert one == two != other
        with pytest.raises(ConfigError, match="min_p"):
            batching.add_request(prompt(5), min_p=0.5)


def test_the_seed_of_all_draws_the_same_for_the_same_requests_in_the_same_order() -> None:
    settings = transformers.GenerationConfig(do_sample=True, max_new_tokens=20, eos_token_id=-1)
    drawn = []
    for seed in (3, 3, 4):
        with serving(generation_config=settings, seed=seed) as batching:
            drawn.append([each.result() for each in batching.generate_batch([prompt(45), prompt(45)])])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


# ends


def test_a_request_may_be_aborted_at_any_moment(llama: ContinuousBatching) -> None:
    for moment in range(12):
        request = llama.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
        time.sleep(moment / 4000)
        request.abort()
        request.wait(20)
        assert request.finish is Finish.ABORTED
        assert request.error is None


def test_one_is_aborted_and_the_others_are_not(llama: ContinuousBatching) -> None:
    with held_back(llama._model):
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


def test_if_the_scheduler_dies_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any) -> bool:
        raise MemoryError("no more")

    with serving() as batching:
        with held_back(batching._model):
            request = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
            next(iter(request))
            monkeypatch.setattr(Scheduler, "step", broken)
        with pytest.raises(MemoryError, match="no more"):
            request.result(20)
        with pytest.raises(CacheClosed, match="the scheduler is closed"):
            batching.add_request(prompt(20)).result(20)
        assert batching.closed == "the scheduler has ended: MemoryError('no more')"


def test_closed_it_takes_no_requests_and_leaves_nothing() -> None:
    model, before = make("gpt_oss"), threads()
    batching = ContinuousBatching(model, **SIZES, name="gpt_oss")
    with held_back(model) as (_, go):
        running = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
        next(iter(running))
        waiting = batching.add_request(prompt(45), max_new_tokens=400, eos_token_id=-1)
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
    batching = ContinuousBatching(model_of("llama"), name="llama")
    request = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
    next(iter(request))
    soon = request._soon

    def late(*args: Any) -> None:
        batching.close()
        soon(*args)

    monkeypatch.setattr(request, "_soon", late)
    request.abort()
    with pytest.raises(CacheClosed, match="closed before the request was over"):
        request.result(1)


@pytest.mark.parametrize("lacking", ["PagedModel", "Scheduler", None])
def test_what_was_opened_in_vain_leaves_nothing(lacking: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the cache has opened or not."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError("no more")

    model, before, caches = make("gpt_oss"), threads(), open_caches()
    with monkeypatch.context() as patched:
        if lacking:
            patched.setattr(f"asynccache_hf.cached_model.{lacking}", no_memory)
        with pytest.raises(MemoryError if lacking else ConfigError):
            ContinuousBatching(model, **SIZES, name="gpt_oss", storage=None if lacking else "nothing:here")
    assert threads() <= before
    assert open_caches() == caches
    assert model.config._attn_implementation == "eager"
    with ContinuousBatching(model, **SIZES, name="gpt_oss") as batching:
        assert made(batching, [prompt(23)]) == all_wanted("gpt_oss", [prompt(23)])


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
    ({"namespace": 3}, "namespace=3"),
    ({"temperature": 0.5}, "temperature"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(llama: ContinuousBatching, given: dict[str, Any], said: str) -> None:
    given = {"tokens": [1, 2, 3], **given}
    with pytest.raises(ConfigError, match=said):
        llama.add_request(given.pop("tokens"), **given)


@pytest.mark.parametrize(("option", "value"), [("temperature", 0.0), ("temperature", float("nan")), ("top_k", 0),
                                               ("top_k", 1.5), ("top_p", 1.5), ("seed", "x")])  # fmt: skip
def test_a_value_of_sampling_that_is_none_is_refused(option: str, value: float) -> None:
    settings = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=50, top_p=0.9)
    with serving(generation_config=settings) as batching, pytest.raises(ConfigError, match=option):
        batching.add_request(prompt(5), max_new_tokens=2, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [
    {"repetition_penalty": 1.2}, {"do_sample": True, "temperature": 0.0}, {"do_sample": True, "min_p": 0.1},
    {"do_sample": True, "typical_p": 0.5}, {"min_new_tokens": 2}, {"bad_words_ids": [[1]]}, {"stop_strings": ["x"]},
    {"prompt_lookup_num_tokens": 3}, {"penalty_alpha": 0.6}, {"guidance_scale": 2.0}, {"forced_eos_token_id": 3},
    {"do_sample": True, "num_beams": 3}, {"do_sample": True, "num_return_sequences": 2},
    *({"max_time": value} for value in (-1, float("nan"), "soon")),
])  # fmt: skip
def test_a_setting_that_generate_follows_and_this_does_not_is_refused_by_its_name(given: dict[str, Any]) -> None:
    settings = transformers.GenerationConfig()
    for name, value in given.items():
        setattr(settings, name, value)
    said = f"generation_config.{name}={value!r}" if name != "max_time" else "generation_config.max_time"
    with pytest.raises(ConfigError, match=re.escape(said)):
        ContinuousBatching(model_of("llama"), name="llama", generation_config=settings)


def test_a_reader_whose_loop_was_closed_ends_nothing(llama: ContinuousBatching) -> None:
    with held_back(llama._model) as (_, go):
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
    batching, told = ContinuousBatching(model_of("llama"), name="llama"), []

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


def test_a_model_that_is_wrong_in_common_steps_is_computed_request_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: its caps are lost, as in transformers' own continuous batching."""
    monkeypatch.setattr(attention, "options_of", lambda given, module: {})
    model = make("gemma2", attn_logit_softcapping=1.0)
    with ContinuousBatching(model, **SIZES, name="gemma2") as batching:
        assert not batching._layout.packed
        for asked, output in zip(texts(), made(batching, texts()), strict=True):
            assert output == model.generate(torch.tensor([asked]), max_new_tokens=NEW)[0, len(asked) :].tolist()


def test_a_model_with_eager_attention_generates_as_before_while_it_is_served() -> None:
    model, text = make("gpt_oss"), torch.tensor([prompt(45)])
    right = model.generate(text, max_new_tokens=40).tolist()
    with ContinuousBatching(model, **SIZES, name="gpt_oss") as batching:
        assert batching._layout.packed
        request = batching.add_request(prompt(20), max_new_tokens=400, eos_token_id=-1)
        next(iter(request))
        for _ in range(3):
            assert model.generate(text, max_new_tokens=40).tolist() == right
        assert request.finish is None
        request.abort()
        assert request.result(20) == wanted("gpt_oss", tuple(prompt(20)), 400)[: len(request.output)]
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("together", [True, False])
def test_max_time_ends_a_request_after_the_token_that_came_too_late(together: bool) -> None:
    """As in ``generate``. The tokens until then are kept, and are found by the next turn."""
    asked = [prompt(45), prompt(17, seed=9)]
    for most in (0.0, 60.0):
        settings = transformers.GenerationConfig(max_new_tokens=NEW, max_time=most, do_sample=False)
        usual = [model_of("llama").generate(torch.tensor([each]), generation_config=settings, eos_token_id=-1)
                 [0, len(each) :].tolist() for each in asked]  # fmt: skip
        assert [len(each) for each in usual] == [1 if most == 0 else NEW] * 2
        with serving(generation_config=settings) as batching:
            if together:
                done = batching.generate_batch(asked, eos_token_id=-1)
            else:
                done = [batching.add_request(each, eos_token_id=-1) for each in asked]
            assert [each.result(60) for each in done] == usual
            assert [each.finish for each in done] == [Finish.LENGTH] * 2
            assert batching.ask(lambda cache: cache.match([*asked[0], 1])).device == 40


def test_time_that_is_up_while_a_request_decodes_ends_it_with_what_it_has() -> None:
    settings = transformers.GenerationConfig(max_new_tokens=400, max_time=0.4, do_sample=False)
    with serving(generation_config=settings) as batching:
        hook = batching._model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        try:
            request = batching.add_request(prompt(16), eos_token_id=-1)
            text = request.result(60)
        finally:
            hook.remove()
        assert request.finish is Finish.LENGTH
        assert 1 <= len(text) <= 9  # a step takes at least 0.05 s
        assert text == wanted("llama", tuple(prompt(16)), 12)[: len(text)]


def test_who_does_not_attend_to_our_pages_is_served_as_before() -> None:
    """The function that is registered serves every model of the process, also one that names no arguments."""

    class Layer:
        is_causal, num_key_value_groups, training = True, 1, False

    attention.replace_attention()
    registered = transformers.AttentionInterface()["sdpa"]
    usual = registered.__closure__[0].cell_contents
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for others in ((), (0.0, 0.5)):
        assert torch.equal(registered(Layer(), query, key, value, None, *others)[0],
                           usual(Layer(), query, key, value, None, *others)[0])  # fmt: skip
