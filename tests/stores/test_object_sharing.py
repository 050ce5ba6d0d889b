"""Several writers on one prefix: they hit each other's pages, delete for each other, and harm nobody. Collection."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.object_store.formats import LAST_STAMP, is_name, name_at

from asynccache.storage import Collectable, Collected, Listable, PageKey, Result, Watchable
from asynccache.testing.backend_suite import blank, record_of, same
from tests.storage.page_kit import fill, get
from tests.stores.object_store_kit import bare, folder_url, objects, opened, packs, some_keys, until_hit
from tests.waiting import until

HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED
SOON = "refresh=0.02"


@pytest.mark.asyncio
async def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    url = folder_url(tmp_path, SOON)
    async with opened(url) as one, opened(url) as two:
        for n in range(3):
            keys = some_keys(str(n), 5)
            await fill(one, keys)
            await until_hit(two, keys)
            assert set(await get(two, keys)) == {HIT}
            await fill(two, keys)                      # is there: nothing is stored again
        assert len(packs(tmp_path)) == 3
        assert two.stats()["footers_read"] == 3


@pytest.mark.asyncio
async def test_without_refresh_others_pages_are_not_looked_for(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as one, opened(folder_url(tmp_path)) as two:
        await fill(one, some_keys("0", 5))
        assert set(await two.exists(some_keys("0", 5))) == {MISS}
        assert two.stats()["lists"] == 1


@pytest.mark.asyncio
async def test_a_deletion_is_seen_by_others_and_spares_what_is_stored_later(tmp_path: Path) -> None:
    url = folder_url(tmp_path, SOON)
    async with opened(url) as one, opened(url) as two:
        keys = some_keys("0", 5)
        await fill(one, keys)
        await until_hit(two, keys)
        assert await one.delete(keys[:2]) == [HIT, HIT]
        await until_hit(two, keys[:2], MISS)
        await fill(two, keys[:1])
        await until_hit(one, keys[:1])
        assert await get(one, keys) == [HIT, MISS, HIT, HIT, HIT]


@pytest.mark.asyncio
async def test_what_another_cleared_is_a_miss(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    async with opened(url) as one, opened(url) as two:
        keys = some_keys("0", 5)
        await fill(one, keys)
    async with opened(url) as one, opened(url) as two:
        await one.clear()
        assert objects(tmp_path) == []
        assert set(await get(two, keys)) == {MISS}
        assert set(await two.exists(keys)) == {MISS}
        assert two.stats()["vanished_packs"] == 1
        await fill(two, keys)


@pytest.mark.asyncio
async def test_writers_of_the_same_pages_harm_nobody_and_waste_is_collected(tmp_path: Path) -> None:
    url, keys = folder_url(tmp_path), some_keys("0", 20)
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        await asyncio.gather(*(fill(store, keys) for store in (one, two, three)))
        assert len(packs(tmp_path)) == 3
    async with opened(url) as one:
        assert set(await get(one, keys)) == {HIT}
        assert one.stats()["pages"] == 20
        assert (await bare(one).collect(None)).waste >= 2
        assert len(packs(tmp_path)) == 1
        assert set(await get(one, keys)) == {HIT}


@pytest.mark.asyncio
async def test_small_packs_and_half_dead_ones_are_collected_and_others_follow(tmp_path: Path) -> None:
    url = folder_url(tmp_path, SOON)
    async with opened(url) as one, opened(url) as two:
        keys = [key for n in range(12) for key in some_keys(str(n), 4)]
        for n in range(12):
            await fill(one, keys[4 * n : 4 * n + 4])
        await until_hit(two, keys)
        assert await one.delete(keys[:10]) == [HIT] * 10
        before = one.stats()["stored_bytes"]
        done = await bare(one).collect(None)
        assert isinstance(bare(one), Collectable)
        assert done.size == before - one.stats()["stored_bytes"] > 10 * 16384
        assert len(packs(tmp_path)) == 1
        assert await get(one, keys) == [MISS] * 10 + [HIT] * 38
        await until_hit(two, keys[:10], MISS)
        end = time.monotonic() + 20
        while await get(two, keys) != [MISS] * 10 + [HIT] * 38:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert await bare(one).collect(None) == Collected()


@pytest.mark.asyncio
async def test_a_page_that_a_collection_moved_is_found_where_it_is_now(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as one:
        for n in range(4):
            await fill(one, some_keys(str(n), 2))
        keys = [key for n in range(4) for key in some_keys(str(n), 2)]
        async with opened(folder_url(tmp_path)) as two:
            await bare(two).collect(None)
        async with bare(one)._catalog.lock:
            await bare(one)._catalog.refresh()         # knows both the packs that are gone and the new one
        assert one.stats()["packs"] == 5
        assert await get(one, keys) == [HIT] * 8


@pytest.mark.asyncio
async def test_where_moved_pages_cannot_be_read_the_others_are_good_all_the_same(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as one:
        moved = [*some_keys("0", 2), *some_keys("1", 2)]
        await fill(one, moved[:2])
        await fill(one, moved[2:])
        async with opened(folder_url(tmp_path)) as two:
            await bare(two).collect(None)
        (pack,) = packs(tmp_path)
        async with bare(one)._catalog.lock:
            await bare(one)._catalog.refresh()         # knows the packs that are gone, too, and asks them first
        stays = some_keys("stays", 2)
        await fill(one, stays)
        pack.unlink()
        pack.symlink_to(pack)                          # neither missing nor to be read
        assert await get(one, moved + stays) == [FAILED] * 4 + [HIT] * 2
        assert one.stats()["failed_calls"] == 0
        assert await get(one, moved) == [FAILED] * 4
        assert one.stats()["failed_calls"] == 1


@pytest.mark.asyncio
async def test_what_is_deleted_while_it_is_moved_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys("0", 4) + some_keys("1", 4)
    async with opened(folder_url(tmp_path)) as one, opened(folder_url(tmp_path)) as two:
        await fill(one, keys[:4])
        await fill(one, keys[4:])
        read = bare(two)._client.read
        monkeypatch.setattr(bare(two)._catalog.clock, "now", lambda: time.time() + 60)     # makes nothing younger

        async def delete_and_read(path: str, start: int, length: int) -> Any:
            if not start and keys[0].key in bare(one)._catalog.index:
                assert await one.delete(keys[:1]) == [HIT]
            return await read(path, start, length)

        monkeypatch.setattr(bare(two)._client, "read", delete_and_read)
        assert (await bare(two).collect(None)).waste == 2
        assert await get(two, keys) == [HIT] * 8       # has not heard of it yet
    async with opened(folder_url(tmp_path)) as three:
        assert await get(three, keys) == [MISS] + [HIT] * 7


@pytest.mark.asyncio
async def test_two_that_collect_at_once_lose_nothing(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    keys = [key for n in range(20) for key in some_keys(str(n), 2)]
    async with opened(url) as one:
        for n in range(20):
            await fill(one, keys[2 * n : 2 * n + 2])
    for _ in range(3):
        async with opened(url) as one, opened(url) as two:
            await asyncio.gather(bare(one).collect(None), bare(two).collect(None))
            for store in (one, two):
                results = await get(store, keys)
                assert set(results) <= {HIT, MISS}     # a pack may vanish under a reader
        async with opened(url) as three:
            assert set(await get(three, keys)) == {HIT}


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [0.0, 3600.0, 48 * 3600.0, 2**48 / 1000])
async def test_pages_whose_writer_has_its_clock_ahead_outlive_collections(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the last time that a name can have."""
    url = folder_url(tmp_path)
    keys = [key for n in range(3) for key in some_keys(str(n), 2)]
    async with opened(url) as store:
        clock = bare(store)._catalog.clock
        monkeypatch.setattr(clock, "name", lambda: name_at(min(int((time.time() + ahead) * 1000), LAST_STAMP)))
        for n in range(3):
            await fill(store, keys[2 * n : 2 * n + 2])
    for _ in range(3):
        async with opened(url) as store:
            await bare(store).collect(None)
            assert set(await get(store, keys)) == {HIT}
            assert all(is_name(path.name) for path in packs(tmp_path))
    async with opened(url) as store:
        assert set(await get(store, keys)) == {HIT}
        assert store.stats()["pages"] == 6


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [3600.0, 48 * 3600.0, 2**48 / 1000])
async def test_pages_whose_writer_has_its_clock_ahead_can_be_deleted_and_stored_again(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every process, by whose clock they are not born yet."""
    url, keys, others = folder_url(tmp_path), some_keys("ahead", 3), some_keys("now", 2)
    async with opened(url) as store:
        clock = bare(store)._catalog.clock
        with monkeypatch.context() as patch:
            patch.setattr(clock, "name", lambda: name_at(min(int((time.time() + ahead) * 1000), LAST_STAMP)))
            await fill(store, keys)
        await fill(store, others)
    async with opened(url) as store:
        assert await store.delete(keys + others) == [HIT] * 5
        assert await get(store, keys + others) == [MISS] * 5
    async with opened(url) as store:
        assert await get(store, keys + others) == [MISS] * 5
        await bare(store).collect(None)
        await fill(store, keys + others)
        assert await get(store, keys + others) == [HIT] * 5
    async with opened(url) as store:
        assert await get(store, keys + others) == [HIT] * 5


@pytest.mark.asyncio
async def test_a_deleted_page_stays_deleted_if_there_was_a_copy_that_was_not_read(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    keys = some_keys("0", 4)
    async with opened(url) as one, opened(url) as two:
        await asyncio.gather(fill(one, keys), fill(two, keys))
    async with opened(url) as store:
        packs(tmp_path)[-1].unlink()
        assert await get(store, keys) == [MISS] * 4    # the pack that was read has vanished
        assert await store.delete([*keys[:2], *some_keys("never", 1)]) == [MISS] * 3
        assert store.stats()["deleted"] == 0
    async with opened(url) as store:
        assert await get(store, keys) == [MISS, MISS, HIT, HIT]


@pytest.mark.asyncio
async def test_collection_while_pages_are_put_read_and_deleted(tmp_path: Path) -> None:
    url, rng = folder_url(tmp_path, SOON), Random(7)
    there: set[PageKey] = set()
    async with opened(url) as one, opened(url) as two:
        async def use(n: int) -> None:
            for step in range(6):
                keys = some_keys(f"{n}/{step}", 3)
                await fill(one, keys)
                there.update(keys)
                gone = keys[: rng.randrange(3)]
                if gone:
                    await one.delete(gone)
                    there.difference_update(gone)
                assert set(await get(one, keys)) <= {HIT, MISS}

        async def collect() -> None:
            for store in (one, two, one):
                await bare(store).collect(None)

        await asyncio.gather(*(use(n) for n in range(4)), collect())
        await bare(one).collect(None)
        assert one.stats()["pages"] == len(there)
        assert set(await get(one, sorted(there))) == {HIT}
    async with opened(url) as three:
        assert three.stats()["pages"] == len(there)
        assert set(await get(three, sorted(there))) == {HIT}


@pytest.mark.asyncio
async def test_old_pages_and_damaged_objects_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, hour_ago = folder_url(tmp_path), time.time() - 3600
    async with opened(url) as store:
        monkeypatch.setattr(bare(store)._catalog.clock, "now", lambda: hour_ago)
        await fill(store, some_keys("old", 3))
        await fill(store, some_keys("older", 4))
        monkeypatch.setattr(bare(store)._catalog.clock, "now", time.time)
        await fill(store, some_keys("new", 3))
        await fill(store, some_keys("newer", 4))
        first, _, third, _ = packs(tmp_path)
        await bare(store).collect(None)                # moves all to one pack: nothing gets younger by that
        assert not first.exists()
        assert not third.exists()
        await fill(store, some_keys("whole", 2))
        damaged = tmp_path / "packs" / ("0" * 32)
        damaged.write_bytes(b"torn")
        os.utime(damaged, (hour_ago, hour_ago))
        fresh = tmp_path / "packs" / ("1" * 32)
        fresh.write_bytes(b"on its way")
    async with opened(url) as store:
        done = await bare(store).collect(1800)
        assert done.pages == 7
        assert not damaged.exists()
        assert fresh.exists()
        assert set(await get(store, some_keys("old", 3) + some_keys("older", 4))) == {MISS}
        assert set(await get(store, some_keys("new", 3) + some_keys("newer", 4))) == {HIT}
    async with opened(url) as store:
        assert set(await get(store, some_keys("old", 3) + some_keys("older", 4))) == {MISS}
        assert set(await get(store, some_keys("new", 3) + some_keys("newer", 4) + some_keys("whole", 2))) == {HIT}
        assert (await bare(store).collect(0.0)).pages == 9
        assert packs(tmp_path) == [fresh]


@pytest.mark.asyncio
async def test_a_tombstone_goes_when_it_is_old_and_nothing_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder_url(tmp_path)) as store:
        keys = some_keys("0", 8)
        await fill(store, keys)
        await store.delete(keys[:1])
        await bare(store).collect(None)                # more than half is live: the pack stays, and so does this
        assert len(objects(tmp_path)) == 2 - (len(packs(tmp_path)) == 0)
        monkeypatch.setattr(bare(store)._catalog.clock, "now", lambda: time.time() + 3600)
        await store.delete(keys[1:7])
        await bare(store).collect(None)
        monkeypatch.setattr(bare(store)._catalog.clock, "now", lambda: time.time() + 7200)
        await bare(store).collect(None)
        assert len(objects(tmp_path)) == len(packs(tmp_path)) == 1
    async with opened(folder_url(tmp_path)) as store:
        assert await get(store, keys) == [MISS] * 7 + [HIT]


@pytest.mark.asyncio
async def test_the_oldest_packs_leave_a_full_store(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path, "refresh=0.02&pack=64KiB&capacity=512KiB")) as store:
        for n in range(20):
            await fill(store, some_keys(str(n), 4))    # a pack each
        await until(lambda: store.stats()["stored_bytes"] <= 512 << 10, "room")
        assert set(await get(store, some_keys("0", 4))) == {MISS}
        assert set(await get(store, some_keys("19", 4))) == {HIT}
        assert store.stats()["evicted_packs"] >= 12
        await until(lambda: len(packs(tmp_path)) == store.stats()["packs"], "gone")


@pytest.mark.asyncio
async def test_pages_are_listed_and_watched(tmp_path: Path) -> None:
    url, told = folder_url(tmp_path, SOON), set[bytes]()
    async with opened(url) as one, opened(url) as two:
        backend = bare(two)
        assert isinstance(backend, Listable)
        assert isinstance(backend, Watchable)
        backend.watch(lambda there, keys: (told.update if there else told.difference_update)(keys))
        keys = some_keys("0", 5) + some_keys("1", 2, "odd")
        await fill(one, keys)
        await until_hit(two, keys)
        found = [stored async for batch in backend.listing() for stored in batch]
        assert {stored.key for stored in found} == told == {key.key for key in keys}
        assert {stored.size for stored in found} == {64 + 16384, 64 + 1000}
        assert all(abs(stored.written - time.time()) < 60 for stored in found)
        await one.delete(keys[:3])
        await until(lambda: told == {key.key for key in keys[3:]}, "told")


@pytest.mark.asyncio
async def test_a_listing_goes_on_when_packs_vanish(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as store:
        for n in range(4):
            await fill(store, some_keys(str(n), 2))
        found = []
        async for batch in bare(store).listing():
            found.append(len(batch))
            if len(found) == 1:
                packs(tmp_path)[2].unlink()
                assert set(await get(store, some_keys("2", 2))) == {MISS}
        assert found == [2, 2, 0, 2]


@pytest.mark.asyncio
async def test_small_puts_share_packs(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as store:
        keys = some_keys("0", 100)
        assert await asyncio.gather(*(bare(store).put([key], [record_of(key)]) for key in keys)) == [[HIT]] * 100
        assert 2 <= len(packs(tmp_path)) <= 4
        records = [blank(key) for key in keys]
        assert await bare(store).get(keys, records) == [HIT] * 100
        assert all(same([record_of(key)], [record]) for key, record in zip(keys, records, strict=True))
        assert store.stats()["range_reads"] <= 4
