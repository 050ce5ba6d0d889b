"""The mutable state of one open store, and the two steps of every write. It is changed only on the event loop.

A group is written in two steps. ``begin_write`` takes its place in the active segment and hands the bytes to the I/O.
When they are in the file, ``end_write`` adds the group to the index. Between the two steps the buffers belong to the
I/O and must not change.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from asynccache_backends.file.aio import BatchIO, FileHandles, FileRun, RunsMoved
from asynccache_backends.file.blocks import BLOCK_BYTES, PageGroup, pack_block
from asynccache_backends.file.files import Folder
from asynccache_backends.file.index import FileIndex
from asynccache_backends.file.segments import Segment, SegmentLog


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

    def __init__(self, folder: Folder, seed: int, io: BatchIO, capacity: int, segment_bytes: int, direct: bool) -> None:
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
