"""A fleet's picture of its servers, over real sockets: late, gaps, restarts, ends, snapshots, and wrong frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from random import Random

import pytest
import zmq

from asynccache.core.plan import Cleared, Medium
from asynccache.errors import CacheClosed, ConfigError
from asynccache.events import EventStream, Fleet, HeldReport, Received, Subscriber, TierHits, ZmqPublisher
from asynccache.events.publisher import SNAPSHOT_BLOCKS
from asynccache.events.wire import BlockStored, Encoder, EventBatch, Mirror
from asynccache.storage.contract import named_key

LOCAL = "tcp://127.0.0.1:*"
SOON = 20.0
DEVICE, HOST, STORAGE = Medium.GPU, Medium.CPU, Medium.STORAGE


def key(block: int, part: int = 0) -> bytes:
    return named_key(sha256(f"{block} {part}".encode()).digest(), block)


def held(medium: Medium, *blocks: int, there: bool = True) -> HeldReport:
    return HeldReport(medium, there, [key(block) for block in blocks])


def until(true: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, why()
        time.sleep(0.005)


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
    """A publisher whose every frame is the test's: it sends what it is told to, and answers so, too."""

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
        while not self.closing:
            if self.router.poll(10):
                who, empty, number = self.router.recv_multipart()
                self.asked.append(int.from_bytes(number, "big"))
                if not self.silent:
                    for frames in [*self.answer, [b"", (-1).to_bytes(8, "big", signed=True), b""]]:
                        self.router.send_multipart((who, empty, *frames))

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
                fleet._thread.join(SOON)

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
