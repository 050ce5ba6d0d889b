"""The protocol without I/O: replies cut at every place, and what is sent, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from asynccache_backends.redis.connection import CommandBatch
from asynccache_backends.redis.resp import Names, ProtocolError, Reader, Refusal, command, joined
from asynccache_backends.redis.routing import slot_of

from asynccache.storage import PageKey, Record, Result

HIT, MISS, CORRUPT = Result.HIT, Result.MISS, Result.CORRUPT
GUARD = 16


class _Page:
    """A record with guards around its payload."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(b"\xaa" * (size + 2 * GUARD))
        self.header = bytearray(64)
        self.record = Record(memoryview(self.header), memoryview(self.memory)[GUARD : GUARD + size])

    @property
    def value(self) -> bytes:
        return bytes(self.header) + bytes(self.record.payload)

    @property
    def guarded(self) -> bool:
        return self.memory[:GUARD] == self.memory[-GUARD:] == b"\xaa" * GUARD


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _land(reader: Reader, data: bytes) -> None:
    """What a socket does with ``data``, one buffer after the other."""
    while data:
        buffer = reader.buffer
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        reader.received(count)


def _read(parts: Sequence[bytes], sinks: Sequence[Record | None], spare: int = 64) -> list[Any]:
    reader = Reader(sinks, spare)
    for part in parts:
        _land(reader, part)
    assert reader.missing == 0
    return reader.replies


PLAIN = (
    b"+OK\r\n:1\r\n:-7\r\n$-1\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n-OOM no room\r\n*0\r\n*-1\r\n"
    b"*2\r\n$1\r\n0\r\n*3\r\n$2\r\nk1\r\n:4\r\n*1\r\n$-1\r\n+QUEUED\r\n"
)
PLAIN_REPLIES = [
    b"OK", 1, -7, None, b"", b"a\r\nbc", Refusal("OOM", "OOM no room"), [], None, [b"0", [b"k1", 4, [None]]], b"QUEUED",
]  # fmt: skip


def test_plain_replies_cut_anywhere() -> None:
    sinks = [None] * len(PLAIN_REPLIES)
    for at in range(len(PLAIN) + 1):
        assert _read([PLAIN[:at], PLAIN[at:]], sinks) == PLAIN_REPLIES
    assert _read([PLAIN[i : i + 1] for i in range(len(PLAIN))], sinks) == PLAIN_REPLIES


@pytest.mark.parametrize("spare", [16, 64, 4096])
@pytest.mark.parametrize("size", [0, 1, 100, 40_000])
def test_pages_cut_anywhere(size: int, spare: int) -> None:
    """Found, missing, of another length, refused, found."""
    rng = Random(size)
    first, last = rng.randbytes(64 + size), rng.randbytes(64 + size)
    data = _bulk(first) + b"$-1\r\n" + _bulk(first + b"x") + b"-LOADING x\r\n" + _bulk(last)
    cuts = range(len(data) + 1) if size < 1000 else [rng.randrange(len(data)) for _ in range(8)]
    for at in cuts:
        pages = [_Page(size) for _ in range(5)]
        replies = _read([data[:at], data[at:]], [page.record for page in pages], spare)
        assert replies == [HIT, MISS, CORRUPT, Refusal("LOADING", "LOADING x"), HIT]
        assert (pages[0].value, pages[4].value) == (first, last)
        assert all(page.guarded for page in pages)


def test_pages_in_small_pieces() -> None:
    rng = Random(3)
    values = [rng.randbytes(64 + 300) for _ in range(6)]
    data = b"".join(map(_bulk, values))
    for step in (1, 2, 3, 7, 63, 64, 65, 255, 257):
        pages = [_Page(300) for _ in values]
        parts = [data[i : i + step] for i in range(0, len(data), step)]
        assert _read(parts, [page.record for page in pages]) == [HIT] * 6
        assert [page.value for page in pages] == values


def test_pages_among_other_replies() -> None:
    page = _Page(30)
    value = bytes(range(94))
    assert _read([b"+OK\r\n" + _bulk(value) + b"+OK\r\n"], [None, page.record, None]) == [b"OK", HIT, b"OK"]
    assert page.value == value


def test_pages_are_received_where_they_belong() -> None:
    """Nothing but what is between two of them is received anywhere else."""
    pages = [_Page(100_000 + i) for i in range(5)]
    reader = Reader([page.record for page in pages])
    for page in pages:
        assert len(reader.buffer) == len("$100064\r\n") + 64 + 2 * (page is not pages[0])
        _land(reader, b"\r\n"[: 2 * (page is not pages[0])] + b"$%d\r\n" % (64 + len(page.record.payload)) + bytes(64))
        assert (reader.buffer.obj, len(reader.buffer)) == (page.memory, len(page.record.payload))
        _land(reader, bytes(len(page.record.payload)))
    assert len(reader.buffer) == 2
    _land(reader, b"\r\n")
    assert reader.replies == [HIT] * 5


