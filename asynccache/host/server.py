"""The server's socket: who may connect, who is who, and what is left when one dies.

A process is known by its pidfd (``SO_PEERPIDFD``, so that a client in a container has one, too). When that fires, the
process is dead, no thread of it copies any more, and what it had reserved is free. The end of a connection alone frees
nothing, unless the client said ``Bye`` before: a thread of it may still be copying. Death and the end of a connection
may be noticed in any order. Connections are taken for those of one process only where that is certain (``process_of``);
if nothing tells their processes apart, each connection stands for a process of its own, with a pidfd of its own.

Clients are of this user or root, or of the group that the socket was given. What one sends is bounded: a frame, the
time until its greeting, the answers that it does not read, the connections of one process, and of all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from asynccache.errors import AsyncCacheError, ConfigError, Unavailable
from asynccache.host import wire
from asynccache.host.behind import LET_GO, StoresBehind
from asynccache.host.changes import HeldChanges, TellHeld
from asynccache.host.memory import UNIT, HostMemory, MemoryLayout
from asynccache.host.pages import Books, PageTable, Writer
from asynccache.host.session import HostSession
from asynccache.host.sockets import group_id, groups_of, is_dead, listening_socket, peer_of, pidfd_of, process_of

GREETING_TIME = 5.0
ACCEPT_AGAIN = 0.5
MOST_CLIENTS, MOST_OF_ONE = 1024, 256
MOST_LABELS = 1000
MOST_UNREAD = 4 << 20
MOST_IN_FLIGHT = 256
LONG_RESERVED = 30.0
HAND_OVER_PATIENCE, HEIR_PATIENCE = 2.0, 30.0
MOST_DESCRIPTORS = 200
COUNTERS = ("hits", "misses", "asked_hits", "stored", "evicted", "over_limit", "no_room", "damaged", "malformed",
            "died", "freed_by_death", "ended", "kept", "not_kept", "prefetched", "hints_unknown")  # fmt: skip

LOG = logging.getLogger("asynccache.host")


class Peer:
    """A process at the other end. ``pidfd`` fires when it has died. ``key``: what ``process_of`` returned. ``owes``:
    whether a connection of it has ended without a ``Bye``."""

    def __init__(self, key: tuple[str, int] | None, pidfd: int, name: str, writer: Writer) -> None:
        self.key = key
        self.pidfd = pidfd
        self.name = name
        self.writer = writer
        self.clients: set[HostClient] = set()
        self.owes = False


class Snapshot(msgspec.Struct, array_like=True):
    """The state that a server leaves to the next, beside descriptors of the memory, the listening socket and each
    process in ``held``. An entry of ``held`` is a name and what ``PageTable.held_by`` returns for it."""

    boot: bytes
    layout: MemoryLayout
    allocated: int
    books: Books
    held: list[tuple[str, list[int], list[int]]]


class Inherited:
    """All that was taken over from a server that ran before: its snapshot, its memory, its socket, and the pidfds.
    ``confirm``, which blocks, makes that server end, and raises ConfigError if it goes on instead."""

    def __init__(
        self, snapshot: Snapshot, memory: HostMemory, listener: socket.socket, pidfds: list[int],
        confirm: Callable[[], None],
    ) -> None:  # fmt: skip
        self.snapshot = snapshot
        self.memory = memory
        self.listener = listener
        self.pidfds = pidfds
        self.confirm = confirm


class HostClient(asyncio.Protocol):
    """One connection. ``begun``: it has a transport. ``ended`` is set when it has ended."""

    def __init__(self, server: HostServer, sock: socket.socket, peer: Peer) -> None:
        self.peer = peer
        self.session: HostSession | None = None
        self.ended = asyncio.Event()
        self._server = server
        self._sock = sock
        self._frames = wire.Frames(wire.MOST_GREETING)
        self._transport: asyncio.Transport
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._over = self.begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport  # type: ignore[assignment]
        self.begun = True
        self._transport.set_write_buffer_limits(MOST_UNREAD)
        self._timer = asyncio.get_running_loop().call_later(GREETING_TIME, self.abort)
        if self._over:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are whole by now."""
        if self._over or (self._server.handed_over and self is not self._server.heir):
            return  # the next server answers; this connection ends soon
        try:
            for body in self._frames.feed(data):
                if self.session is None:
                    self._greet(wire.read_greeting(body))
                else:
                    self._answer(self.session, wire.read_request(body))
                if self._transport.is_closing() or self._has_enough:
                    return  # the rest stays with the frames
        except (wire.Malformed, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._server.table.counts["malformed"] += 1
            LOG.warning("%s sends what is no request, and is left alone: %s", self.peer.writer.name, error)
            self.abort()

    @property
    def _has_enough(self) -> bool:
        return self._paused or len(self._tasks) >= MOST_IN_FLIGHT

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more of its requests."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has read its answers."""
        self._paused = False
        self._flow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what can be freed now."""
        if self._timer is not None:
            self._timer.cancel()
        self._over = True
        self.ended.set()
        self._server.lost(self)
        self._sock.close()

    def abort(self) -> None:
        """End the connection now, or as soon as it begins."""
        self._over = True
        if self.begun:
            self._transport.abort()

    def _greet(self, greeting: wire.Greeting) -> None:
        server = self._server
        if greeting.version < wire.OLDEST or greeting.oldest > wire.VERSION:
            why = (f"versions differ: the host process speaks {wire.OLDEST} to {wire.VERSION}, the client "
                   f"{greeting.oldest} to {greeting.version}")  # fmt: skip
            self._transport.write(wire.frame(wire.Refused(0, why)))
            self._transport.close()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._frames.most = wire.MOST_FRAME
        table, layout = server.table, server.memory.layout
        known = table.known_labels
        name = greeting.label if greeting.label in known or len(known) < MOST_LABELS else "other"
        self.peer.writer.name = self.peer.name + (f" ({name})" if name else "")
        self.session = HostSession(table, self.peer.writer, table.label(name), behind=server.behind, now=time.time,
                                   clock=time.monotonic, counts=server.counts)  # fmt: skip
        version = min(greeting.version, wire.VERSION)
        welcome = wire.Welcomed(version, server.boot, layout.size, layout.slots, layout.headers_at, layout.payloads_at,
                                table.quota, table.longest, len(table.index), table.bytes)  # fmt: skip
        self.send_with([server.memory.fd], welcome)

    def _answer(self, session: HostSession, request: wire.Requests) -> None:
        if isinstance(request, wire.TakeOver):
            if peer_of(self._sock)[1] not in (0, os.geteuid()):  # of the group: it may use the memory, and not have it
                why = "only the host process's own user may take over"
                self._transport.write(wire.frame(wire.Refused(request.number, why)))
                return
            self._begin(self._server.hand_over(self, request.number))
            return
        session.draining = self._server.draining
        answer = session.handle(request)
        if isinstance(answer, wire.HostMessage):
            self._transport.write(wire.frame(answer))
        elif answer is not None:
            self._begin(self._later(answer))
        elif session.ended_well:
            self._transport.close()

    async def _later(self, answer: Awaitable[wire.HostMessage]) -> None:
        self._transport.write(wire.frame(await answer))

    def _begin(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name="asynccache-host-answer")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if len(self._tasks) >= MOST_IN_FLIGHT:
            self._transport.pause_reading()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("an answer to %s failed", self.peer.writer.name, exc_info=error)
            self.abort()
        self._flow()

    def _flow(self) -> None:
        if not self._has_enough and not self._transport.is_closing():
            self._transport.resume_reading()
            if self._frames.held:
                asyncio.get_running_loop().call_soon(self.data_received, b"")

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._transport.write(data)

    def send_with(self, descriptors: list[int], message: wire.HostMessage) -> None:
        """Send a message with file descriptors. Nothing else may wait to be sent."""
        data = wire.frame(message)
        try:
            sent = socket.send_fds(self._sock, [data], descriptors)
        except OSError:
            self.abort()
            return
        if sent < len(data):
            self._transport.write(data[sent:])


class HostServer:
    """A host process's server, for one event loop. ``open`` begins to listen.

    ``path``: the socket's. ``group``: the group that may connect, too. ``limits``: bytes at most, by label. ``closed``
    is set when it has ended, by ``aclose`` or because another has taken over.
    """

    def __init__(
        self, path: str, memory: HostMemory, *, behind: StoresBehind | None = None, group: str | None = None,
        limits: Mapping[str, int] | None = None, quota: int | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.memory = memory
        self.table = PageTable(memory.layout, memory.generations, limits=limits, quota=quota)
        self.behind = behind
        self.boot = os.urandom(16)
        self.draining = self.handed_over = False
        self.heir: HostClient | None = None
        self.closed = asyncio.Event()
        self._group = None if group is None else group_id(group)
        self._listener: socket.socket | None = None
        self._own_socket: tuple[int, int] | None = None
        self._peers: set[Peer] = set()
        self._clients: set[HostClient] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._changes: HeldChanges | None = None

    def __repr__(self) -> str:
        return f"HostServer({self.path!r}, {len(self._clients)} clients, {self.table!r})"

    async def open(self, inherited: Inherited | None = None) -> None:
        """Begin to listen. What was ``inherited`` from another server is there at once.

        Raises:
            ConfigError: the socket cannot be used, somebody listens there, or the other server has gone on.
        """
        if inherited is None:
            self._listener = listening_socket(self.path, self._group, MOST_CLIENTS)
        else:
            self._listener = inherited.listener
            self._inherit(inherited)
            await asyncio.to_thread(inherited.confirm)  # before anything in the memory changes
        if self.behind is not None:
            self.behind.use(self.table, self.memory)
        self._listener.setblocking(False)
        usable = asyncio.Event()
        self._growing = self._begin(self._grow(usable))
        await usable.wait()  # there is room for the first client, if not all that there will be
        if not self.table.usable:
            raise ConfigError(f"memory={self.memory.layout.size}: this machine, or its container, has none to give")
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self._own_socket = _identity(self.path)

    def _inherit(self, inherited: Inherited) -> None:
        snapshot, held = inherited.snapshot, list[tuple[Writer, list[int], list[int]]]()
        for (name, reserved, pinned), pidfd in zip(snapshot.held, inherited.pidfds, strict=True):
            peer = self._peer(pidfd, name)
            peer.owes = True
            peer.writer.since = time.monotonic()
            held.append((peer.writer, reserved, pinned))
        self.boot = snapshot.boot
        self.table.now = time.monotonic()
        self.table.restore(snapshot.books, held)

    async def _grow(self, usable: asyncio.Event) -> None:
        """Allocate the memory, part by part, and use each part at once. ``usable`` is set after the first."""
        loop = asyncio.get_running_loop()
        try:
            while self.memory.allocated < self.memory.layout.size:
                self.table.grow(await loop.run_in_executor(None, self.memory.allocate))
                usable.set()
        except OSError as error:
            LOG.error("only %d MiB of memory can be had: %s", self.memory.allocated >> 20, error)
        finally:
            usable.set()

    def counts(self) -> dict[str, float]:
        """Return all counters of the server, by name."""
        table, now = self.table, time.monotonic()
        held = [now - peer.writer.since for peer in self._peers if peer.writer.reserved]
        return {
            "pages": len(table.index), "bytes": table.bytes, "capacity_bytes": table.layout.units * UNIT,
            "allocated_bytes": table.usable * UNIT, "free_bytes": table.free_bytes, "clients": len(self._clients),
            "processes": len(self._peers), "reserved_bytes": table.reserved_bytes, "kept_bytes": table.kept_bytes,
            "oldest_reservation": round(max(held, default=0.0), 3), **{name: table.counts[name] for name in COUNTERS},
            **({} if self.behind is None else self.behind.counts()),
        }  # fmt: skip

    def announce(self, tell: TellHeld) -> None:
        """Tell ``tell`` which keys the memory and the stores hold, and from now on every change of that. To be called
        once, on the open server."""
        changes = self._changes = HeldChanges(tell)
        memory = changes.place("CPU")
        self._begin(changes.list(memory, self.table.watch(memory.note)))
        if self.behind is not None:
            self.behind.watch(changes)

    # who comes

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # such as no file descriptors: it would fail again at once, and again
            LOG.warning("no connection can be accepted for %g s: %s", ACCEPT_AGAIN, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_AGAIN, self._accept_again)
            return
        sock.setblocking(False)
        try:
            peer = self._admitted(sock)
        except (OSError, ConfigError, Unavailable) as error:
            LOG.warning("a connection was refused: %s", error)
            with suppress(OSError):
                sock.send(wire.frame(wire.Refused(0, str(error), for_now=not isinstance(error, ConfigError))))
            sock.close()
            return
        client = HostClient(self, sock, peer)
        peer.clients.add(client)
        self._clients.add(client)
        self._begin(self._connected(client, sock))

    def _accept_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0 and not self.handed_over:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def _connected(self, client: HostClient, sock: socket.socket) -> None:
        own: socket.socket | None = None
        try:
            own = sock.dup()
            await asyncio.get_running_loop().connect_accepted_socket(lambda: client, own)
        except (OSError, asyncio.CancelledError) as error:
            self.lost(client)
            sock.close()
            if own is not None and not client.begun:
                own.close()
            if not isinstance(error, OSError):
                raise

    def _admitted(self, sock: socket.socket) -> Peer:
        """Return the process at the other end. Raises ConfigError: it is not to be served; Unavailable: not now."""
        if len(self._clients) >= MOST_CLIENTS:
            raise Unavailable(f"there are {MOST_CLIENTS} connections already")
        pid, uid, gid = peer_of(sock)
        if uid not in (0, os.geteuid()) and (self._group is None or self._group not in (gid, *groups_of(sock))):
            raise ConfigError(f"the host process is of user {os.geteuid()}, and the client of user {uid}")
        pidfd = pidfd_of(sock, pid)
        key = process_of(pidfd)
        alike = [peer for peer in self._peers if peer.key == key and not is_dead(peer.pidfd)]
        if sum(len(peer.clients) for peer in alike) >= MOST_OF_ONE:
            os.close(pidfd)
            what = alike[0].name if key is not None else "processes that nothing tells apart"
            raise Unavailable(f"{MOST_OF_ONE} connections are of {what} already")
        if key is not None and alike:
            os.close(pidfd)
            return alike[0]
        return self._peer(pidfd, f"process {pid}" if pid else "a process of another container")

    def _peer(self, pidfd: int, name: str) -> Peer:
        peer = Peer(process_of(pidfd), pidfd, name, Writer(name))
        self._peers.add(peer)
        asyncio.get_running_loop().add_reader(pidfd, self._died, peer)
        return peer

    def _died(self, peer: Peer) -> None:
        if self.handed_over:  # the memory may be the heir's by now, who hears of it, too
            asyncio.get_running_loop().remove_reader(peer.pidfd)
            return
        freed = self.table.end(peer.writer)
        self.table.counts["died"] += 1
        self.table.counts["freed_by_death"] += freed
        if freed:
            LOG.warning("%s died with %d slots reserved, which are free again", peer.writer.name, freed)
        self._forget(peer)
        for client in list(peer.clients):  # a forked child may still hold the socket
            client.abort()

    def lost(self, client: HostClient) -> None:
        """A connection has ended. Calling it twice is fine."""
        peer = client.peer
        self._clients.discard(client)
        peer.clients.discard(client)
        peer.owes = peer.owes or not (client.session is None or client.session.ended_well)
        if peer.clients or peer not in self._peers:
            return
        if not peer.owes:
            self.table.end(peer.writer)
        if not peer.writer.holds:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            asyncio.get_running_loop().remove_reader(peer.pidfd)
            os.close(peer.pidfd)

    def long_reserved(self) -> list[str]:
        """Return a sentence about each process that has had slots reserved for long."""
        now = time.monotonic()
        return [
            f"{peer.writer.name} has had {len(peer.writer.reserved)} slots reserved for {now - peer.writer.since:.0f} s"
            for peer in self._peers
            if peer.writer.reserved and now - peer.writer.since > LONG_RESERVED
        ]

    # the end, or another server

    async def hand_over(self, client: HostClient, number: int) -> None:
        """Give everything to the server that asks for it over ``client``, and end once that one has confirmed it; else
        go on as before."""
        if self.draining:
            client.abort()
            return
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        self.draining, self.heir = True, client
        until = time.monotonic() + HAND_OVER_PATIENCE
        # copies that are under way are published, and no new ones begin
        while self.table.reserved_bytes and time.monotonic() < until:  # noqa: ASYNC110  once in a server's life
            await asyncio.sleep(0.01)
        if self._growing is not None:
            await asyncio.wait([self._growing])
        if self.behind is not None:
            await self.behind.close()
        await self._end_answers([other for other in self._clients if other is not client])
        loop.remove_reader(self._listener.fileno())
        self.handed_over = True
        writing = [peer for peer in self._peers if peer.writer.holds]
        if self.behind is not None and self.behind.own.holds:  # a call that hangs may go on until this process is dead
            writing.append(Peer(None, os.pidfd_open(os.getpid()), self.behind.own.name, self.behind.own))
        if len(writing) > MOST_DESCRIPTORS:
            LOG.warning("%d processes are writing, which are too many to hand over", len(writing))
            client.abort()
        else:
            data = msgspec.msgpack.encode(self._snapshot(writing))
            client.send_with(
                [self.memory.fd, self._listener.fileno(), *(peer.pidfd for peer in writing)],
                wire.Inheritance(number, len(self.table.index), self.table.bytes, len(data)),
            )
            client.send(data)
        if self.behind is not None and writing and writing[-1].writer is self.behind.own:
            os.close(writing[-1].pidfd)
        with suppress(TimeoutError):
            await asyncio.wait_for(client.ended.wait(), HEIR_PATIENCE)
        if client.session is not None and client.session.ended_well:
            LOG.info("another host process has taken over")
            self._begin(self.aclose(unlink=False))
            return
        LOG.warning("the process that was to take over does not; going on")
        client.abort()
        self.handed_over, self.draining, self.heir = False, False, None
        for other in list(self._clients):
            other.abort()  # requests of theirs were not heard
        if self._listener.fileno() < 0:
            return  # it was closed meanwhile
        loop.add_reader(self._listener.fileno(), self._accept)
        for peer in self._peers:
            loop.add_reader(peer.pidfd, self._died, peer)
        if self.behind is not None:
            try:
                await self.behind.open()
            except AsyncCacheError as error:
                LOG.error("going on without stores, which cannot be opened again: %s", error)
                self.behind = None

    def _snapshot(self, writing: list[Peer]) -> Snapshot:
        held = [(peer.writer.name, *self.table.held_by(peer.writer)) for peer in writing]
        return Snapshot(self.boot, self.memory.layout, self.memory.allocated, self.table.books(), held)

    @staticmethod
    async def _end_answers(clients: Iterable[HostClient]) -> None:
        """End the answers that wait for stores: they would go on with a table that is another server's by then."""
        answers = [task for client in clients for task in client._tasks]
        for task in answers:
            task.cancel()
        if answers:
            await asyncio.wait(answers, timeout=LET_GO)

    async def aclose(self, *, unlink: bool = True) -> None:
        """Stop listening, have the stores write what waits, and end all connections. Calling it twice is fine."""
        heir = self.heir
        if heir is not None and unlink:  # it is about to have everything, and says who goes on
            await heir.ended.wait()
            if heir.session is not None and heir.session.ended_well:
                await self.closed.wait()
        if self.closed.is_set():
            return
        self.draining = True
        if self._changes is not None:
            self._changes.close()
        if self._listener is not None and self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            # the path may be another server's by now, if somebody has removed this one's socket
            if unlink and self._own_socket is not None and not self.handed_over:
                with suppress(OSError):
                    if _identity(self.path) == self._own_socket:
                        os.unlink(self.path)
        own = asyncio.current_task()
        others = [task for task in self._tasks if task is not own]
        for task in others:
            task.cancel()
        if self.behind is not None:
            await self.behind.close()
        for client in list(self._clients):
            client.abort()
        for peer in list(self._peers):
            self._forget(peer)
        if others:
            await asyncio.wait(others, timeout=1.0)
        self.memory.close()
        self.closed.set()

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
