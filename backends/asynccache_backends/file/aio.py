"""Moves the bytes of pages between files and memory. For gets and puts nothing else does.

``BatchIO`` takes large batches and returns futures that never raise: an error is part of their value. There is one
implementation, a few threads; one on io_uring could take its place. The system calls release the GIL, and beside them a
thread does nothing in Python for each page.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from asynccache.storage import Workers

P = ParamSpec("P")
T = TypeVar("T")


class FileHandles(NamedTuple):
    """Two descriptors of one file. ``direct`` bypasses the system's page cache; it is None if O_DIRECT is not used."""

    buffered: int
    direct: int | None


class FileRun(NamedTuple):
    """A run of ``length`` consecutive bytes of one file, from ``offset`` on, and the buffers (1024 at most) that they
    are read into or written from."""

    offset: int
    length: int
    buffers: Sequence[memoryview]


class RunsMoved(NamedTuple):
    """The outcome of some runs.

    ``bytes``: how many bytes of each run were moved; 0 for one that failed. ``error``: the last error among them, or
    None. ``misaligned``: whether the system refused the buffers for direct I/O, so that buffered I/O was used.
    """

    bytes: list[int]
    error: OSError | None
    misaligned: bool


class BatchIO(Protocol):
    """File I/O in the background. It refers to files and buffers until the future of their call is done."""

    def write(self, files: FileHandles, run: FileRun) -> asyncio.Future[RunsMoved]:
        """Write one run. If not all of it was written, the outcome has an error."""
        ...

    def read(self, files: FileHandles, runs: Sequence[FileRun]) -> asyncio.Future[RunsMoved]:
        """Read runs of one file. Where the file ends early a run has fewer bytes, which is no error."""
        ...

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """Call a function that blocks, and return what it returns; an ``OSError`` is returned, not raised."""
        ...

    def close(self) -> None:
        """End the threads or whatever does the I/O. No call may be in flight."""
        ...


class ThreadIO:
    """``BatchIO`` on threads, which make up to ``threads`` system calls at a time."""

    def __init__(self, threads: int = 4) -> None:
        self._workers = Workers(threads, "asynccache-file")

    def write(self, files: FileHandles, run: FileRun) -> asyncio.Future[RunsMoved]:
        """The same as ``BatchIO.write``, by one pwritev or as many as it takes."""
        return self._workers.call(write_run, files, run)

    def read(self, files: FileHandles, runs: Sequence[FileRun]) -> asyncio.Future[RunsMoved]:
        """The same as ``BatchIO.read``, by one preadv for each run or as many as it takes."""
        return self._workers.call(read_runs, files, runs)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """The same as ``BatchIO.call``."""
        return self._workers.call(lambda: _caught(function, *args, **kwargs))

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


def write_run(files: FileHandles, run: FileRun) -> RunsMoved:
    """Write a run, by direct I/O if ``files`` has such a descriptor and the system accepts the buffers."""
    moved = _move(os.pwritev, files, [run])
    if moved.error is None and moved.bytes[0] < run.length:
        return moved._replace(error=OSError(errno.EIO, "short write"))
    return moved


def read_runs(files: FileHandles, runs: Sequence[FileRun]) -> RunsMoved:
    """Read each run up to its end or the end of the file."""
    return _move(os.preadv, files, runs)


def _move(
    move: Callable[[int, Sequence[memoryview], int], int], files: FileHandles, runs: Sequence[FileRun]
) -> RunsMoved:
    fd = files.buffered if files.direct is None else files.direct
    counts: list[int] = []
    error: OSError | None = None
    for run in runs:
        try:
            try:
                counts.append(_whole(move, fd, run))
            except OSError as refusal:
                if refusal.errno != errno.EINVAL or fd == files.buffered:
                    raise
                fd = files.buffered
                counts.append(_whole(move, fd, run))
        except OSError as failure:
            error = failure
            counts.append(0)
    return RunsMoved(counts, error, files.direct is not None and fd == files.buffered)


def _whole(move: Callable[[int, Sequence[memoryview], int], int], fd: int, run: FileRun) -> int:
    """Repeat ``move`` until it has moved the whole run, or moves nothing more. Returns how many bytes were moved."""
    moved = move(fd, run.buffers, run.offset)
    while moved < run.length:
        count = move(fd, _after(run.buffers, moved), run.offset + moved)
        if count == 0:
            break
        moved += count
    return moved


def _after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return ``buffers`` without their first ``count`` bytes."""
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []


def _caught(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | OSError:
    try:
        return function(*args, **kwargs)
    except OSError as error:
        return error
