"""``asynccache store``: the text, the JSON, the exit status, and progress for those who wait."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asynccache_backends.file import FileBackend

from asynccache.cli import store as command
from asynccache.cli.main import main
from asynccache.storage import CheckedStore, Scrubbed, parse_url
from asynccache.testing.backend_suite import LAYOUT, content, keys_of

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("plug_ins")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of 60 full and 20 odd pages."""

    async def fill() -> None:
        url = parse_url(f"file:{tmp_path}/kv?capacity=64MiB&segment=4MiB")
        store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
        for pool, count in (("full", 60), ("odd", 20)):
            keys = keys_of(count, pool)
            await store.put(keys, [memoryview(content(key, LAYOUT.page_bytes[pool])) for key in keys])
        await store.aclose()

    asyncio.run(fill())
    return tmp_path / "kv"


def damage(folder: Path) -> None:
    with (folder / f"segment-{1:016x}.kv").open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"rot")


def test_a_good_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", f"file:{folder}"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("OK: 80 pages, 980 KiB in ")
    assert err == ""


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
    assert (stat["pages"], stat["segments"]) == (79, 1)
    assert stat["by_page_size"] == [{"page_bytes": 1000, "pages": 20}, {"page_bytes": 16384, "pages": 59}]


def test_stat_for_a_person(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stat", f"file:{folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"file:{folder}: 80 pages, 980 KiB; ")
    assert lines[0].endswith("in 1 segments")
    assert [line.split()[0] for line in lines[1:]] == ["20", "60"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("verify", "file:{}/none"), "holds no store"),
        (("verify", "memory:"), "nothing that could be looked at"),
        (("verify", "none"), "is no store"),
        (("verify", "tea:pot"), "unknown backend 'tea'"),
        (("stat", "file:{}?colour=red"), "unknown option 'colour'"),
        (("verify", "file:{}", "--rate", "fast"), "--rate='fast'"),
        (("verify", "file:{}", "--rate", "0"), "--rate='0'"),
        (("verify", "file:{}", "--json", "/no/such/folder/x"), "--json=/no/such/folder/x"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
) -> None:
    assert main(["store", *(word.format(folder) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert out == ""


def test_a_store_in_use_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def meanwhile() -> int:
        backend = await FileBackend.open(parse_url(f"file:{folder}?capacity=64MiB"), LAYOUT)
        try:
            return await asyncio.to_thread(main, ["store", "verify", f"file:{folder}"])
        finally:
            await backend.aclose()

    assert asyncio.run(meanwhile()) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_to_those_who_wait(terminal: bool) -> None:
    screen, now = Screen(terminal), [0.0]
    progress = command.Progress(screen, 200 << 20, lambda: now[0])
    for step in range(19):
        now[0] = step / 10
        progress.tell(Scrubbed(step, step << 20))
    assert screen.getvalue() == ""
    for step in range(20, 100):
        now[0] = step / 10
        progress.tell(Scrubbed(step, step << 20, 3))
    progress.end()
    lines = screen.getvalue().replace("\r", "\n").split("\n")
    assert any("20.0 MiB of 200 MiB · 20 pages, 3 damaged" in line for line in lines)
    shown = [line for line in lines if "damaged" in line]
    assert len(shown) == (16 if terminal else 2)
    assert screen.getvalue().endswith("\r\x1b[K" if terminal else "damaged\n")


def test_it_imports_no_torch() -> None:
    code = "import sys, asynccache.cli.store, asynccache_backends.file; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
