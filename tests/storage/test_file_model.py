"""The file backend against a dict, by seeded random walks: with crashes, restarts, cancellations and clears."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from asynccache_backends.file import FileBackend

from asynccache.storage import CheckedStore, PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content, page_key

UNIVERSE = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(150)]


class Walk:
    """One store and what must be in it. The capacity is never reached, so nothing may be missing."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = Random(f"walk {seed}")
        self.model: set[PageKey] = set()
        self.generation = 0
        self.direct = self.rng.choice(("auto", "off"))

    async def open(self) -> None:
        """Open, or open again."""
        url = parse_url(f"file:{self.folder}/{self.generation}?capacity=256MiB&segment=1MiB&direct={self.direct}")
        self.store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)

    def some(self) -> list[PageKey]:
        """A few keys, in any order, none twice."""
        return self.rng.sample(UNIVERSE, self.rng.randrange(1, 70))

    async def put(self) -> None:
        keys = self.some()
        results = await self.store.put(keys, [memoryview(content(k, LAYOUT.page_bytes[k.pool])) for k in keys])
        assert results == [Result.HIT] * len(keys)
        self.model.update(keys)

    async def get(self) -> None:
        keys = self.some()
        pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
        results = await self.store.get(keys, pages)
        assert results == [Result.HIT if key in self.model else Result.MISS for key in keys]
        for key, page, result in zip(keys, pages, results, strict=True):
            assert result is Result.MISS or page == content(key, page.nbytes)

    async def delete(self) -> None:
        keys = self.some()[:10]
        assert await self.store.delete(keys) == [Result.HIT if key in self.model else Result.MISS for key in keys]
        self.model.difference_update(keys)

    async def collect(self) -> None:
        """No page is lost, and none that was deleted comes back when its segment goes."""
        assert isinstance(self.store.backend, FileBackend)
        await self.store.backend.collect(None)

    async def flush(self) -> None:
        await self.store.flush()

    async def clear(self) -> None:
        if self.rng.random() < 0.3:
            await self.store.clear()
            self.model.clear()

    async def cancelled_put(self) -> None:
        """Cancelled pages may be there or not, whole or not at all."""
        keys = [key for key in self.some() if key not in self.model]
        putting = asyncio.ensure_future(
            self.store.put(keys, [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in keys])
        )
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        there = await self.store.exists(keys)
        self.model.update(key for key, result in zip(keys, there, strict=True) if result is Result.HIT)

    async def restart(self) -> None:
        await self.store.aclose()
        await self.open()

    async def crash(self) -> None:
        """Go on with a copy of the folder, as a killed process leaves it."""
        old = self.folder / str(self.generation)
        self.generation += 1
        shutil.copytree(old, self.folder / str(self.generation))
        await self.store.aclose()
        shutil.rmtree(old)
        await self.open()


@pytest.mark.parametrize("seed", range(12))
async def test_a_random_walk_agrees_with_a_dict(tmp_path: Path, seed: int) -> None:
    await agrees_with_a_dict(tmp_path, seed)


async def agrees_with_a_dict(folder: Path, seed: int) -> None:
    """Fifty random steps; the store says after each of them what the dict does."""
    walk = Walk(folder, seed)
    await walk.open()
    steps = [
        walk.put, walk.get, walk.delete, walk.flush, walk.collect, walk.clear, walk.cancelled_put, walk.restart,
        walk.crash,
    ]  # fmt: skip
    weights = [8, 8, 4, 1, 2, 1, 3, 1, 2]
    for step in walk.rng.choices(steps, weights, k=50):
        await step()
        stats = walk.store.stats()
        assert stats["pages"] == len(walk.model)
        assert stats["bytes"] == sum(LAYOUT.page_bytes[key.pool] for key in walk.model)
    assert walk.store.stats()["corrupt_pages"] == 0
    await walk.store.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_everything_at_once_in_a_store_that_is_too_small(tmp_path: Path, seed: int) -> None:
    await everything_at_once(tmp_path, seed)


