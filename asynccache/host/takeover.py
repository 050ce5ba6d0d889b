"""How a new host process gets everything from the one that ran before: memory, index, socket, and who writes where."""

from __future__ import annotations

import os
import socket

import msgspec

from asynccache.errors import ConfigError
from asynccache.host import wire
from asynccache.host.memory import HostMemory
from asynccache.host.server import MOST_DESCRIPTORS, Inherited, Snapshot


def take_over(path: str, timeout: float = 60.0) -> Inherited | None:
    """Ask the server at ``path`` for all that it has; None if there is none. It ends once that is confirmed
    (``Inherited.confirm``), and else goes on. Blocks.

    Raises:
        ConfigError: the server there does not hand over.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    descriptors: list[int] = []

    def receive(count: int, most: int = 0) -> bytes:
        data = bytearray()
        while len(data) < count:
            if most:
                part, found, _, _ = socket.recv_fds(sock, count - len(data), most, socket.MSG_CMSG_CLOEXEC)
                descriptors.extend(found)
            else:
                part = sock.recv(min(count - len(data), 1 << 20))
            if not part:
                raise OSError("it has closed the connection")
            data += part
        return bytes(data)

    def message(most: int) -> bytes:
        return receive(int.from_bytes(receive(wire.LENGTH_BYTES, most), "little"), most)

    try:
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        sock.sendall(wire.frame(wire.Greeting(wire.VERSION, wire.OLDEST)))
        welcome = wire.read_welcome(message(1))
        if isinstance(welcome, wire.Refused):
            raise OSError(welcome.why)
        while descriptors:
            os.close(descriptors.pop())
        sock.sendall(wire.frame(wire.TakeOver(1)))
        answer = wire.read_answer(message(MOST_DESCRIPTORS + 2))
        if not isinstance(answer, wire.Inheritance):
            raise OSError(f"it answers {answer}")
        snapshot = msgspec.msgpack.decode(receive(answer.length), type=Snapshot)
        if len(descriptors) != 2 + len(snapshot.held):
            raise ValueError("descriptors are missing; is their number limited (ulimit -n)?")
        memory = HostMemory(snapshot.layout, descriptors[0], snapshot.allocated)
        listener = socket.socket(fileno=descriptors[1])
    except (OSError, ValueError, msgspec.MsgspecError, IndexError) as error:
        for fd in descriptors:
            os.close(fd)
        sock.close()
        raise ConfigError(f"listen=unix:{path}: the host process there does not hand over: {error}") from None

    def confirm() -> None:
        with sock:
            try:
                sock.sendall(wire.frame(wire.Bye()))
                if sock.recv(1):  # its end says that the other one has heard us; a reset, that it had given us up
                    raise OSError("it goes on")
            except OSError as error:
                raise ConfigError(f"listen=unix:{path}: the host process there has gone on: {error}") from None

    return Inherited(snapshot, memory, listener, descriptors[2:], confirm)
