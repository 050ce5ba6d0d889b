"""The files of one store: plain, private files, which are reached through the descriptor of their folder, and the bytes
of pages on their way between them and memory.

Laws:
* Every name is looked up in the folder that was opened. If that folder is renamed or replaced while a store uses it,
  the store goes on with its files and makes none in the folder that has the name now.
* Only plain files are opened. If a FIFO, a socket, a device, a folder or a symbolic link has the name of a store's
  file, ``NotPlain`` is raised, and the thing is neither opened nor followed nor removed.
* A file has the permissions that follow from the folder's ``mode`` from its first byte on, whatever the process's
  umask is.
* The pages of gets and puts are moved by ``ThreadIO`` and by nothing else. It takes large batches; the system calls
  release the GIL, and beside them a thread does nothing in Python for each page.

What is no coroutine blocks, but for the methods of ``ThreadIO``. Whole files (manifest, notes, snapshot, log) are read
and written by ``aiofiles``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Thread
from typing import NamedTuple, ParamSpec, TypeVar

import aiofiles
from aiofiles.os import wrap

from asynccache.storage import ThreadPool, completed

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"),
    (stat.S_ISDIR, "a folder"), (stat.S_ISLNK, "a symbolic link"),
)  # fmt: skip

PRIVATE = 0o700


class NotPlain(OSError):
    """Something that is no plain file has the name of a store's file. The message says what it is, and where."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = next((name for is_it, name in _KINDS if is_it(mode)), "something unknown")
        super().__init__(f"{path} is {kind}, and a plain file belongs there; move it away")


class TooLarge(OSError):
    """A file is larger than any that a store writes under this name."""

    def __init__(self, path: Path, size: int, most: int) -> None:
        super().__init__(f"{path} has {size} bytes, and {most} are the most that are believed; move it away")


P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Does each call in a thread of its own, for ``aiofiles``: files off the hot path are few. The threads are daemon
    threads, so a disk that hangs does not keep the process from ending, as the loop's own executor would."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin the call, and return the future of what it returns."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        Thread(target=work, name="asynccache-file-once", daemon=True).start()
        return future


THREADS = DaemonThreads()


