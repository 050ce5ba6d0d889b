"""The backends as plug-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


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
