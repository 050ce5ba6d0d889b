"""The real servers, started once for a run, or for each worker of one, and ended come what may.

One that cannot start raises ``CannotStart``, of which ``tests/conftest.py`` makes a skip or a failure. Workers do
not share a server, since tests hang and kill the one that they have; such a test puts it back. A server takes a port
that nobody has, so that any number of them can run. The Mooncake master is ended last of all in any case: a process
has one client, and keeps it to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.object_server import Azurite, CephServer, MotoServer
from tests.stores.redis_server import RedisCluster, RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One ``redis-server``."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """A cluster of three."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_server() -> Iterator[MotoServer]:
    """An S3 server with an empty bucket."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def az_server() -> Iterator[Azurite]:
    """Azure's blob storage with an empty container."""
    with Azurite() as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[CephServer]:
    """An S3 server by Ceph."""
    with CephServer() as server:
        yield server


@pytest.fixture(scope="session")
def host_process() -> Iterator[HostProcess]:
    """An ``asynccache serve``."""
    path = socket_path()
    with server_process(path, "256MiB") as server:
        asyncio.run(server.counts())
        yield server


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """A ``mooncake_master``."""
    with MooncakeMaster() as master:
        yield master
