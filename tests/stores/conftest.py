"""The real servers, started once for a run, or for each worker of one, and ended come what may.

One that cannot start raises ``CannotStart``, of which ``tests/conftest.py`` makes a skip or a failure. Workers do
not share a server, since tests hang and kill the one that they have; such a test puts it back. A server takes a port
that nobody has, so that any number of them can run. The Mooncake master is ended last of all in any case: a process
has one client, and keeps it to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.object_server import Azurite, CephServer, MotoServer
from tests.stores.redis_server import RedisCluster, RedisServer


def started(server: Callable[[], AbstractContextManager[Any]]) -> Any:
    """The fixture of a server of this kind."""

    @pytest.fixture(scope="session")
    def of_the_session() -> Iterator[Any]:
        with server() as running:
            yield running

    return of_the_session


redis_server = started(RedisServer)
redis_cluster = started(RedisCluster)
s3_server = started(MotoServer)                        # with an empty bucket
az_server = started(Azurite)
ceph_server = started(CephServer)
mooncake_master = started(MooncakeMaster)


@pytest.fixture(scope="session")
def host_process() -> Iterator[HostProcess]:
    """An ``asynccache serve``."""
    path = socket_path()
    with server_process(path, "256MiB") as server:
        asyncio.run(server.counts())
        yield server
