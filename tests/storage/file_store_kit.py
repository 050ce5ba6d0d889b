"""A file store in a folder, and pages whose content is a function of their key."""

from __future__ import annotations

from pathlib import Path

from asynccache_backends.file import FileBackend

from asynccache.storage import CheckedStore, parse_url
from asynccache.testing.backend_suite import LAYOUT


async def open_at(folder: Path, options: str = "capacity=16MiB&segment=1MiB") -> CheckedStore:
    return CheckedStore(await FileBackend.open(parse_url(f"file:{folder}?{options}"), LAYOUT), LAYOUT)
