"""The blocks that all servers of a fleet hold, for a router: their streams of KV events, followed in one thread.

A server has several streams: its engine's, and that of the host process on its machine, which other servers there have
as well. Each is followed once.

What always holds:
* A stream that was connected anew is asked for all that is there before what it sends is believed.
* One that has ended holds nothing: its connection broke, or it gave no sign of life for ``silence`` seconds.
* A batch that got lost is asked for when the next one comes, and at the latest ``check`` seconds later.
* What a publisher sends wrongly harms the picture of its own servers, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from socket import socketpair
from typing import Any, NamedTuple, Self

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from asynccache import checks
from asynccache.core.plan import Medium
from asynccache.errors import CacheClosed, ConfigError
from asynccache.events.publisher import END
from asynccache.events.subscriber import MOST_SECONDS, BatchOrder, Received, read_frames
from asynccache.events.wire import EventLayout, Mirror

MOST_AT_ONCE = 256
"""Messages of one stream that are read before the others have their turn."""
MOST_SOCKETS = 1 << 16
"""The sockets that ZeroMQ is told to allow, instead of 1,023. A stream takes three, and one more while it asks."""
TICK = 0.05
MOST_HEARTBEAT = 6000.0
"""Seconds of the longest heartbeat that ZeroMQ takes."""
DEVICE, HOST, STORAGE = (medium.value for medium in (Medium.GPU, Medium.CPU, Medium.STORAGE))


class EventStream(NamedTuple):
    """Where a stream is: the address of the PUB socket, that of the ROUTER socket (None: nothing can be asked for), the
    topic, and how events are written."""

    endpoint: str
    replay: str | None = None
    topic: str = ""
    layout: EventLayout | str = EventLayout.MAP


class TierHits(NamedTuple):
    """How many of a prompt's leading blocks a server has, each where it is nearest. The sum is how many it has without
    a gap."""

    device: int
    host: int
    storage: int


class StreamStats(NamedTuple):
    """Counters of a stream. ``connected``: whether its publisher is there. ``batches``: how many were applied.
    ``asked``: how often it was asked for batches. ``gaps``: how often batches were missing. ``malformed``: messages
    that are none."""

    connected: bool
    batches: int
    asked: int
    gaps: int
    malformed: int


class Fleet:
    """The blocks of all servers. Its methods may be called from any thread, and return at once; ``add`` and ``remove``
    wait for the fleet's own thread, which waits for nobody. ``error``: what has ended that thread, if anything has;
    then there are no servers any more.

    Args:
        patience: seconds to wait for the next message of an answer before the rest is taken for lost.
        check: every so many seconds a stream is asked for what may have got lost at its end.
        silence: seconds without a sign of life after which a stream has ended.

    Raises:
        ConfigError: an argument is unusable.
    """

    def __init__(self, *, patience: float = 1.0, check: float = 2.0, silence: float = 3.0) -> None:
        self._patience = checks.number("patience", patience, maximum=MOST_SECONDS, above=0)
        self._check = checks.number("check", check, maximum=MOST_SECONDS, above=0)
        self._silence = checks.number("silence", silence, maximum=MOST_HEARTBEAT, above=0)
        self._servers: dict[str, tuple[_Followed, ...]] = {}
        self._streams: dict[EventStream, _Followed] = {}
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._working = threading.Lock()  # nothing is added to the work, and nobody is woken, once it closes
        self._closing = False
        self.error: BaseException | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._poller = zmq.Poller()
        self._heard: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._wake, self._awaken = socketpair()
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="asynccache-fleet", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Fleet({len(self._servers)} servers, {len(self._streams)} streams)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Follow nothing any more. Calling it twice is fine."""
        with self._working:  # the thread closes the sockets only after it had this lock, too
            if not self._closing:
                self._closing = True
                self._awaken.send(b"\0")
        self._thread.join()

    def add(self, server: str, streams: Sequence[EventStream]) -> None:
        """Follow the streams of a server, in place of those that it had. Streams that are equal are followed once.

        Raises:
            ConfigError: an argument is unusable, or an address is none; then nothing has changed.
            CacheClosed: the fleet is closed.
        """
        server = checks.text("server", server, empty=False)
        wanted = [_checked(stream) for stream in checks.instance("streams", streams, (list, tuple))]
        self._done(lambda: self._add(server, wanted))

    def remove(self, server: str) -> None:
        """Follow the streams of a server no more, but for those that others have.

        Raises:
            ConfigError: there is no such server.
            CacheClosed: the fleet is closed.
        """
        checks.choice("server", checks.text("server", server), self._servers)
        self._done(lambda: self._remove(server))

    def hits(self, hashes: list[int]) -> dict[str, TierHits]:
        """Return for each server how many of ``hashes``, the blocks of a prompt from its start, it has, by tier.

        Raises:
            ConfigError: ``hashes`` is no list of integers.
        """
        hashes = checks.integers("hashes", hashes)
        return {server: _hits(hashes, streams) for server, streams in list(self._servers.items())}

    def stats(self) -> Mapping[str, list[StreamStats]]:
        """Return the counters of each server's streams."""
        return {server: [stream.stats() for stream in streams] for server, streams in list(self._servers.items())}

    # the thread

    def _done(self, act: Callable[[], Any]) -> None:
        """Have the thread do ``act``, and wait for it."""
        future: Future[Any] = Future()
        with self._working:
            if self._closing:
                raise CacheClosed("the fleet is closed")
            self._work.append((future, act))
            self._awaken.send(b"\0")
        future.result()

    def _run(self) -> None:
        ticked = 0.0
        try:
            while not self._closing:
                for heard, _ in self._poller.poll(int(TICK * 1000)):
                    if heard in self._heard:
                        self._heard[heard]()
                    elif heard == self._wake.fileno():
                        self._wake.recv(4096)
                while self._work:
                    _do(*self._work.popleft())
                now = time.monotonic()
                if now >= ticked + TICK:
                    ticked = now
                    for stream in self._streams.values():
                        stream.tick(now)
        except BaseException as error:  # ``hits`` has no server from then on
            self.error = error
        finally:
            with self._working:
                self._closing = True
            self._servers.clear()
            while self._work:
                self._work.popleft()[0].set_exception(CacheClosed("the fleet is closed"))
            self._context.destroy(linger=0)
            self._wake.close()
            self._awaken.close()

    def _add(self, server: str, wanted: Sequence[EventStream]) -> None:
        fresh: list[EventStream] = []
        try:
            for stream in dict.fromkeys(wanted):
                if stream not in self._streams:
                    self._streams[stream] = _Followed(stream, self)
                    fresh.append(stream)
        except zmq.ZMQError as error:
            for begun in fresh:
                self._streams.pop(begun).close()
            raise ConfigError(f"streams: endpoint={stream.endpoint!r}, replay={stream.replay!r} cannot be connected "
                              f"to: {error}") from None  # fmt: skip
        self._servers[server] = tuple(self._streams[stream] for stream in dict.fromkeys(wanted))
        self._forget_unused()

    def _remove(self, server: str) -> None:
        self._servers.pop(server, None)
        self._forget_unused()

    def _forget_unused(self) -> None:
        used = {stream for streams in self._servers.values() for stream in streams}
        for where, stream in list(self._streams.items()):
            if stream not in used:
                del self._streams[where]
                stream.close()

    def _hear(self, heard: zmq.Socket[bytes], call: Callable[[], None] | None) -> None:
        """Call ``call`` whenever there is something in this socket; None: any more."""
        if call is not None:
            self._heard[heard] = call
            self._poller.register(heard, zmq.POLLIN)
        elif self._heard.pop(heard, None) is not None:
            self._poller.unregister(heard)


