"""The file backend: pages in segment files in one folder, for one process at a time.

Laws:
* Nothing is overwritten. A page is written once, together with others, and is deleted with its whole segment.
* The index in memory says which pages are stored. After a crash it can be rebuilt from the files.
* A page can be read as soon as it is written. It survives a power loss once ``flush``, a snapshot or ``aclose`` has
  synced it.
* Payloads are not verified here; ``CheckedStore`` does that.
* When the disk is full or broken, writes are FAILED at once for a while (a back-off), and reads go on.

The options of the URL are in ``settings``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    KEY_BYTES,
    REFUSED,
    Breaker,
    Collected,
    OpenCalls,
    PageKey,
    ParsedUrl,
    Part,
    Permit,
    Record,
    Result,
    Scrubbed,
    Stored,
    StoreLayout,
    Tell,
    Verify,
    completed_in_thread,
    settled,
)
from asynccache_backends.file.files import FileRun, Folder, RunsMoved, ThreadIO
from asynccache_backends.file.folder import FolderLock, load_manifest, note_capacity, noted_capacity
from asynccache_backends.file.janitor import Janitor
from asynccache_backends.file.recovery import recover
from asynccache_backends.file.scrub import is_gone, is_intact, read_group, stored_records
from asynccache_backends.file.segments import PageGroup, Segment, segment_name, supports_direct
from asynccache_backends.file.settings import settings_of
from asynccache_backends.file.state import FileIndex, GroupWrite, StoreState

MISS, HIT, CORRUPT, FAILED = Result  # looking up an Enum's member takes 0.2 µs, and would be done for every page

MOST_BATCH = 4 << 20
LEAST_BATCH = 1 << 20
BATCHES = 4


class GroupStretch(NamedTuple):
    """Pages of one group that lie next to each other, the first at index ``page``. ``which`` has for each page the
    position of its key in the call."""

    group: PageGroup
    page: int
    which: list[int]


class ReadBatch(NamedTuple):
    """One call of the I/O: stretches of pages of one length in one segment. ``runs`` has the bytes and buffers of
    each."""

    segment: int
    length: int
    stretches: list[GroupStretch]
    runs: list[FileRun]


def find_stretches(
    index: FileIndex, keys: Sequence[PageKey], records: Sequence[Record]
) -> tuple[list[GroupStretch], list[int]]:
    """Return the stretches in which the stored pages of ``keys`` lie, in the order in which they were written; and the
    positions of keys whose page has another length than their record."""
    stretches: list[GroupStretch] = []
    wrong: list[int] = []
    expected = -1
    for location, i in sorted(index.locate(keys)):
        if location != expected:
            group, page = index.at(location)
            which: list[int] = []
        if records[i].payload.nbytes != group.length:
            wrong.append(i)
            expected = -1
            continue
        if not which:
            stretches.append(GroupStretch(group, page, which))
        which.append(i)
        expected = location + 1
    return stretches, wrong


def plan_reads(stretches: Sequence[GroupStretch], records: Sequence[Record]) -> list[ReadBatch]:
    """Divide the stretches into batches, each of pages of one length in one segment. The bytes are divided evenly among
    the calls that can run at the same time, but a batch has room for at least 1 MiB, so that it is worth a call, and
    for at most 4 MiB or one longer page."""
    total = sum(stretch.group.length * len(stretch.which) for stretch in stretches)
    limit = max(LEAST_BATCH, min(MOST_BATCH, total // BATCHES))
    batches: list[ReadBatch] = []
    segment = length = room = 0
    left = list(reversed(stretches))
    while left:
        stretch = left.pop()
        group, page, which = stretch
        if room < group.length or length != group.length or segment != group.segment:
            segment, length, room = group.segment, group.length, max(limit, group.length)
            batch = ReadBatch(segment, length, [], [])
            batches.append(batch)
        size = len(which) * length
        if size > room:
            fits = room // length
            left.append(GroupStretch(group, page + fits, which[fits:]))
            stretch = GroupStretch(group, page, which[:fits])
            which, size = stretch.which, fits * length
        batch.stretches.append(stretch)
        batch.runs.append(FileRun(group.payload_offset(page), size, [records[i].payload for i in which]))
        room -= size
    return batches


class _Put(NamedTuple):
    """Pages of one call that are written together.

    ``fresh``: the pages, as positions in ``keys``, by the length of their payloads. ``writings``: the groups that are
    being written, each with the positions of its pages.
    """

    keys: Sequence[PageKey]
    records: Sequence[Record]
    results: list[Result]
    fresh: dict[int, list[int]]
    writings: list[tuple[GroupWrite, list[int]]]


class FileBackend:
    """An open file store. ``open`` makes it."""

    def __init__(self, state: StoreState, lock: FolderLock, page_bytes: Mapping[str, int]) -> None:
        self._state = state
        self._lock = lock
        self._page_bytes = page_bytes
        self._janitor = Janitor(state)
        self._breaker = Breaker(threshold=1)
        self._operations = OpenCalls(f"store folder {str(state.folder.path)!r}")

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any, without looking at the disk."""
        settings_of(url, layout)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Open the store in the folder ``url.path``, which is made if it is missing.

        If the layout has no pools, the store is only looked at. It must exist then, and no page is evicted.

        Raises:
            ConfigError: an option is unknown or unusable.
            Unavailable: another process uses the folder, it has another format or schema, something that is no plain
                file has the name of one of its files, or the disk refuses.

        Cancelling it leaves nothing open.
        """
        settings = settings_of(url, layout)
        lock, io = FolderLock(), ThreadIO()
        store: Self | None = None
        try:
            folder = await lock.take(io, settings.folder, mode=settings.mode, new=settings.used)
            manifest = await load_manifest(folder, layout.schema)
            noted = await noted_capacity(folder)
            capacity = settings.capacity if settings.used or noted is None else noted
            direct = await io.run(_use_direct, folder, settings.direct)
            state = StoreState(folder, manifest.seed, io, capacity, settings.segment, direct)
            store = cls(state, lock, layout.page_bytes)
            await store._recover()
            if capacity != noted and settings.used:
                await note_capacity(folder, capacity)
        except BaseException as error:
            _release(store._state if store else None, io, lock)
            if isinstance(error, OSError):
                raise Unavailable(f"store folder {str(settings.folder)!r}: {error}") from error
            raise
        return store

    def __repr__(self) -> str:
        return f"FileBackend({str(self._state.folder.path)!r}, {self._state.index!r}, {self._state.log!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS. The call never waits."""
        with self._operations:
            index = self._state.index
            return [HIT if key.key in index else MISS for key in keys]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read pages directly into the buffers of their payloads. Cancelling it returns when all reads have ended."""
        with self._operations:
            results = [MISS] * len(keys)
            stretches, wrong = find_stretches(self._state.index, keys, records)
            for i in wrong:
                results[i] = CORRUPT
            batches = plan_reads(stretches, records)
            segments = [self._state.log.segments[batch.segment] for batch in batches]
            futures = [self._begin_read(batch, segment) for batch, segment in zip(batches, segments, strict=True)]
            try:
                await settled(futures)
            finally:
                for segment in segments:
                    segment.leave()
            for batch, future in zip(batches, futures, strict=True):
                self._end_read(batch, future.result(), records, results)
            return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Append new pages, in groups. Pages that are stored already are left alone. A page that two calls put at the
        same time is written twice, and the copy that lies last in the files is the one that is read.

        Cancelling it returns when all writes that had begun have ended; their pages are stored.
        """
        with self._operations:
            index = self._state.index
            results = [HIT if key.key in index else FAILED for key in keys]
            if fresh := self._by_length(keys, records, results):
                await self._write(_Put(keys, records, results, fresh, []))
            return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if it stays deleted after a restart, FAILED if it is deleted now but a crash
        may bring it back, MISS if it was not stored. Cancelling it may leave any of them deleted."""
        with self._operations:
            found = [self._state.index.forget(key.key) for key in keys]
            outcome = await self._log_deleted([place for place in found if place is not None])
            return [MISS if place is None else outcome for place in found]

    async def clear(self) -> None:
        """Delete every page and every segment. Cancelling it may leave any of them deleted.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._operations:
            await self._janitor.clear()

    def parts(self) -> list[Part]:
        """Return a part for every group that has pages now."""
        groups = ((group, len(group.live())) for group in self._state.index.groups())
        return [Part(group.length, count, group) for group, count in groups if count]

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read a group from its file, and delete the pages that do not verify. If its header block is damaged, all of
        its pages are deleted. After it is cancelled nothing more is deleted."""
        with self._operations:
            group: PageGroup = part.place
            try:
                # not in the threads of gets and puts, so that a scrub does not slow those down
                data = await completed_in_thread(read_group, self._state.folder, segment_name(group.segment), group)
            except OSError as error:
                self._state.counts["errors"] += not is_gone(error)
                return Scrubbed() if is_gone(error) else Scrubbed(unread=len(group.live()))
            pages = group.live()
            good = [False] * len(pages)
            if is_intact(group, data, self._state.seed):
                good = await verify(*stored_records(group, pages, data))
            bad = [page for page, is_good in zip(pages, good, strict=True) if not is_good]
            dropped = [place for page in bad if (place := self._state.index.forget_at(group, page))]
            await self._log_deleted(dropped)
            return Scrubbed(len(pages), len(pages) * group.length, len(dropped), 0)

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all stored pages, segment by segment. Cancelling it changes nothing."""
        for number in list(self._state.log.segments):
            with self._operations:
                groups = self._state.index.groups_of(number)
                found = [stored for group in groups for stored in stored_pages(group)]
            if found:
                yield found
            await asyncio.sleep(0)

    async def collect(self, older_than: float | None) -> Collected:
        """Delete old pages. Then delete the segments that are mostly dead pages, if there is room elsewhere for their
        live ones. Cancelling it leaves the rest for the next call.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._operations:
            before, old = self._state.log.bytes, 0
            if older_than is not None:
                places = list(written_before(self._state.index.groups(), time.time() - older_than))
                forgotten = [place for at in places if (place := self._state.index.forget_at(*at))]
                await self._log_deleted(forgotten)
                old = len(forgotten)
            dead = await self._janitor.compact()
            return Collected(old, max(0, dead - old), max(0, before - self._state.log.bytes))

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: whether buffers are aligned is found out when they are used."""

    def watch(self, tell: Tell | None) -> Iterable[Sequence[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Returns the keys that are stored now, in parts."""
        return self._state.index.watched(tell)

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters. ``write_amplification`` is how many bytes were written, also for pages that were moved,
        for each byte that was put."""
        state, counts = self._state, self._state.counts
        return {
            "pages": state.index.pages,
            "bytes": state.index.bytes,
            "capacity_bytes": state.capacity,
            "disk_bytes": state.log.bytes,
            "segments": len(state.log.segments),
            "direct": int(state.direct),
            "write_amplification": 1 + counts["moved_bytes"] / max(1, counts["put_bytes"]),
            **{name: counts[name] for name in COUNTERS},
        }

    async def flush(self) -> None:
        """Return once all pages stored so far would survive a power loss. Cancelling it is safe.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._operations:
            await self._janitor.sync()
            await self._janitor.save_if_due()

    async def aclose(self) -> None:
        """Wait for the calls under way, sync, write a snapshot, and unlock the folder. Later calls raise Unavailable.

        Cancelling it waits for the calls under way all the same, and then unlocks the folder without syncing or a
        snapshot.

        Raises:
            Unavailable: the disk refuses; the folder is unlocked all the same.
        """
        if self._operations.closed:
            return
        try:
            await self._operations.close()
            await self._janitor.close()
        finally:
            try:
                await self._janitor.stop()
            finally:
                _release(self._state, self._state.io, self._lock)

    async def _log_deleted(self, dead: Sequence[tuple[PageGroup, int]]) -> Result:
        """Write into the log that these pages, which are out of the index already, were deleted. Returns FAILED if the
        disk refuses, so that a crash may bring them back; else HIT."""
        if not dead:
            return HIT
        masks: dict[PageGroup, int] = {}
        for group, page in dead:
            masks[group] = masks.get(group, 0) | 1 << page
        self._state.counts["deleted"] += len(dead)
        error = await self._janitor.log_deaths(list(masks.items()))
        self._state.counts["errors"] += error is not None
        return HIT if error is None else FAILED

    def _begin_read(self, batch: ReadBatch, segment: Segment) -> asyncio.Future[RunsMoved]:
        segment.enter()
        return self._state.io.read(self._state.files_for(segment, batch.length), batch.runs)

    def _end_read(self, batch: ReadBatch, moved: RunsMoved, records: Sequence[Record], results: list[Result]) -> None:
        """Set the results of a batch whose reads have ended. A page that was not read to its last byte is CORRUPT, or
        FAILED if there was an error in its batch."""
        length, total, missing = batch.length, 0, CORRUPT if moved.error is None else FAILED
        for count, (group, page, which) in zip(moved.bytes, batch.stretches, strict=True):
            whole = count // length
            for n, i in enumerate(which):
                if n < whole:
                    records[i].header[:] = group.header(page + n)
                    results[i] = HIT
                else:
                    results[i] = missing
            group.hot |= ((1 << whole) - 1) << page
            total += whole * length
        if moved.misaligned:
            self._state.misaligned(length)
        self._state.counts["errors"] += moved.error is not None
        self._state.counts["get_bytes"] += total

    def _by_length(
        self, keys: Sequence[PageKey], records: Sequence[Record], results: Sequence[Result]
    ) -> dict[int, list[int]]:
        """Return the positions of the pages that are not stored, by the length of their payloads, without those whose
        length is not that of their pool."""
        found: dict[int, list[int]] = {}
        for i, result in enumerate(results):
            size = records[i].payload.nbytes
            if result is FAILED and size == self._page_bytes.get(keys[i].pool):
                found.setdefault(size, []).append(i)
        return found

    async def _write(self, put: _Put) -> None:
        """Write the fresh pages, all groups at the same time. Whether it returns or raises, results and index are right
        when it ends."""
        permit, error = self._breaker.allow(asyncio.get_running_loop().time()), None
        try:
            if permit != REFUSED:
                error = await self._submit(put)
        finally:
            try:
                await settled([writing.done for writing, _ in put.writings])
            finally:
                error = self._finish(put) or error
                self._report(permit, error, put)

    async def _submit(self, put: _Put) -> OSError | None:
        """Start to write every group. Returns the error if no segment could be made for the rest of them."""
        try:
            for length, indices in put.fresh.items():
                at = 0
                while at < len(indices):
                    part = indices[at : at + await self._fit(length, len(indices) - at)]
                    put.writings.append((self._begin_write(put, length, part), part))
                    at += len(part)
        except OSError as error:
            self._state.counts["errors"] += 1
            return error
        self._janitor.look_ahead()
        return None

    async def _fit(self, length: int, wanted: int) -> int:
        """Return how many pages the next group gets, once there is room for at least one. The room may be gone after
        the next await."""
        while not (count := self._state.log.fit(length, wanted)):
            await self._janitor.advance()
        return count

    def _begin_write(self, put: _Put, length: int, part: Sequence[int]) -> GroupWrite:
        pieces: list[bytes | memoryview] = []
        payloads = []
        for i in part:
            header, payload = put.records[i]
            pieces += (put.keys[i][1], header)
            payloads.append(payload)
        return self._state.begin_write(length, b"".join(pieces), payloads)

    def _finish(self, put: _Put) -> OSError | None:
        """Finish every write that has begun. Returns an error of one of them, or None."""
        failed = None
        for writing, part in put.writings:
            error = self._state.end_write(writing)
            failed = failed or error
            if error is None:
                self._state.counts["put_bytes"] += len(part) * writing.group.length
                for i in part:
                    put.results[i] = HIT
        return failed

    def _report(self, permit: Permit, error: OSError | None, put: _Put) -> None:
        """Tell the breaker how the writes have ended."""
        if permit == REFUSED:
            self._state.counts["refused_writes"] += 1
        elif error is not None:
            self._breaker.failure(permit, asyncio.get_running_loop().time())
        elif put.writings:
            self._breaker.success(permit)
        else:
            self._breaker.abandon(permit)

    async def _recover(self) -> None:
        """Rebuild the index from the files of earlier runs. A store that is used goes on in their last segment if that
        has room."""
        state, started = self._state, time.monotonic()
        work = recover(state.io, state.folder, state.seed, state.direct)
        recovering = asyncio.get_running_loop().create_task(work, name="asynccache-file-recovery")
        try:
            await settled([recovering])
        finally:
            if not recovering.cancelled() and recovering.exception() is None:
                for segment in recovering.result().segments:
                    state.log.add(segment)
        found = recovering.result()
        state.index = found.found
        if self._page_bytes:
            await self._make_ready()
        if found.scanned or found.stale_deaths:
            await self._janitor.save()
        state.counts["scanned_groups"] = found.scanned
        state.counts["open_ms"] = round((time.monotonic() - started) * 1000)

    async def _make_ready(self) -> None:
        """Prepare the store for writing: evict pages beyond the capacity, and make the last segment active if it has
        room."""
        await self._janitor.trim()
        last = next(reversed(self._state.log.segments.values()), None)
        if last is not None and last.tail < self._state.segment_bytes:
            await self._janitor.reuse(last)


COUNTERS = (
    "errors", "put_bytes", "get_bytes", "moved_pages", "moved_bytes", "evicted_pages", "reclaimed_segments",
    "refused_writes", "deleted", "snapshots", "scanned_groups", "open_ms",
)


def _release(state: StoreState | None, io: ThreadIO, lock: FolderLock) -> None:
    """Close every file, end the threads, and unlock the folder. No call may be under way."""
    for segment in state.log.segments.values() if state else ():
        segment.drop()
    io.close()
    lock.release()


def _use_direct(folder: Folder, wanted: str) -> bool:
    if wanted == "off":
        return False
    possible = supports_direct(folder)
    if wanted == "on" and not possible:
        raise ConfigError(f"storage option direct='on': folder {str(folder.path)!r} does not support O_DIRECT")
    return possible


def stored_pages(group: PageGroup) -> list[Stored]:
    """Return the live pages of a group."""
    size = HEADER_BYTES + group.length
    return [Stored(group.entry(page)[:KEY_BYTES], size, float(group.written)) for page in group.live()]


def written_before(groups: Sequence[PageGroup], until: float) -> Iterator[tuple[PageGroup, int]]:
    """Yield every live page that is known to have been written before the unix time ``until``: its group and its index
    there."""
    for group in groups:
        if 0 < group.written < until:
            for page in group.live():
                yield group, page
