"""The file store starts again: after damage, after kill -9, after random walks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from asynccache_backends.file import FileBackend
from asynccache_backends.file.folder import Manifest, pack_manifest
from asynccache_backends.file.segments import BLOCK_BYTES, DELETION, HEAD_BYTES, segment_name
from xxhash import xxh3_64_hexdigest

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, PageKey, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content, keys_of, page_key
from tests.storage.page_kit import fill
from tests.storage.page_kit import get as read

# Starts after damage. A crash is simulated by a copy of the folder that is taken while the store is open.


FULL = LAYOUT.page_bytes["full"]
KEYS = keys_of(60)
FIRST_GROUP = BLOCK_BYTES + 42 * FULL


async def open_at(folder: Path, options: str = "") -> CheckedStore:
    backend = await FileBackend.open(parse_url(f"file:{folder}?capacity=64MiB&segment=4MiB{options}"), LAYOUT)
    return CheckedStore(backend, LAYOUT)


async def reopened(folder: Path) -> tuple[list[Result], dict[str, int | float]]:
    """Open, read all, close: what was served, and the counters."""
    store = await open_at(folder)
    results = await read(store, KEYS)
    stats = dict(store.stats())
    await store.aclose()
    return results, stats


@pytest_asyncio.fixture
async def crashed(tmp_path: Path) -> Path:
    """A folder with 60 pages in two groups (42 and 18) in a segment without a footer."""
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    return tmp_path / "crashed"


@pytest_asyncio.fixture
async def closed(tmp_path: Path) -> Path:
    """A folder with the same pages, closed in good order."""
    store = await open_at(tmp_path / "closed")
    await fill(store, KEYS)
    await store.aclose()
    return tmp_path / "closed"


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(path: Path, at: int) -> None:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    edit(path, change)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def segments(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("segment-"), 16) for path in folder.glob("segment-*.kv"))


def segment(folder: Path, number: int = 1) -> Path:
    return folder / segment_name(number)


async def test_a_crash_loses_nothing_that_was_written(crashed: Path) -> None:
    results, stats = await reopened(crashed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 2


async def test_a_clean_end_makes_the_next_start_scan_nothing(closed: Path) -> None:
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 0


async def test_a_start_after_a_crash_leaves_a_footer_for_the_next(crashed: Path) -> None:
    await reopened(crashed)
    assert (await reopened(crashed))[1]["scanned_groups"] == 0


@pytest.mark.parametrize("page", [0, 41, 42, 59])
async def test_a_flipped_bit_in_a_payload_costs_that_page_for_ever(crashed: Path, page: int) -> None:
    group, place = (0, page) if page < 42 else (FIRST_GROUP, page - 42)
    flip(segment(crashed), group + BLOCK_BYTES + place * FULL + 100)
    expected = [Result.CORRUPT if i == page else Result.HIT for i in range(60)]
    assert (await reopened(crashed))[0] == expected
    expected[page] = Result.MISS
    assert (await reopened(crashed))[0] == expected


@pytest.mark.parametrize("at", [0, 9, 20, 30, 45, 70, 64 + 96 * 41 + 95])
async def test_a_flipped_bit_in_a_header_block_costs_its_group(crashed: Path, at: int) -> None:
    flip(segment(crashed), at)
    assert (await reopened(crashed))[0] == [Result.MISS] * 42 + [Result.HIT] * 18


async def test_a_group_that_never_reached_the_disk_does_not_hide_the_next(crashed: Path) -> None:
    def zero(data: bytearray) -> None:
        data[:FIRST_GROUP] = bytes(FIRST_GROUP)

    edit(segment(crashed), zero)
    assert (await reopened(crashed))[0] == [Result.MISS] * 42 + [Result.HIT] * 18


async def test_a_torn_write_serves_what_verifies(crashed: Path) -> None:
    """Power loss: the header block reached the disk, the payloads of pages 10 and later did not."""
    def tear(data: bytearray) -> None:
        data[BLOCK_BYTES + 10 * FULL : FIRST_GROUP] = bytes(32 * FULL)

    edit(segment(crashed), tear)
    assert (await reopened(crashed))[0] == [Result.HIT] * 10 + [Result.CORRUPT] * 32 + [Result.HIT] * 18


@pytest.mark.parametrize("size", [0, 1000, 4096, BLOCK_BYTES + 3 * FULL + 17])
async def test_a_truncated_segment_serves_what_is_left(crashed: Path, size: int) -> None:
    edit(segment(crashed), lambda data: data.__delitem__(slice(size, None)))
    left = max(0, size - BLOCK_BYTES) // FULL
    results, _ = await reopened(crashed)
    assert results[:left] == [Result.HIT] * left
    assert Result.HIT not in results[left:]
    assert Result.FAILED not in results


async def test_a_truncated_segment_that_had_a_footer(closed: Path) -> None:
    edit(segment(closed), lambda data: data.__delitem__(slice(BLOCK_BYTES + 5 * FULL + 1, None)))
    results, _ = await reopened(closed)
    assert results[:5] == [Result.HIT] * 5
    assert Result.HIT not in results[5:]


async def test_a_missing_segment_is_missed_only(closed: Path) -> None:
    segment(closed).unlink()
    assert (await reopened(closed))[0] == [Result.MISS] * 60


FOOTER_BYTES = 2 * HEAD_BYTES + 60 * 96 + HEAD_BYTES


@pytest.mark.parametrize("at", [0, 8, 20, 40, 60, 200, FOOTER_BYTES - 64, FOOTER_BYTES - 40, FOOTER_BYTES - 1])
async def test_a_damaged_footer_is_not_believed(closed: Path, at: int) -> None:
    flip(segment(closed), segment(closed).stat().st_size - FOOTER_BYTES + at)
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 2


@pytest.mark.parametrize("keep", [0, 10, 100, FOOTER_BYTES - 1])
async def test_half_a_footer_is_not_believed(closed: Path, keep: int) -> None:
    edit(segment(closed), lambda data: data.__delitem__(slice(len(data) - FOOTER_BYTES + keep, None)))
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_the_footer_of_another_segment_is_not_believed(closed: Path) -> None:
    """Nor one of this segment that does not lie where it says."""
    foreign = segment(closed).read_bytes()
    segment(closed, 2).write_bytes(foreign)
    edit(segment(closed), lambda data: data.extend(foreign[-FOOTER_BYTES:]))
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert (stats["pages"], stats["scanned_groups"]) == (60, 2)


async def test_a_footer_hides_no_page_that_was_put_after_it(closed: Path, tmp_path: Path) -> None:
    """The last segment of an earlier run goes on: its footer is cut off, and a later one names all of its pages."""
    store = await open_at(closed)
    more = keys_of(20, "odd")
    await fill(store, more)
    shutil.copytree(closed, tmp_path / "killed")
    await store.aclose()
    for folder, scanned in ((tmp_path / "killed", 3), (closed, 0)):
        store = await open_at(folder)
        assert await read(store, KEYS + more) == [Result.HIT] * 80
        assert store.stats()["scanned_groups"] == scanned
        await store.aclose()


async def test_after_a_kill_only_the_last_segments_are_scanned(tmp_path: Path) -> None:
    """Full segments got their footers while the store was in use."""
    keys = keys_of(1000)
    url = parse_url(f"file:{tmp_path}/live?capacity=64MiB&segment=1MiB")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
    for at in range(0, 1000, 50):
        await fill(store, keys[at : at + 50])
    assert isinstance(store.backend, FileBackend)
    sealing = store.backend._log._sealing
    assert sealing is not None
    await asyncio.wait([sealing])
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    assert store.stats()["segments"] > 15
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await read(store, keys) == [Result.HIT] * 1000
    assert store.stats()["scanned_groups"] <= 3, "no more than a segment holds"
    await store.aclose()


@pytest.mark.parametrize("seed", range(5))
async def test_a_footer_names_every_page_whose_write_has_ended(tmp_path: Path, seed: int) -> None:
    """Also those of writes that end in the same moment in which their segment is full."""
    keys = keys_of(600)
    url = parse_url(f"file:{tmp_path}/s?capacity=64MiB&segment=256KiB")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
    await asyncio.gather(*(fill(store, keys[at : at + 7 + seed]) for at in range(0, 600, 7 + seed)))
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await read(store, keys) == [Result.HIT] * 600
    assert store.stats()["scanned_groups"] == 0
    await store.aclose()


@pytest.mark.parametrize("orderly", [True, False])
async def test_deletes_outlive_a_restart(tmp_path: Path, orderly: bool) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[5:50])
    if orderly:
        await store.aclose()
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    if not orderly:
        await store.aclose()
    expected = [Result.MISS if 5 <= i < 50 else Result.HIT for i in range(60)]
    assert (await reopened(tmp_path / "crashed"))[0] == expected
    assert (await reopened(tmp_path / "crashed"))[0] == expected


async def test_a_page_put_again_after_its_delete_outlives_a_restart(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[:10])
    await fill(store, KEYS[:4])
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    assert (await reopened(tmp_path / "crashed"))[0] == [Result.HIT] * 4 + [Result.MISS] * 6 + [Result.HIT] * 50


async def test_a_damaged_deletion_costs_its_block_only(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[:1])
    await store.delete(KEYS[50:51])
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    flip(segment(tmp_path / "crashed"), FIRST_GROUP + BLOCK_BYTES + 18 * FULL + HEAD_BYTES)
    assert (await reopened(tmp_path / "crashed"))[0] == [Result.HIT] * 50 + [Result.MISS] + [Result.HIT] * 9


@pytest.mark.parametrize("orderly", [True, False])
async def test_deletions_are_kept_as_long_as_there_are_pages_that_they_speak_of(tmp_path: Path, orderly: bool) -> None:
    """In whatever segment the pages and the deletions lie, and however many deletions there are."""
    url = parse_url(f"file:{tmp_path}/live?capacity=64MiB&segment=1MiB")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
    keys = keys_of(500)
    await fill(store, keys)
    assert await store.delete(keys[1::2]) == [Result.HIT] * 250
    await fill(store, keys_of(500, "swa"))
    await store.flush()
    if orderly:
        await store.aclose()
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    if not orderly:
        await store.aclose()
    for _ in range(2):
        store = await open_at(tmp_path / "copy")
        assert await read(store, keys) == [Result.HIT, Result.MISS] * 250
        assert await store.exists(keys_of(500, "swa")) == [Result.HIT] * 500
        await store.aclose()


async def test_a_deletion_speaks_of_earlier_copies_only(crashed: Path) -> None:
    """Its block says before which place; where the block itself lies does not matter."""
    store = await open_at(crashed)
    await store.delete(KEYS[:2])
    await fill(store, KEYS[:1])
    assert isinstance(store.backend, FileBackend)
    log = store.backend._log
    (deletions,) = log.segments[1].deletions
    places = [place for _, *place in DELETION.iter_unpack(deletions.directory)]
    assert places == [[1, FIRST_GROUP + BLOCK_BYTES + 18 * FULL]] * 2
    await asyncio.wait([log.begin(0, deletions.directory)])
    await store.aclose()
    assert (await reopened(crashed))[0] == [Result.HIT, Result.MISS] + [Result.HIT] * 58


async def test_clear_outlives_a_restart(closed: Path) -> None:
    store = await open_at(closed)
    await store.clear()
    assert segments(closed) == []
    await fill(store, KEYS[:2])
    await store.aclose()
    assert (await reopened(closed))[0] == [Result.HIT] * 2 + [Result.MISS] * 58


async def test_pages_put_after_a_restart_go_into_the_same_segment(closed: Path) -> None:
    for i in range(3):
        store = await open_at(closed)
        await fill(store, [page_key(f"more {i}")])
        await store.aclose()
    assert segments(closed) == [1]
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_what_is_left_of_older_data_is_not_taken_for_pages(closed: Path, tmp_path: Path) -> None:
    """A block of another store, and one of this store at another place, verify nowhere."""
    other = await open_at(tmp_path / "other")
    await fill(other, keys_of(42, "swa"))
    await other.aclose()
    foreign = segment(closed).read_bytes()[:FIRST_GROUP]
    segment(closed, 2).write_bytes(foreign)
    segment(closed, 3).write_bytes(segment(tmp_path / "other", 1).read_bytes())
    store = await open_at(closed)
    assert store.stats()["pages"] == 60
    assert store.stats()["scanned_groups"] == 0
    await store.aclose()


async def test_a_folder_of_another_schema_is_refused(closed: Path) -> None:
    other = StoreLayout(LAYOUT.page_bytes, b"\x01" * 32)
    with pytest.raises(Unavailable, match=rf"{closed}.*another schema: {LAYOUT.schema.hex()}, this is {'01' * 32}"):
        await FileBackend.open(parse_url(f"file:{closed}?capacity=64MiB"), other)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_a_folder_of_another_format_version_is_refused(closed: Path) -> None:
    manifest = json.loads((closed / "manifest.json").read_text())["manifest"] | {"version": 99}
    (closed / "manifest.json").write_bytes(pack_manifest(Manifest(**manifest)))
    with pytest.raises(Unavailable, match="version 99, this is"):
        await open_at(closed)


async def test_a_folder_of_the_first_version_is_refused_with_advice_and_left_as_it_is(tmp_path: Path) -> None:
    """Its manifest, to the letter as that version wrote it, and a name of a file that only that version had."""
    text = '{"format": "asynccache file store", "version": 1, "schema": "' + LAYOUT.schema.hex() + '", "seed": 7}'
    digest = xxh3_64_hexdigest(text.encode())
    (tmp_path / "manifest.json").write_text(f'{{"manifest": {text}, "xxh3": "{digest}"}}')
    (tmp_path / "deletions.log").write_bytes(b"")
    segment(tmp_path).write_bytes(bytes(BLOCK_BYTES))
    before = contents(tmp_path)
    with pytest.raises(Unavailable, match=rf"{tmp_path}.* version 1, this is .* version 2, which cannot read it; name"):
        await open_at(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("at", [0, 20, 60, 120, -3])
async def test_a_damaged_manifest_is_refused_and_nothing_is_touched(closed: Path, at: int) -> None:
    good = (closed / "manifest.json").read_bytes()
    flip(closed / "manifest.json", at)
    with pytest.raises(Unavailable, match=f"{closed}"):
        await open_at(closed)
    (closed / "manifest.json").write_bytes(good)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_a_refused_folder_is_not_left_locked(closed: Path) -> None:
    with pytest.raises(Unavailable):
        await FileBackend.open(parse_url(f"file:{closed}?capacity=64MiB"), StoreLayout(LAYOUT.page_bytes, b""))
    store = await open_at(closed)
    with pytest.raises(Unavailable, match="in use"):
        await open_at(closed)
    await store.aclose()


# kill -9 at any moment: the next start serves only what verifies, and everything whose put had returned is there.


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


@pytest.mark.slow(2)
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


@pytest.mark.slow(2)
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


@pytest.mark.slow(2)
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


@pytest.mark.slow(2)
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


# The file backend against a dict, by seeded random walks: with crashes, restarts, cancellations and clears.


UNIVERSE = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(150)]


class Walk:
    """One store and what must be in it. The capacity is never reached, so nothing may be missing."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = Random(f"walk {seed}")
        self.model: set[PageKey] = set()
        self.generation = 0
        self.direct = self.rng.choice(("auto", "off"))

    async def open(self) -> None:
        """Open, or open again."""
        url = parse_url(f"file:{self.folder}/{self.generation}?capacity=256MiB&segment=1MiB&direct={self.direct}")
        self.store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)

    def some(self) -> list[PageKey]:
        """A few keys, in any order, none twice."""
        return self.rng.sample(UNIVERSE, self.rng.randrange(1, 70))

    async def put(self) -> None:
        keys = self.some()
        results = await self.store.put(keys, [memoryview(content(k, LAYOUT.page_bytes[k.pool])) for k in keys])
        assert results == [Result.HIT] * len(keys)
        self.model.update(keys)

    async def get(self) -> None:
        keys = self.some()
        pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
        results = await self.store.get(keys, pages)
        assert results == [Result.HIT if key in self.model else Result.MISS for key in keys]
        for key, page, result in zip(keys, pages, results, strict=True):
            assert result is Result.MISS or page == content(key, page.nbytes)

    async def delete(self) -> None:
        keys = self.some()[:10]
        assert await self.store.delete(keys) == [Result.HIT if key in self.model else Result.MISS for key in keys]
        self.model.difference_update(keys)

    async def collect(self) -> None:
        """No page is lost, and none that was deleted comes back when its segment goes."""
        assert isinstance(self.store.backend, FileBackend)
        await self.store.backend.collect(None)

    async def flush(self) -> None:
        await self.store.flush()

    async def clear(self) -> None:
        if self.rng.random() < 0.3:
            await self.store.clear()
            self.model.clear()

    async def cancelled_put(self) -> None:
        """Cancelled pages may be there or not, whole or not at all."""
        keys = [key for key in self.some() if key not in self.model]
        putting = asyncio.ensure_future(
            self.store.put(keys, [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in keys])
        )
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        there = await self.store.exists(keys)
        self.model.update(key for key, result in zip(keys, there, strict=True) if result is Result.HIT)

    async def restart(self) -> None:
        await self.store.aclose()
        await self.open()

    async def crash(self) -> None:
        """Go on with a copy of the folder, as a killed process leaves it."""
        old = self.folder / str(self.generation)
        self.generation += 1
        shutil.copytree(old, self.folder / str(self.generation))
        await self.store.aclose()
        shutil.rmtree(old)
        await self.open()