class _Followed:
    """One stream, in the fleet's thread. ``blocks``: those that are there, by medium.

    While an answer is read that says what is missing, batches that come as they are sent wait in their socket, behind
    the one in ``_held`` that showed the gap. ``_for_held``: whether that answer was asked for after it had come.
    """

    def __init__(self, stream: EventStream, fleet: Fleet) -> None:
        self._stream = stream
        self._fleet = fleet
        self._mirror = Mirror()
        self.blocks = self._mirror.blocks
        self._connected = False
        self._batches = self._asked = self._gaps = self._malformed = 0
        self._order = BatchOrder(EventLayout(stream.layout))
        self._held: tuple[int, bytes] | None = None
        self._for_held = False
        self._asking: zmq.Socket[bytes] | None = None
        self._patient_until = self._check_at = 0.0
        self._sub: zmq.Socket[bytes] = fleet._context.socket(zmq.SUB)
        self._sub.linger = 0
        self._sub.setsockopt(zmq.RECONNECT_IVL, 100)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        silence = max(1, int(fleet._silence * 1000))
        self._sub.setsockopt(zmq.HEARTBEAT_IVL, max(1, silence // 3))
        self._sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, stream.topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._sub.connect(stream.endpoint)
            if stream.replay is not None:
                self._ask_socket().close()  # the address can be used
        except zmq.ZMQError:
            self.close()
            raise
        fleet._hear(self._monitor, self._changed)
        fleet._hear(self._sub, self._receive)

    def __repr__(self) -> str:
        return f"_Followed({self._stream.endpoint!r}, {self._mirror!r})"

    def stats(self) -> StreamStats:
        """Return its counters."""
        return StreamStats(self._connected, self._batches, self._asked, self._gaps, self._malformed)

    def close(self) -> None:
        """Follow it no more."""
        self._stop_asking()
        for heard in (self._sub, self._monitor):
            self._fleet._hear(heard, None)
        self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._sub.close()
        self._mirror.forget()

    def tick(self, now: float) -> None:
        """End an answer that does not come, and ask for what may have got lost."""
        if self._asking is not None:
            if now >= self._patient_until:
                self._answered()
        elif self._connected and now >= self._check_at:
            self._ask()

    def _changed(self) -> None:
        """The connection has been made, or has ended."""
        while self._monitor.poll(0):
            self._drop_what_waits()
            made = parse_monitor_message(self._monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._connected = made
            self._mirror.forget()
            self._order = BatchOrder(EventLayout(self._stream.layout))
            self._held = None
            self._stop_asking()
            if made:
                self._ask(first=True)

    def _drop_what_waits(self) -> None:
        """Drop batches that were sent before this change and not read yet: the one who sent them is gone. What is lost
        with them of a new stream is asked for."""
        with suppress(zmq.Again):
            for _ in range(2 * self._sub.rcvhwm if self._stream.replay is not None else 0):
                self._sub.recv_multipart(zmq.NOBLOCK)

    def _ask_socket(self) -> zmq.Socket[bytes]:
        assert self._stream.replay is not None
        asking: zmq.Socket[bytes] = self._fleet._context.socket(zmq.DEALER)
        asking.linger = 0
        asking.set_hwm(0)
        try:
            asking.connect(self._stream.replay)
        except zmq.ZMQError:
            asking.close()
            raise
        return asking

    def _ask(self, *, first: bool = False) -> None:
        """Ask for what comes after the last batch. ``first``: nothing else is believed before the answer."""
        self._check_at = time.monotonic() + self._fleet._check
        if self._stream.replay is None or self._asking is not None:
            return
        try:
            self._asking = self._ask_socket()
        except zmq.ZMQError:  # too many sockets are open in this process; the next check asks again
            return
        self._asked += 1
        self._for_held = self._held is not None
        self._asking.send_multipart((b"", self._order.ask()))
        self._patient_until = time.monotonic() + self._fleet._patience
        self._fleet._hear(self._asking, self._read_answer)
        if first:
            self._fleet._hear(self._sub, None)

    def _read_answer(self) -> None:
        assert self._asking is not None
        for _ in range(MOST_AT_ONCE):
            try:
                message = read_frames(self._asking.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._patient_until = time.monotonic() + self._fleet._patience
            if message is None:
                self._malformed += 1
            elif message[0] == END:
                self._answered()
                return
            else:
                self._apply(self._order.answer, message[1], message[2])

    def _answered(self) -> None:
        """The answer has ended, or will not come. Go on with the batch that showed the gap."""
        self._stop_asking()
        if self._held is not None:
            number, payload = self._held
            if not self._for_held and self._order.next < number:
                self._ask()  # that answer may be older than the gap
                return
            self._held = None
            self._take(self._order.give_up(number))
            if number == self._order.next:
                self._apply(lambda number, payload: [self._order.take(number, payload)], number, payload)
        if self._sub not in self._fleet._heard:
            self._fleet._hear(self._sub, self._receive)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._fleet._hear(self._asking, None)
            self._asking.close()
            self._asking = None

    def _receive(self) -> None:
        """Read what was sent, until there is a gap."""
        for _ in range(MOST_AT_ONCE):
            try:
                message = read_frames(self._sub.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if message is None or message[0] == END:
                self._malformed += 1
                continue
            self._apply(self._sent, message[1], message[2])
            if self._held is not None:
                self._gaps += 1
                if self._stream.replay is None:
                    self._for_held = True
                    self._answered()
                    continue
                self._fleet._hear(self._sub, None)
                self._ask()
                return

    def _sent(self, number: int, payload: bytes) -> list[Received]:
        missing = self._order.missing(number, payload)
        if missing > 0:
            self._held = (number, payload)
        return [self._order.take(number, payload)] if missing == 0 else []

    def _apply(self, read: Callable[[int, bytes], list[Received]], number: int, payload: bytes) -> None:
        try:
            self._take(read(number, payload))
        except (msgspec.MsgspecError, ConfigError, UnicodeDecodeError, RecursionError):
            self._malformed += 1

    def _take(self, batches: Sequence[Received]) -> None:
        for received in batches:
            self._mirror.apply(received.batch)
            self._batches += 1


def _checked(stream: object) -> EventStream:
    found = checks.instance("streams", stream, EventStream)
    checks.text("endpoint", found.endpoint, empty=False)
    if found.replay is not None:
        checks.text("replay", found.replay, empty=False)
    checks.text("topic", found.topic)
    return found._replace(layout=checks.member("layout", found.layout, EventLayout))


def _do(future: Future[Any], act: Callable[[], Any]) -> None:
    try:
        future.set_result(act())
    except Exception as error:
        future.set_exception(error)


def _hits(hashes: Sequence[int], streams: Sequence[_Followed]) -> TierHits:
    tiers = [[stream.blocks[medium] for stream in streams] for medium in (DEVICE, HOST, STORAGE)]
    counts = [0, 0, 0]
    for block in hashes:
        found = next((n for n, tier in enumerate(tiers) if any(block in held for held in tier)), None)
        if found is None:
            break
        counts[found] += 1
    return TierHits(*counts)
