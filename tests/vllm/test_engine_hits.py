"""vLLM's real engine with our stores under it: what it says is what it says without, and it is not computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine_kit import BLOCK, Kind, Models, RunningEngine, installed, prompt

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(60),
]

WHOLE = 16 * BLOCK
TIER = "fs"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_was_stored_is_served_after_a_reset_and_in_a_new_process(
    kind: Kind, models: Models, tmp_path: Path
) -> None:
    """Gemma 3 has three groups of KV, two of them with sliding windows."""
    expected = models.answers(kind)
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    with RunningEngine(models.folder(kind), tmp_path, tiers=tiers, processes=kind == "llama") as engine:
        for number in (0, 1):
            cold = engine.generate(prompt(number))
            cold.same_as(expected[number])
            assert cold.cached == 0
        engine.quiet()
        assert engine.from_tier(TIER) == (0, 0)
        engine.forget(host=False)
        host = engine.generate(prompt(0))
        assert host.cached == WHOLE
        host.same_as(expected[0])
        assert engine.from_tier(TIER) == (0, 0), "vLLM's own host tier has it"
        engine.forget()
        stored = engine.generate(prompt(0))
        assert stored.cached == WHOLE
        stored.same_as(expected[0])
        hits, read = engine.from_tier(TIER)
        assert hits > 0
        assert read > 0
    with RunningEngine(models.folder(kind), tmp_path, tiers=tiers) as engine:
        for number in (1, 0):
            stored = engine.generate(prompt(number))
            assert stored.cached == WHOLE
            stored.same_as(expected[number])
        longer = [*prompt(0)[:WHOLE], *prompt(2)]
        assert engine.generate(longer).cached == WHOLE, "a prefix of it"
        assert engine.from_tier(TIER)[0] >= 2 * hits
        unknown = engine.generate(prompt(3))
        assert unknown.cached == 0
        unknown.same_as(expected[3])
