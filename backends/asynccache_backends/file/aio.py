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
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_BUFFERS = 512


class Files(NamedTuple):
    """One file, open twice: ``direct`` bypasses the page cache and is None where the folder does not allow it."""

    buffered: int
    direct: int | None


class Run(NamedTuple):
    """Consecutive bytes of one file, and the buffers they go to or come from."""

    offset: int
    buffers: Sequence[memoryview]


class Moved(NamedTuple):
    """What became of one run. ``misaligned``: direct I/O refused these buffers, buffered I/O was used."""

    bytes: int
    error: OSError | None
    misaligned: bool


class BatchIO(Protocol):
    """Everything it is given stays referenced until its future is done."""

    def write(self, files: Files, run: Run) -> asyncio.Future[Moved]:
        """Write one run; whole, or an error is in the answer."""
        ...

    def read(self, files: Files, runs: Sequence[Run]) -> asyncio.Future[list[Moved]]:
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
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(threads, "asynccache-file")

    def write(self, files: Files, run: Run) -> asyncio.Future[Moved]:
        """One pwritev, or as many as it takes."""
        return self._loop.run_in_executor(self._executor, write_run, files, run)

    def read(self, files: Files, runs: Sequence[Run]) -> asyncio.Future[list[Moved]]:
        """One preadv per run, or as many as it takes."""
        return self._loop.run_in_executor(self._executor, read_runs, files, runs)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """``function`` in a thread; an ``OSError`` is a value."""
        return self._loop.run_in_executor(self._executor, lambda: _caught(function, *args, **kwargs))

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=True)


def write_run(files: Files, run: Run) -> Moved:
    """Write a whole run, direct if ``files`` says so and the buffers allow it."""
    moved = _direct_first(os.pwritev, files, run)
    if moved.error is None and moved.bytes < sum(buffer.nbytes for buffer in run.buffers):
        return moved._replace(error=OSError(errno.EIO, "short write"))
    return moved


def read_runs(files: Files, runs: Sequence[Run]) -> list[Moved]:
    """Read each run as far as the file goes."""
    return [_direct_first(os.preadv, files, run) for run in runs]


def _direct_first(move: Callable[[int, Sequence[memoryview], int], int], files: Files, run: Run) -> Moved:
    if files.direct is not None:
        try:
            return Moved(_whole(move, files.direct, run), None, False)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return Moved(0, error, False)
    try:
        return Moved(_whole(move, files.buffered, run), None, files.direct is not None)
    except OSError as error:
        return Moved(0, error, files.direct is not None)


def _whole(move: Callable[[int, Sequence[memoryview], int], int], fd: int, run: Run) -> int:
    """Repeat ``move`` until all buffers are through or it moves nothing more."""
    buffers, offset = run.buffers, run.offset
    while buffers:
        count = move(fd, buffers, offset)
        if count == 0:
            break
        offset += count
        buffers = _after(buffers, count)
    return offset - run.offset


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
