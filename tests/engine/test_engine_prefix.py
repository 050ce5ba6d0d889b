"""``PrefixCache.generate`` returns what ``model.generate`` returns, and computes less of it the second time; rows of a
batch in common steps where it can."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asynccache_hf import Counts, PrefixCache, layout, prefix
from asynccache_hf.cached_model import LoopThread
from asynccache_hf.call import cache_name, parameters

from asynccache.core.audit import check
from asynccache.errors import CacheClosed, ConfigError, Unavailable
from tests.engine.engine_kit import at_once, counted, model_of, open_caches, prompt, settled
from tests.engine.engine_models import make

FAMILIES = (
    "llama", "mamba", "gemma2", "mixtral", "deepseek_v3", "qwen3_5", "granitemoehybrid", "jamba", "mamba2", "bamba",
    "gpt_oss", "lfm2", "deepseek_v4", "llama4", "minimax",
)  # fmt: skip
SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 512, "host_tokens": 1024}
LENGTH = 45
NEW = 9
GIVEN: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def alike(cached: PrefixCache, text: torch.Tensor, **given: Any) -> torch.Tensor:
    """What it generates, and it is what its model generates."""
    made: torch.Tensor = cached.generate(text, **given)
    assert made.tolist() == cached._model.generate(text, **given).tolist()
    return made


@pytest.fixture
def cached() -> Iterator[PrefixCache]:
    """Whatever a test does with it: nothing is held afterwards, and its threads have ended."""
    before = set(threading.enumerate())                # other tests of this process may have left some
    with PrefixCache(model_of("llama"), name="llama", **SIZES) as opened:
        yield opened
        opened._loop.call(settled(opened._cache))
        check(opened._cache.core, idle=True)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("asynccache")]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_and_a_second_turn_that_hits(family: str) -> None:
    with PrefixCache(model_of(family), name=family, **SIZES) as cached:
        first = alike(cached, ids(prompt(LENGTH)), **GIVEN)
        assert cached.counts == Counts(LENGTH, 0, 0, 0)
        alike(cached, torch.cat([first, ids(prompt(5, seed=1))], 1), **GIVEN)
        assert cached.counts.device >= LENGTH // 8 * 8


def test_pages_of_an_older_schema_are_not_found_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, found = ids(prompt(LENGTH)), []
    for schema in (layout.SCHEMA, layout.SCHEMA, layout.SCHEMA + 1):
        monkeypatch.setattr(layout, "SCHEMA", schema)
        with PrefixCache(model_of("llama"), name="llama", storage=f"file:{tmp_path}/store", **SIZES) as cached:
            cached.generate(text, max_new_tokens=4)
            found.append(cached.counts.storage)
    assert found == [0, LENGTH // 8 * 8, 0]


def test_rows_of_different_length_are_padded_as_transformers_does() -> None:
    model = make("llama")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 7
    rows = [[t or 1 for t in prompt(length, seed=length)] for length in (40, 23, 33)]
    text = ids(*([0] * (40 - len(row)) + row for row in rows))
    with PrefixCache(model, **SIZES) as cached:
        for options in ({}, {"attention_mask": (text != 0).long()}, {"max_length": 55}, {"num_return_sequences": 1}):
            given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, **options}
            if "max_length" in given:
                del given["max_new_tokens"]
            alike(cached, text, **given)
        assert cached.counts.device == 3 * (32 + 16 + 32)


def test_sampling_arguments_pass_through(cached: PrefixCache) -> None:
    given: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "max_new_tokens": 12}
    text = ids(prompt(LENGTH))
    for _ in range(2):
        torch.manual_seed(5)
        wanted = model_of("llama").generate(text, **given)
        torch.manual_seed(5)
        assert cached.generate(text, **given).tolist() == wanted.tolist()
    assert cached.generate(text, **given, num_return_sequences=3).shape[0] == 3
    assert cached.counts.device == 4 * 40


def test_a_stream_gets_the_same_tokens(cached: PrefixCache) -> None:
    class Words:
        """Of a tokenizer, what a streamer uses."""

        def decode(self, tokens: Any, **options: Any) -> str:
            return "".join(f"{int(token)} " for token in tokens)

    text = ids(prompt(LENGTH))
    for _ in range(2):
        streamer = transformers.TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
        thread = threading.Thread(
            target=cached.generate, args=(text,), kwargs={"streamer": streamer, "max_new_tokens": 8, "do_sample": False}
        )
        thread.start()
        said = "".join(streamer)
        thread.join()
        assert said.split() == [str(t) for t in model_of("llama").generate(text, max_new_tokens=8)[0, LENGTH:].tolist()]
    assert cached.counts.device == 40


def test_threads_share_one_cache_which_counts_every_prompt(cached: PrefixCache) -> None:
    texts = [ids([*prompt(30), *prompt(4, seed=i)]) for i in range(6)]
    wanted = [model_of("llama").generate(text, max_new_tokens=5).tolist() for text in texts]

    def repeated(text: torch.Tensor) -> list[Any]:
        return [cached.generate(text, max_new_tokens=5).tolist() for _ in range(8)]

    assert at_once(*(partial(repeated, text) for text in texts)) == [[each] * 8 for each in wanted]
    assert cached.counts.prompt == 6 * 8 * 34


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic"])
def test_what_is_too_long_for_the_cache_is_generated_without_it(family: str) -> None:
    with PrefixCache(model_of(family), **SIZES) as cached:
        for length, new in ((60, 20), (60, 60), (60, 20)):
            alike(cached, ids(prompt(length)), max_new_tokens=new)
        assert cached.counts.device == 56


def test_what_has_no_room_is_generated_without_it() -> None:
    with PrefixCache(model_of("llama"), page_size=8, device_tokens=64, host_tokens=64) as cached:
        alike(cached, ids(prompt(70)), max_new_tokens=5)
        assert cached.counts == Counts(70, 0, 0, 0)


@pytest.mark.parametrize(("options", "said"), [
    ({"num_beams": 3}, "num_beams=3: beams take over each other"),
    ({"past_key_values": transformers.DynamicCache()}, "past_key_values=.*: the cache is what this object brings"),
    ({"cache": transformers.DynamicCache()}, "cache=.*: the cache is what this object brings"),
    ({"cache_params": transformers.DynamicCache()}, "cache_params=.*: the cache is what this object brings"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3: speculation"),
    ({"use_cache": False}, "use_cache=False"),
    ({"use_mtp": True}, "use_mtp=True: speculation"),
    ({"assistant_early_exit": 1}, "assistant_early_exit=1: speculation"),
    ({"token_healing": True}, "token_healing=True: it takes the last tokens of the prompt back"),
    ({"dola_layers": "low"}, "generation mode 'dola_generation': it uses the cache in ways"),
    ({"penalty_alpha": 0.5, "top_k": 4}, "generation mode 'contrastive_search'"),
    ({"inputs_embeds": torch.ones(1, 4, 32)}, "inputs_embeds: the model would compute from more than tokens"),
    ({"token_type_ids": [0, 0, 0, 0]}, "token_type_ids: the model would compute from more than tokens"),
    ({"token_type_ids": torch.ones(1, 4)}, "token_type_ids: the model would compute from more than tokens"),
    ({"pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values: the model would compute from more than tokens"),
    ({"position_ids": torch.arange(4)[None]}, "position_ids=.*: they follow from the tokens"),
    ({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, "attention_mask: rows must be padded on the left"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask: its shape is \(1, 3\)"),
    ({"namespace": 3}, "namespace"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(cached: PrefixCache, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cached.generate(ids([1, 2, 3, 4]), **options)
    assert cached.counts == Counts()


@pytest.mark.parametrize("given", [None, [[1, 2]], torch.ones(3, dtype=torch.long), torch.ones(1, 2), torch.ones(1, 0)])
def test_a_prompt_is_a_tensor_of_tokens(cached: PrefixCache, given: Any) -> None:
    with pytest.raises(ConfigError, match="input_ids="):
        cached.generate(given)


def test_several_rows_make_one_tensor(cached: PrefixCache) -> None:
    text = ids(prompt(9), prompt(9, seed=1))
    with pytest.raises(ConfigError, match="return_dict_in_generate"):
        cached.generate(text, return_dict_in_generate=True)
    out = cached.generate(text[:1], return_dict_in_generate=True, output_scores=True, max_new_tokens=3)
    assert out.sequences.shape == (1, 12)
    assert len(out.scores) == 3


@pytest.mark.parametrize(("own", "given"), [
    ({"do_sample": True}, {"max_new_tokens": 6}), ({"max_new_tokens": 60}, {"repetition_penalty": 1.0}),
    ({"max_length": 60}, {"do_sample": False}), ({"eos_token_id": 7}, {"max_new_tokens": 6}),
    ({"cache_implementation": "static"}, {"max_new_tokens": 6}),
    ({}, {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 6}),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_configuration_of_the_call_leaves_open_the_models_own_says(
    own: dict[str, Any], given: dict[str, Any], count: int
) -> None:
    model, whole = make("llama"), ids(*(prompt(LENGTH, seed=i) for i in range(count)))
    model.generation_config.update(pad_token_id=0, **own)
    config = transformers.GenerationConfig(**given)
    mask, before = torch.ones_like(whole), (config.to_dict(), model.generation_config.to_dict())
    with PrefixCache(model, name="llama", **SIZES) as cached:
        made = []
        for generate in (cached.generate, cached.generate, model.generate):
            torch.manual_seed(1)
            made.append(generate(whole, attention_mask=mask, generation_config=config))
        assert made[0].shape == made[2].shape
        assert made[0].tolist() == made[1].tolist()
        if count == 1 and not given.get("num_return_sequences"):
            assert made[0].tolist() == made[2].tolist()
    assert (config.to_dict(), model.generation_config.to_dict()) == before


def test_the_models_own_configuration_may_ask_for_what_several_rows_have_not() -> None:
    model = make("llama")
    model.generation_config.return_dict_in_generate = True
    with PrefixCache(model, name="llama", **SIZES) as cached:
        with pytest.raises(ConfigError, match="return_dict_in_generate=True: several rows have no single such answer"):
            cached.generate(ids(*[prompt(9)] * 2), generation_config=transformers.GenerationConfig(max_new_tokens=3))
        assert cached.counts == Counts()


@pytest.mark.parametrize("given", [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}])
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_how_a_configuration_would_keep_a_cache_changes_nothing(given: dict[str, Any], family: str) -> None:
    model, text = make(family), ids(prompt(LENGTH))
    wanted = model.generate(text, max_new_tokens=9, do_sample=False).tolist()
    model.generation_config.update(**given)
    with PrefixCache(model, name=family, **SIZES) as cached:
        for _ in range(2):
            assert cached.generate(text, max_new_tokens=9, do_sample=False).tolist() == wanted
        assert cached.counts.device == 40


@pytest.mark.parametrize("given", [
    {"max_length": 60, "min_length": 48}, {"min_length": 50, "max_new_tokens": 15}, {"min_new_tokens": 4}, {},
    {"max_length": 47}, {"return_dict_in_generate": True, "max_new_tokens": 4},
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_lengths_count_the_padding_as_transformers_does(given: dict[str, Any], rows: int) -> None:
    """Here every token but the pad token ends an answer, as soon as it may."""
    if rows > 1 and given.get("return_dict_in_generate"):
        return
    model = make("llama")
    model.generation_config.update(pad_token_id=0, eos_token_id=list(range(1, 512)))
    text = ids(*([0] * (40 - length) + [t or 1 for t in prompt(length, seed=length)] for length in (29, 33)[:rows]))
    given = {"do_sample": False, "attention_mask": (text != 0).long(), **given}
    wanted = model.generate(text, **given)
    with PrefixCache(model, name="llama", **SIZES) as cached:
        for _ in range(2):
            made = cached.generate(text, **given)
            assert type(made) is type(wanted)
            if given.get("return_dict_in_generate"):
                assert made.sequences.tolist() == wanted.sequences.tolist()
            else:
                assert made.tolist() == wanted.tolist()


def test_a_configuration_of_the_call_alone_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with PrefixCache(model_of("llama"), name="llama", **SIZES) as cached, caplog.at_level("WARNING"):
        transformers.logging.enable_propagation()
        try:
            config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
            cached.generate(ids(prompt(9)), generation_config=config)
        finally:
            transformers.logging.disable_propagation()
    assert "together with generation-related" not in caplog.text


def test_threads_may_close_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one of them is about to close the cache when the other one has closed it."""
    cached = PrefixCache(model_of("llama"), name="llama", **SIZES)
    arrived, ended, failed = threading.Event(), threading.Event(), []
    usual = LoopThread.call

    def call(loop: LoopThread, work: Any) -> Any:
        if threading.current_thread() is late:
            arrived.set()
            ended.wait(10)
        else:
            arrived.wait(0.5)
        return usual(loop, work)

    def close() -> None:
        try:
            cached.close()
        except CacheClosed as error:
            failed.append(error)

    late = threading.Thread(target=close)
    monkeypatch.setattr(LoopThread, "call", call)
    closing = threading.Thread(target=close)
    closing.start()
    late.start()
    closing.join(20)
    ended.set()
    late.join(20)
    assert cached.closed == "the cache is closed"
    assert not failed
    with pytest.raises(CacheClosed):
        cached.generate(ids([1, 2, 3]))


