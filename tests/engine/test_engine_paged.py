"""``PagedModel`` as a scheduler uses it: values in, tokens out, nothing kept but the tail of a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from asynccache_hf import PagedModel
from asynccache_hf.memory import Track, TrackMemory
from asynccache_hf.sampling import draw
from asynccache_shim.model import NO_TOKEN, Batch, Checkpoint, Chunk, Pages, Sampling

from asynccache.errors import ConfigError
from tests.engine.engine_kit import LIMIT, PAGE, alone, judged, layout_of, model_of, prompt
from tests.engine.engine_models import FAMILIES


class Memory:
    """A pool without a cache."""

    def __init__(self, layers: int, pages: int, size: int) -> None:
        self._layers = torch.zeros((layers, pages, size), dtype=torch.uint8)

    def layer(self, i: int) -> torch.Tensor:
        return self._layers[i]

    def leave_gaps(self) -> None:
        """Nobody looks for them."""


def paged(family: str, pages: int = 16) -> PagedModel:
    layout = layout_of(family)
    return PagedModel(model_of(family), layout, {p.name: Memory(p.layers, pages, p.layer_bytes) for p in layout.pools})


def numbers(*values: int) -> Pages:
    return np.array(values, np.int32)


def chunk(who: int, tokens: list[int], start: int, stop: int, pages: Pages, **more: object) -> Chunk:
    terms: dict[str, object] = {"states": numbers(who, who + 8), "checkpoint": None, "sample": True} | more
    return Chunk(who, numbers(*tokens), start, stop, pages, pages, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_one_batch_do_not_meet(family: str) -> None:
    model = paged(family)
    one, two = prompt(21), prompt(13, seed=1)
    first, second = numbers(3, 1, 7, 4), numbers(0, 9, 2)
    made = [list(one), list(two)]
    for start, stop in ((0, 11), (11, 13)):
        chunks = chunk(0, one, start, stop, first, sample=False), chunk(1, two, start, stop, second, sample=stop == 13)
        answer = model.forward(Batch(chunks))
        assert answer[0] == NO_TOKEN
    made[1].append(answer[1])
    at = 13
    for stop in (21, 22, 23):
        answer = model.forward(
            Batch(
                (chunk(0, made[0], at if stop == 21 else stop - 1, stop, first), chunk(1, made[1], at, at + 1, second))
            )
        )
        at += 1
        made[0].append(answer[0])
        made[1].append(answer[1])
    assert made[0][21:] == judged(family, one, made[0][21:])[1]
    assert made[1][13:] == judged(family, two, made[1][13:])[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_has_whole_pages_and_a_checkpoint_goes_on(family: str) -> None:
    model = paged(family)
    tokens = prompt(30)
    model.compute(chunk(0, tokens, 0, 16, numbers(0, 1, 2, 3), checkpoint=Checkpoint(16, 8)))
    model.compute(chunk(0, tokens, 16, 30, numbers(0, 1, 2, 3)))
    logits = model.compute(chunk(5, tokens, 16, 30, numbers(0, 1, 4, 5), states=numbers(8)))
    assert float((logits - alone(family, 0, tuple(tokens))[-1:]).abs().max()) <= LIMIT


def test_a_request_goes_on_within_a_page_only_where_it_stopped() -> None:
    model = paged("deepseek_v4")
    tokens, pages = prompt(30), numbers(0, 1, 2, 3)
    model.compute(chunk(0, tokens, 0, 13, pages))
    with pytest.raises(RuntimeError, match="stopped at 13 and cannot go on at 12"):
        model.compute(chunk(0, tokens, 12, 20, pages))
    model.forward(Batch((), ended=(0,)))
    with pytest.raises(RuntimeError, match="cannot go on at 13"):
        model.compute(chunk(0, tokens, 13, 20, pages))


def test_a_page_that_is_missing_is_no_silent_zero() -> None:
    model = paged("gemma3")
    tokens = prompt(30)
    model.compute(chunk(0, tokens, 0, 24, numbers(0, 1, 2, 3)))
    with pytest.raises(IndexError, match="no page"):
        model.compute(chunk(0, tokens, 24, 30, numbers(0, -1, 2, 3)))


def test_every_logit_on_request() -> None:
    logits = paged("qwen3").compute(chunk(0, prompt(9), 0, 9, numbers(0, 1)), keep=0)
    assert logits.shape == (9, model_of("qwen3").config.vocab_size)


def test_a_cache_without_the_pools_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pool called 'full'"):
        PagedModel(model_of("qwen3"), layout_of("qwen3"), {})


# memory


@pytest.mark.parametrize(("stride", "units"), [(1, 24), (4, 6), (8, 3), (16, 1)])
def test_units_of_any_stride_come_back(stride: int, units: int) -> None:
    sample = {"a": torch.empty(3, 2), "b": torch.empty(5, dtype=torch.float64)}
    track = Track.of("p", "full", stride, sample)
    more = 32 * track.per_page(PAGE)  # another layer of the pool keeps more
    memory = torch.zeros((7, track.page_bytes(PAGE) + more), dtype=torch.uint8)
    slots, table = TrackMemory(track, memory, PAGE), numbers(4, 0, 6)
    values = {name: torch.randn(units, *t.shape).to(t.dtype) for name, t in sample.items()}
    half = units // 2
    slots.write(table, 0, {name: v[:half] for name, v in values.items()})
    slots.write(table, half, {name: v[half:] for name, v in values.items()})
    for first in range(units):
        found = slots.read(table, first, units)
        assert all(torch.equal(found[name], values[name][first:]) for name in values)
    assert not memory[[1, 2, 3, 5]].any()
    assert not memory.view(7 * track.per_page(PAGE), -1)[:, track.unit_bytes :].any()


def test_units_without_a_page_are_left_out() -> None:
    track = Track.of("p", "swa", 1, {"a": torch.empty(4)})
    memory = torch.zeros((4, track.page_bytes(PAGE)), dtype=torch.uint8)
    slots = TrackMemory(track, memory, PAGE)
    values = torch.randn(3 * PAGE, 4)
    slots.write(numbers(-1, 2, 0), 0, {"a": values})
    assert torch.equal(slots.read(numbers(-1, 2, 0), PAGE, 3 * PAGE)["a"], values[PAGE:])
    assert not memory[[1, 3]].any()
    with pytest.raises(IndexError, match="no page"):
        slots.read(numbers(-1, 2, 0), PAGE - 1, 3 * PAGE)


# sampling


def drawn_of(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Drawn beside others, which change nothing."""
    others = [Sampling(), Sampling(0.7, 0.5, 3), Sampling(2.0, seed=1, top_k=2)]
    rows = torch.stack([logits, logits * 0, logits.flip(0), logits])
    alone = draw(logits[None], [sampling], [position])
    together = draw(rows, [sampling, *others], [position, 0, 1, 2])
    assert together[0] == alone[0]
    return alone[0]


