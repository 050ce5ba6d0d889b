"""The real servers, started once for a run, or for each worker of one, and ended come what may.

One that cannot start is a failed test where the stores are required, and a skip that says why anywhere else. Workers do
not share a server, since tests hang and kill the one that they have; such a test puts it back. A server takes a port
that nobody has, so that any number of them can run. The Mooncake master is ended last of all in any case: a process
has one client, and keeps it to its end.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn, Protocol, TypeVar

import pytest
import uvloop

from tests.stores.server import CannotStart, required


class Startable(Protocol):
    """A server, or several that form one."""

    def start(self) -> object: ...
    def close(self) -> None: ...


S = TypeVar("S", bound=Startable)

BOTH_LOOPS = ("test_redis_conformance.py", "test_redis_connection.py", "test_object_conformance.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of code that uses sockets itself, or is called back by a library's threads, run on both loops."""
    if item.path.name in BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


def refuse(reason: str) -> NoReturn:
    """Fail the test, or skip it where the stores are not required, because a store cannot be had."""
    if required():
        pytest.fail(reason)
    pytest.skip(reason)


def started(module: str, name: str, package: str, extra: str) -> Iterator[Any]:
    """The server, once it serves; its client's ``package`` has to be there, too."""
    if find_spec(package) is None:
        refuse(f"{package} is not installed: pip install 'asynccache[{extra}]'")
    try:
        server = getattr(import_module(f"tests.stores.{module}"), name)()
    except ImportError as error:
        refuse(f"{name}: {error}")
    yield from served(server)


def served(server: S) -> Iterator[S]:
    """``server`` while it serves. The test is refused if it cannot."""
    try:
        server.start()
    except CannotStart as error:
        server.close()
        refuse(str(error))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Any]:
    """One ``redis-server``."""
    yield from started("redis_server", "RedisServer", "asynccache_backends", "redis")


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Any]:
    """A cluster of three."""
    yield from started("redis_server", "RedisCluster", "asynccache_backends", "redis")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 server with an empty bucket."""
    yield from started("s3_server", "MotoServer", "obstore", "object")


@pytest.fixture(scope="session")
def az_server() -> Iterator[Any]:
    """Azure's blob storage with an empty container, where somebody has installed it; nowhere is it required."""
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite is not installed: npm install -g azurite")
    yield from started("az_server", "Azurite", "obstore", "object")


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[Any]:
    """An S3 server by Ceph, where somebody has installed it; nowhere is it required."""
    if shutil.which("radosgw") is None:
        pytest.skip("radosgw is not installed: make stores-install S3=ceph")
    yield from started("ceph_server", "CephServer", "obstore", "object")


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[Any]:
    """A ``mooncake_master``."""
    yield from started("mooncake_server", "MooncakeMaster", "mooncake", "mooncake")
