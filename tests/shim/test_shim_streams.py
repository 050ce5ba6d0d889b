"""Orders over real sockets: in order, whole, and the end of a rank told in time, whoever waits for what."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from asynccache_shim import Limits, Request, Sampling, connect_orders, streams
from asynccache_shim.orders import Arrival, Desk, Order, decode, encode
from asynccache_shim.streams import StreamOrders, Wire

from asynccache import Adapter, RankFailure
from asynccache.ranks import Links, Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate


class Meeting:
    """Where ranks of one process gather. ``order``: of the world, which may be another than that of ranks."""

    def __init__(self, count: int, order: int = 1) -> None:
        self.said: list[bytes | None] = [None] * count
        self.order = order
        self.all = asyncio.Event()


class Member:
    """``Ranks`` of which nothing but ``gather`` is used."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.topology = Topology(tp=len(meeting.said))
        self.rank = rank
        self._meeting = meeting

    def links(self, length: int) -> Links:
        raise AssertionError("nobody steps here")

    async def gather(self, content: bytes) -> Sequence[bytes]:
        self._meeting.said[self.rank] = content
        if all(said is not None for said in self._meeting.said):
            self._meeting.all.set()
        await self._meeting.all.wait()
        return [said or b"" for said in self._meeting.said[:: self._meeting.order]]


async def connected(count: int, timeout: float = 30.0, order: int = 1) -> list[StreamOrders]:
    meeting = Meeting(count, order)
    members = [Member(meeting, rank) for rank in range(count)]
    return await asyncio.gather(*(connect_orders(member, timeout=timeout) for member in members))


async def close(orders: Sequence[StreamOrders]) -> None:
    """All at once: then nobody waits out the grace, which would end this in an error."""
    async with asyncio.timeout(streams.GRACE / 2):
        await asyncio.gather(*(one.aclose(well=True) for one in orders))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GRACE", 60.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("world", [1, -1])
async def test_every_rank_gets_every_order_in_order(world: int) -> None:
    leader, *others = orders = await connected(4, order=world)
    sent = [bytes([i]) * (i * i) for i in range(60)]
    for order in sent:
        leader.send(order)
    for other in others:
        assert [await other.receive() for _ in sent] == sent
    assert [one.leads for one in orders] == [True, False, False, False]
    await close(orders)


@pytest.mark.asyncio
async def test_the_last_order_arrives_although_its_sender_has_left() -> None:
    leader, other = await connected(2)
    lost: list[RankFailure] = []
    other.watch(lost.append)
    leader.send(b"last")
    leaving = asyncio.ensure_future(leader.aclose(well=True))
    await asyncio.sleep(0.05)
    assert await other.receive() == b"last"
    with pytest.raises(RankFailure, match="rank 0 has left"):
        await other.receive()
    assert not lost
    await other.aclose(well=True)
    await leaving


@pytest.mark.asyncio
@pytest.mark.parametrize("gone", [0, 1])
async def test_a_rank_that_is_gone_is_told_of_whoever_waits(gone: int) -> None:
    orders = await connected(2)
    lost: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
    orders[1 - gone].watch(lost.set_result)
    leaving = asyncio.ensure_future(orders[gone].aclose(well=False))
    async with asyncio.timeout(10):
        assert f"rank {gone} closed" in str(await lost)
    if gone == 0:
        with pytest.raises(RankFailure, match="rank 0 closed"):
            await orders[1].receive()
    await orders[1 - gone].aclose(well=False)
    await leaving


@pytest.mark.asyncio
async def test_rank_0_tells_the_others_who_is_gone() -> None:
    """At once, not when it leaves itself."""
    leader, one, two = await connected(3)
    lost: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
    one.watch(lost.set_result)
    await two.aclose(well=False)
    async with asyncio.timeout(10):
        assert "rank 2 closed" in str(await lost)
    await asyncio.gather(leader.aclose(well=False), one.aclose(well=False))


# coming together


@pytest.mark.asyncio
async def test_a_rank_that_does_not_come_is_named() -> None:
    meeting = Meeting(2)
    leading = asyncio.ensure_future(connect_orders(Member(meeting, 0), timeout=0.05))
    await Member(meeting, 1).gather(b"")
    with pytest.raises(RankFailure, match=r"ranks \[1\] did not connect within 0.05 s"):
        await leading


