"""kill -9 at any moment: the next start serves only what verifies, and everything whose put had returned is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from asynccache_backends.file import FileBackend

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, content, page_key

pytestmark = pytest.mark.slow(2)

CHILD = Path(__file__).parent / "file_store_child.py"
ROOT = CHILD.parents[2]
BATCH = 30


def batch_keys(round_: int, batch: int) -> list[PageKey]:
    """The keys of one of the child's batches."""
    return [page_key(f"{round_}/{batch}/{i}", "odd" if i % 5 == 4 else "full") for i in range(BATCH)]


def child(url: str, round_: int, what: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    return subprocess.Popen(
        [sys.executable, str(CHILD), url, str(round_), what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )


def kill_after(process: subprocess.Popen[str], lines: int) -> dict[str, set[int]]:
    """Read that many lines, kill, and return what had been said: batches by word."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    process.kill()
    said += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    done: dict[str, set[int]] = {"put": set(), "deleted": set(), "flushed": set()}
    for line in said:
        word, *number = line.split()
        if number and line.endswith("\n"):
            done[word].add(int(number[0]))
    return done


async def serve(store: CheckedStore, keys: list[PageKey]) -> list[Result]:
    """Read keys; every hit must be the bytes that were put under that key."""
    pages = [memoryview(bytearray(LAYOUT.page_bytes[key.pool])) for key in keys]
    results = await store.get(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Result.HIT or page == content(key, page.nbytes)
    return results


@pytest.mark.parametrize("direct", ["off", "auto"])
async def test_after_kills_everything_that_was_put_is_there(tmp_path: Path, direct: str) -> None:
    url = f"file:{tmp_path}/s?capacity=256MiB&direct={direct}&segment=8MiB"
    rng = Random(f"kill {direct}")
    history: list[dict[str, set[int]]] = []
    for round_ in range(4):
        history.append(kill_after(child(url, round_, "fill"), rng.randrange(3, 60)))
        store = CheckedStore(await FileBackend.open(parse_url(url), LAYOUT), LAYOUT)
        for earlier, done in enumerate(history):
            for batch in range(max(done["put"], default=0) + 3):
                results = await serve(store, batch_keys(earlier, batch))
                if batch in done["deleted"]:
                    assert results == [Result.MISS] * 3 + [Result.HIT] * (BATCH - 3)
                elif batch in done["put"] and batch % 5 != 4:
                    assert results == [Result.HIT] * BATCH
        assert store.stats()["errors"] == 0
        if round_ % 2:
            await store.aclose()
        else:
            _abandon(store)


async def test_after_a_kill_while_segments_are_reclaimed_only_good_pages_are_served(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/s?capacity=16MiB&segment=2MiB"
    for round_ in range(3):
        done = kill_after(child(url, round_, "fill"), Random(f"reclaim {round_}").randrange(40, 90))
        store = CheckedStore(await FileBackend.open(parse_url(url), LAYOUT), LAYOUT)
        hits = [await serve(store, batch_keys(round_, batch)) for batch in range(max(done["put"]) + 2)]
        last = hits[max(done["put"])]
        assert last.count(Result.HIT) >= BATCH - 3
        served = sum(
            LAYOUT.page_bytes[key.pool]
            for batch, results in enumerate(hits)
            for key, result in zip(batch_keys(round_, batch), results, strict=True) if result is Result.HIT
        )
        assert 4 << 20 <= served <= 16 << 20
        await store.aclose()


async def test_two_processes_cannot_have_one_folder(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/s?capacity=64MiB"
    process = child(url, 0, "hold")
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    with pytest.raises(Unavailable, match=rf"{tmp_path}/s.*process {process.pid}"):
        await FileBackend.open(parse_url(url), LAYOUT)
    process.communicate("")
    assert process.returncode == 0
    await (await FileBackend.open(parse_url(url), LAYOUT)).aclose()


def test_under_a_file_size_limit_writes_fail_and_reads_go_on(tmp_path: Path) -> None:
    out, _ = child(f"file:{tmp_path}/s?capacity=64MiB&segment=2MiB", 0, "limited").communicate("")
    words = out.splitlines()[-1].split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert numbers["read"] == BATCH
    assert numbers["failed"] > 30 * BATCH
    assert numbers["errors"] >= 1
    assert numbers["refused"] > 30


def _abandon(store: CheckedStore) -> None:
    """Let go of the folder without a word to the disk, as a killed process would."""
    backend = store.backend
    assert isinstance(backend, FileBackend)
    for segment in backend._log.segments.values():
        segment.drop()
    backend._log.threads.close()
    backend._lock.release()
