"""SGLang's own cache and controller bring pages from L1 to L3 and back, in the same process and in another one; and two
processes on one host process: what one has stored the other finds, and so does one that was killed and started again.

The bytes of every hit are compared where they are read: ``tiny_engine`` fails if one is wrong.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-sglang", allow_module_level=True)

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process

ROOT = Path(__file__).resolve().parents[2]
POOLS = {
    "full": {"kv": "PartViews"}, "full layer_first": {"kv": "PartViews"}, "mla": {"kv": "DirectPages"},
    "mla layer_first": {"kv": "PartViews"}, "swa": {"kv": "PartViews", "swa": "PartViews"},
    "mamba": {"kv": "PartViews", "mamba": "PartViews"},
}  # fmt: skip
MODELS = tuple(POOLS)
PROMPT = 24

Told = dict[str, dict[str, Any]]


def prompt(number: int) -> list[int]:
    """Tokens of six pages."""
    return [1000 * number + at for at in range(PROMPT)]


class ServingProcess:
    """``with ServingProcess(log) as one``: a ``serving_child`` until the end of the block."""

    def __init__(self, log: Path, *version: str) -> None:
        self._words = [sys.executable, "-m", "tests.sglang.serving_child", *version]
        self._log = log
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        with self._log.open("a") as errors:
            self._process = subprocess.Popen(
                self._words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.communicate()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"it has ended: {self._log.read_text()[-3000:]}"
        told = json.loads(line)
        assert "error" not in told, told["error"]
        return told["answer"]

    def serve(self, number: int) -> int:
        """How many tokens of a prompt were found."""
        found: int = self.ask("serve", prompt(number))
        return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What one process found that writes, and then three that read, the last two with another version of SGLang, of
    which the last says that its pages are those of this one."""
    folder, told = tmp_path_factory.mktemp("sglang"), {model: dict[str, Any]() for model in MODELS}

    def options(model: str, **more: str) -> dict[str, str]:
        name = model.replace(" ", "-")
        return {"storage": f"file:{folder}/{name}?capacity=64MiB", "namespace": "w1", **more}

    with ServingProcess(folder / "log") as one:
        declared = {"compatible_with": one.ask("version")}
        for model, mine in told.items():
            mine["pools"] = one.ask("open", model, options(model))
            mine["cold"] = one.serve(1) + one.serve(2)
            one.ask("to_host")
            mine["L2"] = one.serve(1)
            one.ask("forget")
            mine["L3"] = one.serve(1)
            one.ask("drain")
            one.ask("close")
    for who, calls_itself, more in (("read", (), {}), ("upgraded", ("99.0",), {}), ("declared", ("99.0",), declared)):
        with ServingProcess(folder / "log", *calls_itself) as one:
            for model, mine in told.items():
                one.ask("open", model, options(model, **more))
                mine[who] = one.serve(1)
                if who == "read":
                    mine["fork"] = one.ask("serve", prompt(2)[:12] + prompt(3)[:4])
                    mine["other"] = one.serve(4)
                one.ask("drain")
                one.ask("close")
    return told


@pytest.mark.parametrize("model", MODELS)
def test_pages_come_back_from_the_host_and_from_the_store(told: Told, model: str) -> None:
    mine = told[model]
    assert mine["pools"] == POOLS[model]
    assert (mine["cold"], mine["L2"], mine["L3"]) == (0, PROMPT, PROMPT)


@pytest.mark.parametrize("model", MODELS)
def test_a_new_process_finds_what_another_one_stored(told: Told, model: str) -> None:
    assert told[model]["read"] == PROMPT
    assert told[model]["other"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_another_version_finds_what_it_cannot_have_laid_out_otherwise(told: Told, model: str) -> None:
    assert told[model]["upgraded"] == (0 if model == "mamba" else PROMPT)
    assert told[model]["declared"] == PROMPT


def test_a_prompt_that_forks_off_is_found_up_to_the_fork(told: Told) -> None:
    assert [told[model]["fork"] for model in ("full", "mla")] == [12, 12]
    assert told["mamba"]["fork"] == 0  # there is a state at the end of the other prompt only


# two processes on one host process


SERVED = ("full", "mla", "swa", "mamba")


def counts(server: HostProcess) -> dict[str, float]:
    """What the server counts, once nothing is being written."""
    return asyncio.run(server.settled())


@pytest.fixture(scope="module")
def server() -> Iterator[HostProcess]:
    with server_process(socket_path(), "64MiB") as made:
        yield made


@pytest.fixture(scope="module")
def found(server: HostProcess, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """How many tokens each process found of each prompt, by model; and what the server counted meanwhile."""
    log, told = tmp_path_factory.mktemp("sglang") / "log", dict[str, dict[str, Any]]()

    def options(model: str) -> dict[str, str]:
        return {"storage": server.url, "namespace": model}

    with ServingProcess(log) as first:
        with ServingProcess(log) as second:
            for model in SERVED:
                for one in (first, second):
                    one.ask("open", model, options(model))
                mine: dict[str, Any] = {"cold": (first.serve(1), second.serve(2))}
                for one in (first, second):
                    one.ask("drain")
                before = counts(server)["stored"]
                mine["stored"] = before
                told[model] = mine
                mine["other"] = (first.serve(2), second.serve(1))
                for one in (first, second):
                    one.ask("drain")
                mine["stored again"] = counts(server)["stored"] - before
                first.ask("close")
                if model != SERVED[-1]:
                    second.ask("close")
            second.kill()
        with ServingProcess(log) as again:
            for model in SERVED:
                again.ask("open", model, options(model))
                told[model]["again"] = (again.serve(1), again.serve(2))
                again.ask("forget")
                told[model]["unknown"] = again.serve(3)
                again.ask("drain")
                again.ask("close")
    return told


@pytest.mark.parametrize("model", SERVED)
def test_each_of_two_processes_finds_what_the_other_stored(found: Told, model: str) -> None:
    told = found[model]
    assert told["cold"] == (0, 0)
    assert told["stored"] > 0
    assert told["other"] == (PROMPT, PROMPT)
    assert told["stored again"] == 0, "what both have is there once"


@pytest.mark.parametrize("model", SERVED)
def test_a_process_that_was_killed_and_started_again_finds_everything(
    found: Told, model: str
) -> None:
    assert found[model]["again"] == (PROMPT, PROMPT)
    assert found[model]["unknown"] == 0


def test_nothing_was_damaged_or_is_left_reserved(found: Told, server: HostProcess) -> None:
    assert len(found) == len(SERVED)
    after = counts(server)
    assert after["hits"] > 0
    assert [after[name] for name in ("evicted", "no_room", "damaged", "malformed", "reserved_bytes")] == [0] * 5
    assert not [name for name in after if "." in name], "there is no store behind it"
