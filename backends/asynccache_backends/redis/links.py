"""A connected socket, as a connection uses it: as much as goes at once, and never a wait.

Plain sockets take and fill many buffers in one system call. TLS takes them one at a time, and small ones are joined.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from asynccache_backends.redis.resp import Buffer

TLS_BYTES = 64 << 10


class Link(Protocol):
    """``receive`` and ``send`` return how many bytes went. They raise ``BlockingIOError`` if none can go now, and any
    other ``OSError`` if none ever will. ``by_the_piece``: one read takes only a little of what is there, and the loop
    does not see the rest; it ends when nothing can be read."""

    by_the_piece: bool

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the first bytes of ``buffers``; 0: the other end has closed."""
        ...

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send the first bytes of ``buffers``."""
        ...

    def call_at(self, count: int) -> None:
        """The loop is to hear of bytes only when there are so many, or the other end has closed. Only a hint."""
        ...

    def fileno(self) -> int:
        """Of the socket."""
        ...

    def close(self) -> None:
        """At once: what was not sent yet is not sent."""
        ...


class PlainLink:
    """TCP."""

    by_the_piece = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._called_at = 1
        self.fileno = sock.fileno
        self.close = sock.close

    def call_at(self, count: int) -> None:
        """The kernel does it."""
        if count != self._called_at:
            self._called_at = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """One ``recvmsg``."""
        return self._socket.recvmsg_into(buffers)[0]

    def send(self, buffers: Sequence[Buffer]) -> int:
        """One ``sendmsg``."""
        return self._socket.sendmsg(buffers)



class TlsLink:
    """TLS. A send that could not be done must be tried again with the same bytes, and is: they stay at the head."""

    by_the_piece = True

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self.fileno = sock.fileno
        self.close = sock.close

    def call_at(self, count: int) -> None:
        """Nothing: how many bytes arrive for so many is not known."""

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Into the first buffer."""
        try:
            return self._socket.recv_into(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            return 0

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Of the first buffer, or of some small ones."""
        try:
            return self._socket.send(_first(buffers))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None



def _first(buffers: Sequence[Buffer]) -> Buffer:
    """What to send as one: a piece of a large buffer, or all small ones before it."""
    if len(buffers[0]) >= TLS_BYTES // 4:
        return buffers[0][:TLS_BYTES]
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) >= TLS_BYTES // 4:
            break
        small.append(buffer)
    return b"".join(small)[:TLS_BYTES]
