"""What only object stores do: packs, their index and tombstones, several writers, and objects that lie."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
from asynccache_backends.object_store.client import connect, redacted, settings_of
from asynccache_backends.object_store.formats import (
    ENTRY_BYTES,
    LAST_STAMP,
    MAX_RECORDS,
    TRAILER_BYTES,
    NameClock,
    Pack,
    PackIndex,
    PackIndexSnapshot,
    first_name,
    footer_bytes,
    is_name,
    pack_entries,
    pack_snapshot,
    pack_tomb,
    parse_footer,
    parse_snapshot,
    parse_tomb,
    stamp_of,
    trailer_of,
)
from xxhash import xxh3_128_digest

from asynccache.errors import ConfigError
from asynccache.storage import HEADER_BYTES, RECORD_SCHEMA, Listable, Result, StoreLayout, Watchable, parse_url
from asynccache.testing.backend_suite import LAYOUT, blank, record_of, same
from tests.storage.pages_kit import fill, get, put
from tests.stores.kinds import (
    bare,
    folder_url,
    fresh_name,
    objects,
    open_backend,
    opened,
    packs,
    some_keys,
    store_url,
    until_answered,
)
from tests.stores.object_server import MotoServer
from tests.stores.slow_proxy import DISKS, QUOTA, FullProxy, Refusal
from tests.waiting import interrupted_after, until

# Several writers on one prefix: they hit each other's pages, delete for each other, and harm nobody.


HIT, MISS, CORRUPT, FAILED = Result.HIT, Result.MISS, Result.CORRUPT, Result.FAILED
SOON = "refresh=0.02"


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with interrupted_after(60):
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    return folder_url(tmp_path)


async def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    url = folder_url(tmp_path, SOON)
    async with opened(url) as one, opened(url) as two:
        for n in range(3):
            keys = some_keys(str(n), 5)
            await fill(one, keys)
            await until_answered(two, keys)
            assert set(await get(two, keys)) == {HIT}
            await fill(two, keys)                      # is there: nothing is stored again
        assert len(packs(tmp_path)) == 3
        assert two.stats()["footers_read"] == 3


async def test_without_refresh_others_pages_are_not_looked_for(url: str) -> None:
    async with opened(url) as one, opened(url) as two:
        await fill(one, some_keys("0", 5))
        assert set(await two.exists(some_keys("0", 5))) == {MISS}
        assert two.stats()["lists"] == 1


async def test_a_deletion_is_seen_by_others_and_spares_what_is_stored_later(tmp_path: Path) -> None:
    url = folder_url(tmp_path, SOON)
    async with opened(url) as one, opened(url) as two:
        keys = some_keys("0", 5)
        await fill(one, keys)
        await until_answered(two, keys)
        assert await one.delete(keys[:2]) == [HIT, HIT]
        await until_answered(two, keys[:2], MISS)
        await fill(two, keys[:1])
        await until_answered(one, keys[:1])
        assert await get(one, keys) == [HIT, MISS, HIT, HIT, HIT]


async def test_what_another_cleared_is_a_miss(tmp_path: Path, url: str) -> None:
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


def name_ahead(seconds: float) -> str:
    """A name by a clock that is so far ahead; at most the last that a name can have."""
    return first_name(min(int((time.time() + seconds) * 1000), LAST_STAMP)) + token_hex(10)


@pytest.mark.parametrize("ahead", [3600.0, 48 * 3600.0, 2**48 / 1000])
async def test_pages_whose_writer_has_its_clock_ahead_can_be_deleted_and_stored_again(
    url: str, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every process, by whose clock they are not born yet."""
    keys, others = some_keys("ahead", 3), some_keys("now", 2)
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


async def test_a_deleted_page_stays_deleted_if_there_was_a_copy_that_was_not_read(tmp_path: Path, url: str) -> None:
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


