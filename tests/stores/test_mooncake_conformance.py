"""The conformance suite against a real Mooncake store, each test in a namespace of its own."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from asynccache_backends.mooncake import MooncakeBackend

from asynccache.storage import StorageBackend, parse_url
from asynccache.testing.backend_suite import LAYOUT, BackendSuite, OpenBackend

_numbers = count()


@pytest.fixture
def namespace() -> str:
    """One that no other test has."""
    return f"conformance{next(_numbers)}."


class TestMooncake(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self, mooncake_master: Any, namespace: str) -> OpenBackend:
        async def open_backend() -> StorageBackend:
            return await MooncakeBackend.open(parse_url(mooncake_master.url, {"namespace": namespace}), LAYOUT)

        return open_backend

