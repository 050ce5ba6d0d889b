"""The file store when things happen at once: clearing while pages are moved, closing while segments are made; and
folders that cannot be used."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiofiles
import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.files import FileHandles, FileRun, RunsMoved, ThreadIO

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, Result
from asynccache.testing.backend_suite import LAYOUT, aligned, keys_of, page_key
from tests.storage.file_store_kit import open_at, open_files
from tests.storage.page_kit import get, put

FULL = LAYOUT.page_bytes["full"]


def backend_of(store: CheckedStore) -> FileBackend:
    assert isinstance(store.backend, FileBackend)
    return store.backend


class HeldWrites(ThreadIO):
    """Real I/O whose writes are answered in the order in which the test opens their ``gates``."""

    def __init__(self, backend: FileBackend) -> None:
        super().__init__(2)
        self.gates: list[asyncio.Event] = []
        self.both = asyncio.Event()
        backend._state.io.close()
        backend._state.io = self

    def write(self, files: FileHandles, run: FileRun) -> asyncio.Future[RunsMoved]:
        done, gate = super().write(files, run), asyncio.Event()
        self.gates.append(gate)
        if len(self.gates) == 2:
            self.both.set()

        async def held() -> RunsMoved:
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


class HeldReads(ThreadIO):
    """Real I/O whose reads are answered when the test says so."""

    def __init__(self, backend: FileBackend) -> None:
        super().__init__(2)
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        backend._state.io.close()
        backend._state.io = self

    def read(self, files: FileHandles, runs: Sequence[FileRun]) -> asyncio.Future[RunsMoved]:
        done = super().read(files, runs)

        async def held() -> RunsMoved:
            self.asked.set()
            await self.gate.wait()
            return await done

        return asyncio.ensure_future(held())


@pytest.mark.asyncio
async def test_a_page_that_is_cleared_while_it_is_moved_stays_cleared(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    backend, keys = backend_of(store), keys_of(40)
    state = backend._state
    await put(store, keys)
    io = HeldReads(backend)
    group = state.index.groups()[0]
    moving = asyncio.ensure_future(
        backend._janitor._move(state.log.segments[1], group, list(range(10)), aligned(10 * FULL))
    )
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


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_close_that_is_cancelled_leaves_no_task_and_no_file_open(tmp_path: Path, turns: int) -> None:
    store = await open_at(tmp_path / "s")
    backend = backend_of(store)
    for batch in range(3):
        await put(store, [page_key(f"{batch}/{i}") for i in range(50)])
    reading = HeldReads(backend)
    getting = asyncio.ensure_future(get(store, [page_key("0/1")]))
    await reading.asked.wait()
    backend._janitor._prepare_task()
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [0, 1])
async def test_a_page_that_two_calls_put_during_a_save_is_there_after_a_kill(tmp_path: Path, first: int) -> None:
    """The snapshot does not have the two copies, and the log of deletions that is written after it names one dead."""
    store = await open_at(tmp_path / "s")
    janitor, syncing, gate = backend_of(store)._janitor, asyncio.Event(), asyncio.Event()
    sync = janitor.sync

    async def held() -> None:
        await sync()
        syncing.set()
        await gate.wait()

    janitor.sync = held  # type: ignore[method-assign]
    await put(store, [page_key("before")])
    saving = asyncio.ensure_future(janitor.save())
    await syncing.wait()
    await put_twice(store, first)
    gate.set()
    await saving
    janitor.sync = sync  # type: ignore[method-assign]
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await get(store, [page_key("twice")]) == [Result.HIT]
    await store.aclose()


@pytest.mark.asyncio
async def test_a_page_that_two_calls_put_stays_deleted_when_the_later_copy_is_gone(tmp_path: Path) -> None:
    """Its segment was reclaimed by ``collect``, and the log names nothing in it any more; the earlier copy stays."""
    store = await open_at(tmp_path / "s")
    backend, fill = backend_of(store), [page_key(f"fill {i}") for i in range(300)]
    key = page_key("twice")
    while backend._state.log.fit(FULL, 2) != 1:  # the first copy is the last page of its segment
        await put(store, [fill.pop()])
    await put_twice(store, 1)
    groups = backend._state.index.groups()
    assert [group.segment for group in groups if group.keys().count(key.key)] == [1, 2]
    assert await store.delete([key]) == [Result.HIT]
    backend._state.log.active = None
    await backend.collect(None)
    assert list(backend._state.log.segments) == [1]
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await store.exists([key]) == [Result.MISS]
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_file_in_place_of_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("not a folder")
    with pytest.raises(Unavailable, match=f"store folder '{tmp_path}/s'"):
        await open_at(tmp_path / "s")


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_whole_files_are_read_and_written_by_aiofiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest, the notes, the snapshot and the log of deletions: what is neither pages nor an entry of a log."""
    seen, opened = set[tuple[str, str]](), aiofiles.open

    def noted(name: str, mode: Any, **options: Any) -> Any:
        seen.add((name, mode))
        return opened(name, mode, **options)

    monkeypatch.setattr(aiofiles, "open", noted)
    options = "capacity=8MiB&segment=1MiB"
    store = await open_at(tmp_path / "s", options)
    await put(store, [page_key("a"), page_key("b")])
    await store.delete([page_key("b")])
    await store.aclose()
    assert seen >= {("manifest.json.new", "wb"), ("capacity.new", "wb"), ("lock", "r+b")}
    assert seen >= {("index.snapshot.new", "wb"), ("deletions.log.new", "wb")}
    seen.clear()
    await (await open_at(tmp_path / "s", options)).aclose()
    assert seen >= {("manifest.json", "rb"), ("capacity", "rb"), ("index.snapshot", "rb"), ("deletions.log", "rb")}