async def test_pages_are_watched_and_listed_with_their_time(tmp_path: Path) -> None:
    url, told = folder_url(tmp_path, SOON), set[bytes]()
    async with opened(url) as one, opened(url) as two:
        backend = bare(two)
        assert isinstance(backend, Listable)
        assert isinstance(backend, Watchable)
        backend.watch(lambda there, keys: (told.update if there else told.difference_update)(keys))
        keys = some_keys("0", 5) + some_keys("1", 2, "odd")
        await fill(one, keys)
        await until_answered(two, keys)
        assert told == {key.key for key in keys}
        assert all([abs(page.written - time.time()) < 60 async for batch in backend.listing() for page in batch])
        await one.delete(keys[:3])
        await until(lambda: told == {key.key for key in keys[3:]}, "told")


async def test_a_listing_goes_on_when_packs_vanish(tmp_path: Path, url: str) -> None:
    async with opened(url) as store:
        for n in range(4):
            await fill(store, some_keys(str(n), 2))
        found = []
        async for batch in bare(store).listing():
            found.append(len(batch))
            if len(found) == 1:
                packs(tmp_path)[2].unlink()
                assert set(await get(store, some_keys("2", 2))) == {MISS}
        assert found == [2, 2, 0, 2]


async def test_small_puts_share_packs(tmp_path: Path, url: str) -> None:
    async with opened(url) as store:
        keys = some_keys("0", 100)
        assert await asyncio.gather(*(bare(store).put([key], [record_of(key)]) for key in keys)) == [[HIT]] * 100
        assert 2 <= len(packs(tmp_path)) <= 4
        records = [blank(key) for key in keys]
        assert await bare(store).get(keys, records) == [HIT] * 100
        assert all(same([record_of(key)], [record]) for key, record in zip(keys, records, strict=True))
        assert store.stats()["range_reads"] <= 4


async def test_a_pack_of_which_nothing_is_left_is_removed(tmp_path: Path, url: str) -> None:
    async with opened(url) as store:
        await fill(store, some_keys("0", 4))
        await fill(store, some_keys("1", 4))
        await store.delete(some_keys("0", 4)[:3])
        assert len(packs(tmp_path)) == 2
        await store.delete(some_keys("0", 4)[3:])
        assert len(packs(tmp_path)) == 1
        assert set(await get(store, some_keys("1", 4))) == {HIT}


