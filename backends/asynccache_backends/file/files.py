"""The files of one store: plain, private files, which are reached through the descriptor of their folder, and the bytes
of pages on their way between them and memory.

What always holds:
* Every name is looked up in the folder that was opened. If that folder is renamed or replaced while a store uses it,
  the store goes on with its files and makes none in the folder that has the name now.
* Only plain files are opened. If a FIFO, a socket, a device, a folder or a symbolic link has the name of a store's
  file, ``NotPlain`` is raised, and the thing is neither opened nor followed nor removed.
* A file has the permissions that follow from the folder's ``mode`` from its first byte on, whatever the process's
  umask is.
* The bytes of pages are moved by ``write_run`` and ``read_runs``, in the store's threads. These take large batches; the
  system calls release the GIL, and beside them a thread does nothing in Python for each page.

Everything here blocks.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS = {
    "p": "a FIFO", "s": "a socket", "b": "a device", "c": "a device", "d": "a folder", "l": "a symbolic link",
}  # fmt: skip

PRIVATE = 0o700


class NotPlain(OSError):
    """Something that is no plain file has the name of a store's file. The message says what it is, and where."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = _KINDS.get(stat.filemode(mode)[0], "something unknown")
        super().__init__(f"{path} is {kind}, and a plain file belongs there; move it away")


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
        """Open the plain file ``name`` and return its descriptor. With ``O_CREAT`` in ``flags`` a missing file is made;
        with ``O_EXCL``, too, it must be missing.

        Raises:
            NotPlain: something else has this name.
            OSError: there is no such file, or one with ``O_EXCL``, or it may not be opened.
        """
        if self._look(name) is not None and not flags & os.O_EXCL:
            flags &= ~os.O_CREAT
        elif flags & os.O_CREAT:
            flags |= os.O_EXCL
        fd = os.open(name, flags | _SAFELY, self.mode & 0o666, dir_fd=self.fd)
        try:
            self._check_plain(name, os.fstat(fd).st_mode)
            if flags & os.O_CREAT:
                os.fchmod(fd, self.mode & 0o666)  # the umask may have taken permissions away
        except BaseException:
            os.close(fd)
            raise
        return fd

    def renew(self, name: str, flags: int = os.O_RDWR) -> int:
        """Make a new file ``name`` and return its descriptor. A plain file of this name, which a killed process may
        have left, is removed first. Raises as ``open`` does."""
        if self._look(name) is not None:
            self.unlink(name)
        return self.open(name, flags | os.O_CREAT | os.O_EXCL)

    def unlink(self, name: str) -> None:
        """Remove the file ``name``. Raises OSError if there is none or the disk refuses."""
        os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make sure that files which were created, renamed or removed before survive a power loss as such. Raises
        OSError if the disk refuses, or the folder was removed."""
        if not os.fstat(self.fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        os.fsync(self.fd)

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
    if not os.path.lexists(path.parent):
        make_folder(path.parent, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        os.chmod(path, mode)  # the umask may have taken permissions away


def _set_mode(file: int | str, found: os.stat_result, mode: int, dir_fd: int | None = None) -> None:
    """Set the permissions of a file that belongs to this process's user. The bits beyond the permissions are kept."""
    wanted = stat.S_IMODE(found.st_mode) & ~0o777 | mode
    if found.st_uid == os.geteuid() and wanted != stat.S_IMODE(found.st_mode):
        with suppress(OSError):  # no permissions here, or read-only; whoever has to write will fail with a reason
            os.chmod(file, wanted, dir_fd=dir_fd)


class FileHandles(NamedTuple):
    """Two descriptors of one file. ``direct`` bypasses the system's page cache; without O_DIRECT both are the same."""

    buffered: int
    direct: int


class FileRun(NamedTuple):
    """A run of ``length`` consecutive bytes of one file, from ``offset`` on, and the buffers (1024 at most) that they
    are read into or written from."""

    offset: int
    length: int
    buffers: Sequence[memoryview]


class RunsMoved(NamedTuple):
    """What was moved of some runs."""

    bytes: list[int]
    """How many bytes of each run were moved; 0 for one that failed."""
    error: OSError | None
    """The last error among them, or None."""


def write_run(files: FileHandles, run: FileRun) -> None:
    """Write a run, by one pwritev or as many as it takes. Raises OSError if not all of it was written."""
    if _whole(os.pwritev, files, run) < run.length:
        raise OSError(errno.EIO, "short write")


def read_runs(files: FileHandles, runs: Sequence[FileRun]) -> RunsMoved:
    """Read runs of one file, each by one preadv or as many as it takes. Where the file ends early a run has fewer
    bytes, which is no error."""
    counts: list[int] = []
    error: OSError | None = None
    for run in runs:
        try:
            counts.append(_whole(os.preadv, files, run))
        except OSError as failure:
            error = failure
            counts.append(0)
    return RunsMoved(counts, error)


def _whole(move: Callable[[int, Sequence[memoryview], int], int], files: FileHandles, run: FileRun) -> int:
    """Repeat ``move`` until it has moved the whole run, or moves nothing more. Returns how many bytes were moved.

    That is direct I/O if ``files`` has such a descriptor and the system accepts the buffers."""
    moved, buffers, fd = 0, run.buffers, files.direct
    while moved < run.length:
        try:
            count = move(fd, buffers, run.offset + moved)
        except OSError as refusal:
            if refusal.errno != errno.EINVAL or fd == files.buffered:
                raise
            fd = files.buffered
            continue
        if count == 0:
            break
        moved += count
        buffers = _after(buffers, count) if moved < run.length else ()
    return moved


def _after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return ``buffers`` without their first ``count`` bytes."""
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []
