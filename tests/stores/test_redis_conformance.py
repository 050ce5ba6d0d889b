"""The conformance suite against a real server and a real cluster, on both loops; and against TLS, on one."""

from __future__ import annotations

from typing import Any

import pytest
from asynccache_backends.redis import RedisBackend

from asynccache.storage import StorageBackend, parse_url
from asynccache.testing.backend_suite import LAYOUT, BackendSuite, OpenBackend


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