class Folder:
    """An open folder. ``mode`` has the folder's permissions; its files get the same without the bits for execution."""

    def __init__(self, path: Path, mode: int | None = PRIVATE) -> None:
        """Open the folder ``path``. If ``mode`` is None, the permissions of new files follow from those that the folder
        has.

        Raises:
            OSError: there is no such folder, or it may not be opened.
        """
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.mode = stat.S_IMODE(os.fstat(self.fd).st_mode) if mode is None else mode

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r}, mode={self.mode:04o})"

    def close(self) -> None:
        """Close the folder. Calling it twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def has(self, name: str) -> bool:
        """Return True if a file has this name. Raises NotPlain if something else has it, also a link that leads
        nowhere."""
        return self._look(name) is not None

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open the plain file ``name`` and return its descriptor. With ``O_CREAT`` in ``flags`` a missing file is made.

        Raises:
            NotPlain: something else has this name.
            OSError: there is no such file, or it may not be opened.
        """
        if self._look(name) is None and flags & os.O_CREAT:
            return self.create(name, flags)
        fd = os.open(name, (flags & ~os.O_CREAT) | _SAFELY, dir_fd=self.fd)
        try:
            self._check_plain(name, os.fstat(fd).st_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, name: str, flags: int = os.O_RDWR) -> int:
        """Make a new file ``name`` and return its descriptor.

        Raises:
            FileExistsError: something has this name already.
            OSError: the disk refuses.
        """
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | _SAFELY, self.mode & 0o666, dir_fd=self.fd)
        try:
            os.fchmod(fd, self.mode & 0o666)  # the umask may have taken permissions away
        except BaseException:
            os.close(fd)
            raise
        return fd

    def renew(self, name: str, flags: int = os.O_RDWR) -> int:
        """Make a new file ``name`` and return its descriptor. A plain file of this name, which a killed process may
        have left, is removed first.

        Raises:
            NotPlain: something else has this name.
            OSError: the disk refuses.
        """
        if self._look(name) is not None:
            self.unlink(name)
        return self.create(name, flags)

    async def read(self, name: str, most: int) -> bytes:
        """Return the content of the file ``name``. Cancelling it waits until the file is closed.

        Raises:
            TooLarge: it has more than ``most`` bytes.
            OSError: as ``open``.
        """
        return await completed(self._read(name, most))

    async def _read(self, name: str, most: int) -> bytes:
        async with aiofiles.open(name, "rb", opener=self.open, executor=THREADS) as file:
            size = await file.seek(0, os.SEEK_END)
            if size > most:
                raise TooLarge(self.path / name, size, most)
            await file.seek(0)
            return await file.read(size)

    async def rewrite(self, name: str, parts: Sequence[bytes]) -> None:
        """Write a file in such a way that after a crash either the old file or the whole new one is there. Raises
        OSError if the disk refuses. Cancelling it waits until the new file is there, or given up."""
        await completed(self._rewrite(name, parts))

    async def _rewrite(self, name: str, parts: Sequence[bytes]) -> None:
        new = f"{name}.new"
        async with aiofiles.open(new, "wb", opener=lambda name, _: self.renew(name), executor=THREADS) as file:
            await file.writelines(parts)
            await file.flush()
            await wrap(os.fdatasync)(file.fileno(), executor=THREADS)
        await wrap(self.replace)(new, name, executor=THREADS)
        await wrap(self.sync)(executor=THREADS)

    def unlink(self, name: str) -> None:
        """Remove the file ``name``. Raises OSError if there is none or the disk refuses."""
        os.unlink(name, dir_fd=self.fd)

    def replace(self, old: str, new: str) -> None:
        """Rename the file ``old`` to ``new``, in the place of a file of that name. Raises OSError if the disk
        refuses."""
        os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        """Make sure that files which were created, renamed or removed before survive a power loss as such. Raises
        OSError if the disk refuses."""
        os.fsync(self.fd)

    def insist_on_files(self) -> None:
        """Raise NotPlain if anything in the folder is no plain file."""
        for name in os.listdir(self.fd):
            self._look(name)

    def tighten(self, is_ours: Callable[[str], bool]) -> None:
        """Give the folder, and the files in it whose names ``is_ours`` accepts, the permissions of ``mode``, so that
        files of earlier runs are as private as new ones.

        If the folder has any other file, its own permissions are left alone: it may be somebody's home, or ``/tmp``.
        What belongs to another user is left alone, and so is everything on a file system without permissions.
        """
        names = os.listdir(self.fd)
        if all(map(is_ours, names)):
            _set_mode(self.fd, os.fstat(self.fd), self.mode)  # first, so that nobody can replace a file meanwhile
        for name in filter(is_ours, names):
            found = self._look(name, plain=False)
            if found is not None and stat.S_ISREG(found.st_mode):
                _set_mode(name, found, self.mode & 0o666, dir_fd=self.fd)

    def _look(self, name: str, *, plain: bool = True) -> os.stat_result | None:
        """Return the status of what has this name, or None. ``plain``: whether to raise NotPlain for anything but a
        plain file. It is not opened to find out, since opening a device may have any effect."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if plain:
            self._check_plain(name, found.st_mode)
        return found

    def _check_plain(self, name: str, mode: int) -> None:
        if not stat.S_ISREG(mode):
            raise NotPlain(self.path / name, mode)


def make_folder(path: Path, mode: int) -> None:
    """Make the folder ``path`` and all missing folders above it, with the permissions ``mode``. Folders that exist are
    left as they are.

    Raises:
        OSError: one of them cannot be made.
    """
    missing = [path]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            if not folder.is_dir():
                raise
        else:
            os.chmod(folder, mode)  # the umask may have taken permissions away


def _set_mode(file: int | str, found: os.stat_result, mode: int, dir_fd: int | None = None) -> None:
    """Set the permissions of a file that belongs to this process's user. The bits beyond the permissions are kept."""
    wanted = stat.S_IMODE(found.st_mode) & ~0o777 | mode
    if found.st_uid != os.geteuid() or wanted == stat.S_IMODE(found.st_mode):
        return
    try:
        os.chmod(file, wanted, dir_fd=dir_fd)
    except OSError:  # the file system is read-only or has no permissions; whoever has to write will fail with a reason
        return


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


class ThreadIO:
    """File I/O in the background, on threads which make up to ``threads`` system calls at a time. It refers to files
    and buffers until the future of their call is done. These futures raise no OSError: it is part of their value."""

    def __init__(self, threads: int = 4) -> None:
        self._threads = ThreadPool(threads, "asynccache-file")

    def write(self, files: FileHandles, run: FileRun) -> asyncio.Future[RunsMoved]:
        """Write one run, by one pwritev or as many as it takes. If not all of it was written, the outcome has an
        error."""
        return self._threads.call(write_run, files, run)

    def read(self, files: FileHandles, runs: Sequence[FileRun]) -> asyncio.Future[RunsMoved]:
        """Read runs of one file, each by one preadv or as many as it takes. Where the file ends early a run has fewer
        bytes, which is no error."""
        return self._threads.call(read_runs, files, runs)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T | OSError]:
        """Call a function that blocks, and return what it returns; an ``OSError`` is returned, not raised."""
        return self._threads.call(lambda: _caught(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks, and return what it returns or raise its ``OSError``. Cancelling it waits until
        the function has ended."""
        return await self._threads.run(function, *args, **kwargs)

    def close(self) -> None:
        """End the threads. No call may be in flight."""
        self._threads.close()


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
