"""The stream over real sockets: in order, replayed from any number, never in the cache's way; and who follows many."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from random import Random
from statistics import median
from typing import Any

import msgspec
import pytest
import zmq
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, ConfigError
from asynccache.core.plan import Cleared, Medium, Publish
from asynccache.errors import CacheClosed
from asynccache.events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    EventLayout,
    EventStream,
    Fleet,
    HeldReport,
    Mirror,
    Opened,
    Received,
    Subscriber,
    TierHits,
    ZmqPublisher,
)
from asynccache.events.publisher import END, SNAPSHOT_BLOCKS, History
from asynccache.events.wire import Encoder
from asynccache.memory.cpu import CpuDevice
from asynccache.storage.contract import named_key
from tests.runtime.runtime_kit import compute, settings, settled, text

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 20.0


def page(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int) -> Publish:
    return Publish(Medium.GPU, True, page(number - 1) if number else b"", page(number), bytes(8), b"")


def until(true: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, why()
        time.sleep(0.001)


@contextmanager
def opened(endpoint: str = LOCAL, replay: str | None = LOCAL, **options: Any) -> Iterator[ZmqPublisher]:
    """A publisher of a cache that has been opened."""
    with ZmqPublisher(endpoint, replay, **{"gather": 0.0, **options}) as publisher:
        publisher(Opened(2, None, lambda space: None))
        yield publisher


@pytest.fixture
def publisher() -> Iterator[ZmqPublisher]:
    with opened(keep=100, topic="kv") as publisher:
        yield publisher


def sent(publisher: ZmqPublisher, events: int) -> None:
    """Return when so many events have left."""
    until(lambda: publisher.stats().events >= events, publisher.stats)
    assert publisher.error is None


@contextmanager
def asking(publisher: ZmqPublisher, *asked: tuple[bytes, ...]) -> Iterator[zmq.Socket[bytes]]:
    """Who has sent these frames to be replayed something, and has had an answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay or "")
        for frames in asked:
            socket.send_multipart(frames)
        assert socket.poll(10_000)
        yield socket


def one_by_one(publisher: ZmqPublisher, first: int, last: int) -> None:
    """A batch each."""
    for number in range(first, last):
        publisher(stored(number))
        sent(publisher, number + 2)


def joined(publisher: ZmqPublisher, replay: bool = True) -> Subscriber:
    return Subscriber(publisher.endpoint, publisher.replay if replay else None, topic="kv")


def heard(publisher: ZmqPublisher, subscriber: Subscriber, number: int) -> list[Received]:
    """Publish batches from that ``number`` on, until the subscriber hears of some."""
    batches: list[Received] = []
    while not batches:
        one_by_one(publisher, number, number + 1)
        number += 1
        batches += subscriber.receive(0.02)
    return batches


def read(subscriber: Subscriber, number: int) -> list[Received]:
    """The batches up to that ``number``."""
    batches: list[Received] = []

    def there() -> bool:
        batches.extend(subscriber.receive(0.01))
        return bool(batches) and batches[-1].number >= number

    until(there, lambda: batches)
    return batches


def test_a_gap_is_filled_before_what_comes_after_it(publisher: ZmqPublisher) -> None:
    with joined(publisher) as subscriber:
        list(subscriber.catch_up())
        one_by_one(publisher, 0, 5)  # some of it before the subscription has arrived, for all we know
        list(subscriber.catch_up())
        subscriber._order.next = 3  # what came after number 2 is lost
        one_by_one(publisher, 5, 6)
        batches = read(subscriber, publisher.stats().batches - 1)
    assert [batch.number for batch in batches] == list(range(3, publisher.stats().batches))


def test_a_publisher_that_began_anew_is_read_from_its_beginning() -> None:
    with opened() as first:
        one_by_one(first, 0, 60)
        endpoint, replay = first.endpoint, first.replay
        subscriber = Subscriber(endpoint, replay)
        assert len(list(subscriber.catch_up())) > 3
    with subscriber, opened(endpoint, replay) as second:
        batches = heard(second, subscriber, 0)
    assert [batches[at].batch.events[0] for at in (0, 1)] == [AllBlocksCleared()] * 2, "of the old one, of the new one"
    assert [batch.number for batch in batches[1:]] == list(range(len(batches) - 1))


