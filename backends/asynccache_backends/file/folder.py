"""Whose folder it is: one process at a time (by locks) and one format (a manifest). Blocking functions.

The lock that counts is on the folder itself: nobody gets in while it is held, whatever was done to the files in it or
to its name. The file ``lock`` is locked, too: it says which process has the folder, and keeps out versions that know of
no other lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import aiofiles
import aiofiles.os
from xxhash import xxh3_64_hexdigest

from asynccache.errors import Unavailable
from asynccache_backends.file.files import PRIVATE, Folder, make_folder
from asynccache_backends.file.segments import list_segments
from asynccache_backends.file.settings import Settings

FORMAT = "asynccache file store"
VERSION = 1
MANIFEST = "manifest.json"
LOCK = "lock"
CAPACITY = "capacity"
MOST_MANIFEST = 4 << 10

_OURS = re.compile(
    r"(manifest\.json|index\.snapshot|deletions\.log|capacity)(\.new)?|lock|direct\.probe|segment-[0-9a-f]{16}\.kv"
)
_NO_SUCH_LOCK = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What must be known before anything else can be read. ``seed`` is the store's random number."""

    format: str
    version: int
    schema: str
    seed: int


class FolderLock:
    """Held until ``release``, or until the process is gone, however it goes. ``folder``: where the files are, open."""

    def __init__(self, folder: Folder) -> None:
        """Lock ``folder``, which is closed when this raises.

        Raises:
            Unavailable: another process, or another store in this one, has it; the message names folder and process.
            OSError: the disk refuses.
        """
        self.folder = folder
        self._file = -1
        try:
            self._lock_folder()
            self._file = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = self._owner()
            self.release()
            raise Unavailable(f"store folder {str(folder.path)!r} is in use by process {owner}") from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the next one in. Twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.folder.close()

    def _lock_folder(self) -> None:
        """Where folders cannot be locked, as on NFS, the file alone stands for it."""
        try:
            fcntl.flock(self.folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _NO_SUCH_LOCK:
                raise

    def _owner(self) -> str:
        """Who has it, as far as the file still says."""
        try:
            return self.folder.read(LOCK, 32).decode(errors="replace").strip() or "unknown"
        except OSError:
            return "unknown"


def claim(path: Path, *, mode: int | None, new: bool) -> FolderLock:
    """Open and lock the folder ``path``. ``new``: it is made if it is not there, else a store must be in it. ``mode``:
    what the folder is given, and its files without the bits for execution; None: new files are as private as the folder
    is, and nothing that is there changes.

    Raises:
        Unavailable: it is in use, holds no store, or cannot be made or written.
    """
    try:
        if new:
            make_folder(path, PRIVATE if mode is None else mode)
        folder = _folder_of_a_store(path, mode) if not new else Folder(path, mode)
        lock = FolderLock(folder)
        try:
            if mode is not None:
                folder.tighten(lambda name: _OURS.fullmatch(name) is not None)
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise Unavailable(f"store folder {str(path)!r}: {error}") from error
    return lock


def _folder_of_a_store(path: Path, mode: int | None) -> Folder:
    """Raises Unavailable if there is no store in ``path``, where the lock would be its first file."""
    try:
        folder = Folder(path, mode)
    except FileNotFoundError:
        raise Unavailable(f"store folder {str(path)!r} holds no store") from None
    try:
        if not folder.has(MANIFEST):
            raise Unavailable(f"store folder {str(path)!r} holds no store")
    except BaseException:
        folder.close()
        raise
    return folder


async def load_manifest(folder: Folder, schema: bytes) -> Manifest:
    """The folder's manifest, made if the folder is new. Not to be cancelled, as ``replace_file``.

    Raises:
        Unavailable: it is damaged, or was written by another format or schema; nothing is touched then.
        OSError: it cannot be read, or is no plain file.
    """
    if not folder.has(MANIFEST):
        return await _new_manifest(folder, schema)
    manifest = _parse(folder, await aiofiles.os.wrap(folder.read)(MANIFEST, MOST_MANIFEST))
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise Unavailable(
            f"store folder {str(folder.path)!r} was written by {manifest.format!r} version {manifest.version}, "
            f"this is {FORMAT!r} version {VERSION}"
        )
    if manifest.schema != schema.hex():
        raise Unavailable(
            f"store folder {str(folder.path)!r} was written by another schema: {manifest.schema}, this is "
            f"{schema.hex()}"
        )
    return manifest


async def capacity_of(folder: Folder, settings: Settings) -> int:
    """What the store may take on the disk, in bytes. Who uses the store says so, and it is noted in the folder; who only
    looks at it is told what was noted, or what ``settings`` say where nothing readable is. Not to be cancelled, as
    ``replace_file``.

    Raises:
        OSError: the disk refuses, or something that is no plain file has the note's name.
    """
    noted: int | None = None
    if folder.has(CAPACITY):
        text = await aiofiles.os.wrap(folder.read)(CAPACITY, MOST_MANIFEST)
        noted = int(text) if text.isdigit() and len(text) < 20 else None
    if not settings.used:
        return settings.capacity if noted is None else noted
    if noted != settings.capacity:
        await replace_file(folder, CAPACITY, [str(settings.capacity).encode()])
    return settings.capacity


async def replace_file(folder: Folder, name: str, parts: list[bytes]) -> None:
    """Write a file so that after any crash the old one or the whole new one is there.

    Raises OSError. Not to be cancelled, as an ``aiofiles`` call that is cancelled leaves its file open: ``completed``.
    """
    new = f"{name}.new"
    async with aiofiles.open(new, "wb", opener=lambda path, _: folder.renew(path)) as file:
        for part in parts:
            await file.write(part)
        await file.flush()
        await aiofiles.os.wrap(os.fdatasync)(file.fileno())
    await aiofiles.os.wrap(folder.replace)(new, name)
    await aiofiles.os.wrap(folder.sync)()


async def _new_manifest(folder: Folder, schema: bytes) -> Manifest:
    if list_segments(folder.fd):
        raise Unavailable(
            f"store folder {str(folder.path)!r} has segments but no manifest; remove the folder to start anew"
        )
    manifest = Manifest(FORMAT, VERSION, schema.hex(), secrets.randbits(64))
    content = {"manifest": asdict(manifest), "xxh3": _digest(manifest)}
    await replace_file(folder, MANIFEST, [json.dumps(content).encode()])
    return manifest


def _digest(manifest: Manifest) -> str:
    digest: str = xxh3_64_hexdigest(json.dumps(asdict(manifest)).encode())
    return digest


def _is_sound(manifest: Manifest) -> bool:
    """Whether every field is of its type: a checksum guards against accidents and not against people."""
    fields = (manifest.format, str), (manifest.version, int), (manifest.schema, str), (manifest.seed, int)
    return all(type(value) is kind for value, kind in fields) and 0 <= manifest.seed < 1 << 64


def _parse(folder: Folder, data: bytes) -> Manifest:
    """The manifest in ``data``."""
    try:
        parsed = json.loads(data)
        manifest = Manifest(**parsed["manifest"])
        intact = _is_sound(manifest) and _digest(manifest) == parsed["xxh3"]
    except (ValueError, TypeError, KeyError, RecursionError):  # the last one: nested beyond all reason
        intact = False
    if not intact:
        path = str(folder.path / MANIFEST)
        raise Unavailable(
            f"store folder {str(folder.path)!r}: its manifest {path!r} is damaged; remove the folder to start anew"
        )
    return manifest
