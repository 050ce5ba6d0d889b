"""The I/O seam: the only place that moves page bytes between files and memory.

``BatchIO`` takes large batches and answers with futures that never carry an error: what went wrong is in the value. The
one implementation is a bounded pool of threads; io_uring can take its place. A thread's call does no Python per page
beyond building the list of buffers, and the system calls release the GIL.
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


class Files(NamedTuple):
    """One file, open twice: ``direct`` bypasses the page cache and is None where the folder does not allow it."""

    buffered: int
    direct: int | None


class Run(NamedTuple):
    """``length`` consecutive bytes of one file, and the buffers they go to or come from, at most 1024."""

    offset: int
    length: int
    buffers: Sequence[memoryview]


class Moved(NamedTuple):
    """What became of some runs: the bytes of each, the last error that one of them met (its bytes are 0 then), and
    whether direct I/O refused their buffers, so that buffered I/O was used."""

    bytes: list[int]
    error: OSError | None
    misaligned: bool


class BatchIO(Protocol):
    """Everything it is given stays referenced until its future is done."""

    def write(self, files: Files, run: Run) -> asyncio.Future[Moved]:
        """Write one run; whole, or an error is in the answer."""
        ...

    def read(self, files: Files, runs: Sequence[Run]) -> asyncio.Future[Moved]:
        """Read runs of one file; each may come short where the file ends."""
        ...

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """Any other blocking file operation."""
        ...

    def close(self) -> None:
        """End it; nothing may be in flight."""
        ...


class ThreadIO:
    """``threads`` system calls at a time."""

    def __init__(self, threads: int = 4) -> None:
        self._workers = Workers(threads, "asynccache-file")

    def write(self, files: Files, run: Run) -> asyncio.Future[Moved]:
        """One pwritev, or as many as it takes."""
        return self._workers.call(write_run, files, run)

    def read(self, files: Files, runs: Sequence[Run]) -> asyncio.Future[Moved]:
        """One preadv per run, or as many as it takes."""
        return self._workers.call(read_runs, files, runs)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """``function`` in a thread; an ``OSError`` is a value."""
        return self._workers.call(lambda: _caught(function, *args, **kwargs))

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


def write_run(files: Files, run: Run) -> Moved:
    """Write a whole run, direct if ``files`` says so and the buffers allow it."""
    moved = _move(os.pwritev, files, [run])
    if moved.error is None and moved.bytes[0] < run.length:
        return moved._replace(error=OSError(errno.EIO, "short write"))
    return moved


def read_runs(files: Files, runs: Sequence[Run]) -> Moved:
    """Read each run as far as the file goes."""
    return _move(os.preadv, files, runs)


def _move(move: Callable[[int, Sequence[memoryview], int], int], files: Files, runs: Sequence[Run]) -> Moved:
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
    return Moved(counts, error, files.direct is not None and fd == files.buffered)


def _whole(move: Callable[[int, Sequence[memoryview], int], int], fd: int, run: Run) -> int:
    """Repeat ``move`` until all bytes are through or it moves nothing more."""
    moved = move(fd, run.buffers, run.offset)
    while moved < run.length:
        count = move(fd, _after(run.buffers, moved), run.offset + moved)
        if count == 0:
            break
        moved += count
    return moved


def _after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of ``buffers`` after their first ``count`` bytes."""
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
