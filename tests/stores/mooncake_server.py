"""A real Mooncake store: a master, and a process of its own that contributes memory, so that pages outlive the clients
of the tests. The functions that kill, hang or restart do so to the master; ``owner`` is the other process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Self

from asynccache.extras import install
from tests.stores.server import HOST, CannotStart, Server, free_port, listens

LIBRARIES = ("libibverbs.so.1", "libnuma.so.1")


def answer(port: int, path: str) -> str:
    """What the master's admin server says; nothing while it is not there."""
    connection, text = HTTPConnection(HOST, port, timeout=2), ""
    with suppress(OSError, HTTPException):
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
    connection.close()
    return text


class MooncakeMaster(Server):
    """``segment``: MiB that its owner contributes; 0: it has no owner. ``ttl``: seconds after which an owner that is
    silent is gone; generous, for this machine may be busy."""

    program = "mooncake_master"
    libraries = LIBRARIES
    hint = install("mooncake")

    def __init__(self, *, segment: int = 256, ttl: int = 30) -> None:
        super().__init__()
        self.admin = free_port()
        self._ttl = ttl
        self.owner = SegmentOwner(self, segment) if segment else None

    @property
    def url(self) -> str:
        """With the address of the admin server, so that it can be listed."""
        return f"mooncake://{HOST}:{self.port}?admin={HOST}:{self.admin}"

    def command(self, program: str) -> Sequence[str]:
        """Bound to loopback, all of it."""
        return (
            program, f"-rpc_address={HOST}", f"-rpc_port={self.port}", f"-metrics_host={HOST}",
            f"-metrics_port={self.admin}", f"-client_ttl={self._ttl}", "-logtostderr=true",
        )  # fmt: skip

    def ready(self) -> bool:
        """Both of its servers listen."""
        return listens(self.port) and listens(self.admin)

    def start(self) -> Self:
        """With its owner, which finds a restarted master by itself."""
        super().start()
        if self.owner is not None:
            try:
                self.owner.start() if self.owner.pid is None else self.owner.wait()
            except CannotStart:
                self.kill()
                raise
        return self

    def close(self) -> None:
        """Both."""
        if self.owner is not None:
            self.owner.close()
        super().close()


class SegmentOwner(Server):
    """The store's own client program: it contributes a segment and does nothing else."""

    program = "mooncake_client"
    libraries = LIBRARIES
    hint = install("mooncake")

    def __init__(self, master: MooncakeMaster, segment: int) -> None:
        super().__init__()
        self._master = master
        self._segment = segment

    def command(self, program: str) -> Sequence[str]:
        """Ports that it opens for itself are on loopback."""
        return (
            program, f"-host={HOST}", f"-port={self.port}", f"-master_server_address={HOST}:{self._master.port}",
            "-metadata_server=P2PHANDSHAKE", "-protocol=tcp", f"-global_segment_size={self._segment}MB",
        )  # fmt: skip

    def ready(self) -> bool:
        """The master knows its segment."""
        return HOST in answer(self._master.admin, "/get_all_segments")

    def wait(self) -> None:
        """Until the master knows it again."""
        self._wait()
