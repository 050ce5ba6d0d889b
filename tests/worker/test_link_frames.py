"""Links over real sockets: frames whole and in order, signs of life, and each way in which a link ends."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import pytest

from asynccache.errors import RankFailure
from asynccache.worker import link as links
from asynccache.worker.link import BEAT, BYE, LENGTH, MOST_FRAME, Link
from tests.waiting import turns, until
from tests.worker.link_kit import ANYWHERE, Ear, Pair, connected


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


async def test_tcp_does_not_wait_for_more_to_send() -> None:
    async with connected() as pair:
        for link in pair[:2]:
            raw: socket.socket = link._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_frame_goes_out_at_once_and_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (head, worker, _):
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
        assert 5 <= len(written) <= 11
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
        time.sleep(0.6)                                # noqa: ASYNC251  that is the point
        await asyncio.sleep(0.5)
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


async def test_a_peer_that_has_died_is_lost_at_once() -> None:
    async with connected() as (head, worker, _):
        ear = Ear(head)
        worker._transport.abort()
        assert await ear.loses() == "closed the connection"


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