@pytest.mark.parametrize("layers", [
    ["linear_attention", "full_attention"], ["linear_attention", "linear_attention", "full_attention"],
])  # fmt: skip
def test_minimax_with_its_linear_layers_first(layers: list[str]) -> None:
    """transformers asks the first layer for the length, and here that has none."""
    model, text = make("minimax", layer_types=layers, num_hidden_layers=len(layers)), ids(prompt(LENGTH))
    with PrefixCache(model, name="minimax", **SIZES) as cached:
        for _ in range(2):
            made = alike(cached, text, **GIVEN)
            assert made.tolist() == model.generate(text, max_new_tokens=9, do_sample=False, use_cache=False).tolist()
            text = torch.cat([made, ids(prompt(5, seed=1))], 1)
        assert cached.counts.device == 40


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_token_types_that_are_all_zero_are_taken(family: str) -> None:
    """Tokenizers make them. GPT-2 adds an embedding for type 0, so what it caches is not what it caches without."""
    model, text = model_of(family), ids(prompt(LENGTH), prompt(LENGTH, seed=1))
    takes, zeros = "token_type_ids" in parameters(model), torch.zeros_like(text)
    given: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(text)}
    wanted = model.generate(text, **given, **({"token_type_ids": zeros} if takes else {})).tolist()
    plain = model.generate(text, **given).tolist()
    assert takes == (family == "gpt2") == (plain != wanted)
    with PrefixCache(model, name=family, **SIZES) as cached:
        for _ in range(2):
            assert cached.generate(text, token_type_ids=zeros, **given).tolist() == wanted
            assert cached.generate(text, **given).tolist() == plain
        assert cached.counts.device == 2 * 2 * 40 + (0 if takes else 2 * 40)


