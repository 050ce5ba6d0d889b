"""The shipped suite against every real store."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.redis import RedisBackend

from asynccache.storage import StorageBackend, parse_url
from asynccache.testing.backend_suite import LAYOUT, BackendSuite, OpenBackend
from tests.stores.object_server import Azurite, MotoServer
from tests.stores.object_store_kit import folder_url, open_backend

# The conformance suite against a real server and a real cluster, on both loops; and against TLS, on one.


class _Suite(BackendSuite):
    persistent = True

    async def emptied(self, url: str) -> None:
        backend = await RedisBackend.open(parse_url(url), LAYOUT)
        await backend.clear()
        await backend.aclose()

    def opener(self, url: str) -> OpenBackend:
        """The first that a test opens is empty."""
        opened: list[StorageBackend] = []

        async def open_redis() -> StorageBackend:
            if not opened:
                await self.emptied(url)
            opened.append(await RedisBackend.open(parse_url(url), LAYOUT))
            return opened[-1]

        return open_redis


class TestOneServer(_Suite):
    @pytest.fixture
    def open_backend(self, redis_server: Any) -> OpenBackend:
        return self.opener(redis_server.url)


class TestACluster(_Suite):
    @pytest.fixture
    def open_backend(self, redis_cluster: Any) -> OpenBackend:
        return self.opener(redis_cluster.url)


# The object store backend against the shipped suite, on both loops: on a real S3 server, on Azure's emulator where it
# is installed, and on a folder by the same library.


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
