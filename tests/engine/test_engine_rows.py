"""``PrefixCache`` generates the rows of a batch in common steps where it can, and what it returns is what
``model.generate`` returns in any case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from asynccache_hf import Counts, PrefixCache

from asynccache.core.audit import check
from asynccache.errors import ConfigError
from tests.engine.engine_kit import model_of, prompt, settled
from tests.engine.engine_models import make
from tests.engine.test_engine_prefix import SIZES, ids

pytestmark = pytest.mark.slow(0.3)

LENGTH, NEW = 45, 9
GIVEN: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
KINDS = ("llama", "gemma2", "mixtral", "gpt_oss", "gpt2")
"""Full attention, windows beside it, one window, sinks, learned positions."""
ALONE = ("deepseek_v3", "qwen3_5", "jamba", "deepseek_v4", "bamba", "lfm2", "mamba")
"""What is computed request by request: latent attention, states of all kinds, compressed entries."""


@contextmanager
def calls_of(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model computes."""
    calls: list[int] = []

    def count(module: Any, args: Any, given: Any) -> None:
        calls.append(given["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    """Prompts that share nothing, and begin with no padding."""
    return ids(*([1 + seed + i, *prompt(LENGTH - 1, seed=seed + i)] for i in range(count)))


@pytest.fixture
def llama() -> Iterator[PrefixCache]:
    with PrefixCache(model_of("llama"), name="llama", **SIZES) as cached:
        yield cached
        cached._loop.call(settled(cached._cache))
        check(cached._cache.core, idle=True)


@pytest.mark.parametrize("family", KINDS)
def test_a_batch_is_computed_in_common_steps_cold_and_with_hits(family: str) -> None:
    model, text = model_of(family), rows_of(3)
    with PrefixCache(model, name=family, **SIZES) as cached:
        for before in range(3):
            wanted = model.generate(text, attention_mask=torch.ones_like(text), **GIVEN)
            with calls_of(model) as calls:
                assert cached.generate(text, **GIVEN).tolist() == wanted.tolist()
            assert calls == [3 * (LENGTH - (40 if before else 0)), *[3] * (NEW - 1)]
            assert cached.counts.device == before * 3 * 40
        turn = torch.cat([wanted, rows_of(3, seed=7)[:, :5]], 1)
        wanted = model.generate(turn, attention_mask=torch.ones_like(turn), **GIVEN)
        assert cached.generate(turn, **GIVEN).tolist() == wanted.tolist()
        assert cached.counts.device == 3 * (40 + 40 + 48)  # answers are found, too


def test_from_host_and_storage_too(tmp_path: Path) -> None:
    text, url = rows_of(3), f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    wanted = model_of("llama").generate(text, **GIVEN).tolist()
    for found in (0, 120):
        with PrefixCache(model_of("llama"), name="llama", storage=url, **SIZES) as cached:
            assert cached.generate(text, **GIVEN).tolist() == wanted
            assert cached.counts.storage == found


def test_what_rows_share_is_computed_once_and_the_others_follow_together(llama: PrefixCache) -> None:
    text = ids(*([*prompt(30), *prompt(LENGTH - 30, seed=1 + i)] for i in range(4)))
    wanted = model_of("llama").generate(text, **GIVEN).tolist()
    with calls_of(llama._model) as calls:
        assert llama.generate(text, **GIVEN).tolist() == wanted
    assert calls == [LENGTH, 1 + 3 * (LENGTH - 24), *[4] * (NEW - 2), 3]
    assert llama.counts.device == 3 * 24


def test_rows_of_different_lengths_are_computed_in_common_steps(llama: PrefixCache) -> None:
    lengths = (45, 20, 33)
    text = ids(*([0] * (45 - n) + [token or 1 for token in prompt(n, seed=n)] for n in lengths))
    mask = ids(*([0] * (45 - n) + [1] * n for n in lengths))
    wanted = llama._model.generate(text, attention_mask=mask, pad_token_id=0, **GIVEN).tolist()
    with calls_of(llama._model) as calls:
        assert llama.generate(text, attention_mask=mask, pad_token_id=0, **GIVEN).tolist() == wanted
    assert calls == [sum(lengths), *[3] * (NEW - 1)]


@pytest.mark.parametrize("family", ALONE)
def test_rows_of_a_model_that_is_computed_request_by_request(family: str) -> None:
    model, text = model_of(family), rows_of(2)
    wanted = [model.generate(text[i : i + 1], **GIVEN)[0].tolist() for i in range(2)]
    with PrefixCache(model, name=family, **SIZES) as cached:
        for _ in range(2):
            assert cached.generate(text, **GIVEN).tolist() == wanted
        assert cached.counts.device == 2 * 40


def test_rows_that_begin_at_several_places_are_right(llama: PrefixCache) -> None:
    llama.generate(rows_of(2)[1:], **GIVEN)
    assert llama.generate(rows_of(4), **GIVEN).tolist() == model_of("llama").generate(rows_of(4), **GIVEN).tolist()


def test_a_row_that_ends_before_the_others_is_padded_and_its_padding_is_not_kept() -> None:
    model = make("llama")
    model.generation_config.pad_token_id = 0
    text = rows_of(3)
    free = model.generate(text, **GIVEN)[:, LENGTH:].tolist()
    end = next(token for token in free[0][1:5] if token not in free[1])
    with PrefixCache(model, name="llama", **SIZES) as cached:
        for given in ({"eos_token_id": end}, {"eos_token_id": [end, 511]}):
            wanted = model.generate(text, **GIVEN, **given)
            assert cached.generate(text, **GIVEN, **given).tolist() == wanted.tolist()
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


def test_what_only_transformers_does_is_done_row_by_row(llama: PrefixCache) -> None:
    text = rows_of(3)

    def never(tokens: Any, scores: Any) -> Any:
        return scores.index_fill(1, torch.tensor([int(first)]), -torch.inf)

    first = llama.generate(text, **GIVEN)[0, LENGTH]
    own: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.5}, {"logits_processor": [never]}, {"min_new_tokens": 3}, {"bad_words_ids": [[5]]},
    )  # fmt: skip
    for more in own:
        given: dict[str, Any] = {**GIVEN, **more}
        wanted = [llama._model.generate(text[i : i + 1], **given)[0].tolist() for i in range(3)]
        assert llama.generate(text, **given).tolist() == wanted


def test_rows_that_are_sampled_are_drawn_one_after_the_other(llama: PrefixCache) -> None:
    """So that a seed gives the same rows whatever is cached."""
    given: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "max_new_tokens": NEW}
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        with calls_of(llama._model) as calls:
            made.append(llama.generate(rows_of(3), **given).tolist())
        assert len(calls) == 3 * NEW
    assert made[0] == made[1]


def test_rows_that_have_no_room_together_are_generated_one_after_the_other() -> None:
    text = rows_of(4)
    with PrefixCache(model_of("llama"), name="llama", page_size=8, device_tokens=128, host_tokens=512) as cached:
        for _ in range(2):
            assert cached.generate(text, **GIVEN).tolist() == model_of("llama").generate(text, **GIVEN).tolist()
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


def test_an_error_of_the_model_gives_the_pages_of_all_rows_back(llama: PrefixCache) -> None:
    def stop(*_: Any, **options: Any) -> Any:
        raise RuntimeError("enough")

    ways: tuple[dict[str, Any], ...] = ({"stopping_criteria": [stop]}, {})
    for more in ways:
        hook = llama._model.model.layers[1].register_forward_hook(stop) if not more else None
        for _ in range(10):
            with pytest.raises(RuntimeError, match="enough"):
                llama.generate(rows_of(3), **GIVEN, **more)
        if hook is not None:
            hook.remove()
    assert llama.generate(rows_of(3), **GIVEN).shape == (3, LENGTH + NEW)


def lookups(cached: PrefixCache) -> Any:
    async def read(cache: Any) -> Any:
        return cache.statistics().lookups

    return cached.ask(read)


def test_each_row_is_one_lookup_whatever_rows_share(llama: PrefixCache) -> None:
    depths = [8 * (i % 4) for i in range(8)]
    text = ids(*([*prompt(LENGTH)[:d], *prompt(LENGTH - d, seed=1 + i)] for i, d in enumerate(depths)))
    for turn in range(1, 3):
        assert llama.generate(text, **GIVEN).tolist() == model_of("llama").generate(text, **GIVEN).tolist()
        assert lookups(llama).requests == turn * 8
        assert sum(lookups(llama).hits.values()) == sum(llama.counts[1:])


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
            with calls_of(model) as calls:
                made = cached.generate(text, attention_mask=mask, max_new_tokens=NEW, **more).tolist()
            assert made == wanted
            assert len(calls) == (3 * NEW if own else NEW)
        assert cached.counts.device == 3 * 40


def test_rows_of_one_token_are_a_call(llama: PrefixCache) -> None:
    """Nothing of them may be found."""
    text = ids([5], [6], [5])
    for _ in range(2):
        assert llama.generate(text, **GIVEN).tolist() == model_of("llama").generate(text, **GIVEN).tolist()


@pytest.mark.parametrize(("option", "value"), [
    ("prefix_allowed_tokens_fn", lambda row, tokens: [1, 2]), ("negative_prompt_ids", ids([1, 2], [3, 4])),
    ("streamer", object()),
])  # fmt: skip
def test_what_is_of_a_single_row_is_refused_for_several(llama: PrefixCache, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}: "):
        llama.generate(rows_of(2), **GIVEN, **{option: value})
    assert llama.counts == Counts()