async def test_what_a_rule_of_the_bucket_has_removed_is_forgotten(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs become misses and are stored again; tombstones take no memory any more, and a young one stays."""
    keys = some_keys("0", 4)
    async with opened(url) as store:
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


# The pages in an object store are found again: from footers, from a snapshot, from a bad one. Objects that are no
# packs of ours are not served.


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


async def test_opening_reads_the_footers_and_a_save_spares_that(tmp_path: Path, url: str) -> None:
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
async def test_a_snapshot_is_not_needed(tmp_path: Path, url: str, harm: str) -> None:
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


async def test_packs_that_a_snapshot_names_and_that_are_gone_are_misses(tmp_path: Path, url: str) -> None:
    await fill_packs(url, 70)
    for path in packs(tmp_path)[:3]:
        path.unlink()
    async with opened(folder_url(tmp_path, "refresh=0.02")) as store:              # finds out by itself
        await until(lambda: store.stats()["vanished_packs"] == 3, "a full list")
        assert set(await store.exists(some_keys("1", 4))) == {MISS}
    assert (await check(url, 70, missing=(0, 1, 2)))["vanished_packs"] == 3


async def test_deletions_outlive_the_store(url: str) -> None:
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
async def test_a_pack_that_is_no_pack_is_a_miss_and_costs_nobody_else(tmp_path: Path, url: str, harm: str) -> None:
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


async def test_a_pack_of_another_record_schema_is_left_alone(url: str) -> None:
    other = StoreLayout(LAYOUT.page_bytes, sha256(b"other").digest())
    async with opened(url, other) as store:
        await fill(store, some_keys("0", 4))
    async with opened(url) as store:
        assert set(await get(store, some_keys("0", 4))) == {MISS}
        await fill(store, some_keys("1", 4))
    async with opened(url, other) as store:
        assert set(await get(store, some_keys("0", 4))) == {HIT}


async def test_a_pack_that_lies_is_caught_and_its_page_deleted_for_good(tmp_path: Path, url: str) -> None:
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


async def test_a_folder_of_somebody_elses_is_not_touched(tmp_path: Path, url: str) -> None:
    (tmp_path / "packs").mkdir()
    theirs = tmp_path / "packs" / "readme.txt"
    theirs.write_text("hello")
    async with opened(url) as store:
        await fill(store, some_keys("0", 4))
        await store.delete(some_keys("0", 4))
    assert theirs.read_text() == "hello"


# Calls of the object store that are cancelled at the worst moment end, and leave nothing running.


async def test_a_put_cancelled_as_its_pack_is_about_to_begin_ends(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path, "refresh=0&parallel=1")) as store:
        uploads = bare(store)._uploads

        class Away(set[Any]):
            def discard(self, load: Any) -> None:
                super().discard(load)
                second.cancel()  # it hears of that before the task that is to send its pack begins

        uploads._sending = Away()
        first = asyncio.ensure_future(put(store, some_keys("first", 2)))
        second = asyncio.ensure_future(put(store, some_keys("second", 2)))
        assert await first == [HIT, HIT]
        done, _ = await asyncio.wait([second], timeout=5)
        assert done
        assert second.cancelled()
        await fill(store, some_keys("third", 2))


async def test_closing_that_is_cancelled_leaves_nothing_running(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    backend = await open_backend(folder_url(tmp_path, "refresh=1"))
    with backend._open_calls:
        closing = asyncio.ensure_future(backend.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([closing])
    assert closing.cancelled()
    await backend.aclose()
    assert asyncio.all_tasks() == before


async def test_a_cancellation_is_not_lost_while_the_keeper_stops(tmp_path: Path) -> None:
    backend = await open_backend(folder_url(tmp_path, "refresh=1"))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(backend._keeper.stop())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await backend.aclose()


# A real S3 server that hangs, and one that is full.


LARGE = StoreLayout({"full": 256 << 10}, LAYOUT.schema)            # sent from where it lies
SMALL = StoreLayout({"full": 8 << 10}, LAYOUT.schema)              # copied first


@pytest.fixture
def s3_url(request: pytest.FixtureRequest) -> str:
    return store_url("s3", request, fresh_name())


@pytest.mark.slow
async def test_one_of_two_that_share_a_pack_may_leave(s3_server: MotoServer, s3_url: str) -> None:
    backend = await open_backend(s3_url, SMALL)
    keys = some_keys("share", 5)
    s3_server.hang()
    try:
        puts = [asyncio.ensure_future(backend.put([key], [record_of(key, SMALL)])) for key in keys]
        await asyncio.sleep(0)
        puts[0].cancel()                               # has a pack of its own, as the next one
        puts[2].cancel()                               # waits in line, as all others
        await asyncio.wait([puts[0], puts[2]])
        puts[3].cancel()                               # shares a pack that is under way by now
        await asyncio.wait([puts[3]])
    finally:
        s3_server.resume()
    await asyncio.wait(puts)
    assert [task.cancelled() for task in puts] == [True, False, True, True, False]
    assert [task.result() for task in (puts[1], puts[4])] == [[HIT]] * 2
    assert await backend.exists(keys) == [MISS, HIT, MISS, HIT, HIT]
    assert backend.stats()["packs"] == 2
    await backend.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [QUOTA, DISKS], ids=["quota", "disks"])
async def test_a_full_server_refuses_pages_and_serves_what_it_has(
    s3_server: MotoServer, s3_url: str, refusal: Refusal
) -> None:
    with FullProxy(s3_server.port) as proxy:
        async with opened(s3_url.replace(f":{s3_server.port}", f":{proxy.port}"), LARGE) as store:
            old, new = some_keys("old", 8), some_keys("new", 8)
            await fill(store, old)
            proxy.full(refusal)
            assert await put(store, new) == [FAILED] * 8
            asked = [proxy.refused]
            for n in range(20):
                assert await put(store, some_keys(f"more {n}", 1)) == [FAILED]
                asked.append(proxy.refused)
            assert len(set(asked)) < 21, "it is left alone for a moment"
            assert await put(store, old) == [HIT] * 8
            assert await get(store, old) == [HIT] * 8
            stats = store.stats()
            assert stats["refused_pages"] == 28
            assert stats["failed_calls"] == stats["timeouts"] == stats["breaker_opened"] == 0
            proxy.full(None)

            async def stored() -> bool:
                return await put(store, new) == [HIT] * 8

            await until(stored)
            assert await get(store, new) == [HIT] * 8


# Objects that say of themselves what is not so cost a miss: nothing hangs, nothing else is read, and no memory is taken
# on a stranger's word.


KEYS = some_keys("page", 20)


async def use(url: str) -> None:
    """Packs that are sent from where the pages lie and packs that are copied first, a tombstone, a saved index."""
    async with opened(url) as store:
        await fill(store, KEYS)
        await fill(store, some_keys("odd", 3, "odd"))
        await store.delete(KEYS[:1])
        await bare(store)._catalog.save()


async def test_an_object_of_a_tebibyte_is_not_read(tmp_path: Path) -> None:
    """An index, a tombstone and a pack, each with a true beginning or end as far as anybody could tell."""
    await use(folder_url(tmp_path / "s"))
    (index,) = objects(tmp_path / "s", "index")
    os.truncate(index, 1 << 40)
    clock = NameClock()
    for name in (clock.name(), f"{clock.name()}.dead"):
        (tmp_path / "s" / "packs" / name).touch()
        os.truncate(tmp_path / "s" / "packs" / name, 1 << 40)
    async with opened(folder_url(tmp_path / "s")) as store:
        assert await get(store, KEYS) == [MISS] + [HIT] * 19
        stats = store.stats()
        assert (stats["bad_snapshots"], stats["bad_tombstones"], stats["unreadable_packs"]) == (1, 1, 1)


SCHEMA = LAYOUT.schema
ENTRY = struct.Struct("<32s64sQQQ")


def saved(packs: object, tombs: object = (), cursor: float = 1.0, raw: bytes = b"", more: int = 0) -> bytes:
    """An index with a right checksum. ``raw``: what follows the table, which says that it is ``more`` bytes longer."""
    table = msgspec.msgpack.encode((cursor, packs, dict(tombs)))  # type: ignore[call-overload]
    body = (len(table) + more).to_bytes(8, "little") + table + raw
    return b"acINDX\x00\x03" + SCHEMA + xxh3_128_digest(body) + body


def one_pack(
    name: str = "0" * 32, size: int = 184 + 10, offset: int = 0, length: int = 10, end: bytes = b"", count: int = 1,
    more: int = 0,
) -> bytes:
    raw = ENTRY.pack(bytes(32), bytes(64), offset, length, 0) + end
    return saved([(name, size, count)], raw=raw, more=more)


def many_records(count: int) -> bytes:
    """An index of one pack with so many records."""
    raw = b"".join(ENTRY.pack(i.to_bytes(32, "little"), bytes(64), i, 1, 0) for i in range(count))
    return saved([("0" * 32, len(raw) + 64 + count, count)], raw=raw)


def test_an_index_that_can_be_true_is_believed() -> None:
    found = parse_snapshot(memoryview(one_pack()), SCHEMA)
    assert found is not None
    assert (found.cursor, [name for name, _, _ in found.packs]) == (1.0, ["0" * 32])
    assert parse_snapshot(memoryview(many_records(MAX_RECORDS)), SCHEMA) is not None
    assert parse_snapshot(memoryview(saved([], {"0" * 32: 2}, raw=bytes(64))), SCHEMA) is not None


@pytest.mark.parametrize("data", [
    saved(1), saved([()]), saved([("0" * 32, 10)]), one_pack(end=b"x"), one_pack(end=bytes(120)),
    one_pack(end=bytes(120), count=2), one_pack(count=0), one_pack(count=2), one_pack(count=-1),
    one_pack(count=1 << 62), one_pack(more=1), one_pack(more=-1), one_pack(more=1 << 60),
    one_pack(name="x" * 32), one_pack(name="0" * 32 + "\n"), one_pack(size=-1),
    one_pack(name="../../../../../../../etc/passwd"), one_pack(offset=1 << 63),
    one_pack(length=1 << 63), one_pack(size=(1 << 64) - 1),
    one_pack(length=(1 << 63) - 1, size=(1 << 63) + 183), saved([], {"x" * 32: 0}),
    saved([], {"0" * 32: 1}, raw=bytes(31)), saved([], {"0" * 32: 1}, raw=bytes(33)), saved([], {"0" * 32: 1}),
    saved([], {"0" * 32: -1, "1" * 32: 1}), saved([], {"0" * 32: [bytes(32)]}),
    saved([], cursor=float("nan")), saved([], cursor=float("inf")), saved([], cursor=-1e306), saved([], cursor=-1.0),
    saved([], cursor=1e306), many_records(MAX_RECORDS + 1),
])  # fmt: skip
def test_an_index_that_verifies_and_cannot_be_true_is_not_believed(data: bytes) -> None:
    """Its checksum is one that anybody can make."""
    assert parse_snapshot(memoryview(data), SCHEMA) is None


@pytest.mark.parametrize("cursor", [1e10, 1e300, -1e306])
async def test_an_index_of_an_impossible_time_hides_nothing(tmp_path: Path, cursor: float) -> None:
    await use(folder_url(tmp_path / "s"))
    for path in objects(tmp_path / "s", "index"):
        path.unlink()
    name = NameClock().name()
    data = pack_snapshot(PackIndexSnapshot(cursor, [], {}), SCHEMA)
    (tmp_path / "s" / "index" / name).write_bytes(data)
    async with opened(folder_url(tmp_path / "s")) as store:
        assert await get(store, KEYS) == [MISS] + [HIT] * 19


async def test_a_footer_that_claims_more_than_its_object_has_is_left_out(tmp_path: Path) -> None:
    await use(folder_url(tmp_path / "s"))
    entries = pack_entries([KEYS[0].key], [bytes(64)], [1 << 40], 0)
    (tmp_path / "s" / "packs" / NameClock().name()).write_bytes(entries + trailer_of(entries, SCHEMA))
    async with opened(folder_url(tmp_path / "s")) as store:
        assert await get(store, KEYS) == [MISS] + [HIT] * 19
        assert store.stats()["unreadable_packs"] == 1
        assert all(isinstance(pack, Pack) and pack.size < 1 << 30 for pack in bare(store)._catalog.index.packs())


# Packs, snapshots and tombstones say what was written, or nothing; the index answers as a simple model of it does.


OTHER = sha256(b"other").digest()


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def entries_of(numbers: list[int]) -> bytes:
    count = len(numbers)
    return pack_entries([key_of(n) for n in numbers], [bytes(64)] * count, [10] * count, 5)


def footer_of(numbers: list[int]) -> bytes:
    entries = entries_of(numbers)
    return entries + trailer_of(entries, RECORD_SCHEMA)


def pack_of(clock: NameClock, numbers: list[int]) -> Pack:
    return Pack(clock.name(), 10 * len(numbers) + ENTRY_BYTES * len(numbers) + TRAILER_BYTES, entries_of(numbers))


def flipped(data: bytes) -> Iterator[bytes]:
    """With one bit of each byte turned."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def test_a_footer_comes_back_whatever_lies_before_it_and_no_flipped_bit_goes_unseen() -> None:
    footer = footer_of([1, 2, 3])
    size = 30 + len(footer)
    assert footer_bytes(footer) == footer_bytes(footer[-TRAILER_BYTES:]) == len(footer)
    for before in (b"", b"x" * 17):
        assert parse_footer(before + footer, size, RECORD_SCHEMA) == entries_of([1, 2, 3])
    assert not any(parse_footer(broken, size, RECORD_SCHEMA) for broken in flipped(footer))
    assert parse_footer(footer, size, OTHER) is None, "another schema"


def test_a_footer_that_does_not_fit_its_object_is_damaged() -> None:
    footer = footer_of([1, 2])
    for size in (0, len(footer) - 1, len(footer), 19 + len(footer), 21 + len(footer)):
        assert parse_footer(footer, size, RECORD_SCHEMA) is None
    for cut in (0, 1, TRAILER_BYTES - 1, len(footer) - 1):
        assert parse_footer(footer[len(footer) - cut :], 20 + len(footer), RECORD_SCHEMA) is None


def test_a_footer_that_lies_about_offsets_is_damaged() -> None:
    for offset in (0, 11, 2**63):
        entries = entries_of([1]) + key_of(2) + bytes(64) + offset.to_bytes(8, "little") + (10).to_bytes(8, "little")
        entries += bytes(8)
        footer = entries + trailer_of(entries, RECORD_SCHEMA)
        assert parse_footer(footer, 20 + len(footer), RECORD_SCHEMA) is None


def test_a_snapshot_comes_back_and_no_flipped_bit_goes_unseen() -> None:
    clock = NameClock()
    first, second = pack_of(clock, [1, 2]), pack_of(clock, [3])
    tombs = {clock.name(): (key_of(1), key_of(9)), clock.name(): ()}
    packs = [(pack.name, pack.size, pack.entries) for pack in (first, second)]
    data = pack_snapshot(PackIndexSnapshot(12.5, packs, tombs), RECORD_SCHEMA)
    found = parse_snapshot(memoryview(data), RECORD_SCHEMA)
    assert found is not None
    assert (found.cursor, list(found.packs), found.tombs) == (12.5, packs, tombs)
    assert parse_snapshot(memoryview(data), OTHER) is None
    for cut in (0, 10, 55, 56, len(data) - 1):
        assert parse_snapshot(memoryview(data[:cut]), RECORD_SCHEMA) is None
    assert not any(parse_snapshot(memoryview(broken), RECORD_SCHEMA) for broken in flipped(data))


def test_a_tombstone_comes_back_and_no_flipped_bit_goes_unseen() -> None:
    name, data = NameClock().name(), pack_tomb([key_of(1), key_of(2)])
    assert parse_tomb(name, data) == (key_of(1), key_of(2))
    assert parse_tomb("../" + name, data) is None
    assert not any(parse_tomb(name, broken) for broken in flipped(data))


def test_names_sort_by_time_and_never_go_back() -> None:
    now = [1000.0]
    clock = NameClock(lambda: now[0])
    names = [clock.name() for _ in range(5)]
    now[0] = 900.0
    names += [clock.name()]
    clock.seen(1_000_500)
    names += [clock.name()]
    clock.seen(int(1e14))                              # the year 5138
    now[0] = 2000.0
    names += [clock.name()]
    assert names == sorted(names)
    assert len(set(names)) == 8
    assert all(is_name(name) for name in names)
    assert stamp_of(names[6]) == 1_000_501
    assert stamp_of(names[7]) == 2_000_000
    assert first_name(2_000_000) <= names[7] < first_name(2_000_001)
    assert not is_name(names[0] + "\n")


class Model:
    """Packs and tombstones, and which pack each key is read from, one key at a time."""

    def __init__(self) -> None:
        self.packs: dict[str, list[int]] = {}
        self.tombs: dict[str, list[int]] = {}
        self.holders: dict[int, str] = {}

    def add(self, name: str, numbers: list[int]) -> None:
        self.packs[name] = numbers
        for number in numbers:
            rivals = [name, self.holders[number]] if number in self.holders else [name]
            self.holders[number] = max(rivals)
        self.bury_dead()

    def drop(self, name: str) -> None:
        self.holders = {number: holder for number, holder in self.holders.items() if holder != name}
        del self.packs[name]

    def bury_dead(self) -> None:
        for name, numbers in self.tombs.items():
            for number in numbers:
                if number in self.holders and stamp_of(self.holders[number]) <= stamp_of(name):
                    del self.holders[number]


@pytest.mark.parametrize("seed", range(40))
def test_the_index_answers_as_a_model_does(seed: int) -> None:
    rng, clock, index, model = random.Random(seed), NameClock(), PackIndex(), Model()
    told: set[bytes] = set()

    def tell(there: bool, keys: object) -> None:
        assert isinstance(keys, (list, tuple))
        assert (not told & set(keys)) if there else (told >= set(keys))
        (told.update if there else told.difference_update)(keys)

    index.tell = tell
    names = [clock.name() for _ in range(60)]
    for _ in range(120):
        step = rng.random()
        if step < 0.5 and names:
            name = names.pop(rng.randrange(len(names)))
            numbers = rng.sample(range(12), rng.randint(1, 5))
            model.add(name, numbers)
            for _ in range(2):
                index.add(Pack(name, 10 * len(numbers), entries_of(numbers)))
        elif step < 0.75 and model.packs:
            name = rng.choice(sorted(model.packs))
            model.drop(name)
            index.drop(name)
            index.drop(name)
        elif step < 0.95 and names:
            name = names.pop(rng.randrange(len(names)))
            model.tombs[name] = rng.sample(range(12), rng.randint(1, 3))
            model.bury_dead()
            index.bury(name, [key_of(n) for n in model.tombs[name]])
        elif step > 0.99:
            index.clear()
            model = Model()
        compare(index, model, told)


def compare(index: PackIndex, model: Model, told: set[bytes]) -> None:
    holders = model.holders
    assert set(index._locations) == {key_of(number) for number in holders} == told
    assert index.pages == len(holders)
    assert index.bytes == len(holders) * (10 + HEADER_BYTES)
    assert index.stored == sum(10 * len(numbers) for numbers in model.packs.values())
    assert {pack.name for pack in index.packs()} == set(model.packs)
    for pack in index.packs():
        live = [pack.entry(at).key for at in index.live(pack)]
        assert live == [key_of(n) for n in model.packs[pack.name] if holders.get(n) == pack.name]
        assert pack.live == len(live)


# Object store URLs: what is allowed, what is refused, and that no secret is ever shown.


SECRET = "hunter2hunter2"


def test_a_capacity_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="there is no capacity: a lifetime rule of the bucket"):
        settings_of(parse_url("s3://bucket?capacity=5GiB"))


@pytest.mark.parametrize("url", [
    "s3://bucket/a/b?region=eu-west-1", "s3://bucket?endpoint=http://127.0.0.1:9000", "gs://bucket/a",
    "az://container/a?account=name", "s3://bucket/a/",
])
def test_places_that_are_understood(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client = connect(parse_url(url), settings_of(parse_url(url)))
    assert url.partition("?")[0].replace("//", "") == client.shown
    assert SECRET not in repr(client)


def test_queries_and_long_texts_are_cut_from_messages() -> None:
    text = redacted(ValueError(f"GET https://x.blob/c?sig={SECRET}&se=1 failed\nheaders: {SECRET}" + "x" * 999))
    assert text == "ValueError: GET https://x.blob/c?... failed"
