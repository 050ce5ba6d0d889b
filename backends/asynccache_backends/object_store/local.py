"""``object-file:``, a store in a plain folder: what the client library does not do itself. Blocking functions.

The library makes files and folders with the permissions that the process's umask leaves, opens anything that has an
object's name, and waits for ever if that is a FIFO. So folders are made here, before the library needs them. Every file
gets its permissions when it was stored; until then its private folder protects it. And what is no plain file is refused
before it is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from asynccache_backends.file.files import PRIVATE, Folder, NotPlain, make_folder
from asynccache_backends.object_store.formats import INDEX, PACKS

_IN_ROOT = (PACKS, INDEX, "raw")  # "raw" is made by a benchmark


class LocalFolder:
    """The folder of a store. ``mode``: permissions for folders and, without the bits for execution, for files; None:
    existing permissions are left alone, and those of new files and folders follow from the root folder's."""

    def __init__(self, root: Path, mode: int | None) -> None:
        """Make the folder if it is missing. Raises OSError if it cannot be made."""
        self.root = root.absolute()
        make_folder(self.root, PRIVATE if mode is None else mode)
        self._changes = mode is not None
        self._mode = stat.S_IMODE(self.root.stat().st_mode) & 0o777 if mode is None else mode

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.root)!r}, mode={self._mode:04o})"

    def prepare(self) -> None:
        """Make missing folders, check that there are only plain files among the objects, and set the permissions.

        Raises:
            NotPlain: there is something else than a plain file.
            OSError: the disk refuses.
        """
        self._enter(self.root, _IN_ROOT)
        for name in (PACKS, INDEX):
            path = self.root / name
            make_folder(path, self._mode)
            if path.is_symlink():
                raise NotPlain(path, stat.S_IFLNK)
            self._enter(path, None)

    def check(self, path: str) -> None:
        """Check an object before it is read.

        Raises:
            FileNotFoundError: there is no such object.
            NotPlain: something else has its name.
        """
        found = os.lstat(self.root / path)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlain(self.root / path, found.st_mode)

    def stored(self, path: str) -> None:
        """Set the permissions of an object that was just stored, if it was not removed meanwhile."""
        with suppress(OSError):
            os.chmod(self.root / path, self._mode & 0o666)

    def _enter(self, path: Path, known: Collection[str] | None) -> None:
        folder = Folder(path, self._mode)
        try:
            if known is None:
                for name in os.listdir(folder.fd):
                    folder.has(name)  # raises NotPlain for what is no plain file
            if self._changes:
                folder.tighten(lambda name: known is None or name in known)
        finally:
            folder.close()
