"""Whose folder it is: one process at a time (a lock file) and one format (a manifest). Blocking functions."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import aiofiles
import aiofiles.os
from xxhash import xxh3_64_hexdigest

from asynccache.errors import Unavailable
from asynccache_backends.file.segments import list_segments

FORMAT = "asynccache file store"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What must be known before anything else can be read. ``seed`` is the store's random number."""

    format: str
    version: int
    schema: str
    seed: int


class FolderLock:
    """Held until ``release``, or until the process is gone, however it goes."""

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            Unavailable: another process, or another store in this one, has it; the message names folder and process.
        """
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise Unavailable(f"store folder {str(folder)!r} is in use by process {owner}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next one in. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def must_exist(folder: Path) -> None:
    """Raises Unavailable if there is no store in ``folder``."""
    if not (folder / MANIFEST).exists():
        raise Unavailable(f"store folder {str(folder)!r} holds no store")


def claim(folder: Path) -> FolderLock:
    """Make the folder if need be, and lock it.

    Raises:
        Unavailable: it is in use, or cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder)
    except OSError as error:
        raise Unavailable(f"store folder {str(folder)!r}: {error}") from error


async def load_manifest(folder: Path, schema: bytes) -> Manifest:
    """The folder's manifest, made if the folder is new. Not to be cancelled, as ``replace_file``.

    Raises:
        Unavailable: it is damaged, or was written by another format or schema; nothing is touched then.
    """
    path = folder / MANIFEST
    if not path.exists():
        return await _new_manifest(folder, path, schema)
    async with aiofiles.open(path, "rb") as file:
        manifest = _parse(folder, await file.read())
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        raise Unavailable(
            f"store folder {str(folder)!r} was written by {manifest.format!r} version {manifest.version}, "
            f"this is {FORMAT!r} version {VERSION}"
        )
    if manifest.schema != schema.hex():
        raise Unavailable(
            f"store folder {str(folder)!r} was written by another schema: {manifest.schema}, this is {schema.hex()}"
        )
    return manifest


async def replace_file(path: Path, parts: list[bytes]) -> None:
    """Write a file so that after any crash the old one or the whole new one is there.

    Raises OSError. Not to be cancelled, as an ``aiofiles`` call that is cancelled leaves its file open: ``completed``.
    """
    new = path.with_name(path.name + ".new")
    async with aiofiles.open(new, "wb") as file:
        for part in parts:
            await file.write(part)
        await file.flush()
        await aiofiles.os.wrap(os.fdatasync)(file.fileno())
    await aiofiles.os.replace(new, path)
    await aiofiles.os.wrap(sync_folder)(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were created or deleted in ``folder`` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


async def _new_manifest(folder: Path, path: Path, schema: bytes) -> Manifest:
    if list_segments(folder):
        raise Unavailable(f"store folder {str(folder)!r} has segments but no manifest; remove the folder to start anew")
    manifest = Manifest(FORMAT, VERSION, schema.hex(), secrets.randbits(64))
    content = {"manifest": asdict(manifest), "xxh3": _digest(manifest)}
    await replace_file(path, [json.dumps(content).encode()])
    return manifest


def _digest(manifest: Manifest) -> str:
    digest: str = xxh3_64_hexdigest(json.dumps(asdict(manifest)).encode())
    return digest


def _parse(folder: Path, data: bytes) -> Manifest:
    try:
        parsed = json.loads(data)
        manifest = Manifest(**parsed["manifest"])
        intact = _digest(manifest) == parsed["xxh3"]
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise Unavailable(f"store folder {str(folder)!r}: its manifest is damaged; remove the folder to start anew")
    return manifest