def kept_by_transformers(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """The tokens that transformers' own processors leave."""
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    processors = model_of("llama")._get_logits_processor(settings)
    return set(processors(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 4, 6, 99])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_it_is_drawn_among_the_tokens_that_transformers_leaves(temperature: float, top_p: float, top_k: int) -> None:
    """The same order of the filters, and the same tokens where several are equally likely."""
    logits = torch.tensor([0.5, 2.0, 1.0, 1.0, -torch.inf, 1.0, 1.7])
    sampling = Sampling(temperature, top_p, None, top_k)
    drawn = set(draw(logits.expand(3000, 7), [sampling._replace(seed=i) for i in range(3000)], [0] * 3000))
    kept = kept_by_transformers(logits, sampling)
    equal = {2, 3, 5}  # of these top_p may leave any
    assert (drawn - equal, len(drawn)) == (kept - equal, len(kept))


def test_a_row_that_is_no_numbers_does_not_disturb_the_others() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 2.0, 3.0], [torch.inf, torch.inf, 0.0], [-torch.inf] * 3])
    sampling = Sampling(1.0, 0.9, 7, 2)
    drawn = draw(rows, [sampling] * 4, range(4))
    assert drawn[0] == drawn_of(rows[0], sampling, 0)
    assert all(0 <= token < 3 for token in drawn)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = torch.log(chances).expand(4000, 4)
    drawn = draw(rows, [Sampling(1.0, 1.0, 5)] * 4000, range(4000))
    assert (torch.bincount(torch.tensor(drawn)) / 4000 - chances).abs().max() < 0.03


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn_of(torch.tensor([0.1, 3.0, 2.9]), Sampling(), 5) == 1


def test_the_same_seed_draws_the_same_and_positions_differ() -> None:
    logits = torch.zeros(1000)
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = [drawn_of(logits, sampling, position) for position in range(20)]
    assert drawn == [drawn_of(logits, sampling, position) for position in range(20)]
    assert len(set(drawn)) > 15
    assert drawn != [drawn_of(logits, Sampling(temperature=1.0, seed=4), position) for position in range(20)]
