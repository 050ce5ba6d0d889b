"""Capacity, reclaim and broken disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.backend import THREADS, PageRun, plan_reads
from asynccache_backends.file.files import FileHandles, FileRun, RunsMoved, read_runs, write_run
from asynccache_backends.file.folder import usual_segment
from asynccache_backends.file.segments import FileIndex, PageGroup, group_bytes

from asynccache.errors import ConfigError
from asynccache.storage import CheckedStore, Record, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, blank, keys_of, page_key, record_of
from tests.storage.file_store_kit import open_at
from tests.storage.page_kit import get, put

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