def test_what_a_dead_publisher_announced_is_cleared_though_its_successor_does_not_say_so() -> None:
    def batch(block: int, at: float) -> bytes:
        return Encoder().encode(EventBatch(at, [BlockStored([block], None, [], 16, None, "GPU", None)]))

    with zmq.Context() as context, context.socket(zmq.PUB) as engine:  # as vLLM's, which begins with what it stores
        with Subscriber(f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}") as subscriber:
            mirror, received = Mirror(), list[Received]()
            while not received:
                engine.send_multipart((b"", bytes(8), batch(1, 1.0)))
                received += subscriber.receive(0.02)
            received += subscriber.receive(0.1)
            engine.send_multipart((b"", bytes(8), batch(2, 2.0)))
            received += subscriber.receive(0.2)
        for one in received:
            mirror.apply(one.batch)
    assert set(mirror.blocks["GPU"]) == {2}


def test_without_replay_a_gap_is_told(publisher: ZmqPublisher) -> None:
    one_by_one(publisher, 0, 3)
    with joined(publisher, replay=False) as subscriber:
        batches = heard(publisher, subscriber, 3)
    assert batches[0].batch.events == [AllBlocksCleared()]
    assert batches[1].number == batches[0].number + 1


def test_what_is_not_kept_any_more_is_told_by_the_publisher() -> None:
    with opened(keep=4) as publisher:
        one_by_one(publisher, 0, 10)
        with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
            batches = list(subscriber.catch_up())
    cleared, there = batches[0].batch.events
    assert cleared == AllBlocksCleared()
    assert isinstance(there, BlockStored)
    assert (set(there.block_hashes), there.medium, there.token_ids) == (set(range(10)), "GPU", [])
    assert [batch.number for batch in batches] == list(range(batches[0].number, batches[0].number + 5))
    last = batches[-1].batch.events[-1]
    assert isinstance(last, BlockStored)
    assert last.block_hashes == [9]


def test_frames_are_those_that_routers_expect(publisher: ZmqPublisher) -> None:
    """PUB: topic, number, payload. ROUTER: asked for a number, (empty, topic, number, payload)... and last
    (empty, nothing, -1, nothing)."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        sub.connect(publisher.endpoint)
        number = 0
        while not sub.poll(20):
            one_by_one(publisher, number, number + 1)
            number += 1
        topic, sequence, payload = sub.recv_multipart()
    assert topic == b"kv"
    assert len(sequence) == 8
    assert len(msgspec.msgpack.decode(payload)) == 3
    with asking(publisher, (b"", sequence)) as asked:
        assert asked.recv_multipart() == [b"", b"kv", sequence, payload]
        while (frames := asked.recv_multipart())[2] != END:
            assert int.from_bytes(frames[2], "big") > int.from_bytes(sequence, "big")
        assert frames == [b"", b"", END, b""]


@pytest.mark.parametrize("layout", EventLayout)
def test_replays_have_the_frames_of_the_layouts_time(layout: EventLayout) -> None:
    """Before vLLM sent events as maps, a replayed batch had no topic before it. Either can be had."""
    for replay_topic, topical in ((None, layout is EventLayout.MAP), (True, True), (False, False)):
        with opened(topic="kv", layout=layout, replay_topic=replay_topic) as publisher:
            sent(publisher, 1)
            with Subscriber(publisher.endpoint, publisher.replay, topic="kv", layout=layout) as subscriber:
                assert [number for number, _ in subscriber.catch_up()] == [0]
            with asking(publisher, (b"", bytes(8))) as asked:
                assert asked.recv_multipart()[:-2] == [b"", *([b"kv"] if topical else [])]


CALLS = 3000
CPU_PER_CALL = 50e-6        # it takes 1 µs here; one system call that waits takes more than this
WAIT_PER_CALL = 2e-3


def test_a_slow_or_dead_subscriber_costs_the_cache_nothing() -> None:
    """One that is connected and never reads, and one that reads one batch every few milliseconds: the caller neither
    works nor waits for them, nothing is lost to others, and the slow one gets what it missed by replay."""
    with opened() as publisher:
        alone = published(publisher)
    with opened(high_water=4) as publisher:
        context = zmq.Context()
        dead = context.socket(zmq.SUB)
        dead.set_hwm(1)
        dead.setsockopt(zmq.RCVBUF, 1024)
        dead.setsockopt_string(zmq.SUBSCRIBE, "")
        dead.connect(publisher.endpoint)
        slow = threading.Thread(target=read_slowly, args=(publisher, got := list[Received]()))
        slow.start()
        try:
            beside = published(publisher)
            sent(publisher, CALLS + 1)
            assert publisher.stats().lost == 0
            with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
                events = [event for _, batch in subscriber.catch_up() for event in batch.events]
            assert len(events) == CALLS + 1
        finally:
            publisher(stored(CALLS))
            slow.join(PATIENCE)
            context.destroy(linger=0)
        assert [number for number, _ in got] == list(range(len(got))), "a gap that was not filled"
        assert sum(len(batch.events) for _, batch in got) == CALLS + 2
    for cpu, wait in (alone, beside):
        assert cpu < CPU_PER_CALL
        assert wait < WAIT_PER_CALL
    assert beside[0] < 3 * alone[0] + 5e-6


def published(publisher: ZmqPublisher) -> tuple[float, float]:
    """Median CPU time of this thread for a call, and the median of its time on the clock, in seconds."""
    cpu, clock = list[float](), list[float]()
    for number in range(CALLS):
        event, began, worked = stored(number), time.perf_counter(), time.thread_time()
        publisher(event)
        cpu.append(time.thread_time() - worked)
        clock.append(time.perf_counter() - began)
    return median(cpu), median(clock)


def read_slowly(publisher: ZmqPublisher, got: list[Received]) -> None:
    """Until the last event; a batch every few milliseconds at first, so that the publisher's queue runs over."""
    end = time.monotonic() + PATIENCE
    with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
        while time.monotonic() < end:
            for received in subscriber.receive(0.05):
                got.append(received)
                if any(isinstance(e, BlockStored) and e.block_hashes == [CALLS] for e in received.batch.events):
                    return
                if len(got) < 20:
                    time.sleep(0.005)


