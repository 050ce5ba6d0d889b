"""A run can be asked about prompts, on each tier, in part, evicted, without a window, without a state."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.explain import tokens
from asynccache.cli.main import main
from asynccache.cli.workloads import RunRequest, StressSource
from tests import warm

# ``--serve`` and ``asynccache explain``: a run can be asked about prompts; where it cannot, there is one sentence.


SEED, PROMPTS, PATIENCE = 5, 60, 60.0
RUN = ["stress", "--serve", "0", "--quiet", "--duration", "300", "--workload", "chat", "--rate", "12",
       "--seed", f"{SEED}", "--concurrency", "1", "--components", "full,swa,mamba", "--end-hints", "0.5",
       "--window", "256", "--device-tokens", "8192", "--host-tokens", "16384", "--swa-ratio", "0.4",
       "--storage", "memory:?capacity=24MiB"]  # fmt: skip
WANTED = {"device", "host", "storage", "nowhere", "in part", "evicted", "no window", "no state", "prefetch"}


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Where the run is served."""
    with warm.Popen([sys.executable, "-m", "asynccache", *RUN], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[1].removesuffix("/metrics")
            process.send_signal(2)
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 130, said
        finally:
            process.kill()


def test_tokens_are_read_in_any_usual_form() -> None:
    assert (tokens("1,2, 3 4\n"), tokens("[5]")) == ([1, 2, 3, 4], [5])


def test_a_run_can_be_looked_into(served: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for page, word in (("/metrics", "asynccache_requests_total"), ("/healthz", "ok"), ("/statistics", '"lookups"')):
        with urllib.request.urlopen(served + page, timeout=20) as answer:
            assert word in answer.read().decode()
    assert main(["explain", served, "--tokens", ",".join(["7"] * 40)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("40 tokens, 32 of them in whole pages\n")
    assert "match: 0 on the device" in printed
    assert "never in memory" in printed
    file = tmp_path / "tokens"
    file.write_text("[1, 2,\n3]")
    assert main(["explain", served.removeprefix("http://"), "--tokens", f"@{file}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3
    assert main(["explain", served, "--tokens", "1,-2"]) == 2
    assert "refuses: tokens[1]=-2" in capsys.readouterr().err


def prompts() -> list[RunRequest]:
    """What the run asks for: a request is drawn while the one before is served."""
    source = StressSource("chat", seed=SEED, requests=None, open_conversations=4, hints=0.5, rate=12.0)
    drawn = [source.next()]
    while len(drawn) < PROMPTS:
        drawn.append(source.next())
        if (before := drawn[-2]) is not None:
            source.done(before)
    return [request for request in drawn if request is not None]


def kinds(answer: dict[str, Any]) -> Iterator[str]:
    """What this answer is an example of."""
    places = {span["where"] for span in answer["spans"]}
    yield from places
    if len(places) > 1:
        yield "in part"
    if "evicted" in answer["why"] or "left" in answer["why"]:
        yield "evicted"
    if answer["fetch"].startswith("up to"):
        yield "prefetch"
    full = [span for span in answer["spans"] if "present" in span["states"].get("full", ())]
    if any("present" not in span["states"]["swa"] for span in full):
        yield "no window"
    if any("present" not in span["states"]["mamba"] for span in full):
        yield "no state"


def holds(answer: dict[str, Any]) -> None:
    """What is true of every answer."""
    assert answer["spans"][0]["start"] == 0
    assert answer["spans"][-1]["stop"] == answer["length"]
    assert all(one["stop"] == other["start"] for one, other in zip(answer["spans"], answer["spans"][1:], strict=False))
    assert answer["device"] <= answer["host"] <= answer["storage"] <= answer["length"]
    assert answer["ends"] in (None, "full", "swa", "mamba")


@pytest.mark.slow
def test_prompts_are_found_wherever_they_are(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, dict[str, Any]] = {}
    asked, end, file = prompts(), time.monotonic() + PATIENCE, tmp_path / "prompt"
    while not seen.keys() >= WANTED:
        assert time.monotonic() < end, f"never seen: {WANTED - seen.keys()}"
        for request in asked:
            file.write_text(" ".join(map(str, request.prompt().tolist())))
            key = ["--namespace", request.namespace] if request.namespace else []
            assert main(["explain", served, "--tokens", f"@{file}", "--json", *key]) == 0
            answer = json.loads(capsys.readouterr().out)
            holds(answer)
            seen |= dict.fromkeys(kinds(answer), answer)
            if seen.keys() >= WANTED:
                break
    assert seen["no window"]["length"] > 0
