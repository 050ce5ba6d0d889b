"""The file store starts again: after damage, after random walks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from asynccache_backends.file import FileBackend
from asynccache_backends.file.folder import Manifest, pack_manifest
from asynccache_backends.file.segments import BLOCK_BYTES, DELETION, HEAD_BYTES
from xxhash import xxh3_64_hexdigest

from asynccache.errors import Unavailable
from asynccache.storage import CheckedStore, PageKey, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, keys_of, page_key
from tests.storage import pages_kit
from tests.storage.pages_kit import edit, file_backend, fill, flip, open_files, opened, put, segment
from tests.storage.pages_kit import get as read
from tests.stores import filler

# Starts after damage. A crash is simulated by a copy of the folder that is taken while the store is open.


FULL = LAYOUT.page_bytes["full"]
KEYS = keys_of(60)
FIRST_GROUP = BLOCK_BYTES + 42 * FULL


async def open_at(folder: Path, options: str = "capacity=64MiB&segment=4MiB") -> CheckedStore:
    return await pages_kit.open_at(folder, options)


async def reopened(folder: Path) -> tuple[list[Result], dict[str, int | float]]:
    """Open, read all, close: what was served, and the counters."""
    store = await open_at(folder)
    results = await read(store, KEYS)
    stats = dict(store.stats())
    await store.aclose()
    return results, stats


@pytest_asyncio.fixture
async def crashed(tmp_path: Path) -> Path:
    """A folder with 60 pages in two groups (42 and 18) in a segment without a footer."""
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    return tmp_path / "crashed"


@pytest_asyncio.fixture
async def closed(tmp_path: Path) -> Path:
    """A folder with the same pages, closed in good order."""
    store = await open_at(tmp_path / "closed")
    await fill(store, KEYS)
    await store.aclose()
    return tmp_path / "closed"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def segments(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("segment-"), 16) for path in folder.glob("segment-*.kv"))


async def test_a_crash_loses_nothing_that_was_written_and_an_end_leaves_a_footer_for_the_next_start(
    crashed: Path, closed: Path
) -> None:
    for folder, scanned in ((crashed, 2), (crashed, 0), (closed, 0)):
        results, stats = await reopened(folder)
        assert (results, stats["scanned_groups"]) == ([Result.HIT] * 60, scanned)


HIT, MISS, CORRUPT = Result.HIT, Result.MISS, Result.CORRUPT


def zeroed(start: int, stop: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[start:stop] = bytes(stop - start)

    return change


def cut_at(size: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        del data[size:]

    return change


DAMAGE: list[tuple[Callable[[bytearray], None], list[Result]]] = [
    *(
        (flip(BLOCK_BYTES + page * FULL + 100 + (BLOCK_BYTES if page > 41 else 0)),
         [CORRUPT if i == page else HIT for i in range(60)])
        for page in (0, 41, 42, 59)
    ),
    *((flip(at), [MISS] * 42 + [HIT] * 18) for at in (0, 9, 20, 30, 45, 70, 64 + 96 * 41 + 95)),
    (zeroed(0, FIRST_GROUP), [MISS] * 42 + [HIT] * 18),
    (zeroed(BLOCK_BYTES + 10 * FULL, FIRST_GROUP), [HIT] * 10 + [CORRUPT] * 32 + [HIT] * 18),
    *((cut_at(size), [MISS] * 60) for size in (0, 1000, 4095)),
    *((cut_at(BLOCK_BYTES + pages * FULL + 17), [HIT] * pages + [CORRUPT] * (42 - pages) + [MISS] * 18)
      for pages in (0, 3)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DAMAGE)))
async def test_damage_costs_the_pages_that_it_hit_and_no_others(crashed: Path, number: int) -> None:
    """A flipped bit of a payload, of a header block (its group); a group, or a half of it, that never reached the disk;
    a segment that was cut off. What was corrupt is a miss from then on."""
    change, expected = DAMAGE[number]
    edit(segment(crashed), change)
    assert (await reopened(crashed))[0] == expected
    assert (await reopened(crashed))[0] == [MISS if result is CORRUPT else result for result in expected]


@pytest.mark.parametrize("size", [None, BLOCK_BYTES + 5 * FULL + 1])
async def test_a_missing_or_truncated_segment_that_had_a_footer(closed: Path, size: int | None) -> None:
    if size is None:
        segment(closed).unlink()
    else:
        os.truncate(segment(closed), size)
    results, _ = await reopened(closed)
    assert results[:5] == [MISS if size is None else HIT] * 5
    assert HIT not in results[5:]


FOOTER_BYTES = 2 * HEAD_BYTES + 60 * 96 + HEAD_BYTES


@pytest.mark.parametrize("at", [0, 8, 20, 40, 60, 200, FOOTER_BYTES - 64, FOOTER_BYTES - 40, FOOTER_BYTES - 1])
@pytest.mark.parametrize("how", ["a bit", "its half"])
async def test_a_damaged_footer_is_not_believed(closed: Path, at: int, how: str) -> None:
    start = segment(closed).stat().st_size - FOOTER_BYTES
    edit(segment(closed), flip(start + at) if how == "a bit" else cut_at(start + at))
    results, stats = await reopened(closed)
    assert (results, stats["scanned_groups"]) == ([Result.HIT] * 60, 2)


async def test_the_footer_of_another_segment_is_not_believed(closed: Path) -> None:
    """Nor one of this segment that does not lie where it says."""
    foreign = segment(closed).read_bytes()
    segment(closed, 2).write_bytes(foreign)
    edit(segment(closed), lambda data: data.extend(foreign[-FOOTER_BYTES:]))
    results, stats = await reopened(closed)
    assert results == [Result.HIT] * 60
    assert (stats["pages"], stats["scanned_groups"]) == (60, 2)


async def test_a_footer_hides_no_page_that_was_put_after_it(closed: Path, tmp_path: Path) -> None:
    """The last segment of an earlier run goes on: its footer is cut off, and a later one names all of its pages."""
    store = await open_at(closed)
    more = keys_of(20, "odd")
    await fill(store, more)
    shutil.copytree(closed, tmp_path / "killed")
    await store.aclose()
    for folder, scanned in ((tmp_path / "killed", 3), (closed, 0)):
        store = await open_at(folder)
        assert await read(store, KEYS + more) == [Result.HIT] * 80
        assert store.stats()["scanned_groups"] == scanned
        await store.aclose()


async def test_after_a_kill_only_the_last_segments_are_scanned(tmp_path: Path) -> None:
    """Full segments got their footers while the store was in use."""
    keys = keys_of(1000)
    store = await open_at(tmp_path / "live", "capacity=64MiB&segment=1MiB")
    for at in range(0, 1000, 50):
        await fill(store, keys[at : at + 50])
    sealing = file_backend(store)._log._sealing
    assert sealing is not None
    await asyncio.wait([sealing])
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    assert store.stats()["segments"] > 15
    await store.aclose()
    store = await open_at(tmp_path / "killed")
    assert await read(store, keys) == [Result.HIT] * 1000
    assert store.stats()["scanned_groups"] <= 3, "no more than a segment holds"


@pytest.mark.parametrize("seed", range(5))
async def test_a_footer_names_every_page_whose_write_has_ended(tmp_path: Path, seed: int) -> None:
    """Also those of writes that end in the same moment in which their segment is full."""
    keys = keys_of(600)
    store = await open_at(tmp_path / "s", "capacity=64MiB&segment=256KiB")
    await asyncio.gather(*(fill(store, keys[at : at + 7 + seed]) for at in range(0, 600, 7 + seed)))
    await store.aclose()
    store = await open_at(tmp_path / "s")
    assert await read(store, keys) == [Result.HIT] * 600
    assert store.stats()["scanned_groups"] == 0


async def test_a_damaged_deletion_costs_its_block_only(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "live")
    await fill(store, KEYS)
    await store.delete(KEYS[:1])
    await store.delete(KEYS[50:51])
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    await store.aclose()
    edit(segment(tmp_path / "crashed"), flip(FIRST_GROUP + BLOCK_BYTES + 18 * FULL + HEAD_BYTES))
    assert (await reopened(tmp_path / "crashed"))[0] == [Result.HIT] * 50 + [Result.MISS] + [Result.HIT] * 9


async def test_a_deletion_speaks_of_earlier_copies_only(crashed: Path) -> None:
    """Its block says before which place; where the block itself lies does not matter."""
    store = await open_at(crashed)
    await store.delete(KEYS[:2])
    await fill(store, KEYS[:1])
    log = file_backend(store)._log
    (deletions,) = log.segments[1].deletions
    places = [place for _, *place in DELETION.iter_unpack(deletions.directory)]
    assert places == [[1, FIRST_GROUP + BLOCK_BYTES + 18 * FULL]] * 2
    await asyncio.wait([log.begin(0, deletions.directory)])
    await store.aclose()
    assert (await reopened(crashed))[0] == [Result.HIT, Result.MISS] + [Result.HIT] * 58


async def test_pages_put_after_a_restart_go_into_the_same_segment(closed: Path) -> None:
    for i in range(3):
        store = await open_at(closed)
        await fill(store, [page_key(f"more {i}")])
        await store.aclose()
    assert segments(closed) == [1]
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_what_is_left_of_older_data_is_not_taken_for_pages(closed: Path, tmp_path: Path) -> None:
    """A block of another store, and one of this store at another place, verify nowhere."""
    other = await open_at(tmp_path / "other")
    await fill(other, keys_of(42, "swa"))
    await other.aclose()
    foreign = segment(closed).read_bytes()[:FIRST_GROUP]
    segment(closed, 2).write_bytes(foreign)
    segment(closed, 3).write_bytes(segment(tmp_path / "other", 1).read_bytes())
    store = await open_at(closed)
    assert store.stats()["pages"] == 60
    assert store.stats()["scanned_groups"] == 0


async def test_a_folder_of_another_schema_is_refused(closed: Path) -> None:
    other = StoreLayout(LAYOUT.page_bytes, b"\x01" * 32)
    with pytest.raises(Unavailable, match=rf"{closed}.*another schema: {LAYOUT.schema.hex()}, this is {'01' * 32}"):
        await FileBackend.open(parse_url(f"file:{closed}?capacity=64MiB"), other)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


async def test_a_folder_of_another_format_version_is_refused(closed: Path) -> None:
    manifest = json.loads((closed / "manifest.json").read_text())["manifest"] | {"version": 99}
    (closed / "manifest.json").write_bytes(pack_manifest(Manifest(**manifest)))
    with pytest.raises(Unavailable, match="version 99, this is"):
        await open_at(closed)


async def test_a_folder_of_the_first_version_is_refused_with_advice_and_left_as_it_is(tmp_path: Path) -> None:
    """Its manifest, to the letter as that version wrote it, and a name of a file that only that version had."""
    text = '{"format": "asynccache file store", "version": 1, "schema": "' + LAYOUT.schema.hex() + '", "seed": 7}'
    digest = xxh3_64_hexdigest(text.encode())
    (tmp_path / "manifest.json").write_text(f'{{"manifest": {text}, "xxh3": "{digest}"}}')
    (tmp_path / "deletions.log").write_bytes(b"")
    segment(tmp_path).write_bytes(bytes(BLOCK_BYTES))
    before = contents(tmp_path)
    with pytest.raises(Unavailable, match=rf"{tmp_path}.* version 1, this is .* version 2, which cannot read it; name"):
        await open_at(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("at", [0, 20, 60, 120, -3])
async def test_a_damaged_manifest_is_refused_and_nothing_is_touched(closed: Path, at: int) -> None:
    good = (closed / "manifest.json").read_bytes()
    edit(closed / "manifest.json", flip(at))
    with pytest.raises(Unavailable, match=f"{closed}"):
        await open_at(closed)
    (closed / "manifest.json").write_bytes(good)
    assert (await reopened(closed))[0] == [Result.HIT] * 60


@pytest.mark.slow(2)
def test_under_a_file_size_limit_writes_fail_and_reads_go_on(tmp_path: Path) -> None:
    out, _ = filler.child(f"file:{tmp_path}/s?capacity=64MiB&segment=2MiB", 0, "limited").communicate()
    numbers = {word: int(number) for word, number in map(str.split, out.splitlines())}
    assert (numbers["read"], numbers["right"]) == (filler.BATCH, 1), "what was not stored is not there, and all else is"
    assert numbers["failed"] > 30 * filler.BATCH
    assert numbers["errors"] >= 1
    assert numbers["refused"] > 30


# The file backend against a dict, by seeded random walks: with crashes, restarts, cancellations and clears.


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
        options = f"capacity=256MiB&segment=1MiB&direct={self.direct}"
        self.store = await opened(self.folder / str(self.generation), options)

    def some(self) -> list[PageKey]:
        """A few keys, in any order, none twice."""
        return self.rng.sample(UNIVERSE, self.rng.randrange(1, 70))

    async def put(self) -> None:
        keys = self.some()
        await fill(self.store, keys)
        self.model.update(keys)

    async def get(self) -> None:
        keys = self.some()
        assert await read(self.store, keys) == [Result.HIT if key in self.model else Result.MISS for key in keys]

    async def delete(self) -> None:
        keys = self.some()[:10]
        assert await self.store.delete(keys) == [Result.HIT if key in self.model else Result.MISS for key in keys]
        self.model.difference_update(keys)

    async def collect(self) -> None:
        """No page is lost, and none that was deleted comes back when its segment goes."""
        await file_backend(self.store).collect(None)

    async def flush(self) -> None:
        await self.store.flush()

    async def clear(self) -> None:
        if self.rng.random() < 0.3:
            await self.store.clear()
            self.model.clear()

    async def cancelled_put(self) -> None:
        """Cancelled pages may be there or not, whole or not at all."""
        keys = [key for key in self.some() if key not in self.model]
        putting = asyncio.ensure_future(put(self.store, keys))
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
    assert await everything_at_once(tmp_path, seed) > 0


async def everything_at_once(folder: Path, seed: int) -> float:
    """Puts, gets, deletes, flushes and clears at the same time, some cancelled, while segments come and go. Returns how
    many were reclaimed."""
    rng = Random(f"at once {seed}")
    store = await opened(folder / "s", f"capacity=1MiB&segment=256KiB&direct={rng.choice(('auto', 'off'))}")

    async def act() -> None:
        keys = rng.sample(UNIVERSE, 12)
        which = rng.random()
        if which < 0.5:
            assert Result.FAILED not in await put(store, keys)
        elif which < 0.9:
            assert not {Result.FAILED, Result.CORRUPT} & set(await read(store, keys))
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
    assert stats["disk_bytes"] <= 1 << 20
    await store.aclose()
    return stats["reclaimed_segments"]


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
    deleted: in a copy of the folder, taken at any moment, no page is found whose deletion had ended, and what is found
    is right."""
    rng = Random(f"deleted {seed}")
    options = f"capacity=1MiB&segment=256KiB&direct={rng.choice(('auto', 'off'))}"
    store, gone = await opened(folder / "live", options), set[PageKey]()

    async def worker(universe: list[PageKey]) -> None:
        for _ in range(60):
            keys = rng.sample(universe, 8)
            which = rng.random()
            if which < 0.4:
                gone.difference_update(keys)
                await put(store, keys)
            elif which < 0.7:
                await read(store, keys)
            elif which < 0.95:
                assert Result.FAILED not in await store.delete(keys)
                gone.update(keys)
            else:
                await file_backend(store).collect(None)

    async def kill() -> None:
        for number in range(6):
            for _ in range(rng.randrange(400)):
                await asyncio.sleep(0)
            deleted = list(gone)
            copy_of(folder / "live", folder / f"copy {number}")
            copy = await opened(folder / f"copy {number}", options)
            assert set(await copy.exists(deleted)) <= {Result.MISS}
            assert Result.FAILED not in await read(copy, UNIVERSE)
            await copy.aclose()

    await asyncio.gather(*(worker(UNIVERSE[at::3]) for at in range(3)), kill())
    assert store.stats()["reclaimed_segments"] > 0
    await store.aclose()
    store = await opened(folder / "live", options)
    assert set(await store.exists(list(gone))) <= {Result.MISS}
    await store.aclose()


async def test_an_open_that_is_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    url = parse_url(f"file:{tmp_path}/s?capacity=64MiB")
    store = await open_at(tmp_path / "s")
    await fill(store, UNIVERSE)
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
            assert open_files(tmp_path) == []
        else:
            await opening.result().aclose()
    assert cancelled > 3