def test_a_publisher_that_falls_behind_says_so() -> None:
    with opened(gather=0.05, backlog=50) as publisher:
        for number in range(200):
            publisher(stored(number))
        sent(publisher, 51)
        assert publisher.stats().lost >= 150
        publisher(stored(1000))
        sent(publisher, 52)
        with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
            events = [event for _, batch in subscriber.catch_up() for event in batch.events]
    assert events[-2] == AllBlocksCleared()
    assert isinstance(events[-1], BlockStored)
    assert events[-1].block_hashes == [1000]


def test_a_replay_request_that_makes_no_sense_is_ignored(publisher: ZmqPublisher) -> None:
    with asking(publisher, (b"what", b"is", b"this"), (b"", b"short"), (b"", bytes(8))):
        assert publisher.error is None


def test_an_endpoint_that_cannot_be_bound_is_refused(publisher: ZmqPublisher) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        ZmqPublisher(publisher.endpoint)


def test_closing_sends_what_waits_and_is_idempotent() -> None:
    with opened(gather=0.001) as publisher:
        publisher(stored(0))
    publisher.close()
    assert publisher.stats().events == 2
    publisher(stored(1))
    assert publisher.stats().lost == 1


def test_history_is_bounded_by_bytes_too() -> None:
    history = History(keep=100, keep_bytes=10)
    for number in range(5):
        history.add(number, b"1234")
    assert list(history.since(0, lambda: [b"gone", b"all"])) == [(2, b"gone"), (2, b"all"), (3, b"1234"), (4, b"1234")]
    assert list(history.since(4, lambda: [b"gone"])) == [(4, b"1234")]
    history.add(5, b"far more than ten bytes")
    assert list(history.since(5, lambda: [b"gone"])) == [(5, b"far more than ten bytes")]


