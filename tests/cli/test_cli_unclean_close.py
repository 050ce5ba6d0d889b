"""A run whose cache cannot close cleanly has a report and exit status 1, with one rank and with several."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.cli.main import main
from asynccache.errors import BackendError, RankFailure
from asynccache.worker.group import WorkerGroup
from tests import warm
from tests.cli.rank_runs import TP2, options


def test_a_store_that_cannot_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: MemoryBackend) -> None:
        raise BackendError("the disk is gone")

    monkeypatch.setattr(MemoryBackend, "aclose", fails)
    path = tmp_path / "report.json"
    status = main(["stress", "--requests", "8", "--storage", "memory:", "--quiet", "--json", str(path)])
    report = json.loads(path.read_text())
    assert status == 1
    assert not report["ok"]
    assert report["requests"] == 8
    assert any("could not close cleanly: " in problem and "the disk is gone" in problem
               for problem in report["problems"])  # fmt: skip


@pytest.mark.slow(8)
def test_a_rank_that_is_late_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    aclose = WorkerGroup.aclose

    async def fails(self: WorkerGroup, patience: float) -> None:
        await aclose(self, patience)
        raise BackendError("rank 1: was late") from RankFailure("was late", 1)

    monkeypatch.setattr(WorkerGroup, "aclose", fails)
    path = tmp_path / "report.json"
    arguments = options(TP2, f"file:{tmp_path}/kv?capacity=64MiB", path, "--requests", "20", "--quiet")
    assert main(arguments) == 1
    report = json.loads(path.read_text())
    assert not report["ok"]
    assert any("could not close cleanly: rank 1: was late" in problem for problem in report["problems"])
    assert report["served"] == 20
