"""Every backend of this distribution, and the wrappers, against the shipped suite."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend

from asynccache.storage import PageKey, StorageBackend, parse_url
from asynccache.testing.backend_suite import LAYOUT, BackendSuite, OpenBackend
from asynccache.testing.faulty_backend import FaultyBackend
from asynccache.testing.slow_backend import SlowBackend
from tests.simulated.backend import Hostility, SimulatedBackend


class TestMemoryBackend(BackendSuite):
    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        async def open_memory() -> StorageBackend:
            return await MemoryBackend.open(parse_url("memory:"), LAYOUT)

        return open_memory


class _FileSuite(BackendSuite):
    persistent = True
    direct = "off"

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> OpenBackend:
        async def open_file() -> StorageBackend:
            return await FileBackend.open(parse_url(f"file:{tmp_path}/s?capacity=64MiB&direct={self.direct}"), LAYOUT)

        return open_file


class TestFileBackendBuffered(_FileSuite):
    pass


class TestFileBackendDirect(_FileSuite):
    direct = "auto"


class TestSimulatedBackend(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        pages: dict[PageKey, tuple[bytes, bytes]] = {}

        async def open_simulated() -> StorageBackend:
            return SimulatedBackend(Random(1), Hostility(delay=0.0), pages)

        return open_simulated


class TestWrappersThatDoNothing(BackendSuite):
    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        async def open_wrapped() -> StorageBackend:
            return SlowBackend(FaultyBackend(MemoryBackend(), rate=0.0), latency=0.0, bandwidth=1e12)

        return open_wrapped