@pytest.mark.parametrize("layout", EventLayout)
async def test_a_cache_tells_the_world(layout: EventLayout) -> None:
    """From the cache to a mirror over sockets: every tier, then a reset."""
    backend, device = MemoryBackend(), CpuDevice()
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0, layout=layout, rank=2) as publisher:
        async with AsyncCache(settings(host=16), device=device, storage=backend, on_event=publisher) as cache:
            async with cache.lease(text(4)) as lease:
                compute(cache, lease, text(4))
                await lease.commit(text(4))
            await cache.flush()
            await settled(cache)
        with Subscriber(publisher.endpoint, publisher.replay, layout=layout) as subscriber:
            mirror = Mirror()
            while any(len(held) < 4 for held in mirror.blocks.values()):
                for _, batch in await asyncio.to_thread(lambda: list(subscriber.catch_up())):
                    assert batch.data_parallel_rank == 2
                    mirror.apply(batch)
    await backend.aclose()
    await device.aclose()


def test_a_publisher_whose_thread_has_died_takes_notices_and_is_closed_without_an_error() -> None:
    """The thread closes what wakes it. Somebody may just then be about to wake it."""

    def broken() -> float:
        raise OSError("no clock")

    publisher = ZmqPublisher(LOCAL, clock=broken)
    publisher(Opened(2, None, lambda space: None))
    publisher(stored(1))
    publisher._thread.join(30)
    assert isinstance(publisher.error, OSError)
    publisher.error, publisher._woken = None, False  # as a caller saw it who looked a moment before
    publisher(stored(2))
    publisher.close()


@pytest.mark.parametrize("asked", range(5))
def test_a_snapshot_comes_first_exactly_if_a_batch_that_was_asked_for_is_not_kept(asked: int) -> None:
    """One missing batch is as good as many: a subscriber must not take what follows for all there was."""
    history = History(keep=2, keep_bytes=1 << 20)
    for number in range(4):
        history.add(number, b"batch")
    snapshot = [(1, b"snapshot")] if asked < 2 else []
    batches = [(number, b"batch") for number in (2, 3) if number >= asked]
    assert list(history.since(asked, lambda: [b"snapshot"])) == snapshot + batches


# A fleet's picture of its servers, over real sockets: late, gaps, restarts, ends, snapshots, and wrong frames.


DEVICE, HOST, STORAGE = Medium.GPU, Medium.CPU, Medium.STORAGE


def key(block: int, part: int = 0) -> bytes:
    return named_key(sha256(f"{block} {part}".encode()).digest(), block)


def held(medium: Medium, *blocks: int, there: bool = True) -> HeldReport:
    return HeldReport(medium, there, [key(block) for block in blocks])


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(patience=0.3, check=0.2, silence=1.0) as fleet:
        yield fleet
        assert fleet.error is None


def publishing(*, first: int = 0, keep: int = 10_000, at: ZmqPublisher | None = None) -> ZmqPublisher:
    publisher = ZmqPublisher(
        LOCAL if at is None else at.endpoint, LOCAL if at is None else at.replay, gather=0.0, first=first, keep=keep
    )
    publisher(Cleared())
    return publisher


def follow(fleet: Fleet, **servers: ZmqPublisher) -> None:
    for name, publisher in servers.items():
        fleet.add(name, [EventStream(publisher.endpoint, publisher.replay)])


def hits(fleet: Fleet, name: str, *blocks: int) -> tuple[int, int, int]:
    return tuple(fleet.hits(list(blocks))[name])  # type: ignore[return-value]


def test_leading_blocks_are_counted_where_they_are_nearest(fleet: Fleet) -> None:
    with publishing() as machine, publishing() as engine:
        engine(held(DEVICE, 1, 2))
        machine(held(HOST, 1, 2, 3))
        machine(held(STORAGE, 1, 2, 3, 4, 6))
        host = EventStream(machine.endpoint, machine.replay)
        fleet.add("a", [EventStream(engine.endpoint, engine.replay), host])
        fleet.add("b", [host])
        until(lambda: fleet.hits([1, 2, 3, 4, 5, 6]) == {"a": TierHits(2, 1, 1), "b": TierHits(0, 3, 1)},
              lambda: fleet.hits([1, 2, 3, 4, 5, 6]))  # fmt: skip
        assert "2 streams" in repr(fleet), "the machine's is followed once"
        fleet.remove("a")
        assert fleet.hits([1]) == {"b": TierHits(0, 1, 0)}
        assert "1 streams" in repr(fleet)


