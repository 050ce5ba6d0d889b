"""A file store in a folder, and pages whose content is a function of their key."""

from __future__ import annotations

import os
from pathlib import Path

from asynccache_backends.file import FileBackend

from asynccache.storage import CheckedStore, parse_url
from asynccache.testing.backend_suite import LAYOUT


async def open_at(folder: Path, options: str = "capacity=16MiB&segment=1MiB") -> CheckedStore:
    return CheckedStore(await FileBackend.open(parse_url(f"file:{folder}?{options}"), LAYOUT), LAYOUT)


def open_files(folder: Path) -> list[str]:
    """The files that this process has open under ``folder``."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [path for path in found if str(folder) in path]
