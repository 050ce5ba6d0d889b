"""The backend that docs/stores.md shows as complete passes the suite that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynccache.storage import StorageBackend
from asynccache.testing.backend_suite import BackendSuite, OpenBackend
from tests.docs.docs_kit import all_blocks


@pytest.fixture(scope="module")
def shown() -> Callable[[], StorageBackend]:
    """The class on the page."""
    [code] = [block.code for block in all_blocks("python") if "class DictBackend" in block.code]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/stores.md", "exec"), names)
    found: Callable[[], StorageBackend] = names["DictBackend"]
    return found


class TestTheBackendOfThePage(BackendSuite):
    @pytest.fixture
    def open_backend(self, shown: Callable[[], StorageBackend]) -> OpenBackend:
        async def open_shown() -> StorageBackend:
            return shown()

        return open_shown
