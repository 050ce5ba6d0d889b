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
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-sglang", allow_module_level=True)

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process

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


# two processes on one host process


SERVED = ("full", "mla", "swa", "mamba")


class ServingProcess:
    """``with ServingProcess(url) as one``: a ``serving_child`` until the end of the block."""

    def __init__(self, url: str, log: Path) -> None:
        self._words = [sys.executable, "-m", "tests.sglang.serving_child", url]
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


def counts(server: HostProcess) -> dict[str, float]:
    """What the server counts, once nothing is being written."""
    return asyncio.run(server.settled())


@pytest.fixture(scope="module")
def server() -> Iterator[HostProcess]:
    with server_process(socket_path(), "64MiB") as made:
        yield made


@pytest.fixture(scope="module")
def found(server: HostProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How many tokens each process found of each prompt, by model; and what the server counted meanwhile."""
    log, told = tmp_path_factory.mktemp("sglang") / "log", dict[str, dict[str, Any]]()
    with ServingProcess(server.url, log) as first:
        with ServingProcess(server.url, log) as second:
            for model in SERVED:
                for one in (first, second):
                    one.ask("open", model)
                mine: dict[str, Any] = {"cold": (first.ask("serve", 1), second.ask("serve", 2))}
                for one in (first, second):
                    one.ask("drain")
                before = counts(server)["stored"]
                mine["stored"] = before
                told[model] = mine
                mine["other"] = (first.ask("serve", 2), second.ask("serve", 1))
                for one in (first, second):
                    one.ask("drain")
                mine["stored again"] = counts(server)["stored"] - before
                first.ask("close")
                if model != SERVED[-1]:
                    second.ask("close")
            second.kill()
        with ServingProcess(server.url, log) as again:
            for model in SERVED:
                again.ask("open", model)
                told[model]["again"] = (again.ask("serve", 1), again.ask("serve", 2))
                again.ask("forget")
                told[model]["unknown"] = again.ask("serve", 3)
                again.ask("drain")
                again.ask("close")
    return told


@pytest.mark.parametrize("model", SERVED)
def test_each_of_two_processes_finds_what_the_other_stored(found: dict[str, dict[str, Any]], model: str) -> None:
    told = found[model]
    assert told["cold"] == (0, 0)
    assert told["stored"] > 0
    assert told["other"] == (PROMPT, PROMPT)
    assert told["stored again"] == 0, "what both have is there once"


@pytest.mark.parametrize("model", SERVED)
def test_a_process_that_was_killed_and_started_again_finds_everything(
    found: dict[str, dict[str, Any]], model: str
) -> None:
    assert found[model]["again"] == (PROMPT, PROMPT)
    assert found[model]["unknown"] == 0


def test_nothing_was_damaged_or_is_left_reserved(found: dict[str, dict[str, Any]], server: HostProcess) -> None:
    assert len(found) == len(SERVED)
    after = counts(server)
    assert after["hits"] > 0
    assert [after[name] for name in ("evicted", "no_room", "damaged", "malformed", "reserved_bytes")] == [0] * 5
    assert not [name for name in after if "." in name], "there is no store behind it"
