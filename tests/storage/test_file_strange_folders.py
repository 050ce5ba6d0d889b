"""Opening a store ends at once with ``Unavailable`` that names the file, whatever lies in its folder under the name of
one of its files; nothing else is opened, followed or removed. A folder that is in use stays with whoever has it,
whatever is done to its files or its name."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from asynccache_backends.file.files import Folder
from asynccache_backends.file.folder import FolderLock
from asynccache_backends.file.segments import (
    DELETION,
    ENTRY_BYTES,
    FOOTER_MAGIC,
    Deletions,
    PageGroup,
    SegmentRecord,
    _head,
    pack_block,
    pack_footer,
)
from xxhash import xxh3_64_hexdigest

from asynccache.cli.main import main
from asynccache.errors import Unavailable
from asynccache.storage import Result
from asynccache.testing.backend_suite import keys_of, page_key
from tests.storage.pages_kit import fill, get, open_at, open_files
from tests.waiting import interrupted_after

KEYS = keys_of(60)
FILES = ("lock", "manifest.json", "segment-0000000000000001.kv")
LEFTOVER = "manifest.json.new"
PATIENCE = 20


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.symlink(path.parent, link := f"/tmp/as-{os.getpid()}")  # a socket's path has 108 bytes
        try:
            listener.bind(f"{link}/{path.name}")
        finally:
            os.unlink(link)


def device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a device")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: who reads all of it never ends


def link_to_a_file(path: Path) -> None:
    path.parent.with_name("precious").write_text("precious")
    path.symlink_to("../precious")


STRANGE: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo, "a folder": Path.mkdir, "a socket": unix_socket, "a device": device,
    "a symbolic link to a file": link_to_a_file, "a symbolic link to a folder": lambda path: path.symlink_to(".."),
    "a symbolic link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to nothing": lambda path: path.symlink_to("nothing"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with interrupted_after(PATIENCE):
        yield


async def used(folder: Path) -> Path:
    """``folder`` with 60 pages, two of them deleted."""
    opened = await open_at(folder)
    await fill(opened, KEYS)
    await opened.delete(KEYS[:2])
    await opened.aclose()
    return folder


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> Path:
    return await used(tmp_path / "store")


def put_in_place(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def precious(store: Path) -> str:
    return store.with_name("precious").read_text()


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("name", FILES)
async def test_something_strange_in_the_place_of_a_file_is_refused_by_name(store: Path, name: str, what: str) -> None:
    put_in_place(store / name, STRANGE[what])
    before, kind = (store / name).lstat(), what.partition(" to ")[0]
    with pytest.raises(Unavailable, match=f"store folder '{store}': {store / name} is {kind}, and a plain file"):
        await open_at(store)
    after = (store / name).lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)
    assert what != "a symbolic link to a file" or precious(store) == "precious"
    assert open_files(store) == []


async def test_something_strange_where_a_file_is_to_be_written_is_refused_by_name(tmp_path: Path) -> None:
    """A file is written beside the one that it replaces, and nothing is written through a link."""
    (where := tmp_path / "store").mkdir()
    link_to_a_file(where / LEFTOVER)
    with pytest.raises(Unavailable, match=f"store folder '{where}': {where / LEFTOVER} is a symbolic link"):
        await used(where)
    assert precious(where) == "precious"
    assert (where / LEFTOVER).is_symlink()
    assert open_files(where) == []


async def test_what_a_kill_left_half_written_is_written_again(tmp_path: Path) -> None:
    (where := tmp_path / "store").mkdir()
    (where / LEFTOVER).write_text("half a file")
    await used(where)
    assert not [left for left in os.listdir(where) if left.endswith(".new")]


@pytest.mark.parametrize("action", ["verify", "stat", "ls", "gc", "clear"])
@pytest.mark.parametrize("name", FILES)
def test_the_commands_answer_in_a_sentence(
    tmp_path: Path, name: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(used(tmp_path / "store"))
    put_in_place(tmp_path / "store" / name, os.mkfifo)
    more = ["--yes"] if action == "clear" else []
    assert main(["store", action, f"file:{tmp_path}/store", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"asynccache: store folder '{tmp_path}/store': {tmp_path}/store/{name} is a FIFO")


# contents


def bombs() -> dict[str, bytes]:
    """Manifests that are JSON, as far as they go."""
    deep = b"[" * 200_000 + b"]" * 200_000
    odd = {"format": "asynccache file store", "version": 1, "schema": "", "seed": -1}
    nested = dict(odd, format=json.loads("[" * 400 + "]" * 400), seed=1)
    return {
        "deep": deep,
        "deep inside": b'{"manifest": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "xxh3": ""}',
        "a little deep": b"[" * 1990 + b"]" * 1990,
        "digits": b'{"manifest": ' + b"9" * 3000 + b"}",
        "no object": b"[1, 2]",
        "a seed that is none": json.dumps({"manifest": odd, "xxh3": digest(odd)}).encode(),
        "a list for a format": json.dumps({"manifest": nested, "xxh3": digest(nested)}).encode(),
        "not UTF-8": b"\xff\xfe\x00",
    }


def digest(manifest: dict[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(manifest).encode())


@pytest.mark.parametrize("name", bombs())
async def test_a_manifest_that_is_a_bomb_is_refused_by_name(store: Path, name: str) -> None:
    (store / "manifest.json").write_bytes(bombs()[name])
    with pytest.raises(Unavailable, match=f"{store / 'manifest.json'}") as refused:
        await open_at(store)
    assert len(str(refused.value)) < 1000
    assert open_files(store) == []


async def test_a_manifest_of_a_tebibyte_is_refused_by_name_and_not_read(store: Path) -> None:
    os.truncate(store / "manifest.json", 1 << 40)
    with pytest.raises(Unavailable, match=f"{store}/manifest.json has {1 << 40} bytes, and [0-9]+ are the most"):
        await open_at(store)


SEGMENT = "segment-0000000000000001.kv"


def seed_of(store: Path) -> int:
    seed: int = json.loads((store / "manifest.json").read_text())["manifest"]["seed"]
    return seed


def tail_of(store: Path) -> int:
    data = (store / SEGMENT).read_bytes()
    tail: int = struct.unpack_from("<Q", data, data.rindex(FOOTER_MAGIC) + 24)[0]
    return tail


def with_footer(store: Path, footer: bytes) -> None:
    """Put another footer in the place of that of the first segment."""
    (store / SEGMENT).write_bytes((store / SEGMENT).read_bytes()[: tail_of(store)] + footer)


@pytest.mark.parametrize("footer", [True, False])
async def test_a_segment_of_a_tebibyte_is_scanned_where_it_has_data(store: Path, footer: bool) -> None:
    """Whatever a footer at its end says of its size."""
    os.truncate(store / SEGMENT, 1 << 40)
    if footer:
        tail, length = 0, (1 << 40) - 64
        with (store / SEGMENT).open("r+b") as file:
            file.seek(length)
            file.write(_head(FOOTER_MAGIC, (3, 1, tail, length), 0, b"", seed_of(store)))
    opened = await open_at(store, "capacity=2TiB&segment=1MiB")
    assert await get(opened, KEYS) == [Result.MISS] * 2 + [Result.HIT] * 58
    assert opened.stats()["scanned_groups"] == 3
    await opened.aclose()
    assert (store / SEGMENT).stat().st_size < 1 << 20


NONSENSE = [
    bytes(15), bytes(64 * 5), b"acSEGMT\x02" + b"\xff" * 4 + bytes(200),
    pack_block(PageGroup(1, 0, 16384, bytes(96)), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "count"), [(b"", 1), (b"", 1 << 63), *((body, n) for body in NONSENSE for n in (0, 1, 1 << 63))]
)
async def test_a_footer_that_verifies_and_says_nonsense_is_not_believed(store: Path, body: bytes, count: int) -> None:
    tail = tail_of(store)
    with_footer(store, body + _head(FOOTER_MAGIC, (count, 1, tail, len(body)), 0, body, seed_of(store)))
    opened = await open_at(store)
    assert await get(opened, KEYS) == [Result.MISS] * 2 + [Result.HIT] * 58


async def test_a_group_of_pages_longer_than_any_disk_is_none(store: Path) -> None:
    """It verifies, and what follows it in the arithmetic would not fit any field."""
    seed = seed_of(store)
    with_footer(store, pack_footer(1, tail_of(store), [PageGroup(1, 0, (1 << 63) + 1, bytes(ENTRY_BYTES * 42))], seed))
    block = pack_block(PageGroup(2, 0, 1 << 62, bytes(ENTRY_BYTES * 42)), seed)
    (store / "segment-0000000000000002.kv").write_bytes(block + bytes(8192))
    opened = await open_at(store)
    assert await get(opened, KEYS) == [Result.MISS] * 2 + [Result.HIT] * 58
    await fill(opened, keys_of(100, "odd"))


async def test_deletions_of_unknown_pages_and_places_are_no_harm(store: Path) -> None:
    seed = seed_of(store)
    entries = [DELETION.pack(os.urandom(32), (1 << 64) - 1, (1 << 64) - 1), DELETION.pack(KEYS[9].key, 1, 0)]
    records: list[SegmentRecord] = [Deletions(2, 0, b"".join(entries))]
    block = pack_block(records[0], seed).ljust(4096, b"\0")
    (store / "segment-0000000000000002.kv").write_bytes(block + pack_footer(2, 4096, records, seed))
    opened = await open_at(store)
    assert await get(opened, KEYS) == [Result.MISS] * 2 + [Result.HIT] * 58
    assert opened.stats()["scanned_groups"] == 0


async def test_a_segment_with_the_last_of_all_numbers_is_refused_by_name(store: Path) -> None:
    (store / f"segment-{'f' * 16}.kv").write_bytes(b"")
    with pytest.raises(Unavailable, match=f"segment-{'f' * 16}.kv: no store gives"):
        await open_at(store)


# whose folder it is


@pytest.mark.parametrize("harm", ["unlink", "another", "all"])
async def test_a_folder_in_use_is_refused_whatever_was_done_to_the_files_in_it(store: Path, harm: str) -> None:
    opened = await open_at(store)
    assert f"'{store}'" in repr(opened.backend), "it says where it is"
    if harm == "all":
        for name in os.listdir(store):
            (store / name).unlink()
    else:
        (store / "lock").unlink()
    if harm == "another":
        (store / "lock").write_text("1\n")
    with pytest.raises(Unavailable, match=f"store folder '{store}' is in use by process"):
        await open_at(store)
    await opened.aclose()
    await (await open_at(store)).aclose()


async def test_a_store_stays_with_its_folder_when_that_is_renamed(store: Path) -> None:
    """The folder that comes in its place is another store's, and neither ever writes into the other one."""
    first = await open_at(store)
    os.rename(store, moved := store.with_name("moved"))
    with pytest.raises(Unavailable, match="in use"):
        await open_at(moved)
    second = await open_at(store)
    for number in range(4):
        await fill(first, [page_key(f"first {number}/{i}") for i in range(100)])
        await fill(second, [page_key(f"second {number}/{i}") for i in range(100)])
    await first.delete([page_key("first 0/0")])
    await first.flush()
    assert await get(first, [page_key("second 1/1")]) == [Result.MISS]
    await first.aclose()
    await second.aclose()
    for folder, own, other in ((moved, "first", "second"), (store, "second", "first")):
        opened = await open_at(folder)
        assert await get(opened, [page_key(f"{own} 3/{i}") for i in range(100)]) == [Result.HIT] * 100
        assert await get(opened, [page_key(f"{other} 3/{i}") for i in range(100)]) == [Result.MISS] * 100
        assert opened.stats()["scanned_groups"] == 0, "the footers are its own"
        await opened.aclose()


