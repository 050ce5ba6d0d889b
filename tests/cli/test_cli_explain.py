"""``--serve`` and ``asynccache explain``: a run can be asked about prompts; where it cannot, there is one sentence.
What is told of a prompt on each tier, in part, evicted, without a window or a state: ``tests/runtime/test_explain.py``.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynccache.cli.explain import tokens
from tests.processes import Command, Running

RUN = ["stress", "--serve", "0", "--quiet", "--duration", "300", "--workload", "chat", "--rate", "12",
       "--seed", "5", "--concurrency", "1", "--components", "full,swa,mamba", "--end-hints", "0.5",
       "--window", "256", "--device-tokens", "8192", "--host-tokens", "16384", "--swa-ratio", "0.4",
       "--storage", "memory:?capacity=24MiB"]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Where the run is served."""
    with Running("-m", "asynccache", *RUN) as process:
        yield process.line().split()[1].removesuffix("/metrics")
        done = process.ended(signal.SIGINT)
        assert done.returncode == 130, done


def test_tokens_are_read_in_any_usual_form() -> None:
    assert (tokens("1,2, 3 4\n"), tokens("[5]")) == ([1, 2, 3, 4], [5])


def test_a_run_can_be_looked_into(served: str, command: Command, tmp_path: Path) -> None:
    for page, word in (("/metrics", "asynccache_requests_total"), ("/healthz", "ok"), ("/statistics", '"lookups"')):
        with urllib.request.urlopen(served + page, timeout=20) as answer:
            assert word in answer.read().decode()
    printed = command("explain", served, "--tokens", ",".join(["7"] * 40)).stdout
    assert printed.startswith("40 tokens, 32 of them in whole pages\n")
    assert "match: 0 on the device" in printed
    assert "never in memory" in printed
    file = tmp_path / "tokens"
    file.write_text("[1, 2,\n3]")
    answer = json.loads(command("explain", served.removeprefix("http://"), "--tokens", f"@{file}", "--json").stdout)
    assert answer["tokens"] == 3
    theirs = json.loads(command("explain", served, "--tokens", "7 " * 40, "--namespace", "theirs", "--json").stdout)
    assert {span["where"] for span in theirs["spans"]} == {"nowhere"}
    assert "refuses: tokens[1]=-2" in command("explain", served, "--tokens", "1,-2", status=2).stderr