def test_max_time_is_of_the_whole_call() -> None:
    """Of several rows that are computed one after the other, and of what is computed before transformers begins."""
    model = make("mamba2")
    text = ids(*(prompt(LENGTH, seed=i) for i in range(3)))
    model.generation_config.update(max_time=0.6)
    handle = model.register_forward_hook(lambda *_: time.sleep(0.02))
    try:
        with PrefixCache(model, name="mamba2", **SIZES) as cached:
            given: dict[str, Any] = {"max_new_tokens": 400, "do_sample": False, "attention_mask": torch.ones_like(text)}
            began = time.monotonic()
            made = cached.generate(text, **given)
            assert 0.6 <= time.monotonic() - began < 3
            assert LENGTH < made.shape[1] < LENGTH + 400
            assert cached.generate(text, **given, max_time=0.0).shape[1] == LENGTH + 1
            model.generation_config.update(max_time=None)
            config = transformers.GenerationConfig(max_time=0.0)
            assert cached.generate(text, **given, generation_config=config).shape[1] == LENGTH + 1
            assert cached.generate(text, **{**given, "max_new_tokens": 3}).shape[1] == LENGTH + 3
    finally:
        handle.remove()


def test_statistics_are_the_caches_own(cached: PrefixCache) -> None:
    cached.generate(ids(prompt(LENGTH)), max_new_tokens=1)
    counted = cached.statistics()
    assert counted.device["full"].capacity == SIZES["device_tokens"] // SIZES["page_size"]
    assert type(counted) is type(cached._cache.statistics())


