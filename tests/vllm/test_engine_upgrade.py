"""A store survives an upgrade: what one version of vLLM stored, another one serves, with the same answers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engine_kit import BLOCK, ROOT, Answer, Kind, Models, RunningEngine, installed, prompt, tier

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(60),
]

WHOLE = 16 * BLOCK
LAST = os.environ.get("ASYNCCACHE_VLLM_LAST", "")


def test_an_engine_that_calls_itself_another_version_is_served_what_this_one_stored(
    models: Models, tmp_path: Path
) -> None:
    """And one whose blocks have another length is not."""
    expected, model, tiers = models.answers("llama"), models.folder("llama"), [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        assert engine.generate(prompt(0)).cached == 0
        engine.quiet()
    with RunningEngine(model, tmp_path, tiers=tiers, environment={"CALLS_ITSELF": "0.99.0"}) as engine:
        served = engine.generate(prompt(0))
        assert served.cached == WHOLE
        served.same_as(expected[0])
    with RunningEngine(model, tmp_path, tiers=tiers, block_size=2 * BLOCK) as engine:
        assert engine.generate(prompt(0)).cached == 0


@pytest.mark.skipif(not LAST, reason="for make test-vllm-upgrade: needs another version of vLLM")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_this_version_is_served_what_the_last_one_stored(kind: Kind, models: Models, tmp_path: Path) -> None:
    """``ASYNCCACHE_VLLM_LAST``: the folders in which the last version and its transformers are found."""
    code = f"from tests.vllm.test_engine_upgrade import stored; stored({str(models.folder(kind))!r}, {str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": LAST}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[Answer] = pickle.loads((tmp_path / "answers").read_bytes())
    with RunningEngine(models.folder(kind), tmp_path, tiers=[tier(f"file:{tmp_path}/kv")]) as engine:
        for number, answer in enumerate(answers):
            served = engine.generate(prompt(number))
            assert (answer.cached, served.cached) == (0, WHOLE)
            served.same_as(answer)


def stored(model: str, folder: str) -> None:
    """What the last version does: answer two prompts, and leave them in the store."""
    with RunningEngine(Path(model), Path(folder), tiers=[tier(f"file:{folder}/kv")]) as engine:
        answers = [engine.generate(prompt(number)) for number in range(2)]
        engine.quiet()
    Path(folder, "answers").write_bytes(pickle.dumps(answers))
