"""The file store in its folder: its room, its disks, who may read it, and things that happen at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiofiles
import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.backend import THREADS, GroupRun, plan_reads
from asynccache_backends.file.files import FileHandles, FileRun, RunsMoved, read_runs, write_run
from asynccache_backends.file.folder import usual_segment
from asynccache_backends.file.segments import FileIndex, PageGroup, group_bytes

from asynccache.errors import Unavailable
from asynccache.storage import RECORD_SCHEMA, CheckedStore, Record, Result, StoreLayout, ThreadPool, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, blank, keys_of, page_key, record_of
from tests.storage.pages_kit import file_backend, fill, get, open_at, open_files, put
from tests.waiting import turns, until

# Capacity, reclaim and broken disks.


FULL = LAYOUT.page_bytes["full"]


async def test_the_capacity_holds_and_the_oldest_pages_go_first(store: CheckedStore) -> None:
    keys = keys_of(2500)
    for at in range(0, 2500, 50):
        assert await put(store, keys[at : at + 50]) == [Result.HIT] * 50
        stats = store.stats()
        assert stats["disk_bytes"] <= 16 << 20
    there = [result is Result.HIT for result in await store.exists(keys)]
    stats = store.stats()
    assert there == sorted(there)
    assert stats["pages"] == sum(there) >= 800
    assert stats["evicted_pages"] == 2500 - sum(there)
    assert (stats["moved_pages"], stats["write_amplification"]) == (0, 1.0)
    assert set(await get(store, keys[-800:])) == {Result.HIT}


@pytest.mark.slow(2)
async def test_pages_that_are_read_survive_and_the_price_is_stated(tmp_path: Path, store: CheckedStore) -> None:
    hot, cold = keys_of(20), [page_key(f"cold {i}") for i in range(3000)]
    await put(store, hot)
    for at in range(0, 3000, 15):
        assert await get(store, hot) == [Result.HIT] * 20
        await put(store, cold[at : at + 15])
    stats = store.stats()
    assert stats["evicted_pages"] > 1500
    assert 40 <= stats["moved_pages"] < 200
    assert stats["write_amplification"] == 1 + stats["moved_pages"] / 3020
    assert stats["disk_bytes"] <= 16 << 20
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await get(store, hot) == [Result.HIT] * 20


async def test_pages_of_every_length_get_their_second_chance(tmp_path: Path) -> None:
    """The buffer for moving them has room for 8 MiB, as much as a group of short ones has."""
    layout = LAYOUT._replace(page_bytes={"short": 4096, "long": 9 << 20})
    url = parse_url(f"file:{tmp_path / 's'}?capacity=96MiB&segment=32MiB")
    store = CheckedStore(await FileBackend.open(url, layout), layout)
    keys = [page_key("a", "short"), page_key("b", "long")]
    for key in keys:
        payload = memoryview(bytes(layout.page_bytes[key.pool]))
        assert await store.put([key], [payload]) == [Result.HIT]
    log = file_backend(store)._log
    groups = log.index.groups_of(1)
    await log._rescue(log.segments[1], [(group, [0]) for group in groups], 32 << 20)
    assert log.counts["moved_pages"] == 2
    await store.aclose()


class HeldIO:
    """The store's own reads and writes: they happen, and are answered when the test opens their ``gates``, in any
    order. With ``error`` they fail."""

    def __init__(self, store: CheckedStore) -> None:
        self.gates: list[asyncio.Event] = []
        self.done: list[asyncio.Future[Any]] = []
        self.error: OSError | None = None
        self._threads = file_backend(store)._log.threads
        self._call = self._threads.call
        self._threads.call = self.call  # type: ignore[method-assign]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        if function not in (write_run, read_runs):
            return self._call(function, *args, **kwargs)
        gate, answer = asyncio.Event(), asyncio.get_running_loop().create_future()
        if self.error is None:
            self.gates.append(gate)
            self.done.append(self._call(function, *args, **kwargs))
            return asyncio.ensure_future(self._held(gate, self.done[-1]))
        if function is write_run:
            answer.set_exception(self.error)
        else:
            answer.set_result(RunsMoved([run.length // 2 for run in args[1]], self.error))
        return answer

    async def _held(self, gate: asyncio.Event, done: asyncio.Future[Any]) -> Any:
        await gate.wait()
        return await done

    def stop(self) -> None:
        """Hold nothing any more."""
        self._threads.call = self._call  # type: ignore[method-assign]
        self.error = None
        for gate in self.gates:
            gate.set()


async def killed(store: CheckedStore, folder: Path) -> AsyncIterator[CheckedStore]:
    """The store opened again, as a kill left it now, and as its own end does."""
    shutil.copytree(folder, folder.with_name("killed"))
    await store.aclose()
    for left in (folder.with_name("killed"), folder):
        again = await open_at(left)
        yield again
        await again.aclose()


@pytest.mark.parametrize("stage", [1, 2], ids=["while it is read", "while it is written"])
@pytest.mark.parametrize("call", ["delete", "clear"])
async def test_a_page_that_is_forgotten_while_it_is_moved_stays_forgotten(
    tmp_path: Path, store: CheckedStore, call: str, stage: int
) -> None:
    log, keys = file_backend(store)._log, keys_of(40)
    await put(store, keys)
    io, (group,) = HeldIO(store), log.index.groups_of(1)
    moving = asyncio.ensure_future(log._rescue(log.segments[1], [(group, list(range(10)))], 1 << 20))
    await until(lambda: len(io.gates) == 1)
    if stage == 2:
        io.gates[0].set()
        await until(lambda: len(io.gates) == 2)
    forgetting = asyncio.ensure_future(store.delete(keys[2:5]) if call == "delete" else store.clear())
    await turns(20)
    io.stop()
    await moving
    await forgetting
    assert call == "clear" or log.counts["moved_pages"] == (7 if stage == 1 else 10)
    expected = [Result.MISS if call == "clear" or 2 <= i < 5 else Result.HIT for i in range(40)]
    assert await get(store, keys) == expected
    assert await put(store, [page_key("after")]) == [Result.HIT]
    async for again in killed(store, tmp_path / "s"):
        assert await get(again, [*keys, page_key("after")]) == [*expected, Result.HIT]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs, where mounting is permitted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_on_a_full_disk_a_store_opens_though_its_capacity_cannot_be_noted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "6m") as disk:
        store = await open_at(disk / "s", "capacity=64MiB&segment=1MiB")
        keys = keys_of(30)
        assert set(await put(store, keys)) == {Result.HIT}
        await store.aclose()
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        store = await open_at(disk / "s", "capacity=32MiB&segment=1MiB")
        assert set(await get(store, keys)) == {Result.HIT}
        await store.aclose()


async def test_a_call_cancelled_in_the_middle_returns_only_after_its_io(store: CheckedStore) -> None:
    backend, keys = file_backend(store), keys_of(20)
    await put(store, [page_key("first")])
    records = [record_of(key) for key in keys]
    for call in (backend.put(keys, records), backend.get(keys, [blank(key) for key in keys])):
        io, task = HeldIO(store), asyncio.ensure_future(call)
        await until(lambda io=io: bool(io.gates))  # type: ignore[misc]
        for _ in range(3):
            task.cancel()
            await turns(20)
            assert not task.done()
        io.stop()
        await asyncio.wait([task])
        assert task.cancelled()
    assert await backend.exists(keys) == [Result.HIT] * 20


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_a_broken_disk_fails_pages_once_and_then_refuses_writes(store: CheckedStore, number: int) -> None:
    """What it did read is served: half of the pages, and none of the others is called corrupt."""
    keys = keys_of(20)
    await put(store, keys[:10])
    io = HeldIO(store)
    io.error = OSError(number, os.strerror(number))
    assert await put(store, keys) == [Result.HIT] * 10 + [Result.FAILED] * 10
    assert await put(store, keys) == [Result.HIT] * 10 + [Result.FAILED] * 10
    assert await file_backend(store).get(keys, [blank(key) for key in keys]) == (
        [Result.HIT] * 5 + [Result.FAILED] * 5 + [Result.MISS] * 10
    )
    stats = store.stats()
    assert (stats["errors"], stats["refused_writes"], stats["breaker"]) == (2, 1, 0)
    io.stop()
    assert await get(store, keys[:10]) == [Result.HIT] * 10


@pytest.mark.parametrize("exponent", range(16, 46))
def test_segments_are_few_and_small(exponent: int) -> None:
    capacity = 1 << exponent
    segment = usual_segment(capacity)
    assert segment % 4096 == 0
    assert 4 <= capacity // segment <= 128
    assert capacity > 1 << 32 or segment <= 128 << 20


async def test_a_small_capacity_still_works(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=72KiB")
    for key in keys_of(20, "swa"):
        assert await put(store, [key]) == await get(store, [key]) == [Result.HIT]
    assert store.stats()["disk_bytes"] <= 72 << 10


PAGES = keys_of(1000)


def _plan(groups: int, which: Sequence[int]) -> list[list[GroupRun]]:
    """The batches of pages of an index of groups of 40 pages that lie side by side."""
    index, records = FileIndex(), [Record(aligned(64), memoryview(bytearray(FULL))) for _ in which]
    for i in range(groups):
        names = b"".join(key.key + bytes(64) for key in PAGES[40 * i : 40 * i + 40])
        index.add(PageGroup(1, i * group_bytes(FULL, 40), FULL, names))
    batches, wrong = plan_reads(index, [PAGES[i] for i in which], records)
    assert not wrong
    for run in (run for runs in batches for run in runs):
        assert [id(buffer) for buffer in run.buffers] == [id(records[i].payload) for i in run.which]
    return batches


def test_neighbours_are_read_in_one_run() -> None:
    (runs,) = _plan(2, [3, 1, 2, 9, 999, 41, 40, 39, 2])
    assert [run.which for run in runs] == [[1, 2], [8, 0], [3], [7], [6, 5]]
    (runs,) = _plan(2, [3, 1, 2, 9, 999, 41, 40, 39])
    assert [run.which for run in runs] == [[1, 2, 0], [3], [7], [6, 5]]
    assert [(run.group.offset, run.page) for run in runs] == [(0, 1), (0, 9), (0, 39), (group_bytes(FULL, 40), 0)]


def test_a_large_get_is_dealt_out_in_several_full_batches() -> None:
    batches = _plan(25, range(1000))
    sizes = [sum(len(run.which) for run in runs) * FULL for runs in batches]
    assert sizes[:-1] == [1000 * FULL // THREADS // FULL * FULL] * (len(sizes) - 1)
    assert len(batches) == THREADS
    assert sorted(i for runs in batches for run in runs for i in run.which) == list(range(1000))


async def test_files_of_reclaimed_segments_are_gone_and_closed(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    for batch in range(20):
        await put(store, [page_key(f"{batch}/{i}") for i in range(50)])
    sealing = file_backend(store)._log._sealing
    assert sealing is not None
    await asyncio.wait([sealing])  # it may be syncing a segment that was reclaimed meanwhile
    numbers = sorted(int(path.stem[8:], 16) for path in (tmp_path / "s").glob("segment-*"))
    assert len(numbers) <= 4
    assert min(numbers) > 10
    assert len([name for name in open_files(tmp_path) if "segment-" in name]) <= 8
    await store.aclose()
    assert open_files(tmp_path) == []


def test_an_error_in_one_run_is_told_and_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(200)) * 100)
    fd = os.open(path, os.O_RDONLY)
    buffers = [memoryview(bytearray(5000)) for _ in range(3)]
    runs = [FileRun(at, 5000, [buffer]) for at, buffer in zip((0, -5, 18000), buffers, strict=True)]
    moved = read_runs(FileHandles(fd, fd), runs)
    os.close(fd)
    assert moved.bytes == [5000, 0, 2000]
    assert moved.error is not None
    assert moved.error.errno == errno.EINVAL
    assert buffers[2][:2000] == (bytes(range(200)) * 10)


# A store in a folder is for its owner alone, whatever the umask says and whatever was there before, unless its URL
# says otherwise.


SMALL = "capacity=16MiB&segment=1MiB"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """What the process may not give while this lasts."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


