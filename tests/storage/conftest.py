"""The conformance suite runs on asyncio and on uvloop; the other tests of this folder, on asyncio."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name == "test_backend_conformance.py":
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends as an installed distribution offers them."""
    info = tmp_path / "plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[asynccache.backends]\nfile = asynccache_backends.file:FileBackend\n"
        "memory = asynccache_backends.memory:MemoryBackend\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