def test_a_store_that_this_very_process_has_is_refused_in_those_words(tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    with PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES):
        with pytest.raises(Unavailable, match=r"in use by process [0-9]+, this very process: share the cache"):
            PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES)
    with PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES):
        pass


def forgets_the_cache(self: Any, inputs: Any, **options: Any) -> Any:
    options.pop(cache_name(self), None)
    return type(self).generate(self, inputs, **options)


def knows_no_cache(self: Any, inputs: Any, **options: Any) -> Any:
    raise TypeError(f"generate() got an unexpected keyword argument {cache_name(self)!r}")


def begins_at_zero(self: Any, inputs: Any, **options: Any) -> Any:
    options[cache_name(self)].layers[0].values = options[cache_name(self)].layers[0].values * 0
    return type(self).generate(self, inputs, **options)


@pytest.mark.parametrize(("generate", "said"), [
    (forgets_the_cache, "raises .*took no update"),
    (knows_no_cache, "raises TypeError: .* unexpected keyword argument"),
    (begins_at_zero, "makes logits that differ by"),
])  # fmt: skip
def test_a_transformers_whose_generate_takes_no_cache_is_refused_before_anything_is_opened(
    generate: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says which version it is, and what is missing. The model is left as it was."""
    monkeypatch.setattr(prefix, "VERSION", "transformers 6.1.0")
    model, before = make("llama"), len(open_caches())
    own = model.generation_config
    model.generate = types.MethodType(generate, model)
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM with transformers 6.1.0: generate.. on a cache .*{said}"):
        PrefixCache(model, name="llama", **SIZES)
    assert model.generation_config is own
    assert len(open_caches()) == before
    del model.generate
    own.update(num_beams=3, num_return_sequences=2, stop_strings=["x"], max_length=4, assistant_early_exit=1)
    with PrefixCache(model, name="llama", **SIZES) as cached:         # another version is no reason to refuse
        assert cached.counts == Counts()


# Rows of a batch are generated in common steps where that can be.


KINDS = ("llama", "gemma2", "mixtral", "gpt_oss", "gpt2")
"""Full attention, windows beside it, one window, sinks, learned positions."""
ALONE = ("deepseek_v3", "qwen3_5", "jamba", "deepseek_v4", "bamba", "lfm2", "mamba")
"""What is computed request by request: latent attention, states of all kinds, compressed entries."""


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    """Prompts that share nothing, and begin with no padding."""
    return ids(*([1 + seed + i, *prompt(LENGTH - 1, seed=seed + i)] for i in range(count)))


@pytest.mark.parametrize("family", KINDS)
def test_a_batch_is_computed_in_common_steps_cold_and_with_hits(family: str) -> None:
    model, text = model_of(family), rows_of(3)
    with PrefixCache(model, name=family, **SIZES) as cached:
        for before in range(3):
            wanted = model.generate(text, attention_mask=torch.ones_like(text), **GIVEN)
            with counted(model) as calls:
                assert cached.generate(text, **GIVEN).tolist() == wanted.tolist()
            assert calls == [3 * (LENGTH - (40 if before else 0)), *[3] * (NEW - 1)]
            assert cached.counts.device == before * 3 * 40
        turn = torch.cat([wanted, rows_of(3, seed=7)[:, :5]], 1)
        alike(cached, turn, attention_mask=torch.ones_like(turn), **GIVEN)
        assert cached.counts.device == 3 * (40 + 40 + 48)  # answers are found, too


def test_what_rows_share_is_computed_once_and_the_others_follow_together(cached: PrefixCache) -> None:
    text = ids(*([*prompt(30), *prompt(LENGTH - 30, seed=1 + i)] for i in range(4)))
    wanted = model_of("llama").generate(text, **GIVEN).tolist()
    with counted(cached._model) as calls:
        assert cached.generate(text, **GIVEN).tolist() == wanted
    assert calls == [LENGTH, 1 + 3 * (LENGTH - 24), *[4] * (NEW - 2), 3]
    assert cached.counts.device == 3 * 24


def test_rows_of_different_lengths_are_computed_in_common_steps(cached: PrefixCache) -> None:
    lengths = (45, 20, 33)
    text = ids(*([0] * (45 - n) + [token or 1 for token in prompt(n, seed=n)] for n in lengths))
    mask = ids(*([0] * (45 - n) + [1] * n for n in lengths))
    wanted = cached._model.generate(text, attention_mask=mask, pad_token_id=0, **GIVEN).tolist()
    with counted(cached._model) as calls:
        assert cached.generate(text, attention_mask=mask, pad_token_id=0, **GIVEN).tolist() == wanted
    assert calls == [sum(lengths), *[3] * (NEW - 1)]


@pytest.mark.parametrize("family", ALONE)
def test_rows_of_a_model_that_is_computed_request_by_request(family: str) -> None:
    model, text = model_of(family), rows_of(2)
    wanted = [model.generate(text[i : i + 1], **GIVEN)[0].tolist() for i in range(2)]
    with PrefixCache(model, name=family, **SIZES) as cached:
        for _ in range(2):
            assert cached.generate(text, **GIVEN).tolist() == wanted
        assert cached.counts.device == 2 * 40


def test_rows_that_begin_at_several_places_are_right(cached: PrefixCache) -> None:
    cached.generate(rows_of(2)[1:], **GIVEN)
    alike(cached, rows_of(4), **GIVEN)


def test_a_row_that_ends_before_the_others_is_padded_and_its_padding_is_not_kept() -> None:
    model = make("llama")
    model.generation_config.pad_token_id = 0
    text = rows_of(3)
    free = model.generate(text, **GIVEN)[:, LENGTH:].tolist()
    end = next(token for token in free[0][1:5] if token not in free[1])
    with PrefixCache(model, name="llama", **SIZES) as cached:
        for given in ({"eos_token_id": end}, {"eos_token_id": [end, 511]}):
            wanted = alike(cached, text, **GIVEN, **given)
        assert 0 in wanted[0, LENGTH:].tolist()
        stop = wanted[0].tolist().index(end, LENGTH)
        padded = wanted[0, : LENGTH + NEW].tolist()
        kept = cached.ask(lambda cache: cache.match(padded))
        assert kept.device == stop // 8 * 8


def test_without_a_pad_token_the_first_end_that_was_given_pads() -> None:
    """Whatever is cached: rows together, and rows alone."""
    model, text = make("llama"), rows_of(3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = None, 500
    mask = torch.ones_like(text)
    free = model.generate(text, attention_mask=mask, **GIVEN)[:, LENGTH:].tolist()
    end = next(token for token in free[0][1:5] if token not in free[1] + free[2])
    for given in (end, [end, 511], [511, end], torch.tensor([511, end])):
        wanted = model.generate(text, attention_mask=mask, eos_token_id=given, **GIVEN).tolist()
        for cached_rows in (0, 1):
            with PrefixCache(model, name="llama", **SIZES) as cached:
                if cached_rows:
                    cached.generate(text[1:2], max_new_tokens=1)
                assert cached.generate(text, attention_mask=mask, eos_token_id=given, **GIVEN).tolist() == wanted


def test_what_only_transformers_does_is_done_row_by_row(cached: PrefixCache) -> None:
    text = rows_of(3)

    def never(tokens: Any, scores: Any) -> Any:
        return scores.index_fill(1, torch.tensor([int(first)]), -torch.inf)

    first = cached.generate(text, **GIVEN)[0, LENGTH]
    own: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.5}, {"logits_processor": [never]}, {"min_new_tokens": 3}, {"bad_words_ids": [[5]]},
    )  # fmt: skip
    for more in own:
        given: dict[str, Any] = {**GIVEN, **more}
        wanted = [cached._model.generate(text[i : i + 1], **given)[0].tolist() for i in range(3)]
        assert cached.generate(text, **given).tolist() == wanted


def test_rows_that_have_no_room_together_are_generated_one_after_the_other() -> None:
    text = rows_of(4)
    with PrefixCache(model_of("llama"), name="llama", page_size=8, device_tokens=128, host_tokens=512) as cached:
        for _ in range(2):
            alike(cached, text, **GIVEN)
        assert cached.counts.device + cached.counts.host == 4 * 40
        cached._loop.call(settled(cached._cache))
        check(cached._cache.core, idle=True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_that_the_model_cannot_compute_fail_alone(family: str) -> None:
    """As in transformers, and never in a common step, where they would fail the requests of other threads, too."""
    model = model_of(family)
    positions = model.config.max_position_embeddings
    strange = rows_of(2)
    strange[1, 3] = model.config.vocab_size
    many = ids(*(prompt(positions - 2, seed=i) for i in range(2)))
    asked = [(strange, GIVEN, IndexError), (rows_of(2), {"max_length": LENGTH, "do_sample": False}, ValueError)]
    if family == "gpt2":  # whose positions are learned
        asked.append((many, GIVEN, IndexError))
    with PrefixCache(model, name=family, page_size=8, device_tokens=4 * positions) as cached:
        for text, given, error in asked:
            with pytest.raises(error):
                model.generate(text, attention_mask=torch.ones_like(text), **given)
            with pytest.raises(error):
                cached.generate(text, attention_mask=torch.ones_like(text), **given)
            assert not cached._scheduler.steps
        cached._loop.call(settled(cached._cache))
        check(cached._cache.core, idle=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_error_of_the_model_gives_the_pages_of_all_rows_back(cached: PrefixCache, rows: int) -> None:
    def stop(*_: Any, **options: Any) -> Any:
        raise RuntimeError("enough")

    ways: tuple[dict[str, Any], ...] = ({"stopping_criteria": [stop]}, {})
    for more in ways:
        hook = cached._model.model.layers[1].register_forward_hook(stop) if not more else None
        for _ in range(10):
            with pytest.raises(RuntimeError, match="enough"):
                cached.generate(rows_of(rows), **GIVEN, **more)
        if hook is not None:
            hook.remove()
    assert cached.generate(rows_of(rows), **GIVEN).shape == (rows, LENGTH + NEW)


def lookups(cached: PrefixCache) -> Any:
    async def read(cache: Any) -> Any:
        return cache.statistics().lookups

    return cached.ask(read)


def test_each_row_is_one_lookup_whatever_rows_share(cached: PrefixCache) -> None:
    depths = [8 * (i % 4) for i in range(8)]
    text = ids(*([*prompt(LENGTH)[:d], *prompt(LENGTH - d, seed=1 + i)] for i, d in enumerate(depths)))
    for turn in range(1, 3):
        alike(cached, text, **GIVEN)
        assert lookups(cached).requests == turn * 8
        assert sum(lookups(cached).hits.values()) == sum(cached.counts[1:])


def test_a_row_that_is_not_stored_does_not_change_where_the_others_are_found(tmp_path: Path) -> None:
    text, url = rows_of(4), f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    with PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES) as cached:
        cached.generate(text[:3], **GIVEN)
    with PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES) as cached:
        cached.generate(text, **GIVEN)
        assert cached.counts == Counts(4 * LENGTH, 0, 0, 3 * 40)
        assert lookups(cached).requests == 4


@pytest.mark.parametrize("own", [True, False])
def test_a_model_whose_own_configuration_samples_draws_row_by_row(own: bool) -> None:
    """Unless the call says otherwise."""
    model, text, mask = make("llama"), rows_of(3), torch.ones(3, LENGTH, dtype=torch.long)
    model.generation_config.update(do_sample=True, temperature=1.3, pad_token_id=0)
    more: dict[str, Any] = {} if own else {"do_sample": False}
    with PrefixCache(model, name="llama", **SIZES) as cached:
        for _ in range(2):
            torch.manual_seed(5)
            wanted = [model.generate(text[i : i + 1], attention_mask=mask[:1], max_new_tokens=NEW, **more)[0].tolist()
                      for i in range(3)]  # fmt: skip
            torch.manual_seed(5)
            with counted(model) as calls:
                made = cached.generate(text, attention_mask=mask, max_new_tokens=NEW, **more).tolist()
            assert made == wanted
            assert len(calls) == (3 * NEW if own else NEW)
        assert cached.counts.device == 3 * 40


def test_rows_of_one_token_are_a_call(cached: PrefixCache) -> None:
    """Nothing of them may be found."""
    text = ids([5], [6], [5])
    for _ in range(2):
        alike(cached, text, **GIVEN)


@pytest.mark.parametrize(("option", "value"), [
    ("prefix_allowed_tokens_fn", lambda row, tokens: [1, 2]), ("negative_prompt_ids", ids([1, 2], [3, 4])),
    ("streamer", object()),
])  # fmt: skip
def test_what_is_of_a_single_row_is_refused_for_several(cached: PrefixCache, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}: "):
        cached.generate(rows_of(2), **GIVEN, **{option: value})
    assert cached.counts == Counts()
