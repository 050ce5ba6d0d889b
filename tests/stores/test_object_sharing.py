"""Several writers on one prefix: they hit each other's pages, delete for each other, and harm nobody."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from secrets import token_hex

import pytest
from asynccache_backends.object_store.formats import LAST_STAMP, first_name

from asynccache.storage import Listable, Result, Watchable
from asynccache.testing.backend_suite import blank, record_of, same
from tests.storage.page_kit import fill, get
from tests.stores.object_store_kit import bare, folder_url, objects, opened, packs, some_keys, until_hit
from tests.waiting import until

HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED
SOON = "refresh=0.02"


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


async def test_without_refresh_others_pages_are_not_looked_for(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as one, opened(folder_url(tmp_path)) as two:
        await fill(one, some_keys("0", 5))
        assert set(await two.exists(some_keys("0", 5))) == {MISS}
        assert two.stats()["lists"] == 1


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


async def test_writers_of_the_same_pages_harm_nobody(tmp_path: Path) -> None:
    url, keys = folder_url(tmp_path), some_keys("0", 20)
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        await asyncio.gather(*(fill(store, keys) for store in (one, two, three)))
        assert len(packs(tmp_path)) == 3
    async with opened(url) as one:
        assert set(await get(one, keys)) == {HIT}
        assert one.stats()["pages"] == 20


def name_ahead(seconds: float) -> str:
    """A name by a clock that is so far ahead; at most the last that a name can have."""
    return first_name(min(int((time.time() + seconds) * 1000), LAST_STAMP)) + token_hex(10)


@pytest.mark.parametrize("ahead", [3600.0, 48 * 3600.0, 2**48 / 1000])
async def test_pages_whose_writer_has_its_clock_ahead_can_be_deleted_and_stored_again(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every process, by whose clock they are not born yet."""
    url, keys, others = folder_url(tmp_path), some_keys("ahead", 3), some_keys("now", 2)
    async with opened(url) as store:
        clock = bare(store)._catalog.clock
        with monkeypatch.context() as patch:
            patch.setattr(clock, "name", lambda: name_ahead(ahead))
            await fill(store, keys)
        await fill(store, others)
    async with opened(url) as store:
        assert await store.delete(keys + others) == [HIT] * 5
        assert await get(store, keys + others) == [MISS] * 5
    async with opened(url) as store:
        assert await get(store, keys + others) == [MISS] * 5
        await fill(store, keys + others)
        assert await get(store, keys + others) == [HIT] * 5
    async with opened(url) as store:
        assert await get(store, keys + others) == [HIT] * 5


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


async def test_small_puts_share_packs(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as store:
        keys = some_keys("0", 100)
        assert await asyncio.gather(*(bare(store).put([key], [record_of(key)]) for key in keys)) == [[HIT]] * 100
        assert 2 <= len(packs(tmp_path)) <= 4
        records = [blank(key) for key in keys]
        assert await bare(store).get(keys, records) == [HIT] * 100
        assert all(same([record_of(key)], [record]) for key, record in zip(keys, records, strict=True))
        assert store.stats()["range_reads"] <= 4


async def test_a_pack_of_which_nothing_is_left_is_removed(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path)) as store:
        await fill(store, some_keys("0", 4))
        await fill(store, some_keys("1", 4))
        await store.delete(some_keys("0", 4)[:3])
        assert len(packs(tmp_path)) == 2
        await store.delete(some_keys("0", 4)[3:])
        assert len(packs(tmp_path)) == 1
        assert set(await get(store, some_keys("1", 4))) == {HIT}


async def test_what_a_rule_of_the_bucket_has_removed_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs become misses and are stored again; tombstones take no memory any more, and a young one stays."""
    keys = some_keys("0", 4)
    async with opened(folder_url(tmp_path)) as store:
        catalog = bare(store)._catalog
        hour_ago = time.time() - 3600
        monkeypatch.setattr(catalog.clock, "now", lambda: hour_ago)
        await fill(store, keys)
        await store.delete(keys[:1])
        monkeypatch.setattr(catalog.clock, "now", time.time)
        await store.delete(keys[1:2])
        for path in objects(tmp_path):
            path.unlink()
        async with catalog.lock:
            await catalog.refresh(full=True)
            await fill(store, some_keys("1", 1))       # the time of the store itself, which no list has told before
            await catalog.refresh(full=True)
            await catalog.refresh(full=True)
        assert store.stats()["tombstones"] == 1
        assert await get(store, keys) == [MISS] * 4
        await fill(store, keys)
        assert await get(store, keys) == [HIT] * 4