async def test_a_store_whose_folder_was_removed_fails_its_pages_and_makes_no_folder(store: Path) -> None:
    opened = await open_at(store)
    shutil.rmtree(store)
    results = await opened.put(keys_of(400, "odd"), [memoryview(bytes(1000))] * 400)
    assert set(results) <= {Result.HIT, Result.FAILED}
    with pytest.raises(Unavailable, match="No such file"):
        await opened.aclose()
    assert store.name not in os.listdir(store.parent)


async def test_a_store_that_was_closed_can_be_opened_while_a_forked_process_lives(store: Path) -> None:
    """It has the descriptors, and with them the locks. When it lets go of them, whoever has the folder keeps it."""
    opened, lock = await open_at(store), FolderLock()
    (ending, end), (told, tell) = os.pipe(), os.pipe()
    inherited = opened.backend._lock  # type: ignore[attr-defined]
    child = os.fork()
    if not child:
        try:
            os.read(ending, 1)
            inherited.release()
            os.write(tell, b"released")
        finally:
            os._exit(0)
    try:
        await opened.aclose()
        lock.take(store, None, False)
        os.write(end, b"!")
        assert os.read(told, 8) == b"released"
        with pytest.raises(Unavailable, match="in use"):
            FolderLock().take(store, None, False)
    finally:
        os.write(end, b"!")
        await asyncio.to_thread(os.waitpid, child, 0)
        lock.release()
        for fd in (ending, end, told, tell):
            os.close(fd)


async def test_the_lock_on_the_file_holds_as_well(store: Path) -> None:
    """Somebody may know of the file and of nothing else: both ways."""
    theirs = os.open(store / "lock", os.O_RDWR)
    fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(Unavailable, match=f"in use by process {os.getpid()}"):
        await open_at(store)
    fcntl.flock(theirs, fcntl.LOCK_UN)
    await open_at(store)
    with pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(theirs)


async def test_where_folders_cannot_be_locked_the_file_is(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    real = fcntl.flock

    def flock(fd: int, what: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(9, "Bad file descriptor")
        real(fd, what)

    monkeypatch.setattr(fcntl, "flock", flock)
    await open_at(store)
    with pytest.raises(Unavailable, match=f"in use by process {os.getpid()}"):
        await open_at(store)


async def test_a_folder_that_could_not_be_made_private_is_not_in_use(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails after the folder was locked, and the next opening finds nobody in it."""

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "tighten", fails)
        with pytest.raises(Unavailable, match="Input/output error"):
            await open_at(store)
    await open_at(store)