@pytest.mark.parametrize("wrong", [b"$-1\r\n", b"-ERR\r\n", b"$95\r\n" + bytes(95) + b"\r\n", b"$0\r\n\r\n"])
@pytest.mark.parametrize("place", range(6))
def test_one_page_that_is_not_there_leaves_the_others_whole(place: int, wrong: bytes) -> None:
    """Cut at every place."""
    rng = Random(place)
    values = [rng.randbytes(64 + 30) for _ in range(6)]
    data = b"".join(wrong if i == place else _bulk(value) for i, value in enumerate(values))
    for at in range(len(data) + 1):
        pages = [_Page(30) for _ in values]
        replies = _read([data[:at], data[at:]], [page.record for page in pages])
        assert [i for i, reply in enumerate(replies) if reply is not HIT] == [place]
        assert all(page.value == value or i == place for i, (page, value) in enumerate(zip(pages, values, strict=True)))
        assert all(page.guarded for page in pages)


def test_a_page_of_another_length_however_long() -> None:
    page = _Page(10)
    assert _read([b"$200000\r\n" + b"x" * 200_000 + b"\r\n"], [page.record]) == [CORRUPT]
    assert page.guarded


def test_after_the_last_page_the_next_byte_has_a_place_and_is_an_error() -> None:
    page = _Page(10)
    reader = Reader([page.record])
    _land(reader, _bulk(bytes(74)))
    assert reader.missing == 0
    with pytest.raises(ProtocolError, match="nobody asked"):
        _land(reader, b"x")


def test_large_pages_among_other_replies() -> None:
    """Those that a server with half a slot answers."""
    page = _Page(1 << 20)
    reader = Reader([None, page.record])
    _land(reader, b"+OK\r\n$%d\r\n" % (64 + (1 << 20)) + bytes(64))
    assert (reader.buffer.obj, len(reader.buffer)) == (page.memory, 1 << 20)


def test_a_reader_that_forgets_holds_no_buffer() -> None:
    page = _Page(100)
    reader = Reader([page.record])
    _land(reader, b"$164\r\n" + bytes(64) + b"abc")
    reader.forget()
    page.record.header.release()
    page.record.payload.release()
    page.memory.extend(b"x")


@pytest.mark.parametrize(
    "data",
    [b"HTTP/1.1 400\r\n", b"$x\r\n", b"\r\n", b"$3\r\nabcd\r\n", b":1\r\n:2\r\n", b"*x\r\n", b"x" * 70, b"$\r\n",
     b":1\r\n:0\r\n",
     b"$99999999999999\r\n"],
)  # fmt: skip
def test_what_is_no_answer_is_an_error(data: bytes) -> None:
    reader = Reader([None], 64)
    with pytest.raises(ProtocolError):
        _land(reader, data)


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"$x\r\n", b"$1a\r\n", b"$14\r\n" + bytes(14) + b"\r\r"])
def test_what_is_no_page_is_an_error(data: bytes) -> None:
    reader = Reader([_Page(4).record], 64)
    with pytest.raises(ProtocolError):
        _land(reader, data)


def test_a_list_is_no_page() -> None:
    reader = Reader([_Page(4).record])
    with pytest.raises(ProtocolError):
        _land(reader, b"*1\r\n:1\r\n")


def test_half_an_answer_too_many_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="nobody asked"):
        _land(Reader([None]), b":1\r\n:")


def test_commands_are_framed_by_length() -> None:
    assert command(b"AUTH", b"a\r\nFLUSHALL\r\n") == b"*2\r\n$4\r\nAUTH\r\n$13\r\na\r\nFLUSHALL\r\n\r\n"


@pytest.mark.parametrize("ttl_ms", [0, 90_000])
def test_a_page_is_sent_from_where_it_lies(ttl_ms: int) -> None:
    page = _Page(100)
    key = b"p:" + b"\r\n$0*" * 6 + b"xx"
    buffers = list(joined([Names(b"", ttl_ms).storing(key, page.record), b"GET\r\n", b"X"]))
    assert buffers[1].obj is page.memory  # type: ignore[union-attr]
    assert len(buffers) == 3
    options = (b"NX", b"PX", b"90000") if ttl_ms else (b"NX",)
    assert b"".join(buffers) == command(b"SET", key, page.value, *options) + b"GET\r\nX"


def test_neighbours_share_a_buffer() -> None:
    requests = [Names(b"").storing(b"k%d" % i, _Page(100).record) for i in range(5)]
    assert len(list(joined(requests))) == 11
    assert len(list(joined([b"a", b"b", b"c"]))) == 1
    assert list(joined([])) == []


def test_asking_comes_before_each_command() -> None:
    page = _Page(4)
    batch = CommandBatch([b"1", b"2"], [page.record, None], 2).asking()
    assert batch.commands == [command(b"ASKING"), b"1", command(b"ASKING"), b"2"]
    assert batch.sinks == [None, page.record, None, None]


def test_names_are_of_one_store() -> None:
    names, longer = Names(b"a:"), Names(b"a:b")
    key = PageKey("full", bytes(range(32)))
    (name,) = names.of([key])
    assert names.key(name) == key.key
    assert names.ours([name, *longer.of([key]), b"a:", b"b:" + key.key, b""]) == [name]
    assert longer.ours([name]) == []
    assert names.commands(b"GET", [name]) == [command(b"GET", name)]
    assert Names(b"a*[x]?").pattern() == rb"a\*\[x\]\?*"


def test_slots_are_those_of_the_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
