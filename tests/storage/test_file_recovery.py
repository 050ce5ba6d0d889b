"""Starts after damage. A crash is simulated by a copy of the folder that is taken while the store is open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio
from asynccache_backends.file import FileBackend
from asynccache_backends.file.folder import Manifest, _digest
from asynccache_backends.file.segments import BLOCK_BYTES, list_segments

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, keys_of, page_key
from tests.storage.page_kit import fill
from tests.storage.page_kit import get as read

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
    """A folder with 60 pages in two groups (42 and 18) and no snapshot."""
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


def segment(folder: Path, number: int = 1) -> Path:
    return folder / f"segment-{number:016x}.kv"


@pytest.mark.asyncio
async def test_a_crash_loses_nothing_that_was_written(crashed: Path) -> None:
    results, stats = await reopened(crashed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 2


@pytest.mark.asyncio
async def test_a_clean_end_makes_the_next_start_scan_nothing(closed: Path) -> None:
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 0


@pytest.mark.asyncio
async def test_a_start_after_a_crash_leaves_a_snapshot_for_the_next(crashed: Path) -> None:
    await reopened(crashed)
    assert (await reopened(crashed))[1]["scanned_groups"] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("page", [0, 41, 42, 59])
async def test_a_flipped_bit_in_a_payload_costs_that_page_for_ever(crashed: Path, page: int) -> None:
    group, place = (0, page) if page < 42 else (FIRST_GROUP, page - 42)
    flip(segment(crashed), group + BLOCK_BYTES + place * FULL + 100)
    expected = [Result.CORRUPT if i == page else Result.HIT for i in range(60)]
    assert (await reopened(crashed))[0] == expected
    expected[page] = Result.MISS
    assert (await reopened(crashed))[0] == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 9, 20, 30, 45, 70, 64 + 96 * 41 + 95])
async def test_a_flipped_bit_in_a_header_block_costs_its_group(crashed: Path, at: int) -> None:
    flip(segment(crashed), at)
    assert (await reopened(crashed))[0] == [Result.MISS] * 42 + [Result.HIT] * 18


@pytest.mark.asyncio
async def test_a_group_that_never_reached_the_disk_does_not_hide_the_next(crashed: Path) -> None:
    def zero(data: bytearray) -> None:
        data[:FIRST_GROUP] = bytes(FIRST_GROUP)

    edit(segment(crashed), zero)
    assert (await reopened(crashed))[0] == [Result.MISS] * 42 + [Result.HIT] * 18


@pytest.mark.asyncio
async def test_a_torn_write_serves_what_verifies(crashed: Path) -> None:
    """Power loss: the header block reached the disk, the payloads of pages 10 and later did not."""
    def tear(data: bytearray) -> None:
        data[BLOCK_BYTES + 10 * FULL : FIRST_GROUP] = bytes(32 * FULL)

    edit(segment(crashed), tear)
    assert (await reopened(crashed))[0] == [Result.HIT] * 10 + [Result.CORRUPT] * 32 + [Result.HIT] * 18


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 1000, 4096, BLOCK_BYTES + 3 * FULL + 17])
async def test_a_truncated_segment_serves_what_is_left(crashed: Path, size: int) -> None:
    edit(segment(crashed), lambda data: data.__delitem__(slice(size, None)))
    left = max(0, size - BLOCK_BYTES) // FULL
    results, _ = await reopened(crashed)
    assert results[:left] == [Result.HIT] * left
    assert Result.HIT not in results[left:]
    assert Result.FAILED not in results


@pytest.mark.asyncio
async def test_a_truncated_segment_that_the_snapshot_knows(closed: Path) -> None:
    edit(segment(closed), lambda data: data.__delitem__(slice(BLOCK_BYTES + 5 * FULL + 1, None)))
    results, _ = await reopened(closed)
    assert results[:5] == [Result.HIT] * 5
    assert Result.HIT not in results[5:]


@pytest.mark.asyncio
async def test_a_missing_segment_is_missed_only(closed: Path) -> None:
    segment(closed).unlink()
    assert (await reopened(closed))[0] == [Result.MISS] * 60


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 8, 20, 40, 60, 200, -1])
async def test_a_damaged_snapshot_is_not_believed(closed: Path, at: int) -> None:
    flip(closed / "index.snapshot", at)
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert stats["scanned_groups"] == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("keep", [0, 10, 100])
async def test_half_a_snapshot_is_not_believed(closed: Path, keep: int) -> None:
    edit(closed / "index.snapshot", lambda data: data.__delitem__(slice(keep, None)))
    assert (await reopened(closed))[0] == [Result.HIT] * 60


@pytest.mark.asyncio
async def test_another_segments_snapshot_is_no_harm(closed: Path, tmp_path: Path) -> None:
    """A snapshot from before more pages came, as after a crash: those are found by scanning from where it ends."""
    old = (closed / "index.snapshot").read_bytes()
    store = await open_at(closed)
    more = keys_of(20, "odd")
    await fill(store, more)
    await store.aclose()
    (closed / "index.snapshot").write_bytes(old)
    store = await open_at(closed)
    assert await read(store, KEYS + more) == [Result.HIT] * 80
    assert store.stats()["scanned_groups"] == 1
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("orderly", [True, False])
async def test_deletes_outlive_a_restart_even_without_the_snapshot(tmp_path: Path, orderly: bool) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[5:50])
    if orderly:
        await store.aclose()
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    if not orderly:
        await store.aclose()
    (tmp_path / "crashed" / "index.snapshot").unlink(missing_ok=True)
    expected = [Result.MISS if 5 <= i < 50 else Result.HIT for i in range(60)]
    assert (await reopened(tmp_path / "crashed"))[0] == expected
    assert (await reopened(tmp_path / "crashed"))[0] == expected


@pytest.mark.asyncio
async def test_a_page_put_again_after_its_delete_outlives_a_restart(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[:10])
    await fill(store, KEYS[:4])
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    assert (await reopened(tmp_path / "crashed"))[0] == [Result.HIT] * 4 + [Result.MISS] * 6 + [Result.HIT] * 50


@pytest.mark.asyncio
async def test_a_damaged_deletion_log_costs_its_damaged_entries_only(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[:1])
    await store.delete(KEYS[50:51])
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    flip(tmp_path / "crashed" / "deletions.log", 3)
    edit(tmp_path / "crashed" / "deletions.log", lambda data: data.extend(b"half an entry"))
    assert (await reopened(tmp_path / "crashed"))[0] == [Result.HIT] * 50 + [Result.MISS] + [Result.HIT] * 9


@pytest.mark.asyncio
async def test_clear_outlives_a_restart(closed: Path) -> None:
    store = await open_at(closed)
    await store.clear()
    assert list_segments(closed) == []
    await fill(store, KEYS[:2])
    await store.aclose()
    assert (await reopened(closed))[0] == [Result.HIT] * 2 + [Result.MISS] * 58


@pytest.mark.asyncio
async def test_pages_put_after_a_restart_go_into_the_same_segment(closed: Path) -> None:
    for i in range(3):
        store = await open_at(closed)
        await fill(store, [page_key(f"more {i}")])
        await store.aclose()
    assert list_segments(closed) == [1]
    assert (await reopened(closed))[0] == [Result.HIT] * 60


@pytest.mark.asyncio
async def test_what_is_left_of_older_data_is_not_taken_for_pages(closed: Path) -> None:
    """A block of another store, and one of this store at another place, verify nowhere."""
    foreign = segment(closed).read_bytes()[:FIRST_GROUP]
    segment(closed, 2).write_bytes(foreign)
    edit(closed / "index.snapshot", lambda data: data.clear())
    store = await open_at(closed)
    assert store.stats()["pages"] == 60
    assert store.stats()["scanned_groups"] == 2
    await store.aclose()


@pytest.mark.asyncio
async def test_a_folder_of_another_schema_is_refused(closed: Path) -> None:
    other = StoreLayout(LAYOUT.page_bytes, b"\x01" * 32)
    with pytest.raises(Unavailable, match=rf"{closed}.*another schema: {LAYOUT.schema.hex()}, this is {'01' * 32}"):
        await FileBackend.open(parse_url(f"file:{closed}?capacity=64MiB"), other)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


@pytest.mark.asyncio
async def test_a_folder_of_another_format_version_is_refused(closed: Path) -> None:
    path = closed / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"] | {"version": 99}
    path.write_text(json.dumps({"manifest": manifest, "xxh3": _digest(Manifest(**manifest))}))
    with pytest.raises(Unavailable, match="version 99, this is"):
        await open_at(closed)


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 20, 60, 120, -3])
async def test_a_damaged_manifest_is_refused_and_nothing_is_touched(closed: Path, at: int) -> None:
    good = (closed / "manifest.json").read_bytes()
    flip(closed / "manifest.json", at)
    with pytest.raises(Unavailable, match=f"{closed}"):
        await open_at(closed)
    (closed / "manifest.json").write_bytes(good)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


@pytest.mark.asyncio
async def test_a_refused_folder_is_not_left_locked(closed: Path) -> None:
    with pytest.raises(Unavailable):
        await FileBackend.open(parse_url(f"file:{closed}?capacity=64MiB"), StoreLayout(LAYOUT.page_bytes, b""))
    store = await open_at(closed)
    with pytest.raises(Unavailable, match="in use"):
        await open_at(closed)
    await store.aclose()
