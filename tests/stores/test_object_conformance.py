"""The object store backend against the shipped suite, on both loops: on a real S3 server, on Azure's emulator where it
is installed, and on a folder by the same library."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from asynccache.storage import StorageBackend
from asynccache.testing.backend_suite import BackendSuite, OpenBackend
from tests.stores.az_server import Azurite
from tests.stores.object_store_kit import folder_url, open_backend
from tests.stores.s3_server import MotoServer

_PREFIXES = itertools.count()


def opener(url: str) -> OpenBackend:
    async def open_store() -> StorageBackend:
        return await open_backend(url)

    return open_store


class TestObjectStoreOnS3(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self, s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> OpenBackend:
        for name, value in s3_server.client_environment.items():
            monkeypatch.setenv(name, value)
        return opener(s3_server.url_at(f"conformance/{next(_PREFIXES)}"))


class TestObjectStoreOnAzure(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self, az_server: Azurite, monkeypatch: pytest.MonkeyPatch) -> OpenBackend:
        for name, value in az_server.client_environment.items():
            monkeypatch.setenv(name, value)
        return opener(az_server.url_at(f"conformance/{next(_PREFIXES)}"))


class TestObjectStoreInAFolder(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> OpenBackend:
        return opener(folder_url(tmp_path / "store"))
