"""The backends as plug-ins."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from asynccache.storage import CheckedStore
from tests.storage.pages_kit import OPENED, open_at


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    """``backends`` as an installed distribution offers them. What else lies in ``folder`` can be imported."""
    info = folder / "plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    offered = "".join(f"{name} = {where}\n" for name, where in backends.items())
    (info / "entry_points.txt").write_text(f"[asynccache.backends]\n{offered}")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


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


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends as an installed distribution offers them."""
    install(tmp_path, monkeypatch, file="asynccache_backends.file:FileBackend",
            memory="asynccache_backends.memory:MemoryBackend")  # fmt: skip