async def everything_at_once(folder: Path, seed: int) -> None:
    """Puts, gets, deletes, flushes and clears at the same time, some cancelled, while segments come and go."""
    rng = Random(f"at once {seed}")
    url = parse_url(f"file:{folder}/s?capacity=3MiB&segment=512KiB&direct={rng.choice(('auto', 'off'))}")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)

    async def act() -> None:
        keys = rng.sample(UNIVERSE, 12)
        pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
        which = rng.random()
        if which < 0.5:
            for key, page in zip(keys, pages, strict=True):
                page[:] = content(key, page.nbytes)
            assert Result.FAILED not in await store.put(keys, pages)
        elif which < 0.9:
            results = await store.get(keys, pages)
            assert not {Result.FAILED, Result.CORRUPT} & set(results)
            for key, page, result in zip(keys, pages, results, strict=True):
                assert result is Result.MISS or page == content(key, page.nbytes)
        elif which < 0.97:
            await store.delete(keys[:3])
        else:
            await (store.flush() if rng.random() < 0.6 else store.clear())

    async def worker() -> None:
        for _ in range(40):
            task = asyncio.ensure_future(act())
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None, task.exception()

    await asyncio.gather(*(worker() for _ in range(4)))
    stats = store.stats()
    assert (stats["errors"], stats["corrupt_pages"]) == (0, 0)
    assert stats["disk_bytes"] <= 3 << 20
    await store.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_what_was_deleted_never_comes_back_after_a_kill(tmp_path: Path, seed: int) -> None:
    await deleted_stays_deleted(tmp_path, seed)


def copy_of(folder: Path, target: Path) -> None:
    """Files may go while their folder is copied."""
    target.mkdir()
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            shutil.copyfile(folder / name, target / name)


async def deleted_stays_deleted(folder: Path, seed: int) -> None:
    """In a store that is too small, whose segments are reclaimed and collected while pages of them are moved and
    deleted: in a copy of the folder, taken at any moment, no page is found whose deletion had ended."""
    rng = Random(f"deleted {seed}")
    url = f"?capacity=3MiB&segment=512KiB&direct={rng.choice(('auto', 'off'))}"
    backend = await FileBackend.open(parse_url(f"file:{folder}/live{url}"), LAYOUT)
    store, gone = CheckedStore(backend, LAYOUT), set[PageKey]()

    async def worker(universe: list[PageKey]) -> None:
        for _ in range(60):
            keys = rng.sample(universe, 8)
            pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
            which = rng.random()
            if which < 0.4:
                gone.difference_update(keys)
                for key, page in zip(keys, pages, strict=True):
                    page[:] = content(key, page.nbytes)
                await store.put(keys, pages)
            elif which < 0.7:
                await store.get(keys, pages)
            elif which < 0.95:
                assert Result.FAILED not in await store.delete(keys)
                gone.update(keys)
            else:
                await backend.collect(None)

    async def kill() -> None:
        for number in range(6):
            for _ in range(rng.randrange(400)):
                await asyncio.sleep(0)
            deleted = list(gone)
            copy_of(folder / "live", folder / f"copy {number}")
            at = parse_url(f"file:{folder}/copy {number}{url}")
            copy = CheckedStore(await FileBackend.open(at, LAYOUT), LAYOUT)
            assert set(await copy.exists(deleted)) <= {Result.MISS}
            await copy.aclose()

    await asyncio.gather(*(worker(UNIVERSE[at::3]) for at in range(3)), kill())
    await store.aclose()
    store = CheckedStore(await FileBackend.open(parse_url(f"file:{folder}/live{url}"), LAYOUT), LAYOUT)
    assert set(await store.exists(list(gone))) <= {Result.MISS}
    await store.aclose()


async def test_an_open_that_is_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    url = parse_url(f"file:{tmp_path}/s?capacity=64MiB")
    store = CheckedStore(await FileBackend.open(url, LAYOUT), LAYOUT)
    await store.put(UNIVERSE, [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in UNIVERSE])
    await store.aclose()
    cancelled = 0
    for turns in range(12):
        opening = asyncio.ensure_future(FileBackend.open(url, LAYOUT))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if opening.cancelled():
            cancelled += 1
            assert not [name for name in map(_target, os.listdir("/proc/self/fd")) if str(tmp_path) in name]
        else:
            await opening.result().aclose()
    assert cancelled > 3


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
