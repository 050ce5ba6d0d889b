"""The store benchmark measures what it says, on any backend, without torch."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.cli import bench_store
from asynccache.cli.bench_raw import CopyClient
from asynccache.cli.bench_store import PassMeter, summary
from asynccache.cli.charts import cell, text
from asynccache.cli.main import main
from asynccache.errors import BackendError
from asynccache.storage import RECORD_SCHEMA, PageKey, Record, Result, StoreLayout, checked, open_store
from asynccache.storage.checked import seal

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("plug_ins")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_store.add_arguments(parser)
    return parser.parse_args(words)


def silent(_: str) -> None:
    """Tell nobody how far a measurement has come."""


SMALL = ("--page-sizes", "16KiB,64KiB", "--bytes", "1MiB", "--repeat", "2", "--batch", "8")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_file_store_is_measured_buffered_and_direct(tmp_path: Path, loop: str) -> None:
    told: list[str] = []
    report = bench_store.run(options(f"file:{tmp_path}/s?capacity=64MiB", *SMALL, "--loop", loop), told.append)
    assert [size["page_bytes"] for size in report["sizes"]] == [16384, 65536]
    for size in report["sizes"]:
        assert size["raw"].keys() == {"memcpy", "checksum"}
        for mode in ("buffered", "direct"):
            found = size[mode]
            assert (found["mismatches"], found["without_raw"], found["stats"]["errors"]) == (0, None, 0)
            assert found["raw"].keys() == found["off"].keys() == {"put", "get"}
            assert found["on"].keys() == {"put", "get", "get_shuffled", "exists"}
            for figures in (*found["raw"].values(), *found["off"].values(), *found["on"].values()):
                assert figures["p999_ms"] >= figures["p99_ms"] >= figures["p50_ms"] > 0
                assert figures["calls"] == 2 * (1 << 20) // size["page_bytes"] // 8
            for variant in ("off", "on"):
                for name in ("put", "get"):
                    assert found["ratio"][variant][name] > 0
                    assert "own_us_per_page" in found[variant][name]
        assert size["buffered"]["stats"]["direct"] == 0
    assert any("16.0 KiB pages, round 2 of 2, on: get shuffled, " in line for line in told)
    json.dumps(report)


def test_what_is_in_a_store_stays_there(tmp_path: Path) -> None:
    async def pages(change: bool) -> list[Result]:
        store = await open_store(f"file:{tmp_path}/s?capacity=64MiB", StoreLayout({"full": 4096}, RECORD_SCHEMA))
        assert store is not None
        keys = [PageKey("full", bytes([n]) * 32) for n in range(20)]
        buffers = [memoryview(bytearray(4096)) for _ in keys]
        results = await (store.put(keys, buffers) if change else store.get(keys, buffers))
        count = store.stats()["pages"]
        await store.aclose()
        assert count == 20
        return results

    asyncio.run(pages(True))
    bench_store.run(options(f"file:{tmp_path}/s?capacity=64MiB", *SMALL), silent)
    assert asyncio.run(pages(False)) == [Result.HIT] * 20


@pytest.mark.parametrize(("verify", "variants"), [("on", {"raw", "on"}), ("off", {"raw", "off"})])
def test_with_checksums_or_without(verify: str, variants: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_store.run(options("memory:", *SMALL, "--verify", verify), silent)
    for size in report["sizes"]:
        assert size["store"].keys() & {"raw", "off", "on"} == variants
        assert size["store"]["ratio"].keys() == {verify}
        assert {"put", "get", "get_shuffled", "exists"} == size["store"][verify].keys()


def test_checksums_are_made_only_with_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"off": 0, "on": 0}
    original = seal

    def counted(keys: Sequence[PageKey], records: Sequence[Record]) -> None:
        made[verify] += len(keys)
        original(keys, records)

    monkeypatch.setattr(checked, "seal", counted)
    for verify in made:
        bench_store.run(options("memory:", *SMALL, "--verify", verify), silent)
    assert made == {"off": 0, "on": 2 * (64 + 16)}


def test_a_store_that_returns_wrong_bytes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing verifies them where checksums are off, but the benchmark looks at every page."""
    original = MemoryBackend.get

    async def get(self: MemoryBackend, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await original(self, keys, records)
        records[0].payload[100] ^= 1
        return results

    monkeypatch.setattr(MemoryBackend, "get", get)
    report = bench_store.run(options("memory:", *SMALL, "--verify", "off"), silent)
    assert report["sizes"][0]["store"]["mismatches"] == 2 * (1 << 20) // 16384 // 8
    assert "pages came back wrong" in "".join(map(text, bench_store.charts(report)))


def test_a_run_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    close = MemoryBackend.aclose

    async def get(self: MemoryBackend, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return [Result.FAILED] * len(keys)

    async def aclose(self: MemoryBackend) -> None:
        left.append(self.stats()["pages"])
        await close(self)

    monkeypatch.setattr(MemoryBackend, "get", get)
    monkeypatch.setattr(MemoryBackend, "aclose", aclose)
    with pytest.raises(BackendError, match="the store failed for 8 of 8 pages"):
        bench_store.run(options("memory:", *SMALL), silent)
    assert left == [0]


def test_a_raw_client_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def put(self: CopyClient, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        raise ValueError("MOVED")

    monkeypatch.setattr(CopyClient, "put", put)
    report = bench_store.run(options("memory:", *SMALL), silent)
    found = report["sizes"][0]["store"]
    assert (found["without_raw"], found["ratio"]) == ("ValueError: MOVED", {})
    assert "no raw client: ValueError: MOVED" in "".join(map(text, bench_store.charts(report)))


def test_the_table_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"file:{tmp_path}/s?capacity=64MiB", "--page-sizes", "16KiB", "--bytes", "1MiB"]
    files = ["--json", str(tmp_path / "s.json")]
    assert main(["bench", "store", *words, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or line.startswith("file:") for line in lines)
    first = lines.index(next(line for line in lines if line.startswith("put")))
    names = [line[:17].strip() for line in lines[first : first + 8]]
    assert names[:3] == ["put, raw", "put, off", "put, on"]
    assert names[3:] == ["get, raw", "get, off", "get, on", "get, shuffled, on", "exists, on"]
    figures = json.loads((tmp_path / "s.json").read_text())["sizes"][0]["buffered"]
    assert lines[first].split()[2] == cell(figures["raw"]["put"]["gb_per_s"])
    assert lines[first + 2].split()[3] == cell(figures["ratio"]["on"]["put"])
    assert main(["bench", "store", *words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "store"


def test_without_a_url_it_uses_a_folder_of_its_own_and_removes_it() -> None:
    report = bench_store.run(options(*SMALL), silent)
    assert not Path(report["settings"]["url"].removeprefix("file:").split("?")[0]).parent.exists()


def test_quantiles_and_medians() -> None:
    calls = [ms / 1e3 for ms in range(1, 501)]
    passes = [PassMeter(10, 1000, calls, wall=wall, cpu=wall / 2) for wall in (1.0, 9.0, 2.0)]
    found = summary(passes)
    assert (found["p50_ms"], found["p99_ms"], found["p999_ms"]) == (251, 496, 500)
    assert (found["pages_per_s"], found["gb_per_s"], found["cpu_us_per_page"]) == (5, 0.0, 100_000.0)


@pytest.mark.parametrize(
    "words",
    [
        ("none",), ("--bytes", "1KiB"), ("--page-sizes", "big"), ("--concurrency", "0"), ("--repeat", "0"),
        ("--batch", "0"), ("tea:pot",),
    ],
)
def test_unusable_options_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "store", *SMALL, *words]) == 2
    assert words[0].partition(":")[0] in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    code = "import sys, asynccache.cli.bench_store, asynccache_backends.file; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
