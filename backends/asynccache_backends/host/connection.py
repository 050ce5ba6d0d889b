"""The connection to a host process. It is made when a call needs it, and made again once it is lost.

What always holds:
* Without a server a call fails at once. At most one attempt is made in ``AGAIN`` seconds, and all calls share it.
* A call that was cancelled is answered all the same; slots that such an answer grants are given back.
* Only a server of this user, of root, or of the user that the URL names is spoken to: checksums are not keyed, so a
  false one could serve false pages.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from itertools import count
from typing import Any

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.host import wire
from asynccache.host.sockets import peer_of
from asynccache_backends.host.mapping import HostMapping

AGAIN = 0.05
CONNECT = 2.0


class HostChannel(asyncio.Protocol):
    """An open connection, in the protocol's ``version``. ``boot``: which memory it is about. ``pages``, ``bytes``: what
    the server has, by its last answer. ``lost``: why it has ended; None while it has not."""

    def __init__(self, welcome: wire.Welcomed, mapping: HostMapping) -> None:
        self.boot = welcome.boot
        self.version = welcome.version
        self.mapping = mapping
        self.longest = welcome.longest
        self.pages = welcome.pages
        self.bytes = welcome.held
        self.lost: Unavailable | None = None
        self._numbers = count(1)
        self._frames = wire.Frames(64 << 20)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Hand answers to those who wait for them."""
        try:
            for body in self._frames.feed(data):
                self._take(wire.read_answer(body))
        except (BackendError, ValueError) as error:  # of msgspec's, too
            self.end(f"the host process sends what is no answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whoever waits."""
        self.end("the host process has closed the connection")

    def end(self, why: str, *, bye: bool = False) -> None:
        """Fail whoever waits, and close the connection. ``bye``: nothing copies into the memory any more."""
        if bye and not self._transport.is_closing():
            self._transport.write(wire.frame(wire.Bye()))
        self.fail(why)
        self._transport.close()

    def fail(self, why: str) -> None:
        """Fail whoever waits, and all calls to come."""
        self.lost = self.lost or Unavailable(why)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(Unavailable(why))

    def tell(self, message: wire.HostMessage) -> None:
        """Send a message that gets no answer."""
        if not self._transport.is_closing():
            self._transport.write(wire.frame(message))

    async def ask(self, make: Callable[[int], wire.HostMessage]) -> Any:
        """Send the request that ``make`` makes with its number, and return the answer. Cancelling it returns at once.

        Raises:
            BackendError: the server refuses, or has gone.
        """
        if self.lost is not None:
            raise Unavailable(str(self.lost))
        number = next(self._numbers)
        request = make(number)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._transport.write(wire.frame(request))
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            answered = future.done() and not future.cancelled() and not future.exception()
            if isinstance(request, wire.Reserve) and answered:  # in this very turn
                self.tell(wire.GiveBack(future.result().slots, future.result().generations))
            raise
        finally:
            del future  # its error refers to this frame and its callers', and they to a memory that may be gone

    def _take(self, answer: wire.Answers) -> None:
        future = self._waiting.pop(answer.number, None)
        if isinstance(answer, wire.Refused):
            if future is not None and not future.done():
                future.set_exception(BackendError(answer.why))
            return
        self.pages, self.bytes = answer.pages, answer.held
        if future is not None and not future.done():
            future.set_result(answer)
        elif isinstance(answer, wire.Places):  # slots that were found, and not granted, stay as they are
            self.tell(wire.GiveBack(answer.slots, answer.generations))


class HostConnection:
    """The connection of one backend, for one event loop. ``label``: whom its pages count for. ``owner``: the user that
    the server must be of; below 0: this process's own, or root.

    ``connects`` counts the connections that were made; ``refused`` is why the server will not have this client.
    """

    def __init__(self, path: str, label: str, owner: int) -> None:
        self.connects = 0
        self.refused: ConfigError | None = None
        self._path = path
        self._label = label
        self._owner = owner
        self._pid = os.getpid()
        self._channel: HostChannel | None = None
        self._mapping: tuple[bytes, HostMapping] | None = None
        self._connecting: asyncio.Task[HostChannel] | None = None
        self._failed = Unavailable("")
        self._try_at = 0.0
        self._owed: dict[bytes, list[wire.GiveBack]] = {}

    @property
    def channel(self) -> HostChannel | None:
        """The last connection that there was, open or not."""
        return self._channel

    @property
    def forked(self) -> bool:
        """True in a child of the process that made this."""
        return os.getpid() != self._pid

    async def ready(self) -> HostChannel:
        """Return the open connection, making it if there is none. Cancelling it returns at once.

        Raises:
            Unavailable: there is no server, or none that will have this client.
        """
        if self.forked:
            raise Unavailable("this process was forked, and its store belongs to the parent: open one of its own")
        if self._channel is not None and self._channel.lost is None:
            return self._channel
        if self._connecting is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._try_at:
                raise Unavailable(str(self._failed))
            self._connecting = loop.create_task(self._connect(), name="asynccache-host-connect")
            self._connecting.add_done_callback(self._connected)
        task = self._connecting
        await asyncio.wait([task])  # whoever is cancelled leaves it to the others
        return task.result()

    def owe(self, channel: HostChannel, owed: wire.GiveBack) -> None:
        """Give these slots back, now or when there is a connection again; nothing copies into them any more."""
        if not owed.slots:
            return
        if channel.lost is None:
            channel.tell(owed)
        else:
            self._owed.setdefault(channel.boot, []).append(owed)

    def _connected(self, task: asyncio.Task[HostChannel]) -> None:
        self._connecting = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed = Unavailable(str(error))
            self._try_at = asyncio.get_event_loop().time() + AGAIN

    async def _connect(self) -> HostChannel:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors: list[int] = []
        try:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT):
                await loop.sock_connect(sock, self._path)
                _, uid, _ = peer_of(sock)
                if uid not in ((0, os.geteuid()) if self._owner < 0 else (self._owner,)):
                    raise self._no(f"it is of user {uid}; if that is right, say so: owner={uid}")
                await loop.sock_sendall(sock, wire.frame(wire.Greeting(wire.VERSION, wire.OLDEST, self._label)))
                welcome = await _welcome(loop, sock, descriptors)
            if isinstance(welcome, wire.Refused):
                raise Unavailable(welcome.why) if welcome.for_now else self._no(welcome.why)
            if not wire.OLDEST <= welcome.version <= wire.VERSION:
                raise self._no(f"it speaks version {welcome.version}, and we {wire.OLDEST} to {wire.VERSION}")
            if self._mapping is None or self._mapping[0] != welcome.boot:
                self._mapping = (welcome.boot, HostMapping(descriptors[0], welcome))
            channel = HostChannel(welcome, self._mapping[1])
            await loop.create_unix_connection(lambda: channel, sock=sock)
        except (OSError, TimeoutError, ValueError, IndexError) as error:
            sock.close()
            if isinstance(error, ConfigError):
                raise
            raise Unavailable(f"no host process answers at {self._path}: {error or 'it says nothing'}") from None
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in descriptors:
                os.close(fd)
        self.connects += 1
        self.refused = None
        owed, self._owed = self._owed.get(channel.boot, []), {}
        for one in owed:
            channel.tell(one)
        self._channel = channel
        return channel

    def _no(self, why: str) -> ConfigError:
        self.refused = ConfigError(f"storage='host:{self._path}': {why}")
        return self.refused

    def close(self) -> None:
        """End the connection. No call may be under way, and nothing may copy."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._channel is not None:
            self._channel.end("the store is closed", bye=True)
        self._mapping = None


async def _welcome(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, descriptors: list[int]
) -> wire.Welcomed | wire.Refused:
    """Receive the server's first message, and the descriptor beside it. asyncio cannot receive descriptors."""
    data, wanted = bytearray(), wire.LENGTH_BYTES
    while len(data) < wanted:
        readable = loop.create_future()
        loop.add_reader(sock.fileno(), _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock.fileno())
        try:
            part, found, _, _ = socket.recv_fds(sock, wanted - len(data), 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        descriptors += found
        data += part
        if not part:
            raise OSError("it has closed the connection")
        if len(data) == wanted == wire.LENGTH_BYTES:
            wanted += min(int.from_bytes(data, "little"), wire.MOST_GREETING)
    return wire.read_welcome(bytes(data[wire.LENGTH_BYTES :]))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