def test_who_joins_late_has_all_of_it_though_the_batches_are_kept_no_more(fleet: Fleet) -> None:
    blocks = range(3 * SNAPSHOT_BLOCKS)
    with publishing(keep=4) as publisher:
        for at in range(0, len(blocks), 512):
            publisher(held(HOST, *blocks[at : at + 512]))
            until(lambda: publisher.stats().waiting == 0)
        publisher(held(HOST, 7, there=False))
        until(lambda: publisher.stats().batches > 20)
        follow(fleet, a=publisher)
        until(lambda: hits(fleet, "a", *blocks[8:]) == (0, len(blocks) - 8, 0), fleet.stats)
        assert hits(fleet, "a", 7) == (0, 0, 0)
        with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
            mirror, sizes = Mirror(), []
            for received in subscriber.catch_up():
                mirror.apply(received.batch)
                sizes += [len(event.block_hashes) for event in received.batch.events if isinstance(event, BlockStored)]
        assert mirror.blocks["CPU"] == {*blocks} - {7}
        assert max(sizes) <= SNAPSHOT_BLOCKS, "an answer's messages are bounded"


def test_a_block_is_there_from_its_first_key_until_its_last(fleet: Fleet) -> None:
    with publishing() as publisher:
        follow(fleet, a=publisher)
        publisher(HeldReport(HOST, True, [key(5, 0), key(5, 1), named_key(bytes(32), None)]))
        until(lambda: hits(fleet, "a", 5) == (0, 1, 0))
        publisher(HeldReport(HOST, False, [key(5, 0)]))
        publisher(held(HOST, 6))
        until(lambda: hits(fleet, "a", 6) == (0, 1, 0))
        assert hits(fleet, "a", 5) == (0, 1, 0)
        publisher(HeldReport(HOST, False, [key(5, 1)]))
        until(lambda: hits(fleet, "a", 5) == (0, 0, 0))


