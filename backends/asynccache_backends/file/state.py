"""The mutable state of one open store: the index, the segments, and the two steps of every write. It is changed only on
the event loop.

The index says where each key's page lies; it is rebuilt from the files at every start. A page's location is one integer
(see ``page_index``): the number of its group and its index in that group. A page takes about 280 bytes of memory: its
key as the key of a dict, its entry in the group's directory, and its location. A dead page keeps its place in its
group until the segment is reclaimed.

A group is written in two steps. ``begin_write`` takes its place in the active segment and hands the bytes to the I/O.
When they are in the file, ``end_write`` adds the group to the index. Between the two steps the buffers belong to the
I/O and must not change.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asynccache.storage import KEY_BYTES
from asynccache_backends.file.files import FileHandles, FileRun, Folder, RunsMoved, ThreadIO
from asynccache_backends.file.segments import BLOCK_BYTES, MAX_PAGES, PageGroup, Segment, SegmentLog, pack_block
from asynccache_backends.page_index import PageIndex


class FileIndex(PageIndex[PageGroup]):
    """The index of a file store: its holders are groups. ``bytes`` counts payloads."""

    position_bits = 6

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return f"FileIndex(pages={self.pages}, groups={len(self.holders)}, segments={len(self._segments)})"

    def groups(self) -> list[PageGroup]:
        """Return all groups, segment by segment."""
        return [self.holders[n] for numbers in self._segments.values() for n in numbers]

    def groups_of(self, segment: int) -> list[PageGroup]:
        """Return the groups of one segment, in the order in which they were added."""
        return [self.holders[n] for n in self._segments.get(segment, ())]

    def add(self, group: PageGroup) -> None:
        """Add the pages of a group that are not dead.

        Of two copies of a page, the one that lies later in the log of segments is kept, and the other is marked as
        dead. So the order in which groups are added does not matter: a running store, which adds them as their writes
        end, keeps the same copies as a recovery, which adds them as they lie.
        """
        number = self._hold(group)
        base = number << self.position_bits
        self._segments.setdefault(group.segment, []).append(number)
        fresh, locations = [], self._locations
        for page, key in enumerate(group.keys()):
            if group.dead >> page & 1:
                continue
            if key not in locations:
                fresh.append(key)
            elif self._lies_after(group, locations[key]):
                group.dead |= 1 << page
                continue
            else:
                self._drop(key)
            locations[key] = base + page
            self.bytes += group.length
        self._changed(True, fresh)

    def _lies_after(self, group: PageGroup, location: int) -> bool:
        """Return True if the page of ``location`` lies after all pages of ``group``."""
        other, _ = self.at(location)
        return (other.segment, other.offset) > (group.segment, group.offset)

    def forget(self, key: bytes) -> tuple[PageGroup, int] | None:
        """Remove a key, and mark its page as dead. Returns the page's group and index, or None if the key is not
        stored."""
        place = self._drop(key)
        if place is not None:
            self._changed(False, (key,))
        return place

    def _drop(self, key: bytes) -> tuple[PageGroup, int] | None:
        location = self._locations.pop(key, None)
        if location is None:
            return None
        group, page = self.at(location)
        group.dead |= 1 << page
        self.bytes -= group.length
        return group, page

    def forget_at(self, group: PageGroup, page: int) -> tuple[PageGroup, int] | None:
        """The same as ``forget``, for the key of a page of ``group``; does nothing if that key's page lies elsewhere by
        now."""
        key = group.entry(page)[:KEY_BYTES]
        location = self._locations.get(key)
        return None if location is None or self.at(location) != (group, page) else self.forget(key)

    def drop_segment(self, segment: int) -> None:
        """Remove all keys of a segment and its groups. All pages are marked as dead, for those who still have one of
        its groups."""
        left = []
        for number in self._segments.pop(segment, ()):
            group = self.holders.pop(number)
            for page, key in enumerate(group.keys()):
                if not group.dead >> page & 1:
                    del self._locations[key]
                    left.append(key)
                    self.bytes -= group.length
            group.dead = (1 << group.count) - 1
        self._changed(False, left)

    def apply_deletions(self, deaths: Iterable[tuple[int, int, int]]) -> int:
        """Remove the pages that the log of deletions names, as (segment, offset, bit set of dead pages). For recovery.
        Returns how many entries name a group that does not exist any more."""
        stale = 0
        places = {(group.segment, group.offset): group for group in self.holders.values()}
        for segment, offset, mask in deaths:
            group = places.get((segment, offset))
            if group is None:
                stale += 1
                continue
            for page, key in enumerate(group.keys()):
                if mask >> page & 1 and not group.dead >> page & 1:
                    self.forget(key)
        return stale


assert 1 << FileIndex.position_bits > MAX_PAGES  # so that consecutive locations are always pages of the same group


class GroupWrite(NamedTuple):
    """A group that is being written. ``block`` is the buffer of its header block."""

    group: PageGroup
    segment: Segment
    block: memoryview
    done: asyncio.Future[RunsMoved]


class StoreState:
    """The state of an open store. ``capacity``: how many bytes the segment files may take on the disk.
    ``segment_bytes``: the size of a new one. ``unsaved_bytes``: what was written since the last snapshot, and would
    have to be scanned."""

    def __init__(
        self, folder: Folder, seed: int, io: ThreadIO, capacity: int, segment_bytes: int, direct: bool
    ) -> None:  # fmt: skip
        self.folder = folder
        self.seed = seed
        self.io = io
        self.capacity = capacity
        self.segment_bytes = segment_bytes
        self.direct = direct
        self.index = FileIndex()
        self.log = SegmentLog()
        self.counts: Counter[str] = Counter()
        self.unsaved_bytes = 0
        self._blocks: list[memoryview] = []
        self._buffered_lengths: set[int] = set()

    def files_for(self, segment: Segment, length: int) -> FileHandles:
        """Return the descriptors by which pages of ``length`` bytes are read and written: without direct I/O if the
        length, or the buffers of such pages, are not aligned."""
        if length % BLOCK_BYTES or length in self._buffered_lengths:
            return FileHandles(segment.files.buffered, None)
        return segment.files

    def misaligned(self, length: int) -> None:
        """Note that buffers of pages of this length are not aligned, so that direct I/O is not tried with them
        again."""
        self._buffered_lengths.add(length)

    def begin_write(
        self, length: int, directory: bytes, payloads: Sequence[memoryview], written: int | None = None
    ) -> GroupWrite:
        """Start to write a group, for which ``log.fit`` has found room. ``written``: the unix time at which its pages
        were first written; now by default."""
        segment, offset = self.log.take(length, len(payloads))
        group = PageGroup(segment.number, offset, length, directory, int(time.time()) if written is None else written)
        block = self._blocks.pop() if self._blocks else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        packed = pack_block(group, self.seed)
        block[: len(packed)] = packed
        segment.enter()
        run = FileRun(offset, BLOCK_BYTES + length * len(payloads), [block, *payloads])
        done = self.io.write(self.files_for(segment, length), run)
        segment.writing[offset] = done
        return GroupWrite(group, segment, block, done)

    def end_write(self, writing: GroupWrite) -> OSError | None:
        """Finish a write whose future is done: the group's pages are found from now on. Returns the error if it
        failed."""
        group, segment, block, done = writing
        moved = done.result()
        del segment.writing[group.offset]
        segment.leave()
        self._blocks.append(block)
        if moved.misaligned:
            self.misaligned(group.length)
        if moved.error is not None:
            self.counts["errors"] += 1
            return moved.error
        if not segment.dropped:
            self.index.add(group)
        self.unsaved_bytes += sum(moved.bytes)
        return None