async def open_private(folder: Path, options: str = "", layout: StoreLayout = LAYOUT) -> CheckedStore:
    url = parse_url(f"file:{folder}?{SMALL}{options}")
    return CheckedStore(await FileBackend.open(url, layout), layout)


async def used(folder: Path, options: str = "") -> None:
    """A store with pages and deletions."""
    store = await open_private(folder, options)
    await fill(store, keys_of(100))
    await store.delete(keys_of(5))
    await store.flush()
    await store.aclose()


def modes(folder: Path) -> dict[str, int]:
    """The permissions of the folder, by ``.``, and of what is in it."""
    found = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}
    return {".": stat.S_IMODE(folder.stat().st_mode), **found}


def expected(folder: Path, mode: int) -> dict[str, int]:
    assert {"lock", "manifest.json"} < set(os.listdir(folder))
    assert any(name.startswith("segment-") for name in os.listdir(folder))
    return {".": mode, **dict.fromkeys(os.listdir(folder), mode & 0o666)}


@pytest.mark.parametrize(
    ("mask", "option", "mode"),
    [(0, "", 0o700), (0o022, "", 0o700), (0o777, "", 0o700), (0, "&mode=0750", 0o750), (0o077, "&mode=0750", 0o750)],
)
async def test_folder_and_files_are_private_whatever_the_umask(
    tmp_path: Path, mask: int, option: str, mode: int
) -> None:
    """Unless an option lets others in."""
    folder = tmp_path / "above" / "store"
    with umask(mask):
        await used(folder, option)
    assert modes(folder) == expected(folder, mode)
    assert mode != 0o700 or stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


