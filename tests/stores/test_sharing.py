"""Two processes on one store, with the replay tool: what one has stored, the other hits; and both at the same time are
harmless. Every page that either reads is verified."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main
from tests import warm
from tests.stores.each import KINDS, fresh_seed, store_url

ROOT = Path(__file__).resolve().parents[2]
SHARED = tuple(kind for kind in KINDS if kind != "file")  # a folder is one process's at a time
BLOCK = 512
WITHIN = 120.0


def trace(path: Path, seed: int) -> Path:
    """Conversations that grow by a block, in the Mooncake format; blocks of different seeds never meet."""
    rng, rows = random.Random(seed), []
    known = {who: [seed * 10_000 + who] for who in range(8)}
    for at in range(40):
        who = rng.randrange(8)
        known[who] = [*known[who], seed * 10_000 + 100 + at]
        rows.append({"timestamp": at * 50, "input_length": len(known[who]) * BLOCK, "output_length": 8,
                     "hash_ids": known[who]})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(made: Path, url: str, out: str) -> list[str]:
    """A replay whose tiers hold a fraction of the trace."""
    return ["replay", str(made), "--storage", url, "--json", out, "--quiet", "--components", "full",
            "--page-size", "64", "--bytes-per-token", "32", "--device-tokens", "24576",
            "--host-tokens", "32768", "--concurrency", "4", "--decode-tokens", "4"]  # fmt: skip


def here(kind: str, made: Path, url: str) -> dict[str, Any]:
    """What a replay by this process says at its end. Of Mooncake a process has one client to its end, so that has a
    process of its own."""
    if kind == "mooncake":
        return report(replay(made, url))
    out = made.with_suffix(".json")
    assert main(words(made, url, str(out))) == 0
    return checked(out.read_text())


def replay(made: Path, url: str) -> subprocess.Popen[str]:
    """A replay by another process."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "backends", ROOT / "scheduler_shim")))
    command = [sys.executable, "-m", "asynccache", *words(made, url, "-")]
    return warm.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says at its end."""
    try:
        out, _ = process.communicate(timeout=WITHIN)
    finally:
        process.kill()
    assert process.returncode == 0, f"status {process.returncode}"
    return checked(out)


def checked(text: str) -> dict[str, Any]:
    """A report: every page right, nothing left."""
    found: dict[str, Any] = json.loads(text)
    assert found["problems"] == []
    assert found["verify"]["mismatches"] == 0 < found["verify"]["pages"]
    assert found["leaks"] == {"device_pages": 0, "host_pages": 0, "pins": 0, "tasks": 0}
    assert (found["requests"], found["served"], found["failed"]) == (40, 40, 0)
    return found


def of_storage(found: dict[str, Any]) -> int:
    return int(found["tokens"]["hit"]["storage"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_hits_what_the_first_has_stored(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store_url(kind, request, tmp_path, monkeypatch)
    made = trace(tmp_path / "trace.jsonl", fresh_seed())
    first = here(kind, made, url)
    second = report(replay(made, url))
    assert second["hit_ratio"] > first["hit_ratio"]
    assert of_storage(second) > of_storage(first)
    assert second["hit_ratio"] > 0.9, "all but each prompt's last page, which is computed in any case"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_both_at_the_same_time(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write the same pages at the same time, and read what the other is writing."""
    url = store_url(kind, request, tmp_path, monkeypatch)
    made = trace(tmp_path / "trace.jsonl", fresh_seed())
    for found in [report(process) for process in [replay(made, url), replay(made, url)]]:
        assert found["storage"]["corrupt_pages"] == 0
    third = here(kind, made, url)
    assert third["hit_ratio"] > 0.9
