"""vLLM's real engine over our stores: it generates the same tokens as without them, and does not compute what was
stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine_kit import BLOCK, Kind, Models, RunningEngine, installed, prompt, tier

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(60),
]

WHOLE = 16 * BLOCK


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_was_stored_is_served_after_a_reset_and_in_a_new_process(
    kind: Kind, models: Models, tmp_path: Path
) -> None:
    """Gemma 3 has three groups of KV, two of them with sliding windows. Llama runs as ``vllm serve`` does, with the
    engine in a process of its own."""
    expected, model = models.answers(kind), models.folder(kind)
    tiers = [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers, processes=kind == "llama") as engine:
        for number in (0, 1):
            cold = engine.generate(prompt(number))
            assert cold.cached == 0
            cold.same_as(expected[number])
        assert engine.generate(prompt(0)).cached == WHOLE, "on the device"
        engine.forget(host=False)
        host = engine.generate(prompt(0))
        assert host.cached == WHOLE
        host.same_as(expected[0])
        assert engine.from_tier() == (0, 0), "vLLM's own host tier had it"
        engine.forget()
        stored = engine.generate(prompt(0))
        assert stored.cached == WHOLE
        stored.same_as(expected[0])
        hits, read = engine.from_tier()
        assert hits > 0
        assert read > 0
        assert engine.chunks("loaded_chunks") == {"hit": hits}
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        for number in (1, 0):
            stored = engine.generate(prompt(number))
            assert stored.cached == WHOLE
            stored.same_as(expected[number])
        assert engine.from_tier() == (2 * hits, 2 * read)
        longer = [*prompt(0)[:WHOLE], *prompt(2)]
        engine.forget()
        assert engine.generate(longer).cached == WHOLE, "the prefix that is known"
        unknown = engine.generate(prompt(3))
        assert unknown.cached == 0
        unknown.same_as(expected[3])


def test_two_ranks_have_a_store_of_their_own(models: Models, tmp_path: Path) -> None:
    """Two ranks lie in a chunk in another way than one, so what one rank stored is a miss for two."""
    expected, model = models.answers("llama"), models.folder("llama")
    tiers = [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        engine.generate(prompt(0)).same_as(expected[0])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
    with RunningEngine(model, tmp_path, tiers=tiers, tp=2) as engine:
        other = engine.generate(prompt(0))
        assert other.cached == 0
        other.same_as(expected[0])
        engine.forget()
        own = engine.generate(prompt(0))
        assert own.cached == WHOLE
        own.same_as(expected[0])
        assert engine.from_tier()[0] == 16


def test_other_weights_of_the_same_name_have_a_store_of_their_own(models: Models, tmp_path: Path) -> None:
    """The folder of the model has the same name; what is in its files differs."""
    model = tmp_path / "model"
    tiers = [tier(f"file:{tmp_path}/kv")]
    model.symlink_to(models.folder("llama"))
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        before = engine.generate(prompt(0))
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
    model.unlink()
    model.symlink_to(models.folder("llama", seed=1))
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        after = engine.generate(prompt(0))
        assert after.cached == 0
        assert after.tokens != before.tokens