async def test_what_was_open_to_others_is_closed_to_them_by_opening_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder)
    folder.chmod(0o2777)
    for path in folder.iterdir():
        path.chmod(0o666)
    store = await open_private(folder)
    assert modes(folder) == expected(folder, 0o700) | {".": 0o2700}
    assert await get(store, keys_of(100)[5:]) == [Result.HIT] * 95
    await store.aclose()
    store = await open_private(folder, "&mode=770")
    assert modes(folder) == expected(folder, 0o770) | {".": 0o2770}
    await store.aclose()


async def test_who_only_looks_changes_no_permissions_and_adds_to_none(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder, "&mode=0750")
    store = await open_private(folder, layout=StoreLayout({}, RECORD_SCHEMA))
    assert isinstance(store.backend, FileBackend)
    with umask(0):
        await store.backend.collect(older_than=-1.0)
        await store.aclose()
    assert modes(folder) == {".": 0o750, **dict.fromkeys(os.listdir(folder), 0o640)}


async def test_a_folder_with_other_things_in_it_keeps_its_permissions(tmp_path: Path) -> None:
    """It may be ``/tmp``. The store's own files are private there, too."""
    (tmp_path / "letter").write_text("mine")
    (tmp_path / "letter").chmod(0o644)
    os.chmod(tmp_path, 0o755)
    await used(tmp_path)
    assert modes(tmp_path) == expected(tmp_path, 0o700) | {".": 0o755, "letter": 0o644}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_what_belongs_to_another_user_keeps_its_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder, "&mode=0755")
    os.chown(folder, 12345, -1)
    os.chown(folder / "lock", 12345, -1)
    store = await open_private(folder)
    assert modes(folder) == expected(folder, 0o700) | {".": 0o755, "lock": 0o644}
    await fill(store, [page_key("more")])
    await store.aclose()


