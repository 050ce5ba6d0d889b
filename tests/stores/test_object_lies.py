"""Objects that say of themselves what is not so cost a miss: nothing hangs, nothing else is read, and no memory is
taken on a stranger's word."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from asynccache_backends.object_store.formats import (
    MAX_RECORDS,
    NameClock,
    Pack,
    PackIndexSnapshot,
    pack_entries,
    pack_snapshot,
    parse_snapshot,
    trailer_of,
)
from xxhash import xxh3_128_digest

from asynccache.storage import CheckedStore, Result
from asynccache.testing.backend_suite import LAYOUT
from tests.storage.page_kit import fill, get
from tests.stores.object_store_kit import bare, folder_url, objects, opened, some_keys
from tests.waiting import interrupted_after

pytest.importorskip("obstore")

HIT, MISS = Result.HIT, Result.MISS
KEYS = some_keys("page", 20)
PATIENCE = 20


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with interrupted_after(PATIENCE):
        yield


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
        assert isinstance(store, CheckedStore)
        assert await get(store, KEYS) == [MISS] + [HIT] * 19
        assert store.stats()["unreadable_packs"] == 1
        assert all(isinstance(pack, Pack) and pack.size < 1 << 30 for pack in bare(store)._catalog.index.packs())
