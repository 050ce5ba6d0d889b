"""Two processes with SGLang's own cache and controller on one host process: what one has stored the other finds, and so
does one that was killed and started again. ``tiny_engine`` compares the bytes of every hit where they are read."""

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
MODELS = ("full", "mla", "swa", "mamba")
PROMPT = 24


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
            for model in MODELS:
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
                if model != MODELS[-1]:
                    second.ask("close")
            second.kill()
        with ServingProcess(server.url, log) as again:
            for model in MODELS:
                again.ask("open", model)
                told[model]["again"] = (again.ask("serve", 1), again.ask("serve", 2))
                again.ask("forget")
                told[model]["unknown"] = again.ask("serve", 3)
                again.ask("drain")
                again.ask("close")
    return told


@pytest.mark.parametrize("model", MODELS)
def test_each_of_two_processes_finds_what_the_other_stored(found: dict[str, dict[str, Any]], model: str) -> None:
    told = found[model]
    assert told["cold"] == (0, 0)
    assert told["stored"] > 0
    assert told["other"] == (PROMPT, PROMPT)
    assert told["stored again"] == 0, "what both have is there once"


@pytest.mark.parametrize("model", MODELS)
def test_a_process_that_was_killed_and_started_again_finds_everything(
    found: dict[str, dict[str, Any]], model: str
) -> None:
    assert found[model]["again"] == (PROMPT, PROMPT)
    assert found[model]["unknown"] == 0


def test_nothing_was_damaged_or_is_left_reserved(found: dict[str, dict[str, Any]], server: HostProcess) -> None:
    assert len(found) == len(MODELS)
    after = counts(server)
    assert after["hits"] > 0
    assert [after[name] for name in ("evicted", "no_room", "damaged", "malformed", "reserved_bytes")] == [0] * 5
    assert not [name for name in after if "." in name], "there is no store behind it"