class Lossy:
    """A publisher whose every frame is the test's: it sends what it is told to, and answers so, too. What it is asked
    while it is ``silent`` is answered with nothing, when it is silent no more."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.pub.linger = self.router.linger = 0
        for one in (self.pub, self.router):
            one.bind(LOCAL)
        self.stream = EventStream(*(one.getsockopt_string(zmq.LAST_ENDPOINT) for one in (self.pub, self.router)))
        self.answer: list[list[bytes]] = []
        self.asked: list[int] = []
        self.silent = self.closing = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        self.encode = Encoder().encode

    def run(self) -> None:
        late: list[bytes] = []
        while not self.closing:
            while late and not self.silent:
                self.say(late.pop(), [])
            if self.router.poll(10):
                who, _, number = self.router.recv_multipart()
                self.asked.append(int.from_bytes(number, "big"))
                if self.silent:
                    late.append(who)
                else:
                    self.say(who, self.answer)

    def say(self, who: bytes, answer: list[list[bytes]]) -> None:
        for frames in [*answer, [b"", (-1).to_bytes(8, "big", signed=True), b""]]:
            self.router.send_multipart((who, b"", *frames))

    def batch(self, *blocks: int, medium: str = "CPU") -> bytes:
        return self.encode(EventBatch(time.time(), [BlockStored([*blocks], None, [], 0, None, medium, None)]))

    def frames(self, number: int, payload: bytes) -> list[bytes]:
        return [b"", number.to_bytes(8, "big"), payload]

    def __enter__(self) -> Lossy:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing = True
        self.thread.join()
        self.context.destroy(linger=0)


def connected(fleet: Fleet, lossy: Lossy) -> None:
    fleet.add("a", [lossy.stream])
    until(lambda: fleet.stats()["a"][0].connected and len(lossy.asked) > 1)


def test_a_gap_is_asked_for_and_told_if_it_cannot_be_filled(fleet: Fleet) -> None:
    with Lossy() as lossy:
        connected(fleet, lossy)
        lossy.pub.send_multipart(lossy.frames(0, lossy.batch(1)))
        until(lambda: hits(fleet, "a", 1) == (0, 1, 0))
        lossy.answer = [lossy.frames(1, lossy.batch(2)), lossy.frames(2, lossy.batch(3))]
        lossy.pub.send_multipart(lossy.frames(3, lossy.batch(4)))
        until(lambda: hits(fleet, "a", 1, 2, 3, 4) == (0, 4, 0), fleet.stats)
        lossy.answer = []
        lossy.pub.send_multipart(lossy.frames(9, lossy.batch(5)))
        until(lambda: hits(fleet, "a", 5) == (0, 1, 0))
        assert hits(fleet, "a", 1) == (0, 0, 0), "what could not be had is told"
        lossy.silent = True
        lossy.pub.send_multipart(lossy.frames(20, lossy.batch(6)))
        until(lambda: hits(fleet, "a", 6) == (0, 1, 0))
        assert fleet.stats()["a"][0].gaps >= 3


def test_an_answer_that_is_older_than_a_gap_is_not_the_last_word_on_it() -> None:
    with Fleet(patience=30.0, check=0.2, silence=1.0) as fleet, Lossy() as lossy:
        connected(fleet, lossy)
        lossy.pub.send_multipart(lossy.frames(0, lossy.batch(1)))
        until(lambda: hits(fleet, "a", 1) == (0, 1, 0))
        lossy.silent, asked = True, len(lossy.asked)
        until(lambda: len(lossy.asked) > asked)
        lossy.pub.send_multipart(lossy.frames(3, lossy.batch(4)))
        until(lambda: fleet.stats()["a"][0].gaps == 1)
        lossy.answer = [lossy.frames(1, lossy.batch(2)), lossy.frames(2, lossy.batch(3))]
        lossy.silent = False
        until(lambda: hits(fleet, "a", 1, 2, 3, 4) == (0, 4, 0), fleet.stats)


def test_what_a_dead_publisher_sent_behind_a_gap_is_not_believed_of_the_next_one() -> None:
    with Fleet(patience=30.0, check=0.2, silence=1.0) as fleet, Lossy() as lossy:
        connected(fleet, lossy)
        lossy.silent = True
        for number in range(5, 10):
            lossy.pub.send_multipart(lossy.frames(number, lossy.batch(number)))
        until(lambda: fleet.stats()["a"][0].gaps == 1)
        lossy.pub.close()
        until(lambda: not fleet.stats()["a"][0].connected)
        lossy.silent, lossy.answer = False, [lossy.frames(0, lossy.batch(1))]
        lossy.pub = lossy.context.socket(zmq.PUB)
        lossy.pub.linger = 0
        lossy.pub.bind(lossy.stream.endpoint)
        until(lambda: hits(fleet, "a", 1) == (0, 1, 0), fleet.stats)
        lossy.pub.send_multipart(lossy.frames(1, lossy.batch(2)))
        until(lambda: hits(fleet, "a", 2) == (0, 1, 0), fleet.stats)
        assert not any(any(hits(fleet, "a", block)) for block in range(5, 10))


def test_what_got_lost_last_of_all_is_found_without_another_batch(fleet: Fleet) -> None:
    with Lossy() as lossy:
        connected(fleet, lossy)
        lossy.pub.send_multipart(lossy.frames(0, lossy.batch(1)))
        until(lambda: hits(fleet, "a", 1) == (0, 1, 0))
        lossy.answer = [lossy.frames(1, lossy.batch(2))]
        until(lambda: hits(fleet, "a", 1, 2) == (0, 2, 0), fleet.stats)


def test_wrong_frames_harm_nobody_else(fleet: Fleet) -> None:
    with Lossy() as lossy, publishing() as other:
        other(held(HOST, 1, 2))
        follow(fleet, b=other)
        connected(fleet, lossy)
        random = Random(7)
        last = (1 << 64) - 1
        wrong = [
            [b""], [b"", b"short", b""], [b"a", b"b", b"c", b"d"], lossy.frames(last, lossy.batch(1)),
            lossy.frames(1 << 63, lossy.batch(1)), lossy.frames(0, b""), lossy.frames(0, b"\xc1"),
            lossy.frames(0, b"\x91" * 5000), lossy.frames(0, lossy.batch(1).replace(b"CPU", b"\xff\xff\xff")),
            *([random.randbytes(random.randrange(60)) for _ in range(random.randrange(1, 5))] for _ in range(200)),
        ]
        lossy.answer = [*wrong, *wrong]
        for frames in wrong:
            lossy.pub.send_multipart(frames)
        until(lambda: fleet.stats()["a"][0].malformed > 100, fleet.stats)
        assert hits(fleet, "b", 1, 2) == (0, 2, 0)
        lossy.answer = []
        lossy.pub.send_multipart(lossy.frames((1 << 62) - 1, lossy.batch(8)))
        until(lambda: hits(fleet, "a", 8) == (0, 1, 0), fleet.stats)
        other(held(HOST, 3))
        until(lambda: hits(fleet, "b", 1, 2, 3) == (0, 3, 0))


def test_a_subscriber_takes_the_number_of_an_answers_end_for_no_batch() -> None:
    with Lossy() as lossy, Subscriber(lossy.stream.endpoint, lossy.stream.replay, patience=0.1) as subscriber:
        assert list(subscriber.catch_up()) == []
        found: list[Received] = []
        while not found:
            for number in ((1 << 64) - 1, 1 << 63, 0):
                lossy.pub.send_multipart(lossy.frames(number, lossy.batch(1)))
            found += list(subscriber.receive(0.02))
        assert found[0].number == 0


def test_wrong_streams_are_refused_and_nothing_changes(fleet: Fleet) -> None:
    with publishing() as publisher:
        follow(fleet, a=publisher)
        for endpoint, replay in (("tcp://", None), (publisher.endpoint, "nowhere"), ("no://address", None)):
            with pytest.raises(ConfigError, match="streams: endpoint="):
                fleet.add("a", [EventStream(publisher.endpoint), EventStream(endpoint, replay)])
        publisher(held(HOST, 1))
        until(lambda: hits(fleet, "a", 1) == (0, 1, 0))
        with pytest.raises(ConfigError, match="server"):
            fleet.remove("b")


def test_a_fleet_can_be_closed_while_its_thread_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may see that it is to end, and close its sockets, before the call that closes it goes on."""
    fleet = Fleet()

    class ThreadFirst:
        """The fleet's lock, after which its thread comes first."""

        def __enter__(self, lock: threading.Lock = fleet._working) -> None:
            lock.acquire()

        def __exit__(self, *_: object, lock: threading.Lock = fleet._working) -> None:
            lock.release()
            if threading.current_thread() is not fleet._thread:
                fleet._thread.join()

    monkeypatch.setattr(fleet, "_working", ThreadFirst())
    fleet.close()
    fleet.close()


