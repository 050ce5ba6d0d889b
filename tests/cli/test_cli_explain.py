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
from asynccache.cli.workloads import RunRequest, StressSource
from tests.processes import Command, Running
from tests.waiting import wait_until

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


def test_a_prompt_is_found_under_its_namespace_and_under_no_other(served: str, command: Command) -> None:
    """What the run asks for: a request is drawn while the one before is served."""
    source, asked = StressSource("chat", seed=5, requests=None, open_conversations=4, hints=0.5, rate=12.0), []
    for at in range(60):
        request = source.next()
        assert request is not None
        asked.append(request)
        if at:
            source.done(asked[-2])

    def places(request: RunRequest, namespace: str) -> set[str]:
        told = command("explain", served, "--tokens", " ".join(map(str, request.prompt().tolist())), "--json",
                       "--namespace", namespace)  # fmt: skip
        return {span["where"] for span in json.loads(told.stdout)["spans"]}

    mine = [request for request in asked if request.namespace]
    wait_until(lambda: any(places(request, str(request.namespace)) != {"nowhere"} for request in mine))
    assert all(places(request, "theirs") == {"nowhere"} for request in mine)