# The file store when things happen at once: clearing while pages are moved, closing while segments are made; and
# folders that cannot be used.


@pytest.mark.parametrize("count", range(0, 12, 2))
async def test_a_close_that_is_cancelled_leaves_no_task_and_no_file_open(
    tmp_path: Path, store: CheckedStore, count: int
) -> None:
    """It waits for calls under way, which end well."""
    backend = file_backend(store)
    for batch in range(3):
        await put(store, [page_key(f"{batch}/{i}") for i in range(50)])
    io, getting = HeldIO(store), asyncio.ensure_future(get(store, [page_key("0/1")]))
    await until(lambda: bool(io.gates))
    backend._log._prepare_task()
    closing = asyncio.ensure_future(backend.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await turns(count)
    assert not closing.done()
    io.stop()
    await asyncio.wait([closing, getting])
    assert closing.cancelled()
    assert getting.result() == [Result.HIT]
    assert open_files(tmp_path) == []
    assert [task.get_name() for task in asyncio.all_tasks() if "asynccache" in task.get_name()] == []
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await get(store, [page_key(f"0/{i}") for i in range(50)]) == [Result.HIT] * 50


async def put_twice(store: CheckedStore, first: int) -> None:
    """Put one page by two calls at the same time; the write numbered ``first`` ends before the other."""
    io, key = HeldIO(store), page_key("twice")
    puts = [asyncio.ensure_future(put(store, [key])) for _ in range(2)]
    await until(lambda: len(io.gates) == 2)
    for number in (first, 1 - first):
        io.gates[number].set()
        assert await puts[number] == [Result.HIT]
    io.stop()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("deleted", [True, False])
async def test_a_page_that_two_calls_put_is_there_after_a_kill_or_stays_deleted(
    tmp_path: Path, store: CheckedStore, deleted: bool, first: int
) -> None:
    """Whichever of the two writes ended first: a recovery finds both copies."""
    await put_twice(store, first)
    assert store.stats()["pages"] == 1
    if deleted:
        assert await store.delete([page_key("twice")]) == [Result.HIT]
    async for again in killed(store, tmp_path / "s"):
        assert await get(again, [page_key("twice")]) == [Result.MISS if deleted else Result.HIT]


async def test_a_page_that_is_put_while_its_deletion_waits_for_room_is_there_after_a_kill(
    tmp_path: Path, store: CheckedStore
) -> None:
    """The deletion is written behind it, and speaks of what lay before."""
    backend, key = file_backend(store), page_key("again")
    log = backend._log
    await put(store, [key])
    fill = iter(range(10_000))
    while log.active is None or log.active.fit(0, 1):
        await put(store, [page_key(f"fill {next(fill)}", "swa")])
    deleting = asyncio.ensure_future(backend.delete([key]))
    await asyncio.sleep(0)
    assert not deleting.done()
    assert await put(store, [key]) == [Result.HIT]
    assert await deleting == [Result.HIT]
    async for again in killed(store, tmp_path / "s"):
        assert await get(again, [key]) == [Result.HIT]


async def test_a_segment_with_deletions_is_not_collected_before_what_they_speak_of(
    tmp_path: Path, store: CheckedStore
) -> None:
    """The later of two copies was deleted, and the earlier one lies in an older segment, which stays."""
    backend, fill = file_backend(store), [page_key(f"fill {i}") for i in range(300)]
    log, key = backend._log, page_key("twice")
    await put(store, [page_key("fill", "swa")])
    while log.active is not None and log.active.fit(FULL, 2) != 1:  # the first copy is the last page of its segment
        await put(store, [fill.pop()])
    await put_twice(store, 1)
    assert [log.index.groups_of(number)[-1].keys().count(key.key) for number in (1, 2)] == [1, 1]
    assert await store.delete([key]) == [Result.HIT]
    log.active = None
    await backend.collect(None)
    assert list(log.segments) == [1, 2]
    async for again in killed(store, tmp_path / "s"):
        assert await get(again, [key]) == [Result.MISS]


@pytest.mark.parametrize("by", ["eviction", "clear"])
async def test_while_a_segment_is_removed_its_pages_can_be_deleted_for_good_and_stored_again(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is still there when a deletion has ended, and the process is killed then; what was put stays."""
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    folder, removing, go_on = file_backend(store)._log.folder, threading.Event(), threading.Event()
    remove = folder.unlink

    def held(name: str) -> None:
        removing.set()
        go_on.wait(30)
        remove(name)

    monkeypatch.setattr(folder, "unlink", held)
    deleted, again, number = page_key("0"), page_key("1"), 1
    await put(store, [deleted, again])
    clearing = asyncio.create_task(store.clear()) if by == "clear" else None
    while not removing.is_set():
        if clearing is None:
            number += 1
            await put(store, [page_key(str(number))])
        await turns(5)
    try:
        await store.delete([deleted])
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
        assert await put(store, [again]) == [Result.HIT]
    finally:
        go_on.set()
    await asyncio.gather(*filter(None, [clearing]))
    await store.flush()
    assert await get(store, [deleted, again]) == [Result.MISS, Result.HIT]
    await store.aclose()
    killed = await open_at(tmp_path / "killed")
    assert await get(killed, [deleted]) == [Result.MISS]
    await killed.aclose()


async def test_a_segment_sealed_in_the_moment_in_which_a_write_ends_names_its_pages(
    tmp_path: Path, store: CheckedStore
) -> None:
    """The bytes are in the file, and nothing has been done about it yet."""
    log, io = file_backend(store)._log, HeldIO(store)
    putting = asyncio.ensure_future(put(store, [page_key("a")]))
    await until(lambda: bool(io.gates))
    await asyncio.wait(io.done)
    log.active = None
    io.stop()
    await log._seal()
    assert await putting == [Result.HIT]
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await get(store, [page_key("a")]) == [Result.HIT]
    assert store.stats()["scanned_groups"] == 0


async def test_a_page_that_is_written_during_a_flush_is_synced_by_the_next(
    store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    io = HeldIO(store)
    first = asyncio.ensure_future(put(store, [page_key("a")]))
    await until(lambda: len(io.gates) == 1)
    flushing = asyncio.ensure_future(store.flush())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(put(store, [page_key("b")]))
    await until(lambda: len(io.gates) == 2)
    io.gates[0].set()
    await flushing
    assert (first.done(), second.done(), len(synced)) == (True, False, 1)
    io.stop()
    assert await second == [Result.HIT]
    await store.flush()
    assert len(synced) == 2
    await store.flush()
    assert len(synced) == 2, "nothing was written in between"


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be made or written in ``folder`` meanwhile, not even by root."""
    if os.geteuid():
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    bound = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True)
    if bound.returncode:
        pytest.skip("root can write everywhere, and mounting is not permitted here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("used", [True, False])
async def test_a_read_only_folder_is_refused_by_name_and_nothing_stays_open(tmp_path: Path, used: bool) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    if used:
        store = await open_at(folder)
        await put(store, keys_of(20))
        await store.aclose()
    with read_only(folder):
        with pytest.raises(Unavailable, match=f"store folder '{folder}': .*(Read-only|Permission)"):
            await open_at(folder)
        assert open_files(tmp_path) == []
    store = await open_at(folder)
    assert set(await get(store, keys_of(20))) == {Result.HIT if used else Result.MISS}


@pytest.mark.parametrize("options", ["capacity=8MiB&segment=1MiB", "capacity=8MiB&segment=1MiB&mode=0700&direct=off"])
async def test_opening_asks_the_disk_nothing_on_the_event_loop(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may have thousands of files, and its disk may be slow or gone."""
    loop_thread, on_the_loop = threading.current_thread(), []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is loop_thread:
                on_the_loop.append(name)
            return call(*args, **kwargs)

        return noted

    for name in ("open", "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "chmod", "fchmod", "unlink",
                 "replace", "ftruncate", "fsync", "fdatasync"):  # fmt: skip
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    for _ in range(2):
        store = await open_at(tmp_path / "s", options)
        assert on_the_loop == []
        assert await put(store, keys_of(20)) == [Result.HIT] * 20
        await store.aclose()
        on_the_loop.clear()


async def test_capacity_and_segment_size_may_change_from_run_to_run(tmp_path: Path) -> None:
    """Nothing is lost by a larger capacity or other segments, only the oldest by a smaller one."""
    keys = keys_of(900)
    there = 0
    for run, options in enumerate(("capacity=8MiB&segment=1MiB", "capacity=64MiB&segment=4MiB", "capacity=32MiB&"
                                   "segment=512KiB", "capacity=6MiB&segment=2MiB")):
        store = await open_at(tmp_path / "s", options)
        found = [result is Result.HIT for result in await get(store, keys[: 200 * run])]
        assert found == sorted(found)
        assert sum(found) == (there if run < 3 else store.stats()["pages"])
        assert await put(store, keys[200 * run : 200 * run + 200]) == [Result.HIT] * 200
        stats = store.stats()
        assert stats["disk_bytes"] <= stats["capacity_bytes"]
        assert stats["errors"] == 0
        there += 200
        await store.aclose()


async def test_whole_files_are_read_and_written_by_aiofiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest and the footers. They are handed to the store's own threads, which never keep a process alive."""
    seen, opened = set[tuple[str, str]](), aiofiles.open

    def noted(name: str | int, mode: Any, **options: Any) -> Any:
        assert isinstance(options["executor"], ThreadPool)
        path = os.readlink(f"/proc/self/fd/{name}") if isinstance(name, int) else name
        seen.add((os.path.basename(path), mode))
        return opened(name, mode, **options)

    monkeypatch.setattr(aiofiles, "open", noted)
    options = "capacity=8MiB&segment=1MiB"
    store = await open_at(tmp_path / "s", options)
    await put(store, [page_key("a"), page_key("b")])
    await store.delete([page_key("b")])
    await store.aclose()
    assert seen == {("manifest.json", "rb"), ("manifest.json.new", "wb"), ("segment-0000000000000001.kv", "r+b")}
    seen.clear()
    await (await open_at(tmp_path / "s", options.replace("8MiB", "9MiB"))).aclose()
    assert seen >= {("manifest.json", "rb"), ("manifest.json.new", "wb")}
