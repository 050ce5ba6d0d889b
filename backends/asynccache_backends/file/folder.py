"""A store's folder: the locks that let one process at a time use it, and the manifest that tells its format.

The lock on the folder itself is what protects the store: it holds whatever is done to the folder's name or to the files
in it. The file ``lock`` is locked, too. It says which process uses the folder, and keeps out older versions of this
backend, which know no other lock.
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
from aiofiles.os import wrap
from xxhash import xxh3_64_hexdigest

from asynccache.errors import Unavailable
from asynccache.storage import completed
from asynccache_backends.file.files import PRIVATE, THREADS, Folder, NotPlain, ThreadIO, make_folder
from asynccache_backends.file.segments import list_segments

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
    """The facts that must be known before any other file can be read. ``schema`` is the digest of the record schema, in
    hex. ``seed`` is the store's random number."""

    format: str
    version: int
    schema: str
    seed: int


class FolderLock:
    """The lock on a store's folder. It is held from ``take`` until ``release``, or until the process ends, in whatever
    way."""

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._file = -1

    async def take(self, io: ThreadIO, path: Path, *, mode: int | None, new: bool) -> Folder:
        """Open and lock the folder ``path``, and return it. If this raises, nothing is left open, but for what
        ``release`` closes. Cancelling it waits until the folder is locked.

        ``new``: whether to make the folder if it is missing; otherwise it must hold a store. ``mode``: permissions for
        the folder and, without the bits for execution, for its files; None: existing permissions are left alone, and
        those of new files follow from the folder's.

        Raises:
            Unavailable: another process, or another store in this process, uses the folder (the message has the number
                of the process); the folder holds no store; or it cannot be made or written.
        """
        try:
            folder = await io.run(self._lock, path, mode, new)
            await completed(_sign(folder))
        except BlockingIOError:
            owner = await _owner(self._folder) if self._folder is not None else "unknown"
            self.release()
            own = owner == str(os.getpid())
            why = ", this very process: share the cache that has it, or close that first" if own else ""
            raise Unavailable(f"store folder {str(path)!r} is in use by process {owner}{why}") from None
        except OSError as error:
            self.release()
            raise Unavailable(f"store folder {str(path)!r}: {error}") from error
        except BaseException:
            self.release()
            raise
        return folder

    def release(self) -> None:
        """Give up the lock and close the folder. Calling it twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._folder is not None:
            self._folder.close()

    def _lock(self, path: Path, mode: int | None, new: bool) -> Folder:
        if new:
            make_folder(path, PRIVATE if mode is None else mode)
        self._folder = folder = Folder(path, mode) if new else _folder_of_a_store(path, mode)
        _lock_folder(folder)
        self._file = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mode is not None:
            folder.tighten(lambda name: _OURS.fullmatch(name) is not None)
        return folder


def _lock_folder(folder: Folder) -> None:
    """Lock the folder itself. Where folders cannot be locked, as on NFS, this does nothing, and only the file is
    locked."""
    try:
        fcntl.flock(folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_SUCH_LOCK:
            raise


async def _sign(folder: Folder) -> None:
    async with aiofiles.open(LOCK, "r+b", opener=folder.open, executor=THREADS) as file:
        await file.truncate(0)
        await file.write(f"{os.getpid()}\n".encode())


async def _owner(folder: Folder) -> str:
    """Return the process that has the lock, as far as the file ``lock`` still says."""
    try:
        return (await folder.read(LOCK, 32)).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _folder_of_a_store(path: Path, mode: int | None) -> Folder:
    """Open the folder of an existing store. Raises Unavailable if there is none in ``path``: locking would make a file
    in a folder that is no store's."""
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
    """Return the folder's manifest. In a new folder it is written first.

    Raises:
        Unavailable: it is damaged, or has another format or schema; then nothing was changed.
        OSError: it cannot be read, or is no plain file.
    """
    try:
        data = await folder.read(MANIFEST, MOST_MANIFEST)
    except FileNotFoundError:
        return await _new_manifest(folder, schema)
    manifest = _parse(folder, data)
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


async def noted_capacity(folder: Folder) -> int | None:
    """Return the capacity in bytes that ``note_capacity`` wrote last; None if there is no readable note.

    Raises:
        OSError: the disk refuses, or something that is no plain file has the note's name.
    """
    try:
        text = await folder.read(CAPACITY, MOST_MANIFEST)
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and len(text) < 20 else None


async def note_capacity(folder: Folder, capacity: int) -> None:
    """Note in the folder how many bytes the store may take, for those who only look at it. A disk that is full or
    broken takes no note, and the store is as usable without.

    Raises:
        NotPlain: something that is no plain file has the note's name.
    """
    try:
        await folder.rewrite(CAPACITY, [str(capacity).encode()])
    except NotPlain:
        raise
    except OSError:
        pass


async def _new_manifest(folder: Folder, schema: bytes) -> Manifest:
    if await wrap(list_segments)(folder.fd, executor=THREADS):
        raise Unavailable(
            f"store folder {str(folder.path)!r} has segments but no manifest; remove the folder to start anew"
        )
    manifest = Manifest(FORMAT, VERSION, schema.hex(), secrets.randbits(64))
    content = {"manifest": asdict(manifest), "xxh3": _digest(manifest)}
    await folder.rewrite(MANIFEST, [json.dumps(content).encode()])
    return manifest


def _digest(manifest: Manifest) -> str:
    digest: str = xxh3_64_hexdigest(json.dumps(asdict(manifest)).encode())
    return digest


def _is_sound(manifest: Manifest) -> bool:
    """Return True if every field has its type. The checksum does not tell that: somebody may have written the file by
    hand."""
    fields = (manifest.format, str), (manifest.version, int), (manifest.schema, str), (manifest.seed, int)
    return all(type(value) is kind for value, kind in fields) and 0 <= manifest.seed < 1 << 64


def _parse(folder: Folder, data: bytes) -> Manifest:
    """Return the manifest in ``data``. Raises Unavailable if it is damaged."""
    try:
        parsed = json.loads(data)
        manifest = Manifest(**parsed["manifest"])
        intact = _is_sound(manifest) and _digest(manifest) == parsed["xxh3"]
    except (ValueError, TypeError, KeyError, RecursionError):  # RecursionError: JSON that is nested too deeply
        intact = False
    if not intact:
        path = str(folder.path / MANIFEST)
        raise Unavailable(
            f"store folder {str(folder.path)!r}: its manifest {path!r} is damaged; remove the folder to start anew"
        )
    return manifest
