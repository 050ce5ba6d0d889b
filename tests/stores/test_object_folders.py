"""A store of objects in a plain folder is for its owner alone. Whatever lies among its objects, or says that it is one
of them, costs a sentence or a miss: nothing hangs, nothing else is read, no memory is taken on a stranger's word."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from asynccache_backends.object_store import ObjectBackend
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

from asynccache.cli.main import main
from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import RECORD_SCHEMA, CheckedStore, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT
from tests.storage.page_kit import fill, get
from tests.stores.object_store_kit import bare, folder_url, objects, open_at, opened, packs, some_keys
from tests.waiting import interrupted_after

pytest.importorskip("obstore")

HIT, MISS, FAILED, CORRUPT = Result.HIT, Result.MISS, Result.FAILED, Result.CORRUPT
KEYS = some_keys("page", 20)
PATIENCE = 20


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with interrupted_after(PATIENCE):
        yield


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> set[tuple[str, int]]:
    """What kinds of permissions there are: of folders and of files."""
    found = {("folder", stat.S_IMODE(folder.stat().st_mode))}
    for root, folders, files in os.walk(folder):
        found |= {("folder", stat.S_IMODE((Path(root) / name).lstat().st_mode)) for name in folders}
        found |= {("file", stat.S_IMODE((Path(root) / name).lstat().st_mode)) for name in files}
    return found


async def use(url: str) -> None:
    """Packs that are sent from where the pages lie and packs that are copied first, a tombstone, a saved index."""
    async with opened(url) as store:
        await fill(store, KEYS)
        await fill(store, some_keys("odd", 3, "odd"))
        await store.delete(KEYS[:1])
        await bare(store)._catalog.save()


@pytest.mark.asyncio
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
async def test_objects_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        await use(folder_url(tmp_path / "above" / "store"))
    assert modes(tmp_path / "above") == {("folder", 0o700), ("file", 0o600)}
    async with opened(folder_url(tmp_path / "above" / "store")) as store:
        assert await get(store, KEYS) == [MISS] + [HIT] * 19


@pytest.mark.asyncio
async def test_an_option_lets_others_in_and_opening_without_it_keeps_them_out(tmp_path: Path) -> None:
    with umask(0o077):
        await use(folder_url(tmp_path / "s", "mode=0750"))
    assert modes(tmp_path / "s") == {("folder", 0o750), ("file", 0o640)}
    looking = await ObjectBackend.open(parse_url(folder_url(tmp_path / "s")), StoreLayout({}, RECORD_SCHEMA))
    await looking.aclose()
    assert modes(tmp_path / "s") == {("folder", 0o750), ("file", 0o640)}, "who only looks changes nothing"
    async with opened(folder_url(tmp_path / "s")):
        assert modes(tmp_path / "s") == {("folder", 0o700), ("file", 0o600)}


@pytest.mark.asyncio
async def test_permissions_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage option mode='0644': expected"):
        await open_at(folder_url(tmp_path / "s", "mode=0644"))
    with pytest.raises(ConfigError, match="unknown option 'mode'"):
        await open_at("object-memory:?mode=0700")
    assert os.listdir(tmp_path) == []


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


STRANGE = [(fifo, "a FIFO"), (link, "a symbolic link"), (folder, "a folder")]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["packs", "index", "tomb", "new"])
@pytest.mark.parametrize(("make", "says"), STRANGE, ids=[make.__name__ for make, _ in STRANGE])
async def test_what_is_no_object_is_refused_by_name(
    tmp_path: Path, kind: str, make: Callable[[Path], None], says: str
) -> None:
    await use(folder_url(tmp_path / "s"))
    if kind == "new":
        path = tmp_path / "s" / "packs" / NameClock().name()
    else:
        found = objects(tmp_path / "s", "index" if kind == "index" else "packs")
        path = next(path for path in found if (path.suffix == ".dead") == (kind == "tomb"))
        path.unlink()
    make(path)
    with pytest.raises(Unavailable, match=f"object-file:{tmp_path}/s: .*{path} is {says}, and a plain file"):
        await open_at(folder_url(tmp_path / "s"))
    assert path.lstat()


@pytest.mark.asyncio
async def test_a_folder_of_packs_that_is_a_link_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "packs").symlink_to("/")
    with pytest.raises(Unavailable, match=f"{tmp_path}/s/packs is a symbolic link"):
        await open_at(folder_url(tmp_path / "s"))


@pytest.mark.asyncio
async def test_a_pack_that_becomes_a_fifo_while_it_is_used_fails_its_pages_and_no_others(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path / "s")) as store:
        await fill(store, KEYS)
        (first,) = packs(tmp_path / "s")
        await fill(store, some_keys("other", 5))
        first.unlink()
        os.mkfifo(first)
        assert await get(store, KEYS) == [FAILED] * 20
        assert await get(store, some_keys("other", 5)) == [HIT] * 5
        os.mkfifo(tmp_path / "s" / "packs" / NameClock().name())
        await bare(store)._catalog.refresh(full=True)
        assert await get(store, KEYS) == [MISS] * 20, "a list has no FIFOs in it"


@pytest.mark.parametrize("action", ["verify", "stat", "ls", "gc", "clear"])
def test_the_commands_answer_in_a_sentence(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(use(folder_url(tmp_path / "s")))
    os.mkfifo(path := tmp_path / "s" / "packs" / NameClock().name())
    more = ["--yes"] if action == "clear" else []
    assert main(["store", action, f"object-file:{tmp_path}/s", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"asynccache: object-file:{tmp_path}/s: ")
    assert f"{path} is a FIFO" in line


# what objects say


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_footer_that_claims_more_than_its_object_has_is_left_out(tmp_path: Path) -> None:
    await use(folder_url(tmp_path / "s"))
    entries = pack_entries([KEYS[0].key], [bytes(64)], [1 << 40], [0])
    (tmp_path / "s" / "packs" / NameClock().name()).write_bytes(entries + trailer_of(entries, SCHEMA))
    async with opened(folder_url(tmp_path / "s")) as store:
        assert isinstance(store, CheckedStore)
        assert await get(store, KEYS) == [MISS] + [HIT] * 19
        assert store.stats()["unreadable_packs"] == 1
        assert all(isinstance(pack, Pack) and pack.size < 1 << 30 for pack in bare(store)._catalog.index.packs())