@pytest.mark.parametrize("seed", range(12))
async def test_a_random_walk_agrees_with_a_dict(tmp_path: Path, seed: int) -> None:
    await agrees_with_a_dict(tmp_path, seed)


async def agrees_with_a_dict(folder: Path, seed: int) -> None:
    """Fifty random steps; the store says after each of them what the dict does."""
    walk = Walk(folder, seed)
    await walk.open()
    steps = [
        walk.put, walk.get, walk.delete, walk.flush, walk.collect, walk.clear, walk.cancelled_put, walk.restart,
        walk.crash,
    ]  # fmt: skip
    weights = [8, 8, 4, 1, 2, 1, 3, 1, 2]
    for step in walk.rng.choices(steps, weights, k=50):
        await step()
        stats = walk.store.stats()
        assert stats["pages"] == len(walk.model)
        assert stats["bytes"] == sum(LAYOUT.page_bytes[key.pool] for key in walk.model)
    assert walk.store.stats()["corrupt_pages"] == 0
    await walk.store.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_everything_at_once_in_a_store_that_is_too_small(tmp_path: Path, seed: int) -> None:
    await everything_at_once(tmp_path, seed)


async def everything_at_once(folder: Path, seed: int) -> None:
    """Puts, gets, deletes, flushes and clears at the same time, some cancelled, while segments come and go."""
    rng = Random(f"at once {seed}")
    url = parse_url(f"file:{folder}/s?capacity=3MiB&segment=512KiB&direct={rng.choice(('auto', 'off'))}")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)

    async def act() -> None:
        keys = rng.sample(UNIVERSE, 12)
        pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
        which = rng.random()
        if which < 0.5:
            for key, page in zip(keys, pages, strict=True):
                page[:] = content(key, page.nbytes)
            assert Result.FAILED not in await store.put(keys, pages)
        elif which < 0.9:
            results = await store.get(keys, pages)
            assert not {Result.FAILED, Result.CORRUPT} & set(results)
            for key, page, result in zip(keys, pages, results, strict=True):
                assert result is Result.MISS or page == content(key, page.nbytes)
        elif which < 0.97:
            await store.delete(keys[:3])
        else:
            await (store.flush() if rng.random() < 0.6 else store.clear())

    async def worker() -> None:
        for _ in range(40):
            task = asyncio.ensure_future(act())
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None, task.exception()

    await asyncio.gather(*(worker() for _ in range(4)))
    stats = store.stats()
    assert (stats["errors"], stats["corrupt_pages"]) == (0, 0)
    assert stats["disk_bytes"] <= 3 << 20
    await store.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_what_was_deleted_never_comes_back_after_a_kill(tmp_path: Path, seed: int) -> None:
    await deleted_stays_deleted(tmp_path, seed)


