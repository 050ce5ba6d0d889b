"""Links over real sockets: frames, signs of life, ends, and the handshake before all that."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from asynccache.errors import ConfigError, RankFailure
from asynccache.worker import link as links
from asynccache.worker.link import (
    BEAT,
    BYE,
    GREETING,
    LENGTH,
    MOST_FRAME,
    MOST_HELLO,
    NONCE,
    NOT_AUTHENTICATED,
    PROOF,
    TAKEN,
    TIMEOUT,
    Link,
    ListenAddress,
    Listener,
    _proof,
    find_secret,
    open_link,
    open_listener,
    parse_address,
)
from tests.waiting import turns, until

SECRET = b"what both ends know"
ANYWHERE = "127.0.0.1:0"


class Ear:
    """Hears a link. ``then``: called with every frame."""

    def __init__(self, link: Link, then: Callable[[bytes], None] = lambda _: None) -> None:
        self.frames: list[bytes] = []
        self.lost: list[str] = []
        self.at: list[int] = []
        self.link = link
        self._then = then
        link.begin(self._heard, self._lost)

    def _heard(self, frame: bytes) -> None:
        assert not self.lost, "a frame after the end"
        self.frames.append(frame)
        self._then(frame)

    def _lost(self, failure: RankFailure) -> None:
        self.lost.append(str(failure))
        self.at.append(len(self.frames))

    async def hears(self, count: int) -> list[bytes]:
        """The first ``count`` frames, when they have come."""
        await until(lambda: len(self.frames) >= count, f"{count} frames did not come")
        return self.frames[:count]

    async def loses(self) -> str:
        """Wait until the link has ended; returns why."""
        await until(lambda: bool(self.lost), "nobody was lost")
        return self.lost[0]


class Pair(NamedTuple):
    """Both ends of a link."""

    head: Link
    worker: Link
    listener: Listener


@asynccontextmanager
async def connected(address: str = ANYWHERE, timeout: float = 30.0, to: str = "") -> AsyncIterator[Pair]:
    """An established link to which neither end listens yet. ``to``: the host that the worker connects to; by default
    the one where the head listens."""
    heads: list[Link] = []

    def take(hello: bytes, link: Link) -> bytes:
        heads.append(link)
        return b"welcome, " + hello

    listener = await open_listener(address, SECRET, take, timeout=timeout)
    try:
        where = f"{to}:{listener.address.rpartition(':')[2]}" if to else listener.address
        worker, welcome = await open_link(where, SECRET, b"rank 1", timeout=30.0)
        assert welcome == b"welcome, rank 1"
        (head,) = heads
        try:
            yield Pair(head, worker, listener)
        finally:
            for link in (head, worker):
                link.abort()
            await asyncio.sleep(0.01)
    finally:
        await listener.aclose()


# Links over real sockets: frames whole and in order, signs of life, and each way in which a link ends.


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH, "little") + content


def count_writes(link: Link, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the link writes, from now on, by write."""
    written: list[bytes] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            written.append(data)
            transport.write(data)

    transport = link._transport
    monkeypatch.setattr(link, "_transport", Counting())
    return written


