"""``object-file:``, a store in a plain folder: what the client library leaves to whoever calls it. Blocking functions.

The library makes files and folders as the process's umask has it, opens whatever has an object's name, and waits for
ever where that is a FIFO. So folders are made here, before it looks for them; every file is given its permissions once
it is there, which lies in a private folder by then; and what is no plain file is refused before it is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from asynccache_backends.file.files import PRIVATE, Folder, NotPlain, make_folder
from asynccache_backends.object_store.names import INDEX, PACKS

_IN_ROOT = (PACKS, INDEX, "raw")                   # the last one: of a benchmark


class LocalFolder:
    """``mode``: what the folders are given, and the files without the bits for execution; None: new ones are as private
    as the folder is, and nothing that is there changes."""

    def __init__(self, root: Path, mode: int | None) -> None:
        """Make the folder if it is not there. Raises OSError: it cannot be made."""
        self.root = root.absolute()
        make_folder(self.root, PRIVATE if mode is None else mode)
        self._changes = mode is not None
        self._mode = stat.S_IMODE(self.root.stat().st_mode) & 0o777 if mode is None else mode

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.root)!r}, mode={self._mode:04o})"

    def prepare(self) -> None:
        """Make what is missing, look at what is there, and keep out whom the mode keeps out.

        Raises:
            NotPlain: something lies among the objects that is none. OSError: the disk refuses.
        """
        self._enter(self.root, _IN_ROOT)
        for name in (PACKS, INDEX):
            path = self.root / name
            make_folder(path, self._mode)
            if path.is_symlink():
                raise NotPlain(path, stat.S_IFLNK)
            self._enter(path, None)

    def check(self, path: str) -> None:
        """Look at an object before it is read.

        Raises:
            FileNotFoundError: there is none. NotPlain: something else has its name.
        """
        found = os.lstat(self.root / path)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlain(self.root / path, found.st_mode)

    def stored(self, path: str) -> None:
        """Give an object that was just stored its permissions. It may have left by now."""
        with suppress(OSError):
            os.chmod(self.root / path, self._mode & 0o666)

    def _enter(self, path: Path, known: Collection[str] | None) -> None:
        folder = Folder(path, self._mode)
        try:
            if known is None:
                folder.insist_on_files()
            if self._changes:
                folder.tighten(lambda name: known is None or name in known)
        finally:
            folder.close()
