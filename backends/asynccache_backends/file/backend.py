"""The file backend: pages in segment files in one folder, for one process at a time.

What always holds:
* Nothing is overwritten. A page is written once, together with others, and its room comes back with its whole segment.
* The index in memory says which pages are stored. It can be rebuilt from the files, after a crash, too.
* A page can be read as soon as it is written. It survives a power loss once ``flush`` or ``aclose`` has synced it.
* A page that was deleted stays deleted, unless the disk refused to note it.
* Payloads are not verified here; ``CheckedStore`` does that.
* When the disk is full or broken, writes are FAILED at once for a while (a back-off), and reads go on.

The options of the URL are in ``folder``.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    Collected,
    OpenCalls,
    PageKey,
    ParsedUrl,
    Part,
    Record,
    Result,
    Scrubbed,
    Stored,
    StoreLayout,
    Tell,
    ThreadPool,
    Verify,
    settled,
)
from asynccache_backends.file.files import FileRun
from asynccache_backends.file.folder import FolderLock, load_manifest, settings_of, supports_direct
from asynccache_backends.file.log import SegmentLog
from asynccache_backends.file.segments import BLOCK_BYTES, FileIndex, PageGroup, pack_block

MISS, HIT, CORRUPT, FAILED = Result  # looking up an Enum's member takes 0.2 µs, and would be done for every page

THREADS = 4
BACK_OFF = 1.0  # seconds
MOST_BATCH = 4 << 20
LEAST_BATCH = 1 << 20


class GroupRun(NamedTuple):
    """Pages of one group that lie next to each other, the first at index ``page``. ``which`` has for each page the
    position of its key in the call, ``buffers`` the memory that it is read into."""

    group: PageGroup
    page: int
    which: list[int]
    buffers: list[memoryview]


def plan_reads(
    index: FileIndex, keys: Sequence[PageKey], records: Sequence[Record]
) -> tuple[list[list[GroupRun]], list[int]]:
    """Return the runs in which the stored pages of ``keys`` lie, in the order in which they were written, divided into
    batches, each of pages of one length in one segment; and the positions of keys whose page has another length than
    their record.

    The bytes are divided evenly among the threads, but a batch has room for at least 1 MiB, so that it is worth a call,
    and for at most 4 MiB or one longer page.
    """
    found = sorted(index.locate(keys))
    limit = max(LEAST_BATCH, min(MOST_BATCH, sum(records[i].payload.nbytes for _, i in found) // THREADS))
    batches: list[list[GroupRun]] = []
    wrong: list[int] = []
    segment = length = room = expected = page = -1
    for location, i in found:
        payload, page = records[i].payload, page + 1
        if location != expected:  # otherwise it is the next page of the same group
            group, page = index.at(location)
        if payload.nbytes != group.length:
            wrong.append(i)
            continue
        if room < group.length or length != group.length or segment != group.segment:
            segment, length, room, expected = group.segment, group.length, max(limit, group.length), -1
            batches.append([])
        if location != expected:
            run = GroupRun(group, page, [], [])
            batches[-1].append(run)
        run.which.append(i)
        run.buffers.append(payload)
        room -= length
        expected = location + 1
    return batches, wrong


class FileBackend:
    """An open file store. ``open`` makes it."""

    def __init__(self, log: SegmentLog, lock: FolderLock, layout: StoreLayout) -> None:
        self._log = log
        self._lock = lock
        self._layout = layout
        self._broken_until = 0.0
        self._open_calls = OpenCalls(f"store folder {str(log.folder.path)!r}")

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
        settings, started = settings_of(url, layout), time.monotonic()
        lock, threads = FolderLock(), ThreadPool(THREADS, "asynccache-file")
        log: SegmentLog | None = None
        try:
            folder = await threads.run(lock.take, settings.folder, settings.mode or None, settings.used)
            noted = settings.capacity if settings.used else None
            manifest = await load_manifest(folder, threads, layout.schema, noted)
            direct = settings.direct != "off" and await threads.run(supports_direct, folder)
            if settings.direct == "on" and not direct:
                raise ConfigError(f"storage option direct='on': {str(folder.path)!r} does not support O_DIRECT")
            log = SegmentLog(folder, threads, settings, manifest, direct)
            await log.open()
        except BaseException as error:
            _release(log, threads, lock)
            if isinstance(error, OSError):
                raise Unavailable(f"store folder {str(settings.folder)!r}: {error}") from error
            raise
        log.counts["open_ms"] = round((time.monotonic() - started) * 1000)
        return cls(log, lock, layout)

    def __repr__(self) -> str:
        log = self._log
        return f"FileBackend({str(log.folder.path)!r}, pages={log.index.pages}, segments={len(log.segments)})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS. The call never waits."""
        with self._open_calls:
            index = self._log.index
            return [HIT if key.key in index else MISS for key in keys]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read pages directly into the buffers of their payloads. A page that was not read to its last byte is CORRUPT,
        or FAILED if there was an error in its batch. Cancelling it returns when all reads have ended."""
        with self._open_calls:
            log, results = self._log, [MISS] * len(keys)
            batches, wrong = plan_reads(log.index, keys, records)
            for i in wrong:
                results[i] = CORRUPT
            reads = []
            for runs in batches:
                length = runs[0].group.length
                moves = [FileRun(r.group.payload_offset(r.page), length * len(r.which), r.buffers) for r in runs]
                reads.append(log.read(log.segments[runs[0].group.segment], length, moves))
            await settled(reads)
            for runs, read in zip(batches, reads, strict=True):
                moved = read.result()
                log.counts["errors"] += moved.error is not None
                for count, (group, page, which, _) in zip(moved.bytes, runs, strict=True):
                    whole = count // group.length
                    for n, i in enumerate(which[:whole]):
                        records[i].header[:] = group.header(page + n)
                        results[i] = HIT
                    for i in which[whole:]:
                        results[i] = CORRUPT if moved.error is None else FAILED
                    group.hot |= ((1 << whole) - 1) << page
                    log.counts["get_bytes"] += whole * group.length
            return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Append new pages, in groups, all groups at the same time. Pages that are stored already are left alone, and
        those whose length is not that of their pool are FAILED. A page that two calls put at the same time is written
        twice, and the copy that lies last in the files is the one that is read.

        Cancelling it returns when all writes that had begun have ended; their pages are stored.
        """
        with self._open_calls:
            log = self._log
            results = [HIT if key.key in log.index else FAILED for key in keys]
            fresh: dict[int, list[int]] = {}
            for i, result in enumerate(results):
                size = records[i].payload.nbytes
                if result is FAILED and self._layout.takes(keys[i].pool, size):
                    fresh.setdefault(size, []).append(i)
            if not fresh:
                return results
            if time.monotonic() < self._broken_until:
                log.counts["refused_writes"] += 1
                return results
            writes: list[tuple[asyncio.Future[BaseException | None], list[int]]] = []
            broken = False
            try:
                for length, which in fresh.items():
                    at = 0
                    while at < len(which):
                        part = which[at : at + await log.reserve(length, len(which) - at)]
                        directory = b"".join([piece for i in part for piece in (keys[i].key, records[i].header)])
                        writes.append((log.begin(length, directory, [records[i].payload for i in part]), part))
                        at += len(part)
                log.look_ahead()
            except OSError:
                log.counts["errors"] += 1
                broken = True
            finally:
                try:
                    await settled([write for write, _ in writes])
                finally:
                    for write, part in writes:
                        if write.result() is not None:
                            broken = True
                            continue
                        log.counts["put_bytes"] += len(part) * records[part[0]].payload.nbytes
                        for i in part:
                            results[i] = HIT
                    if broken:
                        self._broken_until = time.monotonic() + BACK_OFF
            return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if it stays deleted after a restart, FAILED if it is deleted now but a crash
        may bring it back, MISS if it was not stored. Cancelling it may leave any of them deleted."""
        with self._open_calls:
            found = [self._log.index.forget(key.key) for key in keys]
            noted = await self._log.log_deletions(
                [key.key for key, there in zip(keys, found, strict=True)
                 if there or any(key.key in going for going in self._log.going)]
            )  # fmt: skip
            return [(HIT if noted else FAILED) if there else MISS for there in found]

    async def clear(self) -> None:
        """Delete every page and every segment. Cancelling it may leave any of them deleted.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._open_calls, self._told():
            await self._log.clear()

    def parts(self) -> list[Part]:
        """Return a part for every group that has pages now."""
        groups = ((group, len(group.live())) for group in self._log.index.holders.values())
        return [Part(group.length, count, group) for group, count in groups if count]

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read a group from its file, and delete the pages that do not verify. If its header block is damaged, all of
        its pages are deleted. After it is cancelled nothing more is deleted."""
        with self._open_calls:
            log, group = self._log, part.place
            segment = log.segments.get(group.segment)
            if segment is None:
                return Scrubbed()  # it was reclaimed meanwhile
            data = memoryview(mmap.mmap(-1, BLOCK_BYTES + group.length * group.count))
            await settled([read := log.read(segment, group.length, [FileRun(group.offset, data.nbytes, [data])])])
            moved = read.result()
            pages, length = group.live(), group.length
            if moved.error is not None:
                log.counts["errors"] += 1
                return Scrubbed(unread=len(pages))
            data, good = data[: moved.bytes[0]], [False] * len(pages)
            if data[: len(block := pack_block(group, log.seed))] == block:
                headers = [memoryview(bytearray(group.header(page))) for page in pages]
                starts = [BLOCK_BYTES + page * length for page in pages]
                records = [Record(h, data[at : at + length]) for h, at in zip(headers, starts, strict=True)]
                good = await verify([PageKey("", group.key(page)) for page in pages], records)
            dropped = log.index.forget_all(group, [page for page, ok in zip(pages, good, strict=True) if not ok])
            await log.log_deletions(dropped)
            return Scrubbed(len(pages), len(pages) * length, len(dropped), 0)

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all stored pages, segment by segment."""
        for number in list(self._log.segments):
            with self._open_calls:
                found = [
                    Stored(group.key(page), HEADER_BYTES + group.length, float(group.written))
                    for group in self._log.index.groups_of(number) for page in group.live()
                ]  # fmt: skip
            yield found
            await asyncio.sleep(0)

    async def collect(self, older_than: float | None) -> Collected:
        """Delete old pages. Then delete the segments that are mostly dead pages, if there is room elsewhere for their
        live ones. Cancelling it leaves the rest for the next call.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._open_calls, self._told():
            log, old = self._log, list[bytes]()
            before = sum(segment.tail for segment in log.segments.values())
            if older_than is not None:
                until = time.time() - older_than
                groups = [group for group in log.index.holders.values() if 0 < group.written < until]
                old = [key for group in groups for key in log.index.forget_all(group, group.live())]
                await log.log_deletions(old)
            dead = await log.compact()
            freed = before - sum(segment.tail for segment in log.segments.values())
            return Collected(len(old), max(0, dead - len(old)), max(0, freed))

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: whether buffers are aligned is found out when they are used."""

    def watch(self, tell: Tell | None) -> Iterable[Sequence[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Returns the keys that are stored now, in parts."""
        return self._log.index.watched(tell)

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters. ``write_amplification`` is the bytes written, moved pages included, per byte put."""
        log, counts = self._log, self._log.counts
        return {
            "pages": log.index.pages,
            "bytes": log.index.bytes,
            "capacity_bytes": log.capacity,
            "disk_bytes": log.disk_bytes,
            "segments": len(log.segments),
            "direct": int(log.direct),
            "write_amplification": 1 + counts["moved_bytes"] / max(1, counts["put_bytes"]),
            **{name: counts[name] for name in COUNTERS},
        }

    async def flush(self) -> None:
        """Return once all pages stored so far would survive a power loss.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._open_calls, self._told():
            await self._log.sync()

    async def aclose(self) -> None:
        """Wait for the calls under way, seal the last segment, sync, and unlock the folder. Later calls raise
        Unavailable.

        Cancelling it waits for the calls under way all the same, and then unlocks the folder without syncing.

        Raises:
            Unavailable: the disk refuses; the folder is unlocked all the same.
        """
        if self._open_calls.closed:
            return
        try:
            await self._open_calls.close()
            with self._told():
                await self._log.close()
        finally:
            try:
                await self._log.stop()
            finally:
                _release(self._log, self._log.threads, self._lock)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise Unavailable where the disk refuses."""
        try:
            yield
        except OSError as error:
            self._log.counts["errors"] += 1
            raise Unavailable(f"store folder {str(self._log.folder.path)!r}: {error}") from error


COUNTERS = (
    "errors", "put_bytes", "get_bytes", "moved_pages", "moved_bytes", "evicted_pages", "reclaimed_segments",
    "refused_writes", "deleted", "scanned_groups", "open_ms",
)  # fmt: skip


def _release(log: SegmentLog | None, threads: ThreadPool, lock: FolderLock) -> None:
    """Close every file, end the threads, and unlock the folder. No call may be under way."""
    for segment in log.segments.values() if log is not None else ():
        segment.drop()
    threads.close()
    lock.release()
