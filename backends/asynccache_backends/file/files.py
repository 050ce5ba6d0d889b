"""The files of one store, reached through the descriptor of their folder: plain files, private, and nothing else.

Laws:
* Every name is looked up in the folder that was opened, so a folder that is renamed or replaced while a store uses it
  takes the store's files along, and none of them is ever made in the folder that came in its place.
* What is opened is a plain file. A FIFO, a socket, a device, a folder or a symbolic link under the name of a store's
  file raises ``NotPlain``, and is neither opened nor followed nor removed.
* A file has the folder's ``mode`` from its first byte on, whatever the process's umask says.

All functions block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"),
    (stat.S_ISDIR, "a folder"), (stat.S_ISLNK, "a symbolic link"),
)  # fmt: skip

PRIVATE = 0o700


class NotPlain(OSError):
    """Something else than a plain file has the name of a store's file. The message says what it is, and where."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = next((name for is_it, name in _KINDS if is_it(mode)), "something unknown")
        super().__init__(f"{path} is {kind}, and a plain file belongs there; move it away")


class TooLarge(OSError):
    """A file is larger than any that a store writes under its name."""

    def __init__(self, path: Path, size: int, most: int) -> None:
        super().__init__(f"{path} has {size} bytes, and {most} are the most that are believed; move it away")


class Folder:
    """An open folder. ``mode`` is that of the folder; its files have the same without the bits for execution."""

    def __init__(self, path: Path, mode: int | None = PRIVATE) -> None:
        """Open the folder ``path``. ``mode`` None: files are made as private as the folder is.

        Raises:
            OSError: there is no such folder, or it may not be opened.
        """
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.mode = stat.S_IMODE(os.fstat(self.fd).st_mode) if mode is None else mode

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r}, mode={self.mode:04o})"

    def close(self) -> None:
        """Let go of the folder. Twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def has(self, name: str) -> bool:
        """Whether anything has this name, be it a link that leads nowhere."""
        return self._look(name) is not None

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the plain file ``name``; with ``O_CREAT`` in ``flags`` it is made if there is none.

        Raises:
            NotPlain: something else has this name. OSError: there is no such file, or it may not be opened.
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
        """A descriptor of a new file ``name``.

        Raises:
            FileExistsError: there is something of this name. OSError: the disk refuses.
        """
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | _SAFELY, self.mode & 0o666, dir_fd=self.fd)
        try:
            os.fchmod(fd, self.mode & 0o666)  # the umask had its say
        except BaseException:
            os.close(fd)
            raise
        return fd

    def renew(self, name: str, flags: int = os.O_RDWR) -> int:
        """As ``create``; a plain file that has the name, as a process leaves it that was killed, goes first.

        Raises:
            NotPlain: something else has this name. OSError: the disk refuses.
        """
        if self._look(name) is not None:
            self.unlink(name)
        return self.create(name, flags)

    def read(self, name: str, most: int) -> bytes:
        """All of the file ``name``.

        Raises:
            TooLarge: it has more than ``most`` bytes. And what ``open`` raises.
        """
        fd = self.open(name)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size > most:
                raise TooLarge(self.path / name, size, most)
            return file.read(most)

    def unlink(self, name: str) -> None:
        """Remove the name. Raises OSError: there is none, or the disk refuses."""
        os.unlink(name, dir_fd=self.fd)

    def replace(self, old: str, new: str) -> None:
        """Rename a file of this folder, over another if need be. Raises OSError: the disk refuses."""
        os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        """Make names that were created or deleted survive a power loss. Raises OSError: the disk refuses."""
        os.fsync(self.fd)

    def insist_on_files(self) -> None:
        """Raises NotPlain: something in the folder is no plain file."""
        for name in os.listdir(self.fd):
            self._look(name)

    def tighten(self, is_ours: Callable[[str], bool]) -> None:
        """Give the folder its ``mode``, and the files in it whose names ``is_ours`` knows: those that were there before
        keep out whom new ones keep out. A folder in which anything else lies stays as it is: it may be a home, or
        ``/tmp``. So does what belongs to another user, and everything on a file system that keeps no modes."""
        names = os.listdir(self.fd)
        if all(map(is_ours, names)):
            _set_mode(self.fd, os.fstat(self.fd), self.mode)  # first: from now on nobody else can swap files
        for name in filter(is_ours, names):
            found = self._look(name, plain=False)
            if found is not None and stat.S_ISREG(found.st_mode):
                _set_mode(name, found, self.mode & 0o666, dir_fd=self.fd)

    def _look(self, name: str, *, plain: bool = True) -> os.stat_result | None:
        """What has this name, if anything has. Opening a device to find out could do whatever its driver likes."""
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
    """Make ``path``, and the folders on the way to it, with ``mode``. What is there stays as it is.

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
            os.chmod(folder, mode)  # the umask had its say


def _set_mode(file: int | str, found: os.stat_result, mode: int, dir_fd: int | None = None) -> None:
    """``chmod``, where it is ours and changes anything; the bits beyond the permissions stay."""
    wanted = stat.S_IMODE(found.st_mode) & ~0o777 | mode
    if found.st_uid != os.geteuid() or wanted == stat.S_IMODE(found.st_mode):
        return
    try:
        os.chmod(file, wanted, dir_fd=dir_fd)
    except OSError:  # a read-only file system, or one without modes: what needs more will say so
        return
