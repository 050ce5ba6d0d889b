"""The commands and benchmarks of stores, on any backend."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend

from asynccache.cli import bench, output
from asynccache.cli.bench import summary
from asynccache.cli.main import main
from asynccache.cli.output import progress
from asynccache.cli.store import age
from asynccache.errors import BackendError
from asynccache.storage import CheckedStore, PageKey, ParsedUrl, Record, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, keys_of
from tests.storage import pages_kit
from tests.storage.pages_kit import open_at
from tests.stores.server import ours

# ``asynccache store``: the text, the JSON, the exit status, and progress for those who wait.




@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of 60 full and 20 odd pages."""

    async def fill() -> None:
        store = await open_at(tmp_path / "kv", "capacity=64MiB&segment=4MiB")
        await pages_kit.fill(store, keys_of(60) + keys_of(20, "odd"))
        await store.aclose()

    asyncio.run(fill())
    return tmp_path / "kv"


def damage(folder: Path) -> None:
    with (folder / f"segment-{1:016x}.kv").open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"rot")


def test_a_damaged_page_is_dropped_and_the_status_says_so_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert main(["store", "verify", f"file:{folder}"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT OK: 80 pages")
    assert "1 damaged pages were dropped" in out
    assert main(["store", "verify", f"file:{folder}"]) == 0
    assert capsys.readouterr().out.startswith("OK: 79 pages")


def test_the_answer_as_json(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damage(folder)
    assert main(["store", "verify", f"file:{folder}", "--json", "-", "--rate", "1GiB"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report.pop("elapsed_s") >= 0
    assert report == {
        "command": "verify", "url": f"file:{folder}", "pages": 80, "bytes": 60 * 16384 + 20000,
        "bad": 1, "unread": 0, "ok": False,
    }
    assert main(["store", "stat", f"file:{folder}", "--json", str(tmp_path / "stat.json")]) == 0
    stat = json.loads((tmp_path / "stat.json").read_text())
    assert (stat["pages"], stat["stats"]["segments"], stat["breaker"]) == (79, 2, "closed")  # one has the deletion


def test_stat_for_a_person(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stat", f"file:{folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"file:{folder}: 80 pages, 980 KiB; ")
    assert lines[0].endswith(" of 64.0 MiB in 1 segments")
    assert [line.split()[0] for line in lines[1:3]] == ["20", "60"]
    assert lines[3] == "  by age: 80 below an hour"
    assert lines[4].startswith("  it answers in ")
    assert lines[4].endswith("; breaker closed")
    assert all(len(line) <= 80 for line in lines[1:])


def test_the_capacity_is_the_stores_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def capacity() -> int:
        assert main(["store", "stat", f"file:{folder}", "--json", "-"]) == 0
        known: int = json.loads(capsys.readouterr().out)["stats"]["capacity_bytes"]
        return known

    async def use(options: str) -> None:
        await (await FileBackend.open(parse_url(f"file:{folder}?segment=4MiB&{options}"), LAYOUT)).aclose()

    assert capacity() == 64 << 20
    asyncio.run(use("capacity=32MiB"))
    assert capacity() == 32 << 20
    asyncio.run(use("capacity=48MiB"))
    assert capacity() == 48 << 20


@pytest.mark.parametrize(("words", "complaint"), [
    ("store verify file:{}/none", "holds no store"),
    ("store gc file:{} --older-than soon", "--older-than='soon'"),
    ("store gc file:{} --dry-run", "say how old"),
    ("store ls file:{} --limit 0", "--limit=0"),
    ("store ls file:{} --yes", "--yes is for asynccache store clear"),
    ("store stat file:{} --rate 1GiB", "--rate is for asynccache store verify"),
    ("store stat file:{} --timeout 0", "--timeout=0.0 must be above 0"),
    ("store clear file:{}", "give --yes"),
    ("store verify none", "is no store"),
    ("store verify tea:pot", "unknown backend 'tea'"),
    ("store stat file:{}?colour=red", "unknown option 'colour'"),
    ("store verify file:{} --rate fast", "--rate='fast'"),
    ("store verify file:{} --rate 0", "--rate=0"),
    ("store verify file:{} --json /no/such/folder/x", "--json=/no/such/folder/x"),
    ("bench store none", "none"), ("bench store tea:pot", "tea"), ("bench store --bytes 1KiB", "--bytes"),
    ("bench store --page-sizes big", "--page-sizes"), ("bench store --concurrency 0", "--concurrency"),
    ("bench store --repeat 0", "--repeat"), ("bench store --batch 0", "--batch"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, complaint: str
) -> None:
    assert main(words.format(folder).split()) == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert out == ""


def test_a_store_in_use_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def meanwhile() -> int:
        store = await open_at(folder, "capacity=64MiB")
        try:
            return await asyncio.to_thread(main, ["store", "verify", f"file:{folder}"])
        finally:
            await store.aclose()

    assert asyncio.run(meanwhile()) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err


def test_list(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["store", "ls", f"file:{folder}"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert total == "80 pages, 980 KiB"
    known = {key.key.hex(): LAYOUT.page_bytes[key.pool] for pool, n in (("full", 60), ("odd", 20))
             for key in keys_of(n, pool)}
    assert {line.split()[0] for line in lines} == set(known)
    assert all(len(line) <= 80 for line in lines)
    assert {line.split(maxsplit=1)[1].rsplit(maxsplit=2)[0] for line in lines} == {"16.0 KiB", "1.0 KiB"}
    assert main(["store", "ls", f"file:{folder}", "--limit", "3", "--json", str(tmp_path / "ls.jsonl")]) == 0
    *pages, last = map(json.loads, (tmp_path / "ls.jsonl").read_text().splitlines())
    assert len(pages) == 3
    assert all(page["size"] == 64 + known[page["key"]] and page["written"] > 1.7e9 for page in pages)
    assert last == {"total": {"pages": 3, "bytes": sum(page["size"] - 64 for page in pages), "more": True}}
    assert main(["store", "ls", f"file:{folder}", "--limit", "80"]) == 0
    assert capsys.readouterr().out.endswith("80 pages, 980 KiB\n")


def test_old_pages_are_counted_then_collected(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file:{folder}"
    assert main(["store", "gc", url, "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == "0 old pages and 0 pieces of waste removed, 0 B freed\n"
    later = time.time() + 2 * 3600
    monkeypatch.setattr("time.time", lambda: later)
    assert main(["store", "gc", url, "--older-than", "1.5h", "--dry-run"]) == 0
    assert capsys.readouterr().out == "80 pages are that old: 985 KiB; nothing was removed\n"
    assert main(["store", "stat", url, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["by_age"] == {"a day": 80}
    assert main(["store", "gc", url, "--older-than", "1.5h", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pages"], report["waste"], report["dry_run"]) == (80, 0, False)
    assert report["size"] >= 80 * 64
    assert main(["store", "stat", url]) == 0
    assert capsys.readouterr().out.startswith(f"{url}: 0 pages, 0 B; 7.9 KiB of 64.0 MiB in 1 segments\n"), "deletions"


@pytest.mark.parametrize(
    ("answer", "status", "left"), [("y\n", 0, 0), ("\n", 1, 80), ("no\n", 1, 80), ("", 1, 80), (None, 0, 0)]
)
def test_clear_asks_first(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str | None, status: int,
    left: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", Screen(True, answer or ""))
    assert main(["store", "clear", f"file:{folder}", *([] if answer is not None else ["--yes"])]) == status
    out, err = capsys.readouterr()
    assert err == (f"Remove every page of file:{folder}? [y/N] " if answer is not None else "")
    assert (out == f"file:{folder} is empty\n") is (status == 0)
    assert main(["store", "stat", f"file:{folder}", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == left


STORED: OrderedDict[bytes, Any] = OrderedDict()


class Kept(MemoryBackend):
    """Its records outlive it, as they would in somebody else's server."""

    def __init__(self) -> None:
        super().__init__()
        self._stored = STORED

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        return cls()

    async def aclose(self) -> None:
        self._stored = OrderedDict()
        await super().aclose()

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Wrong bytes for a page, another length than it lists for one, an error, a page that has left, no header."""
        results = await super().get(keys, records)
        for i, key in enumerate(keys):
            if key.key == ROTTEN[0].key:
                records[i].payload[5] ^= 1
            elif key.key == ROTTEN[1].key:
                results[i] = Result.CORRUPT
            elif key.key == ROTTEN[2].key:
                results[i] = Result.FAILED
            elif key.key == ROTTEN[3].key:
                results[i] = Result.MISS
            elif key.key == ROTTEN[4].key:
                records[i].header[:] = bytes(64)
        return results


ROTTEN = keys_of(5)


@pytest.fixture
def listed_store(monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that is not a file store, with some rotten pages, as the command finds it."""

    async def fill() -> None:
        store = CheckedStore(Kept(), LAYOUT)
        await pages_kit.fill(store, keys_of(200) + keys_of(30, "odd"))
        await store.aclose()

    STORED.clear()
    asyncio.run(fill())
    monkeypatch.setattr("asynccache.storage.attachment.backend_class", lambda scheme: Kept)
    return "kept:"


def test_any_store_that_can_be_listed_can_be_verified(listed_store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", listed_store, "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {name: report[name] for name in ("pages", "bytes", "bad", "unread", "ok")} == {
        "pages": 228, "bytes": 198 * 16384 + 30 * 1000, "bad": 3, "unread": 1, "ok": False,
    }
    assert main(["store", "verify", listed_store]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT OK: 225 pages")
    assert "dropped" not in out
    assert "1 pages could not be read" in out


def test_a_store_that_cannot_be_looked_through_says_so(
    listed_store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        """The contract and nothing more."""

        @classmethod
        async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
            return cls()

        def __init__(self) -> None:
            inner = Kept()
            for name in ("exists", "get", "put", "delete", "clear", "register", "flush", "aclose"):
                setattr(self, name, getattr(inner, name))

        def stats(self) -> dict[str, int]:
            return {"pages": 230, "bytes": 5000, "errors": 0}

    monkeypatch.setattr("asynccache.storage.attachment.backend_class", lambda scheme: Plain)
    complaints = {"ls": "cannot list", "verify": "none can be verified", "gc": "nothing that gc could remove"}
    for action, complaint in complaints.items():
        assert main(["store", action, listed_store]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["store", "stat", listed_store]) == 0
    assert "230 pages" in capsys.readouterr().out
    assert main(["store", "clear", listed_store, "--yes"]) == 0


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "open"])
def test_a_store_that_falls_silent_or_does_not_open_is_given_up(
    action: str, listed_store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: MemoryBackend) -> AsyncIterator[Sequence[object]]:
        await asyncio.Event().wait()
        yield []

    async def never(url: ParsedUrl, layout: StoreLayout) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryBackend, "listing", silent)
    if action == "open":
        monkeypatch.setattr(Kept, "open", never)
    assert main(["store", action.replace("open", "stat"), listed_store, "--timeout", "0.05"]) == 2
    told = "be opened" if action == "open" else "go on with its list"
    assert f"not {told} within 0.05 s" in capsys.readouterr().err


def test_a_store_that_does_not_answer_is_not_ok(
    listed_store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: MemoryBackend, keys: Sequence[PageKey]) -> list[Result]:
        raise OSError("gone")

    monkeypatch.setattr(MemoryBackend, "exists", broken)
    assert main(["store", "stat", listed_store]) == 1
    out = capsys.readouterr().out
    assert "NOT OK: it failed to answer 5 of the questions; breaker open" in out


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (59, "59 s"), (60, "1 m"), (7300, "2 h"), (86400 * 15, "15 d"), (-5, "0 s")]
)
def test_ages(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize("stdin", [None, io.StringIO("y")])
def test_nothing_is_cleared_where_nobody_can_be_asked(
    stdin: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)  # None: it was closed when the process began
    assert main(["store", "clear", "memory:"]) == 2
    assert "give --yes, because there is no terminal to ask at" in capsys.readouterr().err


class Screen(io.StringIO):
    def __init__(self, terminal: bool, text: str = "") -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_to_those_who_wait(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "EVERY", 0.05 if terminal else 0.005)
    screen = Screen(terminal)
    with progress(screen) as tell:
        tell("done at once")
    assert screen.getvalue() == ""
    monkeypatch.setattr(output, "QUIET_FOR", 0.02)
    with progress(screen) as tell:
        for step in range(100):
            tell(f"{step} done")
            time.sleep(0.005)
    lines = screen.getvalue().replace("\r", "\n").split("\n")
    shown = [line for line in lines if "done" in line]
    assert 1 <= len(shown) < 100, "not every line is shown"
    assert screen.getvalue().endswith("\r\x1b[K" if terminal else "done\n")


def test_a_step_that_was_told_at_once_and_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "QUIET_FOR", 0.05)
    screen = Screen(terminal=False)
    with progress(screen) as tell:
        tell("filling the store")
        until = time.monotonic() + 10
        while not screen.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert screen.getvalue() == "filling the store\n"


def test_neither_the_commands_nor_the_benchmark_import_torch() -> None:
    code = "import sys, asynccache.cli.store, asynccache.cli.bench, asynccache_backends.file as _;" \
           "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ours()).returncode == 0


# The store benchmark measures what it says, on any backend, without torch.


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