@pytest.mark.asyncio
async def test_a_leader_that_has_gone_meanwhile_is_named() -> None:
    meeting = Meeting(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens here
        meeting.said[0] = json.dumps(["127.0.0.1", taken.getsockname()[1], bytes(16).hex()]).encode()
        with pytest.raises(RankFailure, match="rank 0 cannot be reached"):
            await connect_orders(Member(meeting, 1))


@pytest.mark.asyncio
async def test_a_stranger_is_turned_away() -> None:
    meeting = Meeting(2)
    leading = asyncio.ensure_future(connect_orders(Member(meeting, 0)))
    other = Member(meeting, 1)
    host, port, secret = json.loads((await other.gather(b""))[0])
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(bytes(16) + (1).to_bytes(8, "little"))
    assert await reader.read() == b""
    writer.close()
    assert not leading.done()
    orders = [await connect_orders(other), await leading]
    assert bytes.fromhex(secret) != bytes(16)
    await close(orders)


@pytest.mark.asyncio
async def test_a_stranger_who_says_nothing_is_turned_away_when_all_have_come() -> None:
    meeting = Meeting(2)
    leading = asyncio.ensure_future(connect_orders(Member(meeting, 0), timeout=3600.0))
    other = Member(meeting, 1)
    host, port, _ = json.loads((await other.gather(b""))[0])
    reader, writer = await asyncio.open_connection(host, port)
    orders = [await connect_orders(other), await leading]
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    await close(orders)


@pytest.mark.asyncio
async def test_one_rank_alone_sends_to_nobody() -> None:
    (alone,) = await connected(1)
    alone.send(b"x")
    await alone.aclose(well=True)


# silence, on virtual time


class Ends:
    """The writing end of a stream in memory. ``hung``: nothing that is written arrives."""

    def __init__(self, to: asyncio.StreamReader) -> None:
        self.to = to
        self.hung = False
        self.transport = self
        self._ended = False

    def write(self, content: bytes) -> None:
        if not self.hung:
            self.to.feed_data(content)

    def is_closing(self) -> bool:
        return self._ended

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self.hung and not self._ended:
            self.to.feed_eof()
        self._ended = True

    abort = write_eof


def pair(loop: SimulatedLoop, timeout: float) -> tuple[StreamOrders, StreamOrders, list[Ends]]:
    """Ranks 0 and 1."""
    meeting = Meeting(2)
    readers = [asyncio.StreamReader(loop=loop) for _ in range(2)]
    ends = [Ends(readers[1]), Ends(readers[0])]
    orders = [
        StreamOrders(Member(meeting, i), [Wire(1 - i, readers[i], ends[i])], timeout)  # type: ignore[arg-type]
        for i in range(2)
    ]
    return orders[0], orders[1], ends


def test_an_idle_group_stands_for_as_long_as_its_processes() -> None:
    async def world(loop: SimulatedLoop) -> None:
        leader, other, _ = pair(loop, 30.0)
        waiting = loop.create_task(other.receive())
        await asyncio.sleep(10_000)
        assert not waiting.done()
        leader.send(b"at last")
        assert await waiting == b"at last"
        await asyncio.gather(leader.aclose(well=True), other.aclose(well=True))

    simulate(world, 1)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_is_silent_is_lost_within_the_timeout(silent: int) -> None:
    async def world(loop: SimulatedLoop) -> None:
        *orders, ends = pair(loop, 30.0)
        lost: asyncio.Future[RankFailure] = loop.create_future()
        orders[1 - silent].watch(lost.set_result)
        await asyncio.sleep(1_000)
        ends[silent].hung = True
        struck = loop.time()
        assert f"rank {silent} was silent for 30 s" in str(await lost)
        assert loop.time() - struck <= 30.01
        ends[silent].hung = False
        await asyncio.gather(*(one.aclose(well=False) for one in orders))

    simulate(world, 2)


# what is sent


def request(**terms: Any) -> Request:
    return Request([5, 2**31 - 1, 0], Limits(7, frozenset({3, 1})), **terms)


@pytest.mark.parametrize("terms", [
    {}, {"priority": -3, "ended": True}, {"extra_key": "tenant"}, {"extra_key": b"\x00\xff"},
    {"extra_key": Adapter("a", lora_name="b", lora_id=4)}, {"sampling": Sampling(0.7, 0.9, 11)},
])  # fmt: skip
def test_a_request_is_the_same_elsewhere(terms: Any) -> None:
    sent = Order((Arrival(4, request(**terms)), Arrival(6, request())), (1, 2), True)
    came = decode(encode(sent))
    assert (came.aborted, came.closing, [number for number, _ in came.arrivals]) == ((1, 2), True, [4, 6])
    for (_, mine), (_, theirs) in zip(sent.arrivals, came.arrivals, strict=True):
        for name in ("limits", "priority", "extra_key", "sampling", "ended"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert type(mine.extra_key) is type(theirs.extra_key)
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert theirs.tokens.dtype == mine.tokens.dtype
    assert repr(came.arrivals[0].request.extra_key) == repr(sent.arrivals[0].request.extra_key)


def test_an_empty_order_is_empty() -> None:
    assert encode(Order()) == b""
    assert decode(b"") == Order()


def test_who_is_aborted_before_an_order_told_of_it_is_never_told_of() -> None:
    desk, first, second = Desk(), request(), request()
    assert not desk
    desk.submit(1, first)
    desk.submit(2, second)
    assert desk.abort(1) is first
    assert desk.order() == Order((Arrival(2, second),))
    assert desk.abort(2) is None
    assert desk.order() == Order((), (2,))
    assert not desk
