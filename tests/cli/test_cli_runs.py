"""Whole runs of ``stress`` and ``replay``: the real cache, small workloads, every page verified."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import session
from asynccache.cli.engine import StandInEngine
from asynccache.cli.main import main
from asynccache.cli.options import LOOPS
from asynccache.cli.service import Server
from asynccache.cli.workloads import RunRequest
from asynccache.worker.stages import BackupHostStage
from tests.cli.trace_kit import ALL, BY_BLOCK, made_trace

pytestmark = pytest.mark.slow(0.7)

REAL = os.environ.get("ASYNCCACHE_TRACE", "")
SMALL = [*ALL, "--rate", "0", "--concurrency", "8", "--bytes-per-token", "64", "--mamba-bytes", "1024", "--window",
         "256", "--device-tokens", "12288", "--host-tokens", "24576", "--quiet"]


def run(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """One run in this process; its report."""
    json_file = Path(str(arguments[-1])) if arguments[-2] == "--json" else None
    assert main([str(a) for a in arguments]) == status
    assert json_file is not None
    report: dict[str, Any] = json.loads(json_file.read_text())
    return report


@pytest.fixture
def out(tmp_path: Path) -> tuple[str, Path]:
    return "--json", tmp_path / "report.json"


@pytest.mark.parametrize("loop", LOOPS)
def test_stress_is_clean_with_all_components_and_tiers(loop: str, tmp_path: Path, out: tuple[str, Path]) -> None:
    report = run("stress", *SMALL, "--requests", "120", "--loop", loop, "--storage", f"file:{tmp_path}/kv", *out)
    assert report["requests"] == report["served"] == 120
    assert report["verify"]["mismatches"] == 0
    assert report["verify"]["pages"] > 1000
    assert set(report["leaks"].values()) == {0}
    hit, total = report["tokens"]["hit"], report["tokens"]["total"]
    assert hit["device"] > 0
    assert hit["host"] > 0
    assert report["hit_ratio"] == pytest.approx(sum(hit.values()) / total)
    assert report["stages"]["backup_storage"]["bytes"] > 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_stress_is_clean_with_faults_and_cancellations(policy: str, out: tuple[str, Path]) -> None:
    report = run("stress", *SMALL, "--requests", "150", "--faults", "0.2", "--cancel-rate", "0.4", "--seed", "7",
                 "--write-policy", policy, *out)
    assert report["cancelled"] > 15
    assert report["served"] + report["cancelled"] == report["requests"] == 150
    assert report["failed"] == report["verify"]["mismatches"] == 0
    assert set(report["leaks"].values()) == {0}


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba"])
@pytest.mark.parametrize("workload", ["chat", "agent"])
def test_stress_is_clean_without_storage(components: str, workload: str, out: tuple[str, Path]) -> None:
    report = run("stress", *SMALL, "--requests", "80", "--components", components, "--workload", workload,
                 "--storage", "none", "--prefetch-policy", "best_effort", *out)
    assert report["hit_ratio"] > 0.1
    assert report["tokens"]["hit"]["storage"] == 0


def test_no_collection_of_what_was_loaded_before_falls_into_the_run(
    monkeypatch: pytest.MonkeyPatch, out: tuple[str, Path]
) -> None:
    """It would hold up the loop for 130 ms, once."""
    seen: list[int] = []
    serve = Server.serve

    async def counted(self: Server, *arguments: Any) -> None:
        seen.append(len(gc.get_objects(generation=2)))
        await serve(self, *arguments)

    monkeypatch.setattr(Server, "serve", counted)
    gc.unfreeze()
    before = len(gc.get_objects(generation=2))
    run("stress", *SMALL, "--requests", "2", *out)
    assert seen[0] < before / 10


def test_the_report_has_every_key(out: tuple[str, Path]) -> None:
    report = run("stress", *SMALL, "--requests", "10", *out)
    for path in ("requests", "tokens.total", "tokens.hit.device", "tokens.hit.host", "tokens.hit.storage", "hit_ratio",
                 "verify.pages", "verify.mismatches", "leaks.device_pages", "leaks.host_pages", "leaks.pins",
                 "leaks.tasks", "cancelled", "failed", "loop_lag_ms.p50", "loop_lag_ms.p99", "loop_lag_ms.p999",
                 "loop_lag_ms.max", "run_queue_ms.p999", "lost_pages", "elapsed_s", "cpu_s", "rss_bytes",
                 "settings.page_size"):
        value: Any = report
        for name in path.split("."):
            value = value[name]
        assert isinstance(value, (int, float)), path
    for name in ("backup_host", "load_back", "backup_storage", "prefetch"):
        assert {"ops", "pages", "bytes", "errors", "latency_ms"} <= report["stages"][name].keys()
    assert "blocks" not in report


def test_with_room_for_everything_a_replay_hits_what_the_trace_implies(tmp_path: Path, out: tuple[str, Path]) -> None:
    trace = made_trace(tmp_path / "trace.jsonl")
    report = run("replay", trace, "--device-tokens", "all", "--host-tokens", "none", "--concurrency", "1", "--quiet",
                 *out)
    blocks = report["blocks"]
    assert blocks["hit"] == blocks["shared"] > 100
    assert blocks["total"] == sum(len(json.loads(line)["hash_ids"]) - 1 for line in trace.read_text().splitlines())
    assert report["evicted"] == {"device": 0, "host": 0}


def test_with_little_room_the_tiers_together_still_hold_it(tmp_path: Path, out: tuple[str, Path]) -> None:
    trace = made_trace(tmp_path / "trace.jsonl")
    report = run("replay", trace, "--device-tokens", str(60 * 512), "--host-tokens", str(80 * 512), "--storage",
                 "memory:", "--concurrency", "1", "--quiet", *out)
    assert report["blocks"]["hit"] == report["blocks"]["shared"]
    assert min(report["tokens"]["hit"].values()) > 0
    assert report["evicted"]["device"] > 0
    assert report["evicted"]["host"] > 0


def test_all_components_replay_by_the_clock_with_hints(tmp_path: Path, out: tuple[str, Path]) -> None:
    trace = made_trace(tmp_path / "trace.jsonl")
    report = run("replay", trace, "--components", "full,swa,mamba", "--page-size", "64", "--device-tokens", "all",
                 "--host-tokens", "all", "--mamba-bytes", "1024", "--speed", "100", "--end-hints", "0.5",
                 "--insert-outputs", "--storage", "memory:", "--limit", "60", "--quiet", *out)
    assert report["served"] == 60
    assert report["tokens"]["hit"]["device"] > 0


def test_the_second_run_starts_with_the_pages_of_the_first(tmp_path: Path, out: tuple[str, Path]) -> None:
    trace = made_trace(tmp_path / "trace.jsonl")
    arguments = ["replay", str(trace), "--device-tokens", str(64 * 512), "--host-tokens", str(64 * 512), "--storage",
                 f"file:{tmp_path}/kv", "--concurrency", "1", "--quiet", *map(str, out)]
    first, second = run(*arguments), run(*arguments)
    assert first["blocks"]["hit"] == first["blocks"]["shared"] < first["blocks"]["total"]
    assert second["blocks"]["hit"] == second["blocks"]["total"]
    assert second["tokens"]["hit"]["storage"] > first["tokens"]["hit"]["storage"]
    assert second["verify"]["mismatches"] == 0


def test_wrong_bytes_are_seen_and_fail_the_run(monkeypatch: pytest.MonkeyPatch, out: tuple[str, Path],
                                               capsys: pytest.CaptureFixture[str]) -> None:
    write, written = StandInEngine.write, []

    def forgetful(self: StandInEngine, pieces: Any) -> None:
        written.append(1)
        if len(written) != 5:
            write(self, pieces)

    monkeypatch.setattr(StandInEngine, "write", forgetful)
    report = run("stress", *SMALL, "--requests", "40", "--seed", "1", *out, status=1)
    assert report["verify"]["mismatches"] > 0
    assert not report["ok"]
    assert "pages are wrong" in capsys.readouterr().err


def test_a_request_that_cannot_fit_fails_the_run(out: tuple[str, Path]) -> None:
    report = run("stress", *SMALL, "--device-tokens", "1024", "--host-tokens", "2048", "--components", "full",
                 "--requests", "30", *out, status=1)
    assert report["failed"] > 0
    assert "gave up" in report["problems"][0]
    assert set(report["leaks"].values()) == {0}


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", *SMALL[:-1], "--requests", "5", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["served"] == 5
    assert shown.err.startswith("stress OK: 5 requests")


def test_a_cache_that_closes_itself_ends_the_run_with_its_report(monkeypatch: pytest.MonkeyPatch,
                                                                 out: tuple[str, Path]) -> None:
    async def dies(stage: BackupHostStage) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(BackupHostStage, "run", dies)
    report = run("stress", *SMALL, "--requests", "20", *out, status=1)
    assert not report["ok"]
    assert any("closed itself" in problem and "no such luck" in problem for problem in report["problems"])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("hang", [False, True])
def test_an_interrupt_ends_the_run_with_its_report(hang: bool, loop: str, monkeypatch: pytest.MonkeyPatch,
                                                   out: tuple[str, Path]) -> None:
    """Also if requests do not end by themselves: they are cancelled when their time is up."""
    serve, begun = Server.serve, []

    async def pressing(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        begun.append(request.number)
        if len(begun) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        if hang and len(begun) > 15:
            await asyncio.Event().wait()  # hangs until it is cancelled
        await serve(self, request, places)

    monkeypatch.setattr(Server, "serve", pressing)
    monkeypatch.setattr(session, "GRACE", 0.05 if hang else 60.0)
    report = run("stress", *SMALL, "--duration", "60", "--loop", loop, *out, status=130)
    assert report["interrupted"]
    assert report["ok"]
    assert 20 <= report["requests"] < 60
    assert (report["cancelled"] > 0) == hang
    assert set(report["leaks"].values()) == {0}
    assert report["elapsed_s"] < 30


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_request_that_meets_a_bug_is_a_sentence_and_its_traceback_is_in_the_report(
    debug: str, monkeypatch: pytest.MonkeyPatch, out: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Server, "serve", breaks)
    monkeypatch.setenv("ASYNCCACHE_DEBUG", debug)
    report = run("stress", *SMALL, "--requests", "5", *out, status=1)
    said = capsys.readouterr().err
    assert "met KeyError: 'x'" in said
    assert ("Traceback" in said, "--debug shows where" in said) == (bool(debug), not debug)
    assert "in breaks" in report["traceback"]


@pytest.mark.soak
@pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_real_trace_hits_all_that_it_implies(out: tuple[str, Path]) -> None:
    report = run("replay", REAL, *BY_BLOCK, "--device-tokens", "all", "--host-tokens", "none", "--concurrency", "1",
                 "--quiet", *out)
    assert (report["blocks"]["hit"], report["blocks"]["total"]) == (105_592, 276_491)
    assert report["verify"] == {"pages": 105_592, "mismatches": 0}


@pytest.mark.soak
@pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")
@pytest.mark.parametrize(("blocks", "least"), [(1_000, 0.0465), (30_000, 0.344)])
def test_the_real_trace_in_little_room_does_as_well_as_lru(blocks: int, least: float, out: tuple[str, Path]) -> None:
    report = run("replay", REAL, *BY_BLOCK, "--device-tokens", str(blocks * 512), "--host-tokens", "none",
                 "--concurrency", "1", "--quiet", *out)
    assert report["blocks"]["hit"] / report["blocks"]["total"] >= least
