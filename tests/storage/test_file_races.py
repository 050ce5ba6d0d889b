"""The file store when things happen at once: clearing while pages are moved, closing while segments are made; and
folders that cannot be used."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiofiles
import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.files import RunsMoved, read_runs, write_run

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, Result, ThreadPool
from asynccache.testing.backend_suite import LAYOUT, keys_of, page_key, record_of
from tests.storage.file_store_kit import open_at, open_files
from tests.storage.page_kit import get, put

FULL = LAYOUT.page_bytes["full"]


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