async def stop(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its process were stopped: nothing more comes from there."""
    await turns()
    link._timer.cancel()
    monkeypatch.setattr(link, "_watch", lambda: None)


def places(folder: Path) -> list[str]:
    return [ANYWHERE, "[::1]:0", f"unix:{folder}/socket", "localhost:0"]


@pytest.mark.parametrize("place", range(4))
async def test_every_frame_is_heard_once_and_in_order_in_both_directions(place: int, tmp_path: Path) -> None:
    sent = [bytes([i % 256]) * (1 + i * i) for i in range(60)] + [bytes(16 << 20), b"end"]
    async with connected(places(tmp_path)[place]) as (head, worker, _):
        ears = Ear(head), Ear(worker)
        for one in sent:
            head.send(one)
            worker.send(one[::-1])
        heard_by_head, heard_by_worker = [await ear.hears(len(sent)) for ear in ears]
        assert heard_by_worker == sent
        assert heard_by_head == [one[::-1] for one in sent]


@pytest.mark.parametrize(("everywhere", "elsewhere"), [("0.0.0.0", "127.0.0.2"), ("[::]", "[::1]")])
async def test_a_head_that_listens_everywhere_is_reached_by_any_of_its_addresses(
    everywhere: str, elsewhere: str
) -> None:
    """As from another host: the worker connects to an address that the head was not given."""
    async with connected(f"{everywhere}:0", to=elsewhere) as (head, worker, listener):
        assert listener.address.startswith(f"{everywhere}:")
        ears = Ear(head), Ear(worker)
        head.send(b"to the worker")
        worker.send(b"to the head")
        assert [await ear.hears(1) for ear in ears] == [[b"to the head"], [b"to the worker"]]
        assert worker._transport.get_extra_info("peername")[0] == elsewhere.strip("[]")


async def test_a_frame_goes_out_at_once_and_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (head, worker, _):
        for link in (head, worker):
            raw: socket.socket = link._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "TCP waits for more to send"
        ear = Ear(worker)
        written = count_writes(head, monkeypatch)
        for number in range(10):
            head.send(bytes([number]))
            assert written == [frame(bytes([sent])) for sent in range(number + 1)]
        assert await ear.hears(10) == [bytes([number]) for number in range(10)]


async def test_frames_that_come_before_anybody_listens_wait_for_them() -> None:
    async with connected() as (head, worker, _):
        for number in range(100):
            head.send(bytes([number]) * 10_000)
        await asyncio.sleep(0.05)
        assert len(worker._rest) <= links.LIMIT + (256 << 10), "a stream stops at the limit, behind one read"
        ear = Ear(worker)
        assert not ear.frames                          # not from within begin
        assert [one[0] for one in await ear.hears(100)] == list(range(100))


async def test_a_frame_is_neither_empty_nor_larger_than_the_bound() -> None:
    async with connected() as (head, worker, _):
        ear = Ear(worker)
        for wrong in (b"", bytes(MOST_FRAME + 1)):
            with pytest.raises(ValueError, match=f"1 to {MOST_FRAME} bytes"):
                head.send(wrong)
        head.send(b"as ever")
        assert await ear.hears(1) == [b"as ever"]


async def test_an_idle_link_sends_signs_of_life_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(timeout=0.4) as (head, worker, _):
        ears = Ear(head), Ear(worker)
        written = count_writes(head, monkeypatch)
        await asyncio.sleep(1.0)
        assert set(written) == {BEAT}
        assert 0 < len(written) <= 11
        assert not any(ear.lost or ear.frames for ear in ears)


async def test_what_is_sent_is_a_sign_of_life_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(timeout=4.0) as (head, worker, _):
        Ear(head), Ear(worker)
        written = count_writes(head, monkeypatch)
        for _ in range(12):
            head.send(b"busy")
            await asyncio.sleep(0.2)
        assert BEAT not in written


async def test_who_is_silent_past_the_time_out_is_lost_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(timeout=0.4) as (head, worker, _):
        Ear(worker)
        loop = asyncio.get_running_loop()
        await stop(worker, monkeypatch)
        ear, began = Ear(head), loop.time()
        assert await ear.loses() == "was silent for 0.4 s"
        assert 0.4 <= round(loop.time() - began, 6) < 5.0, "uvloop's clock counts whole milliseconds"
        assert ear.lost == ["was silent for 0.4 s"]


async def test_patience_may_be_longer_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(timeout=0.2) as (head, worker, _):
        Ear(worker)
        head.patience(30.0)
        ear = Ear(head)
        await stop(worker, monkeypatch)
        await asyncio.sleep(0.8)
        assert not ear.lost
        head.patience(None)
        assert await ear.loses() == "was silent for 0.2 s"


async def test_a_loop_that_was_busy_for_longer_than_the_time_out_blames_nobody() -> None:
    import time

    async with connected(timeout=0.2) as (head, worker, _):
        ears = Ear(head), Ear(worker)
        for _ in range(4):                             # a sign of life that waits to be read may hide it once or twice
            time.sleep(0.25)                           # noqa: ASYNC251  that is the point
            await asyncio.sleep(0.17)
            assert not any(ear.lost for ear in ears)


async def test_the_last_frames_are_heard_before_the_end_and_the_end_once() -> None:
    async with connected() as (head, worker, _):
        ear, other = Ear(worker), Ear(head)
        for number in range(50):
            head.send(bytes([number]) * 70_000)
        await head.aclose()
        assert await ear.loses() == "has left"
        assert ear.at == [50]
        await turns()
        assert (len(ear.lost), other.lost) == (1, [])
        worker.send(b"to nobody")                      # does nothing
        await worker.aclose()
        await head.aclose()


async def test_both_ends_may_close_at_once_and_do_not_wait() -> None:
    async with connected() as (head, worker, _):
        ears = Ear(head), Ear(worker)
        head.send(b"last")
        async with asyncio.timeout(links.GRACE / 2):
            await asyncio.gather(head.aclose(), worker.aclose())
        assert not any(ear.lost for ear in ears)


async def test_closing_takes_a_bounded_time_although_the_peer_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE", 0.2)
    async with connected() as (head, _, _):            # the worker has not begun
        ear = Ear(head)
        head.send(bytes(16 << 20))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await head.aclose()
        assert 0.1 < loop.time() - began < 5.0
        assert not ear.lost


async def test_cancelling_a_close_aborts() -> None:
    async with connected() as (head, worker, _):
        Ear(head)
        worker._transport.pause_reading()              # it does not close, too
        closing = asyncio.create_task(head.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await Ear(worker).loses() in ("has left", "closed the connection")


async def test_who_aborts_hears_nothing_more_and_its_peer_loses_it() -> None:
    async with connected() as (head, worker, _):
        ear, other = Ear(head), Ear(worker)
        worker.send(b"too late")
        head.abort()
        assert "closed the connection" in await other.loses() or other.lost[0].startswith("is gone")
        head.abort()
        head.send(b"to nobody")                        # does nothing
        await turns()
        assert (ear.frames, ear.lost, other.frames) == ([], [], [])


async def test_who_aborts_while_it_hears_hears_no_later_frame() -> None:
    async with connected() as (head, worker, _):
        ear = Ear(worker, lambda _: worker.abort())
        for number in range(5):
            head.send(bytes([number]))
        await ear.hears(1)
        await asyncio.sleep(0.05)
        assert (ear.frames, ear.lost) == ([b"\0"], [])


@pytest.mark.parametrize(
    ("sent", "frames", "reason"),
    [
        (frame(b"one") + (MOST_FRAME + 1).to_bytes(LENGTH, "little") + b"x", 1, f"sent a frame of {MOST_FRAME + 1} by"),
        (frame(b"one") + frame(b"two") + frame(b"three")[:-1], 2, "closed the connection in the middle of a frame"),
        (frame(b"one")[:2], 0, "closed the connection in the middle of a frame"),
        (frame(b"one") + BEAT * 3 + frame(b"two"), 2, "closed the connection"),
        (frame(b"one") + BYE + frame(b"two"), 1, "has left"),
        (b"", 0, "closed the connection"),
    ],
)
async def test_what_is_no_frame_ends_the_link_after_all_that_were(sent: bytes, frames: int, reason: str) -> None:
    async with connected() as (head, worker, _):
        ear = Ear(head)
        worker._transport.write(sent)
        worker._writer.close()                                # closes when that is sent
        assert (await ear.loses()).startswith(reason)
        assert (ear.at, len(ear.lost)) == ([frames], 1)


@pytest.mark.parametrize("seed", range(20))
async def test_however_a_stream_is_cut_the_same_frames_are_heard(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rng.randbytes(rng.choice([1, 2, 3, 100, 5_000, 200_000])) for _ in range(rng.randrange(1, 30))]
    stream = b"".join(frame(one) + BEAT * rng.randrange(3) for one in sent)
    async with connected() as (head, worker, _):
        ear = Ear(head)
        while stream:
            size = rng.choice([1, 2, 3, 4, 5, 1_000, 100_000])
            worker._transport.write(stream[:size])
            stream = stream[size:]
            await turns(rng.randrange(3))
        assert await ear.hears(len(sent)) == sent


@pytest.mark.parametrize("seed", range(40))
async def test_garbage_ends_a_link_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    async with connected() as (head, worker, listener):
        ear = Ear(head)
        worker._transport.write(frame(b"good") + rng.randbytes(rng.randrange(4, 60)))
        worker._writer.close()
        await ear.loses()
        assert ear.frames[0] == b"good"
        assert listener.address


async def test_what_the_listener_raises_ends_the_link_with_that_reason() -> None:
    def refuse(content: bytes) -> None:
        if content == b"odd":
            raise RankFailure("sent what is no message")
        if content == b"worse":
            raise KeyError(7)

    for wrong, reason in ((b"odd", "sent what is no message"), (b"worse", "sent what raised KeyError here: 7")):
        async with connected() as (head, worker, _):
            ear, other = Ear(head, refuse), Ear(worker)
            for one in (b"good", wrong, b"good"):
                worker.send(one)
            assert await ear.loses() == reason
            assert ear.frames == [b"good", wrong]
            assert await other.loses() == "closed the connection"


async def test_sending_never_waits_for_a_peer_that_does_not_read_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_UNSENT", 64 << 20)
    async with connected() as (head, _, _):            # the worker has not begun
        ear = Ear(head)
        for _ in range(10):
            head.send(bytes(10 << 20))
            await asyncio.sleep(0)
        assert (await ear.loses()).startswith("reads nothing any more")


async def test_a_peer_that_died_before_anybody_listened_is_lost_after_its_frames() -> None:
    async with connected() as (head, worker, _):
        worker.send(b"one")
        worker.send(b"two")
        await turns()
        worker._writer.close()
        await asyncio.sleep(0.05)
        ear = Ear(head)
        assert not ear.lost                            # not from within begin
        assert await ear.loses() == "closed the connection"
        assert ear.frames == [b"one", b"two"]


async def test_nothing_of_an_ended_link_is_left() -> None:
    before = asyncio.all_tasks()
    async with connected(timeout=0.2) as pair:
        assert isinstance(pair, Pair)
        Ear(pair.head), Ear(pair.worker)
        pair.head.abort()
        await until(lambda: pair.worker.ended)
        for link in pair[:2]:
            assert link._timer.cancelled()
    assert asyncio.all_tasks() == before


# Nobody is heard who has not shown that they know the secret, and nobody is told it; hostile peers cost nothing.


class Stranger(NamedTuple):
    """Somebody who has connected. ``nonce``: the head's."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    nonce: bytes

    def proof(self, ours: bytes = bytes(NONCE), role: bytes = b"worker") -> bytes:
        return GREETING + ours + _proof(SECRET, role, self.nonce, ours)


class Head:
    """A head that writes down who was let in. ``refuse``: hellos that it does not take. Who came by ``admit`` and
    ``knock`` leaves with it."""

    def __init__(self, *refuse: bytes) -> None:
        self.hellos: list[bytes] = []
        self.listener: Listener
        self._links: list[Link] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._refuse = refuse

    def take(self, hello: bytes, link: Link) -> bytes:
        self._links.append(link)
        if hello in self._refuse:
            raise RankFailure(f"{hello.decode()} came late: the group is complete")
        self.hellos.append(hello)
        return b""

    async def open(self, address: str = ANYWHERE) -> Listener:
        self.listener = await open_listener(address, SECRET, self.take, timeout=30.0)
        return self.listener

    async def admit(self, hello: bytes = b"rank 1") -> Link:
        link, _ = await open_link(self.listener.address, SECRET, hello, timeout=30.0)
        self._links.append(link)
        return link

    async def knock(self) -> Stranger:
        where = parse_address(self.listener.address)
        reader, writer = await asyncio.open_connection(where.host, where.port)
        self._writers.append(writer)
        said = await reader.readexactly(len(GREETING) + NONCE)
        assert said[: len(GREETING)] == GREETING
        return Stranger(reader, writer, said[len(GREETING) :])

    async def aclose(self) -> None:
        for link in self._links:
            link.abort()
        for writer in self._writers:
            writer.close()
        await self.listener.aclose()
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def head() -> AsyncIterator[Head]:
    one = Head(b"rank 7")
    await one.open()
    yield one
    await one.aclose()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed."""
    async with asyncio.timeout(30.0):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_a_wrong_secret_is_not_authenticated_and_no_more_is_said(head: Head) -> None:
    address = head.listener.address
    with pytest.raises(RankFailure, match=f"^the head at {address} does not take this secret: not authent"):
        await open_link(address, b"another secret, long enough", b"rank 1", timeout=30.0)
    assert head.hellos == []
    await head.admit()                                 # nobody else is concerned


Answer = Callable[[bytes], bytes]


async def enter(greeting: bytes, answer: Answer | None = None) -> None:
    """Connect to somebody who is no head, and greets, and answers the worker's proof; what that one heard goes with the
    failure."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = b""
        writer.write(greeting)
        if answer is not None:
            said = await reader.readexactly(len(GREETING) + NONCE + PROOF)
            writer.write(answer(said))
            said += await end_of(reader)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        heard.append(said)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            await open_link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", SECRET, b"my hello", timeout=30.0)
        except RankFailure as failure:
            await until(lambda: bool(heard))
            assert SECRET not in heard[0]
            failure.add_note(repr(heard[0]))
            raise


OWN_NONCE = secrets.token_bytes(NONCE)


@pytest.mark.parametrize(("greeting", "answer", "why"), [
    (GREETING + OWN_NONCE, lambda said: secrets.token_bytes(PROOF), "does not know the secret: not authenticated"),
    (GREETING + OWN_NONCE, lambda said: said[-PROOF:], "does not know the secret"),  # the worker's own proof
    (GREETING + bytes(NONCE) + secrets.token_bytes(1 << 20), None, "does not know the secret: not authenticated"),
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", None, "is not one of asynccache"),
    (GREETING[:-1] + b"\7" + bytes(NONCE), None, "speaks version 7 of links, and this process version 1"),
], ids=["another secret", "mirror", "talker", "another server", "another version"])  # fmt: skip
async def test_who_is_no_head_is_named_and_hears_no_hello(greeting: bytes, answer: Answer | None, why: str) -> None:
    with pytest.raises(RankFailure, match=why) as raised:
        await enter(greeting, answer)
    assert "my hello" not in raised.value.__notes__[0]


@pytest.mark.parametrize("absurd", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_time_out_that_makes_silence_no_failure_is_no_answer(absurd: float) -> None:
    """NaN among the loop's timers would stop them, and 0 keep the loop busy."""

    def answer(said: bytes) -> bytes:
        theirs = said[len(GREETING) :][:NONCE]
        return _proof(SECRET, b"head", OWN_NONCE, theirs) + frame(TAKEN + TIMEOUT.pack(absurd))

    with pytest.raises(RankFailure, match="no answer that can be understood"):
        await enter(GREETING + OWN_NONCE, answer)


async def test_a_handshake_that_was_recorded_is_worth_nothing(head: Head) -> None:
    first, ours = await head.knock(), secrets.token_bytes(NONCE)
    recorded = first.proof(ours)
    first.writer.write(recorded)
    assert await first.reader.readexactly(PROOF) == _proof(SECRET, b"head", first.nonce, ours)
    first.writer.write(frame(b"rank 1"))
    await until(lambda: head.hellos == [b"rank 1"])    # the real one
    second = await head.knock()
    second.writer.write(recorded + frame(b"rank 2"))
    assert await end_of(second.reader) in (b"", NOT_AUTHENTICATED)
    assert head.hellos == [b"rank 1"]


Says = Callable[[random.Random, Stranger], bytes]
STRANGERS: dict[str, Says] = {
    "nothing": lambda rng, one: b"",
    "anything": lambda rng, one: rng.randbytes(rng.choice([1, 71, 72, 73, 5_000, 1 << 20])),
    "no proof": lambda rng, one: GREETING + rng.randbytes(NONCE + PROOF),
    "a part of the proof": lambda rng, one: one.proof()[: rng.randrange(len(one.proof()))],
    "another bit": lambda rng, one: bytes([*one.proof()[:-1], one.proof()[-1] ^ 1]),
    "the head's proof, and a hello": lambda rng, one: one.proof(role=b"head") + frame(b"rank 1"),
    "what a port scanner says": lambda rng, one: b"GET / HTTP/1.1\r\n\r\n" * 5,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("says", STRANGERS)
async def test_a_stranger_is_not_let_in_by_anything_that_it_says(says: str, seed: int, head: Head) -> None:
    one = await head.knock()
    one.writer.write(STRANGERS[says](random.Random(seed), one))
    one.writer.write_eof()
    assert await end_of(one.reader) in (b"", NOT_AUTHENTICATED)
    assert head.hellos == []
    await until(lambda: not head.listener._strangers)


@pytest.mark.parametrize("length", [MOST_HELLO + 1, MOST_FRAME, 2**32 - 1])
async def test_a_giant_hello_of_one_who_knows_the_secret_is_not_waited_for(length: int, head: Head) -> None:
    one = await head.knock()
    one.writer.write(one.proof())
    await one.reader.readexactly(PROOF)
    one.writer.write(length.to_bytes(LENGTH, "little") + bytes(10))
    assert await end_of(one.reader) == b""
    assert head.hellos == []
    with pytest.raises(ConfigError, match=f"a hello has at most {MOST_HELLO} bytes, and this one {MOST_HELLO + 1}"):
        await head.admit(bytes(MOST_HELLO + 1))


async def test_who_takes_too_long_is_closed_and_delays_nobody(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE", 0.5)
    strangers = [await head.knock() for _ in range(5)]
    for one in strangers:
        one.writer.write(GREETING)
    await head.admit()
    assert head.listener._strangers
    assert [await end_of(one.reader) for one in strangers] == [b""] * 5
    assert not head.listener._strangers


async def test_of_too_many_strangers_the_oldest_gives_way_and_a_worker_still_comes_in(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_STRANGERS", 3)
    strangers = [await head.knock() for _ in range(3)]
    await head.admit()
    assert await end_of(strangers[0].reader) == b""
    strangers.append(await head.knock())
    assert len(head.listener._strangers) == 3
    assert not any(one.reader.at_eof() for one in strangers[1:]), "one is enough for one more"


@pytest.mark.parametrize("what", ["a stranger comes", "the head listens no more"])
async def test_a_worker_that_has_come_in_is_no_stranger_any_more(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_STRANGERS", 1)
    loop, head, closing = asyncio.get_running_loop(), Head(), list[asyncio.Task[None]]()
    elsewhere = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    other = await asyncio.open_connection(*elsewhere.sockets[0].getsockname())

    def answer(hello: bytes, link: Link) -> bytes:
        if what == "a stranger comes":  # after the worker's last step, and before the listener hears that it ended
            loop.call_soon(head.listener._came, other[0], other[1])
        else:
            closing.append(loop.create_task(head.listener.aclose()))
        return head.take(hello, link)

    head.listener = await open_listener(ANYWHERE, SECRET, answer, timeout=30.0)
    ear = Ear(await head.admit())
    await asyncio.sleep(0.05)
    assert not ear.lost
    other[1].transport.abort()
    elsewhere.close()
    await elsewhere.wait_closed()
    await head.aclose()


async def test_a_refusal_reaches_the_worker_as_a_sentence(head: Head) -> None:
    with pytest.raises(RankFailure, match=rf"^the head at {head.listener.address} refused: rank 7 came late: the grou"):
        await head.admit(b"rank 7")
    await head.admit(b"rank 2")
    assert head.hellos == [b"rank 2"]


async def test_the_head_s_time_out_is_the_worker_s_and_nothing_shows_the_secret() -> None:
    async with connected(timeout=0.3) as pair:
        assert (pair.head.timeout, pair.worker.timeout) == (0.3, 0.3)
        assert not any(SECRET.decode() in repr(one) for one in pair)


async def test_a_worker_waits_for_a_head_that_comes_later(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    opening = asyncio.create_task(open_link(address, SECRET, b"rank 1", timeout=30.0))
    await asyncio.sleep(0.2)
    head = Head()
    await head.open(address)
    link, _ = await opening
    link.abort()
    await head.aclose()
    assert not (tmp_path / "socket").exists()


@pytest.mark.parametrize(("there", "why"), [(False, ": .*111"), (True, "")])
async def test_a_worker_whose_head_does_not_come_or_says_nothing_says_so_in_time(there: bool, why: str) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not there:
            silent.close()
        began = loop.time()
        with pytest.raises(RankFailure, match=rf"the head at 127.0.0.1:{port} did not answer within 0.5 s{why}"):
            await open_link(f"127.0.0.1:{port}", SECRET, b"rank 1", timeout=0.5)
        assert 0.4 < loop.time() - began < 10.0


async def test_cancelling_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        opening = asyncio.create_task(open_link(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, b"", timeout=30.0))
        there, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.sleep(0.01)
        with there:
            assert there.recv(10) == b""


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_listener_whose_opening_is_cancelled_listens_nowhere(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}" if kind == "tcp" else f"unix:{tmp_path}/socket"
    for steps in range(1, 100):
        opening = asyncio.create_task(Head().open(address))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            listener = await opening
        except asyncio.CancelledError:
            with pytest.raises(RankFailure, match="did not answer within"):
                await open_link(address, SECRET, b"rank 1", timeout=0.05)
            assert not (tmp_path / "socket").exists()
        else:
            await listener.aclose()
            return
    pytest.fail("it never opened")


async def test_an_address_in_use_is_refused_by_name(tmp_path: Path) -> None:
    for address in (ANYWHERE, f"unix:{tmp_path}/socket"):
        head = Head()
        listener = await head.open(address)
        with pytest.raises(ConfigError, match=r"^address='.*' cannot be used: "):
            await Head().open(listener.address)
        await head.admit()                             # still there
        await head.aclose()
        await (await Head().open(listener.address)).aclose()  # and free when it has gone


async def test_the_socket_of_a_head_that_was_killed_is_no_obstacle_and_the_new_one_is_private(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    listener = await Head().open(f"unix:{path}")
    assert path.stat().st_mode & 0o077 == 0
    await listener.aclose()


async def test_a_unix_socket_is_private_from_the_moment_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to close it to others afterwards."""
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    before = os.umask(0)
    try:
        listener = await Head().open(f"unix:{tmp_path}/socket")
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
        await listener.aclose()
        assert os.umask(0) == 0
    finally:
        os.umask(before)


async def test_links_stay_when_the_listener_closes_and_strangers_do_not(head: Head) -> None:
    async with connected() as (there, worker, listener):
        head.listener, own = listener, head.listener
        one = await head.knock()
        await listener.aclose()
        await listener.aclose()
        assert await end_of(one.reader) == b""
        ear, _ = Ear(worker), Ear(there)
        there.send(b"still here")
        assert await ear.hears(1) == [b"still here"]
        head.listener = own


async def test_many_workers_and_strangers_at_once(head: Head) -> None:
    where = parse_address(head.listener.address)

    def knock() -> None:
        for seed in range(30):
            with socket.create_connection((where.host, where.port)) as one:
                one.sendall(random.Random(seed).randbytes(seed * 7))

    thread = threading.Thread(target=knock)
    thread.start()
    await asyncio.gather(*(head.admit(str(rank).encode()) for rank in range(20)))
    await asyncio.get_running_loop().run_in_executor(None, thread.join)
    assert sorted(map(int, head.hellos)) == list(range(20))


async def test_who_has_just_come_when_the_listener_closes_is_let_go(head: Head) -> None:
    where = parse_address(head.listener.address)
    opening = asyncio.create_task(asyncio.open_connection(where.host, where.port))
    while not head.listener._strangers:                # noqa: ASYNC110  before the next turn
        await asyncio.sleep(0)
    await head.listener.aclose()                       # the task that would admit it has not begun
    reader, writer = await opening
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), 10) == b""
    writer.close()


@pytest.mark.parametrize(("text", "found"), [
    ("127.0.0.1:7011", ListenAddress("127.0.0.1", 7011)), ("[::1]:7011", ListenAddress("::1", 7011)),
    ("[fe80::1%eth0]:1", ListenAddress("fe80::1%eth0", 1)),
    ("head-0.model.svc:0", ListenAddress("head-0.model.svc", 0)),
    ("unix:/tmp/a b", ListenAddress(path="/tmp/a b")),
])  # fmt: skip
def test_addresses(text: str, found: ListenAddress) -> None:
    assert parse_address(text) == found
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    ["", "7011", ":7011", "localhost", "localhost:", "::1:7011", "[::1]", "[::1]:x", "[localhost]:1", "unix:", "unix:a",
     "a b:1", "127.0.0.1:-1", "127.0.0.1:70000", "127.0.0.1:١", "tcp://127.0.0.1:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_address(text)


def test_a_secret_is_said_or_in_the_environment_or_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCCACHE_SECRET", raising=False)
    monkeypatch.delenv("ASYNCCACHE_SECRET_FILE", raising=False)
    with pytest.raises(ConfigError, match="need a secret: give one, or set ASYNCCACHE_SECRET or ASYNCCACHE_SECRET_FIL"):
        asyncio.run(find_secret())
    file = tmp_path / "secret"
    monkeypatch.setenv("ASYNCCACHE_SECRET_FILE", str(file))
    with pytest.raises(ConfigError, match=f"ASYNCCACHE_SECRET_FILE={file} cannot be read"):
        asyncio.run(find_secret())
    file.write_text("of the file, long enough\n")
    assert asyncio.run(find_secret()) == b"of the file, long enough"
    monkeypatch.setenv("ASYNCCACHE_SECRET", "of the environment ä\n")
    assert asyncio.run(find_secret()) == "of the environment ä".encode()
    assert asyncio.run(find_secret(b"said, and also long")) == b"said, and also long"


def test_a_secret_that_is_too_short_or_no_bytes_is_refused_and_not_shown() -> None:
    for wrong, why in ((b"", "has at least 16 bytes, and this one 0"), (b"hunter2", "16 bytes, and this one 7")):
        with pytest.raises(ConfigError, match=why) as caught:
            asyncio.run(find_secret(wrong))
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="secret must be bytes, and is of type str") as caught:
        asyncio.run(find_secret("hunter2 hunter2 hunter2"))  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