def test_a_closed_fleet_says_so() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.close()
    with pytest.raises(CacheClosed):
        fleet.add("a", [])
    assert fleet.hits([1]) == {}


@pytest.mark.parametrize("seed", range(3))
def test_after_quiet_the_fleet_has_what_the_publishers_say(seed: int) -> None:
    """Publishers come, go, change their mind a thousand times, and keep a handful of batches."""
    random = Random(seed)
    truth: dict[str, dict[Medium, set[int]]] = {name: {HOST: set(), STORAGE: set()} for name in "abc"}
    with Fleet(patience=0.3, check=0.1, silence=1.0) as fleet:
        publishers = {name: publishing(first=time.time_ns(), keep=3) for name in truth}
        follow(fleet, **publishers)
        for step in range(1500):
            name = random.choice("abc")
            medium = random.choice([HOST, STORAGE])
            mine = truth[name][medium]
            block = random.randrange(-40, 40)
            publishers[name](held(medium, block, there=block not in mine))
            mine.symmetric_difference_update({block})
            if step % 200 == 199:
                old = publishers[name]
                old.close()
                publishers[name] = publishing(first=time.time_ns(), keep=3, at=old)
                for each, blocks in truth[name].items():
                    publishers[name](held(each, *blocks))
            if not step % 50:
                time.sleep(0.01)

        def agree() -> bool:
            return all(
                fleet.hits([block])[name] == (0, block in on[HOST], block in on[STORAGE] - on[HOST])
                for name, on in truth.items() for block in range(-40, 40)
            )  # fmt: skip

        until(agree, fleet.stats)
        for publisher in publishers.values():
            publisher.close()
        assert fleet.error is None
