"""``redis-server`` on loopback: alone, with or without a password, TLS or a limit, and three of them as a cluster."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.stores.server import HOST, Entered, Server, await_start, free_port, path_of

BUS = 10000
"""A cluster's servers talk to each other at their port and so much."""
SLOTS = 16384
SHARE = SLOTS // 3 + 1                                 # of each of three


class RedisServer(Server):
    """One server that keeps everything in memory. ``maxmemory``: bytes; ``tls``: the port speaks TLS only."""

    program = "redis-server"
    hint = "make stores-install"

    def __init__(
        self, port: int = 0, *, maxmemory: int = 0, password: str = "", tls: bool = False, options: Sequence[str] = ()
    ) -> None:
        super().__init__(port)
        self.password = password
        self.tls = Certificate(self.folder) if tls else None
        self._maxmemory = maxmemory
        self._options = options

    @property
    def url(self) -> str:
        """With the path of the certificate, and without the password."""
        if self.tls is not None:
            return f"rediss://{HOST}:{self.port}?ca={self.tls.certificate}"
        return f"redis://{HOST}:{self.port}"

    def command(self, program: str) -> Sequence[str]:
        """Nothing is read from a file of settings, and nothing is written to one."""
        ports = ["--port", str(self.port)] if self.tls is None else ["--port", "0", *self.tls.options(self.port)]
        password = ["--requirepass", self.password] if self.password else []
        limit = ["--maxmemory", str(self._maxmemory)] if self._maxmemory else []
        return [
            program, *ports, "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(self.folder),
            *password, *limit, *self._options,
        ]  # fmt: skip

    def ready(self) -> bool:
        """Whether it answers; where it wants TLS or a password first, whether it listens."""
        if self.tls is not None or self.password:
            return super().ready()
        with suppress(OSError):
            return self.say("PING").startswith("+PONG")
        return False

    def say(self, *words: str | int | bytes) -> str:
        """One command to a server that wants neither TLS nor a password; the first 64 KiB of its reply as they come."""
        said = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        with socket.create_connection((HOST, self.port), timeout=5) as sock:
            sock.sendall(b"*%d\r\n" % len(said) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in said))
            return sock.recv(1 << 16).decode(errors="replace")


class Certificate:
    """A certificate for this machine that vouches for itself, made by ``openssl``."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "server.crt", folder / "server.key"
        openssl = path_of("openssl", install="apt-get install openssl")
        subprocess.run(
            [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", f"subjectAltName=IP:{HOST},DNS:localhost", "-keyout", self.key, "-out", self.certificate],
            check=True, capture_output=True,
        )  # fmt: skip

    def options(self, port: int) -> list[str]:
        """Clients need no certificate of their own."""
        return ["--tls-port", str(port), "--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key),
                "--tls-ca-cert-file", str(self.certificate), "--tls-auth-clients", "no"]  # fmt: skip


class RedisCluster(Entered):
    """Three masters without replicas. It is hung, killed and restarted as one; or one of ``servers`` alone."""

    def __init__(self) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        options += ["--cluster-require-full-coverage", "no"]
        self.servers = [RedisServer(_port_with_bus(), options=options) for _ in range(3)]

    @property
    def url(self) -> str:
        """All three."""
        return "redis://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def start(self) -> Self:
        """Return when every server knows who has which slots."""
        for server in self.servers:
            server.start()
        self._introduce()
        return self

    def hang(self) -> None:
        """All of it."""
        for server in self.servers:
            server.hang()

    def resume(self) -> None:
        """Undo ``hang``."""
        for server in self.servers:
            server.resume()

    def kill(self) -> None:
        """All of it."""
        for server in self.servers:
            server.kill()

    def restart(self) -> None:
        """Kill it and start it again. It keeps nothing in any case, but who has which slots."""
        self.kill()
        for server in self.servers:
            server.start()
        self.wait()

    def say(self, *words: str | int) -> None:
        """One command, to each."""
        for server in self.servers:
            server.say(*words)

    def announce(self, ports: Sequence[int]) -> None:
        """Clients are to find each server at one of these ports, and not at its own; 0: at its own again. Return when
        every server says so of all of them."""
        for server, port in zip(self.servers, ports, strict=True):
            server.say("CONFIG", "SET", "cluster-announce-bus-port", server.port + BUS)
            server.say("CONFIG", "SET", "cluster-announce-port", port)
        shown = [port or server.port for server, port in zip(self.servers, ports, strict=True)]
        await_start(
            lambda: all(f":{port}\r" in server.say("CLUSTER", "SLOTS") for server in self.servers for port in shown),
            lambda: "the servers of the cluster do not hear of each other's ports",
        )

    def close(self) -> None:
        """Kill it and remove its folders."""
        for server in self.servers:
            server.close()

    def _introduce(self) -> None:
        """A third of the slots for each, and everybody meets the first."""
        for i, server in enumerate(self.servers):
            server.say("CLUSTER", "ADDSLOTSRANGE", i * SHARE, min((i + 1) * SHARE, SLOTS) - 1)
            server.say("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in self.servers[1:]:
            server.say("CLUSTER", "MEET", HOST, self.servers[0].port)
        self.wait()

    def wait(self) -> None:
        """Until all servers know each other."""
        await_start(lambda: all(map(self._complete, self.servers)),
                    lambda: "the servers of the cluster do not find each other")

    def _complete(self, server: RedisServer) -> bool:
        info = server.say("CLUSTER", "INFO")
        return all(f"{line}\r" in info for line in ("cluster_state:ok", "cluster_slots_ok:16384", "cluster_size:3"))


def _port_with_bus() -> int:
    """A free port whose bus port is one, too."""
    while (port := free_port()) + BUS > 65535:
        pass
    return port
