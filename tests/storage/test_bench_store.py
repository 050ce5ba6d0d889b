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

from asynccache.cli import bench
from asynccache.cli.bench import summary
from asynccache.cli.main import main
from asynccache.errors import BackendError
from asynccache.storage import RECORD_SCHEMA, CheckedStore, PageKey, Record, Result, StoreLayout, open_store

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("plug_ins")


def options(*words: str) -> bench.Options:
    parser = argparse.ArgumentParser()
    bench.Options.add_arguments(parser)
    return bench.Options.read("bench", vars(parser.parse_args(["store", *words])))


def silent(_: str) -> None:
    """Tell nobody how far a measurement has come."""


SMALL = ("--page-sizes", "16KiB,64KiB", "--bytes", "1MiB", "--repeat", "2", "--batch", "8")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_every_operation_is_measured_in_every_round(tmp_path: Path, loop: str) -> None:
    told: list[str] = []
    report = bench.run(options(f"file:{tmp_path}/s?capacity=64MiB&direct=off", *SMALL, "--loop", loop), told.append)
    assert [size["page_bytes"] for size in report["sizes"]] == [16384, 65536]
    for size in report["sizes"]:
        assert (size["mismatches"], size["stats"]["errors"], size["stats"]["direct"]) == (0, 0, 0)
        for op in ("put", "get", "get_shuffled", "exists"):
            assert size[op]["p999_ms"] >= size[op]["p99_ms"] >= size[op]["p50_ms"] > 0
            assert size[op]["calls"] == 2 * (1 << 20) // size["page_bytes"] // 8
            assert ("gb_per_s" in size[op]) == (op != "exists")
    assert any("16.0 KiB pages, round 2 of 2: get shuffled, " in line for line in told)
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
    bench.run(options(f"file:{tmp_path}/s?capacity=64MiB", *SMALL), silent)
    assert asyncio.run(pages(False)) == [Result.HIT] * 20


def test_a_store_that_returns_wrong_bytes_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checksums find most of that, and the benchmark looks at every page itself."""
    original = CheckedStore.get

    async def get(self: CheckedStore, keys: Sequence[PageKey], into: Sequence[memoryview]) -> list[Result]:
        results = await original(self, keys, into)
        into[0][100] ^= 1
        return results

    monkeypatch.setattr(CheckedStore, "get", get)
    assert main(["bench", "store", "memory:", *SMALL, "--json"]) == 1
    size = json.loads(capsys.readouterr().out)["sizes"][0]
    assert size["mismatches"] == 2 * 2 * (1 << 20) // 16384 // 8
    assert main(["bench", "store", "memory:", *SMALL]) == 1
    assert "pages came back wrong" in capsys.readouterr().out


def test_a_store_that_leaves_the_buffer_as_it_was_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round, too, when the buffer has had the right bytes before."""
    original, calls = CheckedStore.get, 0

    async def get(self: CheckedStore, keys: Sequence[PageKey], into: Sequence[memoryview]) -> list[Result]:
        nonlocal calls
        calls += 1
        return await original(self, keys, into) if calls <= 2 * 8 else [Result.HIT] * len(keys)

    monkeypatch.setattr(CheckedStore, "get", get)
    report = bench.run(options("memory:", "--page-sizes", "16KiB", *SMALL[2:]), silent)
    assert report["sizes"][0]["mismatches"] == 2 * 64


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
        bench.run(options("memory:", *SMALL), silent)
    assert left == [0]


def test_the_table_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"file:{tmp_path}/s?capacity=64MiB", "--page-sizes", "16KiB", "--bytes", "1MiB"]
    files = ["--json", str(tmp_path / "s.json")]
    assert main(["bench", "store", *words, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or line.startswith("file:") for line in lines)
    first = lines.index(next(line for line in lines if line.startswith("  put")))
    assert [line[:16].strip() for line in lines[first : first + 4]] == ["put", "get", "get, shuffled", "exists"]
    figures = json.loads((tmp_path / "s.json").read_text())["sizes"][0]
    assert lines[first].split()[1] == f"{figures['put']['gb_per_s']:.2f}"
    assert main(["bench", "store", *words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "store"
    assert main(["bench", "store", *words, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_without_a_url_it_uses_a_folder_of_its_own_and_removes_it() -> None:
    report = bench.run(options(*SMALL), silent)
    assert not Path(report["settings"]["url"].removeprefix("file:").split("?")[0]).parent.exists()


def test_quantiles_and_medians() -> None:
    calls = [ms / 1e3 for ms in range(1, 501)]
    found = summary([(wall, wall / 2, calls) for wall in (1.0, 9.0, 2.0)], 10, 1000)
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
    code = "import sys, asynccache.cli.bench, asynccache_backends.file; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
