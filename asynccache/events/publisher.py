"""The publisher of KV events over ZeroMQ. It sends in a thread of its own, so that no subscriber can delay the cache.

    PUB     sends each batch as the frames: topic, sequence number (8 bytes, big-endian), payload
    ROUTER  is asked for all batches from a sequence number on. It sends each as (topic, number, payload), and
            ("", -1, "") at the end. In the older layout the first of these three frames is left out.

A notice costs the cache one append to a queue; for each batch one byte is written, too, which wakes the thread. A
subscriber that reads too slowly loses messages at ZeroMQ's high-water mark and sees a gap in the sequence numbers. It
can ask for the last ``keep`` batches again. If they do not reach back far enough, the answer begins with a *snapshot*:
AllBlocksCleared and all blocks that are there now, without their tokens, in messages of bounded size, each with the
number of the last batch that is missing. The batches that follow are applied on top of it, and change nothing in the
end: each block is as the last of them left it, or as the snapshot says. So a gap is filled, and never passed over in
silence. AllBlocksCleared is also sent when the thread falls so far behind that notices are dropped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import zmq

from asynccache import checks
from asynccache.core.plan import Cleared, Publish
from asynccache.errors import ConfigError
from asynccache.events.announcer import Announcer, HeldReport, Notice, Opened, StorageReport
from asynccache.events.wire import AllBlocksCleared, BlockEvent, BlockStored, Encoder, EventBatch, EventLayout, Mirror

END = (-1).to_bytes(8, "big", signed=True)
BATCH_EVENTS = 1024
"""Notices that become one batch, at most; keys of a host process count as one each."""
SNAPSHOT_BLOCKS = 4096
"""Blocks in one message of a snapshot, at most: 40 KB."""
MOST_KEPT = 1 << 30
MOST_NUMBER = 1 << 62
MOST_GATHER = 60.0

_NOTICES = (Publish, Cleared, StorageReport, Opened, HeldReport)


class PublisherStats(NamedTuple):
    """Counters of a publisher.

    ``batches``, ``events`` and ``bytes`` were sent. ``replays``: how many requests for earlier batches were answered.
    ``lost``: notices that were dropped because the thread was too far behind, of which subscribers are told by
    AllBlocksCleared, or because the publisher was closed or had failed. ``waiting``: notices that are still to be sent.
    """

    batches: int
    events: int
    bytes: int
    replays: int
    lost: int
    waiting: int


class History:
    """The last batches, for subscribers that missed some: at most ``keep`` of them with ``keep_bytes`` bytes in all."""

    def __init__(self, keep: int, keep_bytes: int) -> None:
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Add a batch, and drop the oldest ones until the limits are kept."""
        self._batches.append((number, payload))
        self._bytes += len(payload)
        while len(self._batches) > self._keep or (self._bytes > self._keep_bytes and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int, snapshot: Callable[[], Iterable[bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and payloads of the batches from ``number`` on. If the first of them were dropped, the
        payloads ``snapshot()`` come first, each with the number of the last one that is missing."""
        oldest = self._batches[0][0] if self._batches else number
        if number < oldest:
            yield from ((oldest - 1, payload) for payload in snapshot())
        yield from (batch for batch in self._batches if batch[0] >= number)


class ZmqPublisher:
    """Publishes the events of one cache: ``AsyncCache(config, on_event=publisher)``. Close it after the cache.

    The cache calls it with every notice, in the thread of its event loop.

    Args:
        endpoint: the address that the PUB socket is bound to. For a port ``*`` the system chooses one; the attribute
            ``endpoint`` has it then.
        replay: the address of the ROUTER socket, written like ``endpoint``; None: batches cannot be asked for again.
        topic: the topic of every message.
        rank: the data-parallel rank that every batch names; None: it names none.
        layout: how events are written, see ``EventLayout``.
        replay_topic: whether a replayed batch begins with the topic; None: as in the versions of vLLM that write events
            in ``layout``, which is True for MAP and False for ARRAY.
        keep: how many batches are kept for replay, at most.
        keep_bytes: how many bytes they have, at most.
        gather: seconds that a batch waits for more events before it is sent.
        backlog: how many notices may wait for the thread; beyond that, notices of pages are dropped.
        high_water: how many messages ZeroMQ queues for each subscriber; beyond that it drops them.
        first: the number of the first batch. A publisher that takes another one's place at the same address begins
            above all of that one's numbers, as with ``time.time_ns()``; then every subscriber sees a gap.
        clock: returns the time that batches bear, in seconds since 1970.

    Raises:
        ConfigError: an argument is unusable, or an address cannot be bound.
    """

    def __init__(
        self, endpoint: str = "tcp://*:5557", replay: str | None = None, *, topic: str = "", rank: int | None = None,
        layout: EventLayout | str = EventLayout.MAP, replay_topic: bool | None = None,
        keep: int = 10_000, keep_bytes: int = 64 << 20, gather: float = 0.002,
        backlog: int = 200_000, high_water: int = 100_000, first: int = 0, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        checks.text("endpoint", endpoint, empty=False)
        if replay is not None:
            checks.text("replay", replay, empty=False)
        written = checks.member("layout", layout, EventLayout)
        keep = checks.integer("keep", keep, 1, MOST_KEPT)
        high_water = checks.integer("high_water", high_water, 1, checks.INT32_MAX)
        self._topic = checks.text("topic", topic).encode()
        self._rank = None if rank is None else checks.integer("rank", rank, 0, checks.INT32_MAX)
        self._encoder = Encoder(written)
        topical = written is EventLayout.MAP if replay_topic is None else checks.flag("replay_topic", replay_topic)
        self._topic_frames = ((self._topic,), (b"",)) if topical else ((), ())  # of a batch, and of the end
        self._history = History(keep, checks.integer("keep_bytes", keep_bytes, 1))
        self._gather = checks.number("gather", gather, 0, MOST_GATHER)
        self._limit = checks.integer("backlog", backlog, 1)
        self._clock = checks.function("clock", clock)
        self._announcer = Announcer()
        self._backlog: deque[Notice] = deque()
        self._woken = self._closing = self._losing = False
        self._lost = self._events = self._bytes = self._replays = 0
        self._first = self._number = checks.integer("first", first, 0, MOST_NUMBER)
        self._present = Mirror()
        self.error: BaseException | None = None
        self._context = zmq.Context()
        self._wake, self._awaken = socket.socketpair()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, high_water)
            self._router = self._bind(zmq.ROUTER, replay, 2 * keep) if replay is not None else None
        except BaseException:
            self._release()
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router is not None else None
        self._thread = threading.Thread(target=self._run, name="asynccache-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ZmqPublisher({self.endpoint!r}, {self._number} batches, {len(self._backlog)} notices wait)"

    def __call__(self, notice: Notice) -> None:
        """Queue a notice, which the thread publishes soon. The call never blocks.

        Raises:
            ConfigError: ``notice`` is of no type that a cache passes to ``on_event``.
        """
        checks.instance("notice", notice, _NOTICES)
        if self._closing or self.error is not None:
            self._lost += 1
            return
        full = len(self._backlog) >= self._limit and type(notice) is Publish
        if full:
            self._lost += 1
            if self._losing:
                return
            notice = Cleared()  # this one stands for all notices that are dropped from here on
        self._losing = full
        self._backlog.append(notice)
        if not self._woken:
            self._woken = True
            self._wake_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout: float = 5.0) -> None:
        """Send the notices that wait, and end the thread. After ``timeout`` seconds the call returns even if some are
        unsent. Calling it twice is fine."""
        timeout = checks.number("timeout", timeout, 0, threading.TIMEOUT_MAX)
        if self._closing:
            return
        self._closing = True
        self._wake_thread()
        self._thread.join(timeout)

    def _wake_thread(self) -> None:
        """Wake the thread. Nothing happens if the thread has ended because of an error, and so has closed the
        socket."""
        with suppress(OSError):
            self._awaken.send(b"\0")

    def stats(self) -> PublisherStats:
        """Return the counters. May be called from any thread."""
        return PublisherStats(
            self._number - self._first, self._events, self._bytes, self._replays, self._lost, len(self._backlog)
        )

    # the thread

    def _run(self) -> None:
        try:
            self._serve()
            self._send_all()
        except BaseException as error:  # nobody waits for this thread: the cache goes on, and ``error`` has the reason
            self.error = error
            self._backlog.clear()
        finally:
            self._release()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
                if not self._closing:
                    time.sleep(self._gather)
                self._woken = False
                self._send_all()
            if self._router is not None and self._router in ready:
                self._answer(self._router)

    def _send_all(self) -> None:
        backlog = self._backlog
        while backlog:
            notices, weight = list[Notice](), 0
            while backlog and weight < BATCH_EVENTS:
                notices.append(backlog.popleft())
                weight += len(notices[-1].keys) if isinstance(notices[-1], HeldReport) else 1
            events = self._announcer.announce(notices)
            if not events:
                continue
            if self._router is not None:  # or nobody can ask what is there
                for event in events:
                    self._present.note(event)
            number, payload = self._number, self._encode(events)
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._history.add(number, payload)
            self._number += 1
            self._events += len(events)
            self._bytes += len(payload)

    def _encode(self, events: Sequence[BlockEvent]) -> bytes:
        return self._encoder.encode(EventBatch(self._clock(), list(events), self._rank))

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Answer one subscriber's request for earlier batches. A request of a wrong form is ignored. If the subscriber
        does not read, its own answer is lost and nobody else's."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        self._replays += 1
        who, empty, asked = frames
        since = max(self._first, int.from_bytes(asked, "big"))
        topic, no_topic = self._topic_frames
        for number, payload in self._history.since(since, self._snapshot):
            router.send_multipart((who, empty, *topic, number.to_bytes(8, "big"), payload))
        router.send_multipart((who, empty, *no_topic, END, b""))

    def _snapshot(self) -> Iterator[bytes]:
        """Yield the messages of a snapshot."""
        events: list[BlockEvent] = [AllBlocksCleared()]
        for medium, held in self._present.blocks.items():
            blocks = list(held)
            for at in range(0, len(blocks), SNAPSHOT_BLOCKS):
                size = self._announcer.page_size
                part = BlockStored(blocks[at : at + SNAPSHOT_BLOCKS], None, [], size, None, medium, None)
                yield self._encode([*events, part])
                events = []
        if events:
            yield self._encode(events)

    def _bind(self, kind: int, endpoint: str, high_water: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.set_hwm(high_water)
        bound.linger = 0
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events: cannot bind {endpoint!r}: {error}") from error
        return bound

    def _release(self) -> None:
        self._context.destroy(linger=1000 if self.error is None else 0)
        self._wake.close()
        self._awaken.close()