def copy_of(folder: Path, target: Path) -> None:
    """Files may go while their folder is copied."""
    target.mkdir()
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            shutil.copyfile(folder / name, target / name)


async def deleted_stays_deleted(folder: Path, seed: int) -> None:
    """In a store that is too small, whose segments are reclaimed and collected while pages of them are moved and
    deleted: in a copy of the folder, taken at any moment, no page is found whose deletion had ended."""
    rng = Random(f"deleted {seed}")
    url = f"?capacity=3MiB&segment=512KiB&direct={rng.choice(('auto', 'off'))}"
    backend = await FileBackend.open(parse_url(f"file:{folder}/live{url}"), LAYOUT)
    store, gone = CheckedStore(backend, LAYOUT), set[PageKey]()

    async def worker(universe: list[PageKey]) -> None:
        for _ in range(60):
            keys = rng.sample(universe, 8)
            pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
            which = rng.random()
            if which < 0.4:
                gone.difference_update(keys)
                for key, page in zip(keys, pages, strict=True):
                    page[:] = content(key, page.nbytes)
                await store.put(keys, pages)
            elif which < 0.7:
                await store.get(keys, pages)
            elif which < 0.95:
                assert Result.FAILED not in await store.delete(keys)
                gone.update(keys)
            else:
                await backend.collect(None)

    async def kill() -> None:
        for number in range(6):
            for _ in range(rng.randrange(400)):
                await asyncio.sleep(0)
            deleted = list(gone)
            copy_of(folder / "live", folder / f"copy {number}")
            at = parse_url(f"file:{folder}/copy {number}{url}")
            copy = CheckedStore(await FileBackend.open(at, LAYOUT), LAYOUT)
            assert set(await copy.exists(deleted)) <= {Result.MISS}
            await copy.aclose()

    await asyncio.gather(*(worker(UNIVERSE[at::3]) for at in range(3)), kill())
    await store.aclose()
    store = CheckedStore(await FileBackend.open(parse_url(f"file:{folder}/live{url}"), LAYOUT), LAYOUT)
    assert set(await store.exists(list(gone))) <= {Result.MISS}
    await store.aclose()


async def test_an_open_that_is_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    url = parse_url(f"file:{tmp_path}/s?capacity=64MiB")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
    await store.put(UNIVERSE, [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in UNIVERSE])
    await store.aclose()
    cancelled = 0
    for turns in range(12):
        opening = asyncio.ensure_future(FileBackend.open(url, LAYOUT))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if opening.cancelled():
            cancelled += 1
            assert not [name for name in map(_target, os.listdir("/proc/self/fd")) if str(tmp_path) in name]
        else:
            await opening.result().aclose()
    assert cancelled > 3


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
