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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiofiles
import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.backend import THREADS, PageRun, plan_reads
from asynccache_backends.file.files import FileHandles, FileRun, RunsMoved, read_runs, write_run
from asynccache_backends.file.folder import usual_segment
from asynccache_backends.file.segments import FileIndex, PageGroup, group_bytes

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import RECORD_SCHEMA, CheckedStore, Record, Result, StoreLayout, ThreadPool, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, blank, keys_of, page_key, record_of
from tests.storage.page_kit import fill, get, open_at, open_files, put

# Capacity, reclaim and broken disks.


FULL = LAYOUT.page_bytes["full"]


async def test_the_capacity_holds_and_the_oldest_pages_go_first(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
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
    await store.aclose()


@pytest.mark.slow(2)
async def test_pages_that_are_read_survive_and_the_price_is_stated(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
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
    await store.aclose()


async def test_pages_of_every_length_get_their_second_chance(tmp_path: Path) -> None:
    """The buffer for moving them has room for 8 MiB, as much as a group of short ones has."""
    layout = LAYOUT._replace(page_bytes={"short": 4096, "long": 9 << 20})
    url = parse_url(f"file:{tmp_path / 's'}?capacity=96MiB&segment=32MiB")
    store = CheckedStore(await FileBackend.open(url, layout), layout)
    keys = [page_key("a", "short"), page_key("b", "long")]
    for key in keys:
        payload = memoryview(bytes(layout.page_bytes[key.pool]))
        assert await store.put([key], [payload]) == [Result.HIT]
    log = _backend(store)._log
    groups = log.index.groups_of(1)
    await log._rescue(log.segments[1], [(group, [0]) for group in groups], 32 << 20)
    assert log.counts["moved_pages"] == 2
    await store.aclose()


async def test_a_page_deleted_while_it_is_moved_stays_deleted(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend = _backend(store)
    keys = keys_of(40)
    await put(store, keys)
    await get(store, keys)
    io, log = HeldIO(backend), backend._log
    (group,) = log.index.groups_of(1)
    moving = asyncio.ensure_future(log._rescue(log.segments[1], [(group, list(range(10)))], 1 << 20))
    await _turns()
    io.release_all()
    await io.asked()
    deleting = asyncio.ensure_future(store.delete(keys[2:5]))
    await _turns()
    io.release_all()
    await moving
    assert await deleting == [Result.HIT] * 3
    expected = [Result.MISS if 2 <= i < 5 else Result.HIT for i in range(40)]
    assert await store.exists(keys) == expected
    assert log.counts["moved_pages"] == 10
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    io.stop()
    await store.aclose()
    for folder in ("s", "killed"):
        store = await open_at(tmp_path / folder)
        assert await get(store, keys) == expected
        await store.aclose()


async def test_a_page_deleted_while_it_is_read_to_be_moved_is_not_written_again(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend, keys = _backend(store), keys_of(10)
    await put(store, keys)
    io, log = HeldIO(backend), backend._log
    (group,) = log.index.groups_of(1)
    moving = asyncio.ensure_future(log._rescue(log.segments[1], [(group, list(range(10)))], 1 << 20))
    await io.asked()
    deleting = asyncio.ensure_future(store.delete(keys[2:5]))
    await _turns()
    io.stop()
    await moving
    assert await deleting == [Result.HIT] * 3
    assert log.counts["moved_pages"] == 7
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await get(store, keys) == [Result.MISS if 2 <= i < 5 else Result.HIT for i in range(10)]
    await store.aclose()


async def test_a_smaller_capacity_at_the_next_start_drops_the_oldest(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    keys = keys_of(700)
    await put(store, keys)
    await store.aclose()
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    assert store.stats()["disk_bytes"] <= 4 << 20
    there = [result is Result.HIT for result in await store.exists(keys)]
    assert there == sorted(there)
    assert 100 < sum(there) < 256
    await store.aclose()


async def test_reads_and_puts_go_on_while_segments_are_reclaimed(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=8MiB&segment=1MiB")

    async def writer(number: int) -> None:
        for batch in range(15):
            keys = [page_key(f"{number}/{batch}/{i}") for i in range(20)]
            assert await put(store, keys) == [Result.HIT] * 20
            results = await get(store, keys)
            assert set(results) <= {Result.HIT, Result.MISS}

    await asyncio.gather(*(writer(number) for number in range(4)))
    stats = store.stats()
    assert stats["reclaimed_segments"] > 5
    assert (stats["errors"], stats["corrupt_pages"], stats["failed_pages"]) == (0, 0, 0)
    await store.aclose()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs, where mounting is permitted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here; the test with RLIMIT_FSIZE covers a disk that is full")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_on_a_full_disk_writes_fail_for_a_while_and_reads_go_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "6m") as disk:
        store = await open_at(disk / "s", "capacity=64MiB&segment=1MiB")
        keys = keys_of(600)
        results = [result for at in range(0, 600, 30) for result in await put(store, keys[at : at + 30])]
        stored = results.count(Result.HIT)
        assert 200 < stored < 384
        assert set(results[-30:]) == {Result.FAILED}
        stats = store.stats()
        assert stats["errors"] == 1
        assert stats["refused_writes"] > 3
        assert (await get(store, keys)).count(Result.HIT) == stored
        await store.aclose()
        store = await open_at(disk / "s", "capacity=5MiB&segment=1MiB")
        assert Result.CORRUPT not in await get(store, keys)
        assert set(await put(store, [page_key(f"more {i}") for i in range(100)])) == {Result.HIT}
        await store.aclose()


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


class HeldIO:
    """The store's own I/O, whose answers come when the test says so, with errors if it says so."""

    def __init__(self, backend: FileBackend) -> None:
        self.held: list[asyncio.Future[Any]] = []
        self.error: OSError | None = None
        self._asked = asyncio.Event()
        self._threads = backend._log.threads
        self._call = self._threads.call
        self._threads.call = self.call  # type: ignore[method-assign]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        if function not in (write_run, read_runs):
            return self._call(function, *args, **kwargs)
        if self.error is None:
            return self._hold(self._call(function, *args, **kwargs))
        answer = asyncio.get_running_loop().create_future()
        if function is write_run:
            answer.set_exception(self.error)
        else:
            answer.set_result(RunsMoved([0] * len(args[1]), self.error))
        return answer

    def release_all(self) -> None:
        for future in self.held:
            future.set_result(None)
        self.held.clear()

    def stop(self) -> None:
        """Hold nothing any more."""
        self._threads.call = self._call  # type: ignore[method-assign]
        self.release_all()

    async def asked(self) -> None:
        """Return when something is held."""
        if not self.held:
            self._asked.clear()
            await self._asked.wait()

    def _hold(self, done: asyncio.Future[Any]) -> asyncio.Future[Any]:
        gate = asyncio.get_running_loop().create_future()
        self.held.append(gate)
        self._asked.set()

        async def both() -> Any:
            await gate
            return await done

        return asyncio.ensure_future(both())


def _backend(store: CheckedStore) -> FileBackend:
    assert isinstance(store.backend, FileBackend)
    return store.backend


async def _turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_call_cancelled_in_the_middle_returns_only_after_its_io(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend, keys = _backend(store), keys_of(20)
    await put(store, [page_key("first")])
    io = HeldIO(backend)
    records = [record_of(key) for key in keys]
    for call in (backend.put(keys, records), backend.get(keys, [blank(key) for key in keys])):
        task = asyncio.ensure_future(call)
        await _turns()
        for _ in range(3):
            task.cancel()
            await _turns()
            assert not task.done()
        io.release_all()
        await asyncio.wait([task])
        assert task.cancelled()
    assert await backend.exists(keys) == [Result.HIT] * 20
    await store.aclose()


async def test_closing_waits_for_calls_under_way(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend, keys = _backend(store), keys_of(20)
    await put(store, keys)
    io = HeldIO(backend)
    getting = asyncio.ensure_future(backend.get(keys, [blank(key) for key in keys]))
    await _turns()
    closing = asyncio.ensure_future(store.aclose())
    await _turns()
    assert not closing.done()
    io.release_all()
    assert await getting == [Result.HIT] * 20
    await closing


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_a_broken_disk_fails_pages_once_and_then_refuses_writes(tmp_path: Path, number: int) -> None:
    store = await open_at(tmp_path / "s")
    keys = keys_of(20)
    await put(store, keys[:10])
    io = HeldIO(_backend(store))
    io.error = OSError(number, os.strerror(number))
    assert await put(store, keys) == [Result.HIT] * 10 + [Result.FAILED] * 10
    assert await put(store, keys) == [Result.HIT] * 10 + [Result.FAILED] * 10
    assert await get(store, keys) == [Result.FAILED] * 10 + [Result.MISS] * 10
    stats = store.stats()
    assert (stats["errors"], stats["refused_writes"], stats["breaker"]) == (2, 1, 0)
    io.error = None
    reading = asyncio.ensure_future(get(store, keys[:10]))
    await io.asked()
    io.release_all()
    assert await reading == [Result.HIT] * 10
    await store.aclose()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("capacity=12KiB", "capacity=12288"),
        ("capacity=1MiB&segment=512KiB", "three segments"),
        ("segment=5000", "segment=5000"),
        ("segment=8KiB", "segment=8192"),
        ("capacity=lots", "capacity='lots'"),
        ("direct=perhaps", "direct='perhaps'"),
        ("sync=yes", "'sync'"),
    ],
)
async def test_unusable_options_are_refused_by_name_and_value(tmp_path: Path, options: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await FileBackend.open(parse_url(f"file:{tmp_path}/s?{options}"), LAYOUT)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("exponent", range(16, 46))
def test_segments_are_few_and_small(exponent: int) -> None:
    capacity = 1 << exponent
    segment = usual_segment(capacity)
    assert segment % 4096 == 0
    assert 4 <= capacity // segment <= 128
    assert capacity > 1 << 32 or segment <= 128 << 20


async def test_a_small_capacity_still_works(tmp_path: Path) -> None:
    layout = StoreLayout({"full": 4096}, b"s")
    backend = await FileBackend.open(parse_url(f"file:{tmp_path}/s?capacity=36KiB"), layout)
    keys = keys_of(20)
    records = [Record(aligned(64), aligned(4096)) for _ in keys]
    for key, record in zip(keys, records, strict=True):
        record.payload[:32] = key.key
        assert await backend.put([key], [record]) == [Result.HIT]
    assert (await backend.exists(keys))[-1] is Result.HIT
    assert backend.stats()["disk_bytes"] <= 36 << 10
    await backend.aclose()


PAGES = keys_of(1000)


def _index(groups: int = 1, length: int = FULL, segment: int = 1, first: int = 0) -> FileIndex:
    """An index of groups of 40 pages, side by side."""
    index = FileIndex()
    for i in range(groups):
        keys = PAGES[first + 40 * i : first + 40 * i + 40]
        index.add(PageGroup(segment, i * group_bytes(length, 40), length, b"".join(k.key + bytes(64) for k in keys)))
    return index


def _plan(index: FileIndex, which: Sequence[int], length: int = FULL) -> list[list[PageRun]]:
    """The batches of pages, all of which are there and of that length."""
    records = [Record(aligned(64), memoryview(bytearray(length))) for _ in which]
    batches, wrong = plan_reads(index, [PAGES[i] for i in which], records)
    assert not wrong
    for runs in batches:
        for run in runs:
            assert [id(buffer) for buffer in run.buffers] == [id(records[i].payload) for i in run.which]
    return batches


def test_neighbours_are_read_in_one_run() -> None:
    (runs,) = _plan(_index(2), [3, 1, 2, 9, 999, 41, 40, 39])
    assert [run.which for run in runs] == [[1, 2, 0], [3], [7], [6, 5]]
    assert [(run.group.offset, run.page) for run in runs] == [(0, 1), (0, 9), (0, 39), (group_bytes(FULL, 40), 0)]


def test_a_key_that_is_asked_for_twice_is_read_twice() -> None:
    (runs,) = _plan(_index(), [5, 6, 5, 6])
    assert [run.which for run in runs] == [[0], [2, 1], [3]]


def test_pages_of_another_length_are_left_out() -> None:
    index, right, wrong = _index(), blank(page_key("x")), Record(aligned(64), memoryview(bytearray(FULL - 1)))
    (runs,), refused = plan_reads(index, PAGES[:5], [wrong, right, right, wrong, right])
    assert [(run.page, run.which) for run in runs] == [(1, [1, 2]), (4, [4])]
    assert refused == [0, 3]


def test_a_large_get_is_dealt_out_in_several_full_batches() -> None:
    batches = _plan(_index(25), range(1000))
    sizes = [sum(len(run.which) for run in runs) * FULL for runs in batches]
    assert sizes[:-1] == [1000 * FULL // THREADS // FULL * FULL] * (len(sizes) - 1)
    assert len(batches) == THREADS
    assert sorted(i for runs in batches for run in runs for i in run.which) == list(range(1000))


@pytest.mark.parametrize(("segment", "length"), [(2, FULL), (1, FULL + 1)])
def test_segments_and_lengths_are_not_mixed(segment: int, length: int) -> None:
    index, other = _index(), _index(1, length, segment, 40)
    (group,) = other.holders.values()
    index.add(group)
    records = [Record(aligned(64), memoryview(bytearray(FULL if i < 40 else length))) for i in range(80)]
    batches, _ = plan_reads(index, PAGES[:80], records)
    found = [(runs[0].group.segment, runs[0].group.length, len(runs)) for runs in batches]
    assert found == [(1, FULL, 1), (segment, length, 1)]


async def test_files_of_reclaimed_segments_are_gone_and_closed(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    for batch in range(20):
        await put(store, [page_key(f"{batch}/{i}") for i in range(50)])
    log = _backend(store)._log
    assert log._sealing is not None
    await asyncio.wait([log._sealing])  # it may be syncing a segment that was reclaimed meanwhile
    numbers = sorted(int(name[8:-3], 16) for name in os.listdir(tmp_path / "s") if name.startswith("segment-"))
    assert len(numbers) <= 4
    assert min(numbers) > 10
    names = [name for name in map(_target, _descriptors()) if str(tmp_path) in name and "segment-" in name]
    assert len(names) <= 8
    await store.aclose()
    assert not [name for name in map(_target, _descriptors()) if str(tmp_path) in name]


def _descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


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


async def test_pages_of_a_batch_that_met_an_error_are_failed_and_not_corrupt(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    keys = keys_of(6)
    await put(store, keys)
    backend = _backend(store)

    threads = backend._log.threads

    def one_bad(function: Callable[..., Any], files: FileHandles, runs: Sequence[FileRun]) -> asyncio.Future[Any]:
        (run,) = runs
        future: asyncio.Future[RunsMoved] = asyncio.get_running_loop().create_future()
        future.set_result(RunsMoved([run.length // 2], OSError(errno.EIO, "bad sector")))
        return future

    call, threads.call = threads.call, one_bad  # type: ignore[method-assign, assignment]
    results = await backend.get(keys, [blank(key) for key in keys])
    assert results == [Result.HIT] * 3 + [Result.FAILED] * 3
    assert await store.exists(keys) == [Result.HIT] * 6
    threads.call = call  # type: ignore[method-assign]
    await store.aclose()


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


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
async def test_folder_and_files_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "above" / "store"
    with umask(mask):
        await used(folder)
    assert modes(folder) == expected(folder, 0o700)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0o000, 0o077])
async def test_an_option_lets_others_in(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        await used(tmp_path / "store", "&mode=0750")
    assert modes(tmp_path / "store") == expected(tmp_path / "store", 0o750)


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


@pytest.mark.parametrize("text", ["", "0", "0600", "private", "u=rwx", "7777", "0o700", "-700", "0788"])
async def test_permissions_that_are_none_are_refused_by_name_and_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"storage option mode={text!r}: expected .* as in mode=0750"):
        await FileBackend.open(parse_url(f"file:{tmp_path}/s?{SMALL}", {"mode": text}), LAYOUT)
    assert os.listdir(tmp_path) == []


# The file store when things happen at once: clearing while pages are moved, closing while segments are made; and
# folders that cannot be used.


def backend_of(store: CheckedStore) -> FileBackend:
    assert isinstance(store.backend, FileBackend)
    return store.backend


class HeldWrites:
    """The store's own I/O, whose writes are answered in the order in which the test opens their ``gates``."""

    def __init__(self, backend: FileBackend) -> None:
        self.gates: list[asyncio.Event] = []
        self.both = asyncio.Event()
        threads = backend._log.threads
        self._call = threads.call
        threads.call = self.call  # type: ignore[method-assign]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        done, gate = self._call(function, *args, **kwargs), asyncio.Event()
        if function is not write_run or len(self.gates) == 2:
            return done
        self.gates.append(gate)
        if len(self.gates) == 2:
            self.both.set()

        async def held() -> Any:
            await gate.wait()
            return await done

        return asyncio.ensure_future(held())


async def put_twice(store: CheckedStore, first: int) -> None:
    """Put one page by two calls at the same time; the write numbered ``first`` ends before the other."""
    io, key = HeldWrites(backend_of(store)), page_key("twice")
    puts = [asyncio.ensure_future(put(store, [key])) for _ in range(2)]
    await io.both.wait()
    for number in (first, 1 - first):
        io.gates[number].set()
        assert await puts[number] == [Result.HIT]


class HeldReads:
    """The store's own I/O, whose reads are answered when the test says so."""

    def __init__(self, backend: FileBackend) -> None:
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        threads = backend._log.threads
        self._call = threads.call
        threads.call = self.call  # type: ignore[method-assign]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        done = self._call(function, *args, **kwargs)
        if function is not read_runs:
            return done

        async def held() -> RunsMoved:
            self.asked.set()
            await self.gate.wait()
            moved: RunsMoved = await done
            return moved

        return asyncio.ensure_future(held())


async def test_a_page_that_is_cleared_while_it_is_moved_stays_cleared(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend, keys = backend_of(store), keys_of(40)
    log = backend._log
    await put(store, keys)
    io = HeldReads(backend)
    (group,) = log.index.groups_of(1)
    moving = asyncio.ensure_future(log._rescue(log.segments[1], [(group, list(range(10)))], 1 << 20))
    await io.asked.wait()
    await store.clear()
    assert await put(store, [page_key("after")]) == [Result.HIT]
    io.gate.set()
    await moving
    assert await store.exists(keys) == [Result.MISS] * 40
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await store.exists([*keys, page_key("after")]) == [Result.MISS] * 40 + [Result.HIT]
    await store.aclose()


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_close_that_is_cancelled_leaves_no_task_and_no_file_open(tmp_path: Path, turns: int) -> None:
    store = await open_at(tmp_path / "s")
    backend = backend_of(store)
    for batch in range(3):
        await put(store, [page_key(f"{batch}/{i}") for i in range(50)])
    reading = HeldReads(backend)
    getting = asyncio.ensure_future(get(store, [page_key("0/1")]))
    await reading.asked.wait()
    backend._log._prepare_task()
    closing = asyncio.ensure_future(backend.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.gate.set()
    await asyncio.wait([closing, getting])
    assert closing.cancelled()
    assert open_files(tmp_path) == []
    assert [task.get_name() for task in asyncio.all_tasks() if "asynccache" in task.get_name()] == []
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await get(store, [page_key(f"0/{i}") for i in range(50)]) == [Result.HIT] * 50
    await store.aclose()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_page_that_two_calls_put_stays_deleted_after_a_kill(tmp_path: Path, first: int) -> None:
    """Whichever of the two writes ended first: a recovery finds both copies."""
    store = await open_at(tmp_path / "s")
    await put_twice(store, first)
    assert store.stats()["pages"] == 1
    assert await store.delete([page_key("twice")]) == [Result.HIT]
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    for folder in ("killed", "s"):
        store = await open_at(tmp_path / folder)
        assert await store.exists([page_key("twice")]) == [Result.MISS]
        await store.aclose()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_page_that_two_calls_put_is_there_after_a_kill(tmp_path: Path, first: int) -> None:
    store = await open_at(tmp_path / "s")
    await put_twice(store, first)
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    for folder in ("killed", "s"):
        store = await open_at(tmp_path / folder)
        assert await get(store, [page_key("twice")]) == [Result.HIT]
        await store.aclose()


async def test_a_page_that_is_put_while_its_deletion_waits_for_room_is_there_after_a_kill(tmp_path: Path) -> None:
    """The deletion is written behind it, and speaks of what lay before."""
    store = await open_at(tmp_path / "s")
    backend, key = backend_of(store), page_key("again")
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
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await get(store, [key]) == [Result.HIT]
    await store.aclose()


async def test_a_segment_with_deletions_is_not_collected_before_what_they_speak_of(tmp_path: Path) -> None:
    """The later of two copies was deleted, and the earlier one lies in an older segment, which stays."""
    store = await open_at(tmp_path / "s")
    backend, fill = backend_of(store), [page_key(f"fill {i}") for i in range(300)]
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
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await store.exists([key]) == [Result.MISS]
    await store.aclose()


async def test_a_segment_sealed_in_the_moment_in_which_a_write_ends_names_its_pages(tmp_path: Path) -> None:
    """The bytes are in the file, and nothing has been done about it yet."""
    store = await open_at(tmp_path / "s")
    log = backend_of(store)._log
    call, loop = log.threads.call, asyncio.get_running_loop()
    written, told = asyncio.Event(), loop.create_future()

    def held(function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        if function is not write_run:
            return call(function, *args, **kwargs)
        call(function, *args, **kwargs).add_done_callback(lambda _: written.set())
        return told

    log.threads.call = held  # type: ignore[method-assign]
    putting = asyncio.ensure_future(backend_of(store).put([page_key("a")], [record_of(page_key("a"))]))
    await written.wait()
    log.active = None
    told.set_result(None)
    await log._seal()
    assert await putting == [Result.HIT]
    log.threads.call = call  # type: ignore[method-assign]
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await store.exists([page_key("a")]) == [Result.HIT]
    assert store.stats()["scanned_groups"] == 0
    await store.aclose()


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
    await store.aclose()


async def test_a_file_in_place_of_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("not a folder")
    with pytest.raises(Unavailable, match=f"store folder '{tmp_path}/s'"):
        await open_at(tmp_path / "s")


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
