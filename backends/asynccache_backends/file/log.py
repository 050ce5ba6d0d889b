"""The log of segments: everything that a store writes is appended to it, and its oldest segment is reclaimed for room.

A record is written by ``begin``, which takes its place in the active segment and hands the bytes to a thread. When they
are in the file its pages are added to the index. Until then the buffers belong to the thread and must not change.

When no page fits the active segment any more, the next one becomes active, and the full one is sealed in the
background. If one more segment would exceed the capacity, the oldest segment is deleted. Before that its pages get a
second chance: those that were read since they were written are written again, up to half a segment's worth. All its
other pages are lost. So pages that are read survive, and at most twice as many bytes are written as are put; ``stats``
has the measured factor. Reclaiming starts while the active segment is still nearly empty, so writers seldom have to
wait for room.

The state is changed only on the event loop. What the disk refuses is raised as OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import aiofiles

from asynccache.storage import ThreadPool, completed, settled
from asynccache_backends.file.files import FileRun, Folder, RunsMoved, read_runs, write_run
from asynccache_backends.file.folder import FileSettings, Manifest
from asynccache_backends.file.segments import (
    BLOCK_BYTES,
    DELETION,
    GROUP_BYTES,
    Deletions,
    FileIndex,
    PageGroup,
    Segment,
    SegmentRecord,
    list_segments,
    moved_bytes,
    open_segment,
    pack_block,
    pack_footer,
    read_footer,
    scan,
    segment_name,
)


class SegmentLog:
    """The segments of an open store, the oldest first, and its index. ``active`` is the segment that is appended to, if
    there is one.
    """

    def __init__(
        self, folder: Folder, threads: ThreadPool, settings: FileSettings, manifest: Manifest, direct: bool
    ) -> None:  # fmt: skip
        self.folder = folder
        self.threads = threads
        self.seed = manifest.seed
        self.capacity = settings.capacity if settings.used else manifest.capacity
        """How many bytes the files may take on the disk. A store that is only looked at may exceed it: it loses no page
        to want of room."""
        self.segment_bytes = settings.segment
        """The size of a new segment."""
        self.direct = direct
        self.index = FileIndex()
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.counts: Counter[str] = Counter()
        self._used = settings.used
        self._last_number = 0
        self._last_used = 0  # the last segment that had records: the next one may be prepared already
        self._next: asyncio.Task[Segment | OSError] | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._reclaiming = asyncio.Lock()
        self.going: list[frozenset[bytes]] = []
        """The pages of each segment that is forgotten while its file is there. A deletion of one is written down, too:
        else the page would be found again after a kill."""
        self._kept = 0
        self._blocks: list[memoryview] = []

    async def open(self) -> None:
        """Open the segments of earlier runs. If the store is used, segments beyond the capacity, which may be smaller
        than before, are deleted; and the newest segment, if it has room, loses its footer and becomes active.
        Cancelling it waits until no thread reads."""
        await self.threads.run(self._load)
        if not self._used:
            self.segment_bytes = max((s.size for s in self.segments.values()), default=self.segment_bytes)
            return
        while self._exceeds(0) and (oldest := self._oldest()):
            await self._evict(oldest)
        last = next(reversed(self.segments.values()), None)
        if last and last.tail < self.segment_bytes * 3 // 4 and not self._exceeds(self.segment_bytes - last.size):
            with contextlib.suppress(OSError):  # a full disk, and the segment stays as it is
                await self.threads.run(last.extend, self.segment_bytes)
                self.active, last.sealed = last, False
        self._seal_soon()

    def _load(self) -> None:
        """Build the index from footers, and from the records of segments that have none."""
        for number in list_segments(self.folder.fd):
            self._last_number = self._last_used = number
            segment = self.segments[number] = open_segment(self.folder, number, self.direct)
            records = read_footer(segment, self.seed)
            segment.sealed = records is not None
            if records is None:
                records = list(scan(segment, self.seed))
                self.counts["scanned_groups"] += len(records)
            for record in records:
                segment.take(record)
                if isinstance(record, Deletions):
                    segment.deletions.append(record)
                else:
                    self.index.add(record)
        for segment in self.segments.values():
            for key, number, offset in (d for r in segment.deletions for d in DELETION.iter_unpack(r.directory)):
                if (place := self.index.place(key)) is not None and place < (number, offset):
                    self.index.forget(key)

    # appending

    @property
    def disk_bytes(self) -> int:
        """The number of bytes that the files take on the disk."""
        return sum(segment.size for segment in self.segments.values())

    @property
    def end(self) -> tuple[int, int]:
        """The place behind all records, also those of segments that are being removed."""
        last = next(reversed(self.segments.values()), None)
        return (last.number, last.tail) if last else (self._last_used + 1, 0)

    async def reserve(self, length: int, wanted: int) -> int:
        """Return how many of ``wanted`` pages of ``length`` bytes, or of deletions if that is 0, the next record can
        have, once there is room for at least one. The room may be gone after the next await. Cancelling it only stops
        the waiting. Raises OSError if no segment can be made."""
        while not (count := self.active.fit(length, wanted, self._kept) if self.active else 0):
            await self._advance()
        return count

    def begin(
        self, length: int, directory: bytes, payloads: Sequence[memoryview] = (), moved_from: PageGroup | None = None
    ) -> asyncio.Future[BaseException | None]:
        """Start to write a group, or deletions, for which there is room. Returns a future of the disk's error, if any.
        When it is done, the group's pages are found; of pages that are ``moved_from`` another group, those that were
        not deleted meanwhile."""
        segment = self.active
        assert segment is not None
        at = segment.number, segment.tail
        written = int(time.time()) if moved_from is None else moved_from.written
        record = PageGroup(*at, length, directory, written) if length else Deletions(*at, directory)
        segment.take(record)
        block = self._blocks.pop() if self._blocks else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        packed = pack_block(record, self.seed)
        block[: len(packed)] = packed
        segment.enter()
        run = FileRun(record.offset, BLOCK_BYTES + length * len(payloads), [block, *payloads])
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        segment.writing[record.offset] = ended

        def end(done: asyncio.Future[None]) -> None:
            error = done.exception()
            del segment.writing[record.offset]
            segment.leave()
            self._blocks.append(block)
            if error is not None:
                self.counts["errors"] += 1
            elif isinstance(record, Deletions):
                segment.deletions.append(record)
            elif not segment.dropped:
                self.index.add(record, moved_from is not None)
            ended.set_result(error)

        self.threads.call(write_run, segment.files_for(length), run).add_done_callback(end)
        return ended

    def read(self, segment: Segment, length: int, runs: Sequence[FileRun]) -> asyncio.Future[RunsMoved]:
        """Start to read runs of pages of ``length`` bytes. The buffers belong to a thread until the future is done."""
        segment.enter()
        done = self.threads.call(read_runs, segment.files_for(length), runs)
        done.add_done_callback(segment.leave)
        return done

    async def log_deletions(self, keys: Iterable[bytes]) -> bool:
        """Write that the pages of ``keys``, which are out of the index already, were deleted. Returns False if the disk
        refuses. Cancelling it may leave them out."""
        place = self.end  # before the first await: a page that is put again from now on lies behind it
        entries = [DELETION.pack(key, *place) for key in keys]
        self.counts["deleted"] += len(entries)
        writes: list[asyncio.Future[BaseException | None]] = []
        try:
            while entries:
                count = await self.reserve(0, len(entries))
                writes.append(self.begin(0, b"".join(entries[:count])))
                del entries[:count]
        except OSError:
            self.counts["errors"] += 1
        finally:
            await settled(writes)
        return not entries and not any(write.result() for write in writes)

    # the next segment

    def look_ahead(self) -> None:
        """Start to prepare the next segment if it is time: at once if another has to be reclaimed for it, and otherwise
        when the active one is half full."""
        if self.active is not None and (self._exceeds(self.segment_bytes) or self.active.room * 2 < self.active.size):
            self._prepare_task()

    async def _advance(self) -> None:
        """Wait until the next segment is ready and make it the active one. If another call has done that meanwhile,
        just return. Cancelling it only stops the waiting. Raises OSError if no segment can be made."""
        task = self._prepare_task()
        await asyncio.wait([task])
        if self._next is not task:
            return
        self._next = None
        segment = task.result()
        if isinstance(segment, OSError):
            raise segment
        self.active = self.segments[segment.number] = segment
        self._last_used = segment.number

    def _prepare_task(self) -> asyncio.Task[Segment | OSError]:
        if self._next is None or (self._next.done() and isinstance(self._next.result(), OSError)):
            self._next = asyncio.get_running_loop().create_task(self._prepare(), name="asynccache-file-next")
        return self._next

    async def _prepare(self) -> Segment | OSError:
        """Make room, and the next segment in it."""
        try:
            async with self._reclaiming:
                while self._exceeds(self.segment_bytes) and (victim := self._oldest()):
                    groups = [group for group in self.index.groups_of(victim.number) if group.hot]
                    hot = [(group, [page for page in group.live() if group.hot >> page & 1]) for group in groups]
                    await self._rescue(victim, hot, self.segment_bytes // 2)
                    self.counts["reclaimed_segments"] += 1
                    await self._evict(victim)
            self._last_number += 1
            made = await self.threads.run(open_segment, self.folder, self._last_number, self.direct, self.segment_bytes)
        except OSError as error:
            return error
        self._seal_soon()  # not before: somebody may wait for the segment
        return made

    def _exceeds(self, more: int) -> bool:
        return self._used and self.disk_bytes + more > self.capacity

    def _oldest(self) -> Segment | None:
        return next((s for s in self.segments.values() if s is not self.active), None)

    # sealing, syncing

    def _seal_soon(self) -> None:
        if self._sealing is None or self._sealing.done():
            self._sealing = asyncio.get_running_loop().create_task(self._seal(), name="asynccache-file-seal")

    async def _seal(self) -> None:
        """Write the footers of segments that get no more records. A failure is only counted: without a footer a segment
        is scanned at the next start. Nothing is synced for it, which would slow down writers. So after a power loss a
        footer may name pages that are lost, as a header block may; they do not verify. Cancelling it waits until the
        footer is written."""
        while segment := next((s for s in self.segments.values() if not s.sealed and s is not self.active), None):
            segment.sealed = True
            try:
                with segment:
                    await settled(list(segment.writing.values()))
                    records: list[SegmentRecord] = [*self.index.groups_of(segment.number), *segment.deletions]
                    footer = await self.threads.run(pack_footer, segment.number, segment.tail, records, self.seed)
                    await completed(self._write_footer(segment, footer))
            except OSError:
                self.counts["errors"] += 1

    async def _write_footer(self, segment: Segment, footer: bytes) -> None:
        fd = segment.files.buffered
        async with aiofiles.open(fd, "r+b", closefd=False, executor=self.threads) as file:
            await file.seek(segment.tail)
            await file.write(footer)
            segment.size = await file.truncate()
        segment.synced = 0

    async def sync(self) -> None:
        """Return once everything that was written before would survive a power loss."""
        await settled([future for segment in self.segments.values() for future in segment.writing.values()])
        for segment in list(self.segments.values()):
            end = min(segment.writing, default=segment.tail)  # of what no record is being written to
            if end > segment.synced and not segment.dropped:
                with segment:
                    await self.threads.run(os.fdatasync, segment.files.buffered)
                segment.synced = end
        await self.threads.run(self.folder.sync)

    async def stop(self) -> None:
        """Wait until no task is left, and delete a segment that was prepared and not used. Cancelling it does not
        shorten the waiting."""
        try:
            while waiting := [task for task in (self._next, self._sealing) if task is not None and not task.done()]:
                await settled(waiting)  # a segment that was made may begin to seal others
        finally:
            unused, self._next = self._next and self._next.result(), None
            if isinstance(unused, Segment):
                with contextlib.suppress(OSError):  # it is empty
                    await self._evict(unused)

    async def close(self) -> None:
        """End the tasks, seal the active segment, and sync."""
        await self.stop()
        self.active = None
        await self._seal()
        await self.sync()

    # reclaiming

    async def clear(self) -> None:
        """Delete every segment. No page is found from now on."""
        self.active, doomed = None, list(self.segments.values())
        for segment, going in [(segment, self._forget(segment)) for segment in doomed]:
            await self._remove(segment, going)
        await self.threads.run(self.folder.sync)

    async def compact(self) -> int:
        """Delete the segments that are mostly dead pages, after moving their other pages elsewhere. Returns how many
        dead pages are gone.

        No page is lost by it: a segment whose pages find no room elsewhere is kept. Nor does one come back: a segment
        with deletions is kept as long as there is an older one. Cancelling it leaves the remaining segments as they
        were.
        """
        gone = 0
        for segment in [s for s in self.segments.values() if s is not self.active and not s.writing]:
            live, oldest = self._live_bytes(segment), next(iter(self.segments.values()), None)
            if live * 2 >= segment.tail or (segment.deletions and segment is not oldest):
                continue
            if live > (self.active.room if self.active else 0) and not self._exceeds(self.segment_bytes):
                with contextlib.suppress(OSError):  # without another segment this one is kept
                    await self._advance()
            async with self._reclaiming:
                if segment.dropped:
                    continue
                groups = self.index.groups_of(segment.number)
                dead = sum(group.count - len(group.live()) for group in groups)
                await self._rescue(segment, [(group, group.live()) for group in groups], segment.size)
                await self.sync()
                if not self._live_bytes(segment):
                    await self._evict(segment)
                    gone += dead
        return gone

    async def _rescue(self, victim: Segment, found: Sequence[tuple[PageGroup, list[int]]], budget: int) -> None:
        """Write pages of ``victim`` again, ``budget`` bytes at most, as long as there is room in the active segment;
        but not those that cannot be read, or are dead by then. Meanwhile the room that they need is kept from others.
        """
        scratch: memoryview | None = None
        self._kept = min(budget, sum(moved_bytes(group.length, len(pages)) for group, pages in found))
        try:
            for group, pages in found:
                length = group.length
                while count := self._fit(length, min(len(pages), budget // length)):
                    if scratch is None or len(scratch) < length:  # pages of another pool may be longer
                        scratch = memoryview(mmap.mmap(-1, max(GROUP_BYTES, length)))
                    buffers = [scratch[i * length : (i + 1) * length] for i in range(count)]
                    offsets = map(group.payload_offset, pages[:count])
                    runs = [FileRun(at, length, [buffer]) for at, buffer in zip(offsets, buffers, strict=True)]
                    await settled([reading := self.read(victim, length, runs)])
                    read = zip(pages[:count], buffers, reading.result().bytes, strict=True)
                    good = [(page, buffer) for page, buffer, n in read if n == length and not group.dead >> page & 1]
                    del pages[:count]
                    self._kept = max(0, self._kept - moved_bytes(length, count))
                    if not (count := self._fit(length, len(good))):
                        continue
                    directory = b"".join(group.entry(page) for page, _ in good[:count])
                    write = self.begin(length, directory, [buffer for _, buffer in good[:count]], group)
                    await settled([write])
                    budget -= count * length
                    if write.result() is None:
                        self.counts["moved_pages"] += count
                        self.counts["moved_bytes"] += count * length
        finally:
            self._kept = 0

    def _fit(self, length: int, wanted: int) -> int:
        return self.active.fit(length, wanted) if self.active else 0

    def _live_bytes(self, segment: Segment) -> int:
        return sum(moved_bytes(g.length, n) for g in self.index.groups_of(segment.number) if (n := len(g.live())))

    async def _evict(self, segment: Segment) -> None:
        """Delete a segment."""
        before = self.index.pages
        going = self._forget(segment)
        self.counts["evicted_pages"] += before - self.index.pages
        await self._remove(segment, going)

    def _forget(self, segment: Segment) -> frozenset[bytes]:
        """Have no page of the segment found any more. Returns the keys of those that were, for ``_remove``."""
        self.segments.pop(segment.number, None)
        going = frozenset(self.index.drop_segment(segment.number))
        self.going.append(going)
        segment.drop()
        return going

    async def _remove(self, segment: Segment, going: frozenset[bytes]) -> None:
        await self.threads.run(self._unlink, segment)
        self.going.remove(going)

    def _unlink(self, segment: Segment) -> None:
        """Remove a segment's file. It blocks. Deletions outlive the pages that they speak of, after a power loss, too:
        so the removal of older segments is synced first."""
        if segment.deletions:
            self.folder.sync()
        with contextlib.suppress(FileNotFoundError):
            self.folder.unlink(segment_name(segment.number))
