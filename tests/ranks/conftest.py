"""Which tests of ranks are in the gate: those of ``CORE`` that are not marked otherwise. All of them are in ``make
test-ranks``."""

from __future__ import annotations

from pathlib import Path

import pytest

CORE = {
    "test_cache_worlds.py", "test_chain.py", "test_frames.py", "test_handshake.py", "test_rank_events.py",
    "test_rank_keys.py", "test_rank_settings.py",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)                        # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in CORE:
            item.add_marker("ranks")
