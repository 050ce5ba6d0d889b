"""A file store in a folder, which is closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from asynccache.storage import CheckedStore
from tests.storage.pages_kit import OPENED, open_at


@pytest_asyncio.fixture(autouse=True)
async def _closing() -> AsyncIterator[None]:
    """What ``open_at`` has opened is closed."""
    yield
    while OPENED:
        await OPENED.pop().aclose()


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> CheckedStore:
    """A file store of 16 MiB in the folder ``s``."""
    return await open_at(tmp_path / "s")
