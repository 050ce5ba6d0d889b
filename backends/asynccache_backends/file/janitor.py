"""Work in the background of a store: it makes the next segment, reclaims the oldest, syncs files and saves the index.

Segments are reclaimed first in, first out, and pages get a second chance. If one more segment would exceed the
capacity, the oldest segment is deleted. Before that, pages of it that were read since they were written are written
again, up to half a segment's worth. All its other pages are lost. So pages that are read survive, and at most twice as
many bytes are written as are put; ``stats`` has the measured factor. Reclaiming starts while the active segment is
still nearly empty, so writers seldom have to wait for room.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from asynccache.errors import Unavailable
from asynccache.storage import settled
from asynccache_backends.file import deletions, snapshot
from asynccache_backends.file.files import FileRun
from asynccache_backends.file.segments import (
    GROUP_BYTES,
    PageGroup,
    Segment,
    create_segment,
    cut,
    extend,
    group_bytes,
    segment_name,
)
from asynccache_backends.file.state import StoreState

SAVE_EVERY = 8

P = ParamSpec("P")
T = TypeVar("T")


class Janitor:
    """The owner of two tasks: one prepares the next segment, the other saves the index. The snapshot and the log of
    deletions have a lock each; no call holds both."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._next: asyncio.Task[Segment | OSError] | None = None
        self._saver: asyncio.Task[None] | None = None
        self._saving = asyncio.Lock()
        self._deleting = asyncio.Lock()
        self._reclaiming = asyncio.Lock()

    async def advance(self) -> None:
        """Wait until the next segment is ready and make it the active one. If another call has done that meanwhile,
        just return. Cancelling it only stops the waiting.

        Raises:
            OSError: no segment can be made.
        """
        task = self._prepare_task()
        await asyncio.wait([task])
        if self._next is not task:
            return
        self._next = None
        segment = task.result()
        if isinstance(segment, OSError):
            raise segment
        self._state.log.add(segment)
        self._state.log.active = segment
        if self._save_is_due and (self._saver is None or self._saver.done()):
            self._saver = asyncio.get_running_loop().create_task(self._save_quietly(), name="asynccache-file-saver")

    def look_ahead(self) -> None:
        """Start to prepare the next segment if it is time: at once if another has to be reclaimed for it, and otherwise
        when the active one is half full."""
        log = self._state.log
        if log.active is not None and (self._is_full or log.room * 2 < log.active.size):
            self._prepare_task()

    @property
    def _is_full(self) -> bool:
        """True if another segment would exceed the capacity."""
        return self._state.log.bytes + self._state.segment_bytes > self._state.capacity

    async def sync(self) -> None:
        """Return once everything that was written before would survive a power loss. Cancelling it is safe.

        Raises:
            Unavailable: the disk failed; the next call tries again.
        """
        await self._await_writes(list(self._state.log.segments.values()))
        dirty = [segment for segment in self._state.log.segments.values() if segment.dirty]
        for segment in dirty:
            await self._sync_segment(segment)
        await self._call(deletions.sync, self._state.folder)
        await self._call(self._state.folder.sync)

    async def save(self) -> None:
        """Write a snapshot of the index, after all that it names was synced. Cancelling it leaves the old snapshot or a
        new one.

        Raises:
            Unavailable: the disk failed; the old snapshot is still there.
        """
        state = self._state
        async with self._saving:
            covered = state.unsaved_bytes
            groups = state.index.groups()
            scan_from = {segment.number: segment.written_to for segment in state.log.segments.values()}
            await self.sync()
            parts = await self._call(snapshot.pack, scan_from, groups, state.seed)
            await self._rewrite(snapshot.NAME, parts)
            state.unsaved_bytes -= covered
            state.counts["snapshots"] += 1
        await self._compact_deletions()

    async def save_if_due(self) -> None:
        """Write a snapshot if the next start would have to scan an eighth of the capacity, or more, without it. Raises
        as ``save`` does."""
        if self._save_is_due:
            await self.save()

    @property
    def _save_is_due(self) -> bool:
        return self._state.unsaved_bytes * SAVE_EVERY >= self._state.capacity

    async def log_deaths(self, deaths: Sequence[tuple[PageGroup, int]]) -> OSError | None:
        """Write deletions into the log: groups, each with the bit set of pages that were deleted. Returns the error of
        the disk, or None. Cancelling it may leave them out of the log."""
        entries = deletions.pack(deaths, self._state.seed)
        async with self._deleting:
            return await self._done(deletions.append, self._state.folder, entries)

    async def stop(self) -> None:
        """Wait until both tasks have ended, and delete a segment that was prepared and not used. Cancelling it does not
        shorten the waiting."""
        try:
            await settled([task for task in (self._saver, self._next) if task is not None])
        finally:
            unused = None if self._next is None else self._next.result()
            self._next = None
            if isinstance(unused, Segment):
                await self._unlink(unused)

    async def close(self) -> None:
        """End the tasks, cut the active segment to what was written, and write a snapshot. Raises Unavailable if the
        disk fails."""
        await self.stop()
        state = self._state
        if (active := state.log.active) is not None:
            await self._call(cut, active, active.tail)
            active.size = active.tail
        if state.unsaved_bytes or state.counts["deleted"]:
            await self.save()

    async def clear(self) -> None:
        """Delete every segment, and write a snapshot of the empty index. Raises Unavailable if the disk fails."""
        self._state.log.active = None
        for segment in list(self._state.log.segments.values()):
            self._forget(segment)
            await self._unlink(segment)
        await self.save()

    async def trim(self) -> None:
        """Delete the oldest segments until the rest fits the capacity, which may be smaller than in an earlier run."""
        log = self._state.log
        while log.bytes > self._state.capacity and (oldest := log.oldest()):
            await self._evict(oldest)

    async def compact(self) -> int:
        """Delete the segments that are mostly dead pages, after moving their other pages elsewhere. Returns how many
        dead pages are gone.

        No page is lost by it: a segment whose pages find no room elsewhere is kept. In a store that is only looked at,
        a segment is made to move the pages to. Cancelling it leaves the remaining segments as they were.

        Raises:
            Unavailable: the disk failed.
        """
        log, gone = self._state.log, 0
        for segment in self._mostly_dead():
            if log.active is not None and self._live_bytes(segment) > log.room and not self._is_full:
                with contextlib.suppress(OSError):  # without another segment this one is kept
                    await self.advance()
            async with self._reclaiming:
                if not segment.dropped:
                    gone += await self._compact(segment)
        return gone

    async def reuse(self, segment: Segment) -> None:
        """Make the last segment of an earlier run the active one. If the disk has no room to extend it, it is left as
        it is."""
        size = self._state.segment_bytes
        if not isinstance(await self._done(extend, segment, segment.tail, size), OSError):
            segment.size = size
            self._state.log.active = segment

    def _prepare_task(self) -> asyncio.Task[Segment | OSError]:
        if self._next is None or _failed(self._next):
            self._next = asyncio.get_running_loop().create_task(self._prepare(), name="asynccache-file-janitor")
        return self._next

    async def _prepare(self) -> Segment | OSError:
        state = self._state
        async with self._reclaiming:
            while self._is_full and (victim := state.log.oldest()):
                await self._reclaim(victim)
        number = state.log.next_number
        state.log.next_number += 1
        return await self._done(create_segment, state.folder, number, state.segment_bytes, state.direct)

    async def _save_quietly(self) -> None:
        """Write a snapshot. A failure is only counted: without the snapshot the next start takes longer, and another
        will be tried later."""
        with contextlib.suppress(Unavailable):
            await self.save()

    async def _reclaim(self, victim: Segment) -> None:
        hot = _hot_pages(self._state.index.groups_of(victim.number))
        await self._rescue(victim, hot, self._state.segment_bytes // 2)
        self._state.counts["reclaimed_segments"] += 1
        await self._evict(victim)

    def _mostly_dead(self) -> list[Segment]:
        """Return the segments that get no more pages and have more bytes of dead pages than of live ones."""
        log = self._state.log
        return [s for s in log.segments.values()
                if s is not log.active and not s.writing and 2 * self._live_bytes(s) <= s.tail]

    def _live_bytes(self, segment: Segment) -> int:
        groups = self._state.index.groups_of(segment.number)
        return sum(group_bytes(group.length, len(pages)) for group, pages in _live_pages(groups))

    async def _compact(self, segment: Segment) -> int:
        """Move the live pages of a segment elsewhere, and delete it if none is left. Returns how many dead pages are
        gone."""
        state = self._state
        groups = state.index.groups_of(segment.number)
        dead = sum(group.count - len(group.live()) for group in groups)
        needed = self._live_bytes(segment)
        if needed and state.log.active is None:
            made = await self._call(create_segment, state.folder, state.log.next_number, needed, state.direct)
            state.log.add(made)
            state.log.active = made
            await self._rescue(segment, _live_pages(groups), needed)
            state.log.active = None
        elif needed:
            await self._rescue(segment, _live_pages(groups), state.log.room)
        if self._live_bytes(segment):
            return 0
        await self.sync()
        await self._compact_deletions()  # else a restart would find older copies of its pages in other segments
        await self._evict(segment)
        return dead

    async def _rescue(self, victim: Segment, found: Iterable[tuple[PageGroup, list[int]]], budget: int) -> None:
        """Write pages of ``victim`` again, ``budget`` bytes at most, as long as there is room in the active segment."""
        state = self._state
        scratch: memoryview | None = None
        for group, pages in found:
            while count := state.log.fit(group.length, min(len(pages), budget // group.length)):
                scratch = scratch or memoryview(mmap.mmap(-1, max(GROUP_BYTES, group.length)))
                await self._move(victim, group, pages[:count], scratch)
                budget -= count * group.length
                del pages[:count]

    async def _move(self, victim: Segment, group: PageGroup, pages: list[int], scratch: memoryview) -> None:
        state, length = self._state, group.length
        buffers = [scratch[i * length : (i + 1) * length] for i in range(len(pages))]
        read = await self._read(victim, group, pages, buffers)
        count = state.log.fit(length, len(read))
        if not count:
            return
        pages = [page for page, _ in read[:count]]
        writing = state.begin_write(
            length, b"".join(map(group.entry, pages)), [buffer for _, buffer in read[:count]], group.written
        )
        try:
            await settled([writing.done])
        finally:
            writing.group.dead = sum(1 << i for i, page in enumerate(pages) if group.dead >> page & 1)
            error = state.end_write(writing)
        if error is None:
            state.counts["moved_pages"] += count
            state.counts["moved_bytes"] += count * length
            if writing.group.dead:
                await self.log_deaths([(writing.group, writing.group.dead)])

    async def _read(
        self, segment: Segment, group: PageGroup, pages: Sequence[int], buffers: Sequence[memoryview]
    ) -> list[tuple[int, memoryview]]:
        """Read pages of a group into ``buffers``. Returns those that could be read completely, each with its buffer."""
        offsets = map(group.payload_offset, pages)
        runs = [FileRun(at, group.length, [buffer]) for at, buffer in zip(offsets, buffers, strict=True)]
        segment.enter()
        future = self._state.io.read(self._state.files_for(segment, group.length), runs)
        try:
            await settled([future])
        finally:
            segment.leave()
        moved = zip(pages, buffers, future.result().bytes, strict=True)
        return [(page, buffer) for page, buffer, count in moved if count == group.length]

    async def _sync_segment(self, segment: Segment) -> None:
        """Sync one segment. If groups are being written to it, it stays dirty, since this sync may not cover them."""
        if segment.dropped:
            return
        segment.dirty = bool(segment.writing)
        segment.enter()
        try:
            await self._call(os.fdatasync, segment.files.buffered)
        except BaseException:
            segment.dirty = True
            raise
        finally:
            segment.leave()

    async def _evict(self, segment: Segment) -> None:
        """Delete a segment; the pages that are left in it count as evicted."""
        before = self._state.index.pages
        self._forget(segment)
        self._state.counts["evicted_pages"] += before - self._state.index.pages
        await self._unlink(segment)

    def _forget(self, segment: Segment) -> None:
        self._state.log.segments.pop(segment.number, None)
        self._state.index.drop_segment(segment.number)

    async def _unlink(self, segment: Segment) -> None:
        segment.drop()
        await self._done(self._state.folder.unlink, segment_name(segment.number))

    async def _compact_deletions(self) -> None:
        """Replace the log of deletions by one with a single entry for each group that has dead pages."""
        state = self._state
        async with self._deleting:
            deaths = [(group, group.dead) for group in state.index.groups() if group.dead]
            log = [deletions.pack(deaths, state.seed)]
            await self._rewrite(deletions.NAME, log)

    async def _rewrite(self, name: str, parts: Sequence[bytes]) -> None:
        try:
            await self._state.folder.rewrite(name, parts)
        except OSError as error:
            raise self._unavailable(error) from error

    async def _await_writes(self, segments: Sequence[Segment]) -> None:
        await settled([future for segment in segments for future in segment.writing.values()])

    async def _done(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | OSError:
        """Call a function that blocks in a thread. Returns what it returns, or the OSError that it raises. Cancelling
        it waits until the function has ended."""
        try:
            return await self._state.io.run(function, *args, **kwargs)
        except OSError as error:
            return error

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as ``_done``, but raise Unavailable where that returns an OSError."""
        try:
            return await self._state.io.run(function, *args, **kwargs)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> Unavailable:
        self._state.counts["errors"] += 1
        return Unavailable(f"store folder {str(self._state.folder.path)!r}: {error}")


def _failed(task: asyncio.Task[Segment | OSError]) -> bool:
    """Return True if this task has ended without a segment."""
    return task.done() and isinstance(task.result(), OSError)


def _live_pages(groups: Sequence[PageGroup]) -> Iterator[tuple[PageGroup, list[int]]]:
    """Yield each group that has live pages, with these."""
    for group in groups:
        if pages := group.live():
            yield group, pages


def _hot_pages(groups: Sequence[PageGroup]) -> Iterator[tuple[PageGroup, list[int]]]:
    """Yield each group with live pages that were read since they were written, with these."""
    for group in groups:
        wanted = group.hot & ~group.dead
        if wanted:
            yield group, [page for page in range(group.count) if wanted >> page & 1]
