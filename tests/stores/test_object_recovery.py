"""The pages in an object store are found again: from footers, from a snapshot, from a bad one. Objects that are no
packs of ours are not served."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from asynccache.storage import Result, StoreLayout
from asynccache.testing.backend_suite import LAYOUT
from tests.storage.page_kit import fill, get
from tests.stores.object_store_kit import bare, folder_url, objects, open_at, opened, packs, some_keys
from tests.waiting import until

HIT, MISS, CORRUPT = Result.HIT, Result.MISS, Result.CORRUPT


async def fill_packs(url: str, count: int) -> None:
    """Four pages in each of ``count`` packs."""
    async with opened(url) as store:
        for n in range(count):
            await fill(store, some_keys(str(n), 4))


async def check(url: str, count: int, missing: tuple[int, ...] = ()) -> dict[str, int | float]:
    """Everything is there but for the keys of some packs."""
    async with opened(url) as store:
        for n in range(count):
            assert set(await get(store, some_keys(str(n), 4))) == {MISS if n in missing else HIT}
        return dict(store.stats())


async def test_opening_reads_the_footers_and_a_save_spares_that(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 10)
    assert (await check(url, 10))["footers_read"] == 10
    await fill_packs(url, 70)                          # enough to be saved when it is closed
    assert len(objects(tmp_path, "index")) == 1
    assert (await check(url, 70))["footers_read"] == 0
    async with opened(url) as store:
        await fill(store, some_keys("late", 4))
    stats = await check(url, 70)
    assert (stats["footers_read"], stats["pages"]) == (1, 284)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "remove"])
async def test_a_snapshot_is_not_needed(tmp_path: Path, harm: str) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 70)
    (path,) = objects(tmp_path, "index")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[: len(data) // 3]), "empty": b""}[harm])
    stats = await check(url, 70)
    assert stats["footers_read"] == 70
    assert stats["bad_snapshots"] == (harm != "remove")


async def test_packs_that_a_snapshot_names_and_that_are_gone_are_misses(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 70)
    for path in packs(tmp_path)[:3]:
        path.unlink()
    async with opened(folder_url(tmp_path, "refresh=0.02")) as store:              # finds out by itself
        await until(lambda: store.stats()["vanished_packs"] == 3, "a full list")
        assert set(await store.exists(some_keys("1", 4))) == {MISS}
    assert (await check(url, 70, missing=(0, 1, 2)))["vanished_packs"] == 3


async def test_deletions_outlive_the_store(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 70)
    keys = some_keys("0", 4)
    async with opened(url) as store:
        assert await store.delete(keys[:2]) == [HIT, HIT]
    for _ in range(2):
        async with opened(url) as store:
            assert await get(store, keys) == [MISS, MISS, HIT, HIT]
            await bare(store)._catalog.save()          # knows of it
    async with opened(url) as store:
        await fill(store, keys[:1])
    async with opened(url) as store:
        assert await get(store, keys) == [HIT, MISS, HIT, HIT]


@pytest.mark.parametrize("harm", ["cut", "cut within", "empty", "foreign", "other", "gone"])
async def test_a_pack_that_is_no_pack_is_a_miss_and_costs_nobody_else(tmp_path: Path, harm: str) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 3)
    path = packs(tmp_path)[1]
    data = path.read_bytes()
    new = {
        "cut": data[:-1], "cut within": data[:20_000], "empty": b"", "foreign": b"x" * 30_000,
        "other": data[:-24] + sha256(data).digest()[:24],
    }
    async with opened(url) as store:                   # knows the pack as it was
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(new[harm])
        results = await get(store, some_keys("1", 4))
        if harm in ("cut within", "empty"):
            assert set(results) == {CORRUPT}           # and the pack is forgotten, not asked for again
            assert set(await get(store, some_keys("1", 4))) == {MISS}
        elif harm == "gone":
            assert set(results) == {MISS}
        assert set(await get(store, some_keys("2", 4))) == {HIT}
        assert store.stats()["failed_calls"] == 0
    stats = await check(url, 3, missing=(1,))          # and is met for the first time by another
    assert stats["unreadable_packs"] == (harm != "gone")


async def test_a_pack_of_another_record_schema_is_left_alone(tmp_path: Path) -> None:
    other = StoreLayout(LAYOUT.page_bytes, sha256(b"other").digest())
    async with opened(folder_url(tmp_path), other) as store:
        await fill(store, some_keys("0", 4))
    async with opened(folder_url(tmp_path)) as store:
        assert set(await get(store, some_keys("0", 4))) == {MISS}
        await fill(store, some_keys("1", 4))
    async with opened(folder_url(tmp_path), other) as store:
        assert set(await get(store, some_keys("0", 4))) == {HIT}


async def test_a_pack_that_lies_is_caught_and_its_page_deleted_for_good(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    await fill_packs(url, 1)
    (path,) = packs(tmp_path)
    data = bytearray(path.read_bytes())
    data[16384 + 5] ^= 8                               # in the second page
    path.write_bytes(data)
    keys = some_keys("0", 4)
    async with opened(url) as store:
        assert await get(store, keys) == [HIT, CORRUPT, HIT, HIT]
    async with opened(url) as store:
        assert await get(store, keys) == [HIT, MISS, HIT, HIT]


async def test_a_folder_of_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    theirs = tmp_path / "packs" / "readme.txt"
    theirs.write_text("hello")
    store = await open_at(folder_url(tmp_path))
    await fill(store, some_keys("0", 4))
    await store.delete(some_keys("0", 4))
    await store.aclose()
    assert theirs.read_text() == "hello"
