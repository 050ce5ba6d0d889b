"""The stream over real sockets: in order, replayed from any number, and never in the cache's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest
import zmq
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, ConfigError
from asynccache.core.plan import Medium, Publish
from asynccache.events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    EventLayout,
    Mirror,
    Opened,
    Received,
    Subscriber,
    ZmqPublisher,
)
from asynccache.events.publisher import END, History
from asynccache.events.wire import Encoder
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import compute, settings, settled, text

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 10.0


def page(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int) -> Publish:
    return Publish(Medium.GPU, True, page(number - 1) if number else b"", page(number), bytes(8), b"")


@pytest.fixture
def publisher() -> Iterator[ZmqPublisher]:
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0, keep=100, topic="kv") as publisher:
        publisher(Opened(2, None, lambda space: None))
        yield publisher


def sent(publisher: ZmqPublisher, events: int) -> None:
    """Return when so many events have left."""
    until = time.monotonic() + PATIENCE
    while publisher.stats().events < events:
        assert time.monotonic() < until, publisher.stats()
        assert publisher.error is None
        time.sleep(0.001)


def one_by_one(publisher: ZmqPublisher, first: int, last: int) -> None:
    """A batch each."""
    for number in range(first, last):
        publisher(stored(number))
        sent(publisher, number + 2)


def joined(publisher: ZmqPublisher, replay: bool = True) -> Subscriber:
    return Subscriber(publisher.endpoint, publisher.replay if replay else None, topic="kv")


def read(subscriber: Subscriber, until: int) -> list[Received]:
    """The batches up to number ``until``."""
    batches: list[Received] = []
    end = time.monotonic() + PATIENCE
    while not batches or batches[-1].number < until:
        assert time.monotonic() < end, batches
        batches += subscriber.receive(0.01)
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
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0) as first:
        first(Opened(2, None, lambda space: None))
        one_by_one(first, 0, 60)
        endpoint, replay = first.endpoint, first.replay
        subscriber = Subscriber(endpoint, replay)
        assert len(list(subscriber.catch_up())) > 3
    with subscriber, ZmqPublisher(endpoint, replay, gather=0.0) as second:
        second(Opened(2, None, lambda space: None))
        number, batches = 0, list[Received]()
        while not batches:
            one_by_one(second, number, number + 1)
            number += 1
            batches += subscriber.receive(0.02)
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
        number = 3
        batches: list[Received] = []
        while not batches:
            one_by_one(publisher, number, number + 1)
            number += 1
            batches += subscriber.receive(0.02)
    assert batches[0].batch.events == [AllBlocksCleared()]
    assert batches[1].number == batches[0].number + 1


def test_what_is_not_kept_any_more_is_told_by_the_publisher() -> None:
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0, keep=4) as publisher:
        publisher(Opened(2, None, lambda space: None))
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
    context = zmq.Context()
    try:
        sub, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
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
        assert publisher.replay is not None
        asking.connect(publisher.replay)
        asking.send_multipart((b"", sequence))
        assert asking.poll(10_000)
        assert asking.recv_multipart() == [b"", b"kv", sequence, payload]
        while (frames := asking.recv_multipart())[2] != END:
            assert int.from_bytes(frames[2], "big") > int.from_bytes(sequence, "big")
        assert frames == [b"", b"", END, b""]
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("layout", EventLayout)
def test_replays_have_the_frames_of_the_layouts_time(layout: EventLayout) -> None:
    """Before vLLM sent events as maps, a replayed batch had no topic before it. Either can be had."""
    for replay_topic, topical in ((None, layout is EventLayout.MAP), (True, True), (False, False)):
        with ZmqPublisher(LOCAL, LOCAL, gather=0.0, topic="kv", layout=layout, replay_topic=replay_topic) as publisher:
            publisher(Opened(2, None, lambda space: None))
            sent(publisher, 1)
            with Subscriber(publisher.endpoint, publisher.replay, topic="kv", layout=layout) as subscriber:
                assert [number for number, _ in subscriber.catch_up()] == [0]
            context = zmq.Context()
            try:
                asking = context.socket(zmq.DEALER)
                asking.connect(publisher.replay or "")
                asking.send_multipart((b"", bytes(8)))
                assert asking.poll(10_000)
                assert asking.recv_multipart()[:-2] == [b"", *([b"kv"] if topical else [])]
            finally:
                context.destroy(linger=0)


CALLS = 3000
CPU_PER_CALL = 50e-6        # it takes 1 µs here; one system call that waits takes more than this
WAIT_PER_CALL = 2e-3


def test_a_slow_or_dead_subscriber_costs_the_cache_nothing() -> None:
    """One that is connected and never reads, and one that reads one batch every few milliseconds: the caller neither
    works nor waits for them, nothing is lost to others, and the slow one gets what it missed by replay."""
    alone = cost_of_publishing()
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0, high_water=4) as publisher:
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


def cost_of_publishing() -> tuple[float, float]:
    """With nobody there."""
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0) as publisher:
        return published(publisher)


def published(publisher: ZmqPublisher) -> tuple[float, float]:
    """Median CPU time of this thread for a call, and the median of its time on the clock, in seconds."""
    publisher(Opened(2, None, lambda space: None))
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
    with ZmqPublisher(LOCAL, LOCAL, gather=0.05, backlog=50) as publisher:
        publisher(Opened(2, None, lambda space: None))
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
    context = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        assert publisher.replay is not None
        asking.connect(publisher.replay)
        asking.send_multipart((b"what", b"is", b"this"))
        asking.send_multipart((b"", b"short"))
        asking.send_multipart((b"", bytes(8)))
        assert asking.poll(10_000)
        assert publisher.error is None
    finally:
        context.destroy(linger=0)


def test_an_endpoint_that_cannot_be_bound_is_refused() -> None:
    with ZmqPublisher(LOCAL) as publisher, pytest.raises(ConfigError, match="cannot bind"):
        ZmqPublisher(publisher.endpoint)


def test_closing_sends_what_waits_and_is_idempotent(tmp_path: Path) -> None:
    publisher = ZmqPublisher(LOCAL, gather=0.001)
    publisher(Opened(2, None, lambda space: None))
    publisher(stored(0))
    publisher.close()
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


@pytest.mark.asyncio
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
