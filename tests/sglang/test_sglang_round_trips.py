"""SGLang's own cache and controller bring pages from L1 to L3 and back, in the same process and in another one.

The bytes are compared where they are read: ``tiny_engine`` fails if one is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-sglang", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("full", "full layer_first", "mla", "mla layer_first", "swa", "mamba")
POOLS = {
    "full": {"kv": "PartViews"}, "full layer_first": {"kv": "PartViews"}, "mla": {"kv": "DirectPages"},
    "mla layer_first": {"kv": "PartViews"}, "swa": {"kv": "PartViews", "swa": "PartViews"},
    "mamba": {"kv": "PartViews", "mamba": "PartViews"},
}  # fmt: skip
PROMPT = 24

Told = dict[str, dict[str, Any]]


def child(*arguments: str) -> Told:
    """What a process of its own told of each model."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.sglang.round_trip_child", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    told = {one["model"]: one for one in map(json.loads, made.stdout.splitlines())}
    assert told, made.stderr
    return told


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Told, ...]]:
    """One that writes and then three that read, the last two with another version of SGLang."""
    with TemporaryDirectory() as folder:
        yield tuple(child(what, folder) for what in ("write", "read", "upgraded", "declared"))


@pytest.mark.parametrize("model", MODELS)
def test_pages_come_back_from_the_host_and_from_the_store(processes: tuple[Told, ...], model: str) -> None:
    told = processes[0][model]
    assert "error" not in told, told["error"]
    assert told["pools"] == POOLS[model]
    assert (told["cold"], told["L2"], told["L3"]) == (0, PROMPT, PROMPT)


@pytest.mark.parametrize("model", MODELS)
def test_a_new_process_finds_what_another_one_stored(processes: tuple[Told, ...], model: str) -> None:
    told = processes[1][model]
    assert "error" not in told, told["error"]
    assert told["L3"] == PROMPT
    assert told["other"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_another_version_finds_what_it_cannot_have_laid_out_otherwise(
    processes: tuple[Told, ...], model: str
) -> None:
    upgraded, declared = (told[model] for told in processes[2:])
    assert "error" not in upgraded, upgraded["error"]
    assert upgraded["L3"] == (0 if model == "mamba" else PROMPT)
    assert declared["L3"] == PROMPT, declared


def test_a_prompt_that_forks_off_is_found_up_to_the_fork(processes: tuple[Told, ...]) -> None:
    told = processes[1]
    assert {model: told[model]["fork"] for model in ("full", "mla")} == dict.fromkeys(
        ("full", "mla"), 12
    )
    assert told["mamba"]["fork"] == 0  # there is a state at the end of the other prompt only
