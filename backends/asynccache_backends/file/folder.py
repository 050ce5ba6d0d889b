"""A store's folder: the locks that let one process at a time use it, and the manifest that tells its format.

The lock on the folder itself protects the store: nothing that is done to the folder's name or to the files in it breaks
that lock. The file ``lock`` is locked, too: it says which process uses the folder, and it is all there is where folders
cannot be locked, as on NFS.

The options in a file store's URL:

    file:PATH?capacity=10GiB&direct=auto|on|off&segment=64MiB&mode=0700

``capacity`` is how much the segments may take on the disk. ``direct`` is about O_DIRECT: ``auto`` uses it if the folder
allows it, for pages whose length and buffers are aligned to 4 KiB. ``segment`` is the size of a segment file. ``mode``
has the permissions of the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import aiofiles
import msgspec
from msgspec import Meta, structs
from xxhash import xxh3_64_hexdigest

from asynccache.errors import ConfigError, Unavailable
from asynccache.settings import Settings
from asynccache.storage import ParsedUrl, Size, StoreLayout, ThreadPool, completed
from asynccache_backends.file.files import PRIVATE, Folder, make_folder
from asynccache_backends.file.segments import BLOCK_BYTES, group_bytes, list_segments

LEAST_SEGMENT = 4 << 20
USUAL_SEGMENT = 128 << 20
FEWEST_SEGMENTS = 32
MOST_SEGMENTS = 128

_MODE = re.compile(r"0?7[0-7]{2}")


def _permissions(name: str, text: str) -> int:
    if _MODE.fullmatch(text) is None:
        wanted = "who may use the folder, in octal as chmod has it and 7 for the owner, as in mode=0750"
        raise ConfigError(f"{name}={text!r}: expected {wanted}")
    return int(text, 8)


class FileSettings(Settings, frozen=True):
    """The settings of a file store. Sizes are in bytes."""

    folder: Path
    used: bool
    """Whether pages may be stored. If not, the store is only looked at, and must exist."""
    capacity: Size = 10 << 30
    segment: Size = 0
    direct: Literal["auto", "on", "off"] = "auto"
    mode: Annotated[int, Meta(extra={"parse": _permissions})] = 0
    """Permissions of the folder and, without the bits for execution, of its files; 0: as the folder has them."""


def settings_of(url: ParsedUrl, layout: StoreLayout) -> FileSettings:
    """Return the settings in ``url``. If the layout has no pools, the store is only looked at.

    Raises:
        ConfigError: an option is unknown or unusable, no folder is named, or the capacity does not hold three segments
            of at least one page each.
    """
    if not url.path or "\0" in url.path:
        raise ConfigError(f"storage={str(url)!r} names no folder")
    found = url.settings(FileSettings, folder=Path(url.path), used=layout.largest > 0)
    capacity, segment = found.capacity, found.segment
    least = group_bytes(layout.largest or 1, 1) + BLOCK_BYTES  # a page, and the footer
    if "segment" not in url.options:
        segment = max(least, usual_segment(capacity))
    if segment % BLOCK_BYTES or segment < least:
        raise ConfigError(f"storage option segment={segment} must be a multiple of {BLOCK_BYTES}, at least {least}")
    if capacity < 3 * segment:
        raise ConfigError(f"storage option capacity={capacity} is less than three segments of {segment} bytes")
    mode = found.mode or (PRIVATE if found.used else 0)
    return structs.replace(found, segment=segment, mode=mode)


def usual_segment(capacity: int) -> int:
    """Return the size of a segment for this capacity. Small segments are better, since a segment is allocated and
    reclaimed as a whole; but there must not be too many, since each takes two file descriptors."""
    wanted = max(min(capacity // FEWEST_SEGMENTS, USUAL_SEGMENT), capacity // MOST_SEGMENTS)
    return max(wanted, min(LEAST_SEGMENT, capacity // 4)) // BLOCK_BYTES * BLOCK_BYTES


FORMAT = "asynccache file store"
VERSION = 2
MANIFEST = "manifest.json"
LOCK = "lock"
MOST_MANIFEST = 4 << 10

_OURS = re.compile(r"manifest\.json(\.new)?|lock|segment-[0-9a-f]{16}\.kv")
_NO_SUCH_LOCK = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


class FolderLock:
    """The lock on a store's folder. It is held from ``take`` until ``release``, or until the process ends, in whatever
    way, and with it all that were forked from it meanwhile."""

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._file = -1
        self._process = os.getpid()

    def take(self, path: Path, mode: int | None, new: bool) -> Folder:
        """Open and lock the folder ``path``, and return it. It blocks. ``release`` closes what this has opened, also if
        it raises.

        ``new``: whether to make the folder if it is missing; otherwise it must hold a store. ``mode``: permissions for
        the folder and, without the bits for execution, for its files; None: existing permissions are left alone, and
        those of new files follow from the folder's.

        Raises:
            Unavailable: another process, or another store in this process, uses the folder (the message has the number
                of the process), or the folder holds no store.
            OSError: the folder cannot be made or written.
        """
        if new:
            make_folder(path, PRIVATE if mode is None else mode)
        try:
            self._folder = folder = Folder(path, mode)
            if not new and not folder.has(MANIFEST):  # before anything is made in a folder that is no store's
                raise FileNotFoundError
        except FileNotFoundError:
            raise Unavailable(f"store folder {str(path)!r} holds no store") from None
        self._file = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
        for fd in (folder.fd, self._file):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                own = owner == str(os.getpid())
                why = ", this very process: share the cache that has it, or close that first" if own else ""
                raise Unavailable(f"store folder {str(path)!r} is in use by process {owner}{why}") from None
            except OSError as error:  # folders cannot be locked on NFS, say; then the file is all there is
                if fd == self._file or error.errno not in _NO_SUCH_LOCK:
                    raise
        if mode is not None:
            folder.tighten(lambda name: _OURS.fullmatch(name) is not None)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return folder

    def release(self) -> None:
        """Give up the lock and close the folder. Calling it twice is fine."""
        fds = [fd for fd in (self._file, self._folder.fd if self._folder else -1) if fd >= 0]
        if self._process == os.getpid():  # a forked process has the same locks: it keeps them, and must not end them
            for fd in fds:
                with suppress(OSError):  # the file system has no locks
                    fcntl.flock(fd, fcntl.LOCK_UN)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._folder is not None:
            self._folder.close()


def supports_direct(folder: Folder) -> bool:
    """Return True if files in this folder can be opened with O_DIRECT. It blocks."""
    with suppress(OSError):
        os.close(folder.open(LOCK, os.O_RDONLY | os.O_DIRECT))
        return True
    return False


class Manifest(msgspec.Struct, frozen=True):
    """The facts that must be known before any other file can be read. ``schema`` is the digest of the record schema, in
    hex. ``seed`` is the store's random number.
    """

    format: str
    version: int
    schema: str
    seed: int
    capacity: int = 0
    """How many bytes the store may take, for those who only look at it."""


class _ManifestFile(msgspec.Struct):
    manifest: msgspec.Raw
    xxh3: str


async def load_manifest(folder: Folder, threads: ThreadPool, schema: bytes, capacity: int | None) -> Manifest:
    """Return the folder's manifest. In a new folder it is written first. ``capacity`` is noted in it, unless it is
    None; a disk that is full or broken takes no note, and the store is as usable without.

    Cancelling it waits until no file is open.

    Raises:
        Unavailable: it is damaged, or has another format or schema; then nothing was changed.
        OSError: it cannot be read, or is no plain file.
    """
    where = f"store folder {str(folder.path)!r}"
    try:
        manifest = unpack_manifest(await completed(_read(folder, threads)))
    except FileNotFoundError:
        if await threads.run(list_segments, folder.fd):
            raise Unavailable(f"{where} has segments but no manifest; remove the folder to start anew") from None
        manifest = Manifest(FORMAT, VERSION, schema.hex(), secrets.randbits(64), capacity or 0)
        await completed(_write(folder, threads, manifest))
    if manifest is None:
        path = str(folder.path / MANIFEST)
        raise Unavailable(f"{where}: its manifest {path!r} is damaged; remove the folder to start anew")
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise Unavailable(
            f"{where} was written by {manifest.format!r} version {manifest.version}, this is {FORMAT!r} version "
            f"{VERSION}, which cannot read it; name another folder, or remove this one to start anew"
        )
    if manifest.schema != schema.hex():
        raise Unavailable(f"{where} was written by another schema: {manifest.schema}, this is {schema.hex()}")
    if capacity not in (None, manifest.capacity):
        manifest = msgspec.structs.replace(manifest, capacity=capacity)
        with suppress(OSError):
            await completed(_write(folder, threads, manifest))
    return manifest


async def _read(folder: Folder, threads: ThreadPool) -> bytes:
    async with aiofiles.open(MANIFEST, "rb", opener=folder.open, executor=threads) as file:
        size = await file.seek(0, os.SEEK_END)
        if size > MOST_MANIFEST:
            path = folder.path / MANIFEST
            raise OSError(f"{path} has {size} bytes, and {MOST_MANIFEST} are the most that are believed; move it away")
        await file.seek(0)
        return await file.read(size)


async def _write(folder: Folder, threads: ThreadPool, manifest: Manifest) -> None:
    """Write the manifest so that after a crash either the old one or the whole new one is there."""
    new = f"{MANIFEST}.new"
    async with aiofiles.open(new, "wb", opener=lambda name, _: folder.renew(name), executor=threads) as file:
        await file.write(pack_manifest(manifest))
        await file.flush()
        await threads.run(os.fdatasync, file.fileno())
    await threads.run(os.replace, new, MANIFEST, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    await threads.run(folder.sync)


def pack_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file: the manifest and its checksum."""
    text = msgspec.json.encode(manifest)
    return msgspec.json.encode(_ManifestFile(msgspec.Raw(text), xxh3_64_hexdigest(text)))


def unpack_manifest(data: bytes) -> Manifest | None:
    """Return the manifest in ``data``; None if it is damaged. Those of earlier versions can be read, too."""
    try:
        file = msgspec.json.decode(data, type=_ManifestFile)
        manifest = msgspec.json.decode(file.manifest, type=Manifest)
    except (ValueError, RecursionError):  # RecursionError: JSON that is nested too deeply
        return None
    sound = xxh3_64_hexdigest(bytes(file.manifest)) == file.xxh3 and 0 <= manifest.seed < 1 << 64
    return manifest if sound else None
