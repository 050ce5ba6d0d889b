"""The suite of all backends, for a host process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from asynccache.testing.backend_suite import BackendSuite, OpenBackend
from tests.host.host_kit import client, serving, socket_path


class TestHost(BackendSuite):
    persistent = True

    @pytest_asyncio.fixture
    async def open_backend(self) -> AsyncIterator[OpenBackend]:  # type: ignore[override]
        path = socket_path()
        async with serving(path) as server:
            yield lambda: client(path)
            assert not server.table.reserved_bytes
            server.table.audit()


class TestHostWithAFolderBehind(BackendSuite):
    persistent = True

    @pytest_asyncio.fixture
    async def open_backend(self, tmp_path: object) -> AsyncIterator[OpenBackend]:  # type: ignore[override]
        path = socket_path()
        async with serving(path, stores=[f"file:{tmp_path}/kv?capacity=64MiB"]) as server:
            yield lambda: client(path)
            assert not server.table.reserved_bytes
            server.table.audit()
