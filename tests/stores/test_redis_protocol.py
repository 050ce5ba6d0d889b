"""Redis without a server: the protocol, and settings."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.redis.resp import ProtocolError, Reader, Refusal, about, joined, storing
from asynccache_backends.redis.settings import RedisSettings, settings_of

from asynccache.errors import ConfigError
from asynccache.extras import install
from asynccache.storage import HostPort, Record, Result, parse_url
from tests.stores.redis_server import Certificate

# The protocol without I/O: replies cut at every place, and what is sent, byte for byte.


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
    return [str(reply) if isinstance(reply, Refusal) else reply for reply in reader.replies]


PLAIN = [(b"+OK\r\n", b"OK"), (b":-7\r\n", -7), (b"$-1\r\n", None), (b"-OOM no room\r\n", "OOM no room"),
         (b":1234567\r\n", 1234567),         (b"-ERR\r\n", "ERR"), (b"+\r\n", b""), (b":0\r\n", 0)]  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_replies_of_every_kind_come_out_as_they_are_however_they_are_cut(seed: int) -> None:
    """Pages that are there, missing, refused or of another length (however long), among replies that are no pages: cut
    at every place, and in small pieces. No byte beside a payload is touched, and what is there is whole."""
    rng, parts, sinks, expected = Random(seed), list[bytes](), list[_Page | None](), list[Any]()
    size = rng.choice([0, 1, 30, 300, 40_000])
    pages = list[tuple[int, bytes]]()
    for at in range(rng.randint(1, 9)):
        if rng.random() < 0.3:
            sinks.append(None)
            part, reply = rng.choice(PLAIN)
        else:
            sinks.append(_Page(size))
            value = rng.randbytes(64 + size)
            part, reply = rng.choice([(_bulk(value), HIT)] * 3 + [
                (b"$-1\r\n", MISS), (b"-LOADING x\r\n", "LOADING x"), (_bulk(value + b"x"), CORRUPT),
                (_bulk(b""), CORRUPT), (_bulk(bytes(200_000 if size == 300 else 95 + size)), CORRUPT),
            ])  # fmt: skip
            pages += [(at, value)] if reply is HIT else []
        parts.append(part)
        expected.append(reply)
    data = b"".join(parts)
    short = len(data) < 2500
    cuts = [[at, len(data)] for at in (range(len(data)) if short else rng.sample(range(len(data)), 8))]
    steps = [range(step, len(data) + step, step) for step in ((1, 2, 3, 7, 63, 64, 65, 255) if short else (9999,))]
    for ends in (*cuts, *steps):
        for sink in filter(None, sinks):
            sink.memory[GUARD:-GUARD] = bytes(size)
        pieces = [data[begin:end] for begin, end in pairwise([0, *ends])]
        records = [None if sink is None else sink.record for sink in sinks]
        assert _read(pieces, records, rng.choice([16, 64, 4096])) == expected
        for at, value in pages:
            assert getattr(sinks[at], "value", None) == value
        assert all(sink is None or sink.guarded for sink in sinks)


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


def test_after_the_last_page_the_next_byte_has_a_place_and_is_an_error() -> None:
    page = _Page(10)
    reader = Reader([page.record])
    _land(reader, _bulk(bytes(74)))
    assert reader.missing == 0
    with pytest.raises(ProtocolError, match="nobody asked"):
        _land(reader, b"x")


def test_a_reader_that_forgets_holds_no_buffer() -> None:
    page = _Page(100)
    reader = Reader([page.record])
    _land(reader, b"$164\r\n" + bytes(64) + b"abc")
    reader.forget()
    page.record.header.release()
    page.record.payload.release()
    page.memory.extend(b"x")


NO_PAGE = [b"HTTP/1.1 400\r\n", b"$x\r\n", b"$1a\r\n", b"$68\r\n" + bytes(68) + b"\r\r"]
NO_ANSWER = [
    b"HTTP/1.1 400\r\n", b"$x\r\n", b"\r\n", b"$3\r\nabcd\r\n", b":1\r\n:2\r\n", b"*x\r\n", b"x" * 70, b"$\r\n",
    b":1\r\n:", b"$99999999999999\r\n", b"$1\r\n1\r\n", b"$0\r\n\r\n", b"$-2\r\n",
]  # fmt: skip
LISTS = [b"*1\r\n:1\r\n", b"*0\r\n", b"*-1\r\n", b"%1\r\n+a\r\n:1\r\n"]


@pytest.mark.parametrize(("page", "data"), [
    *((True, data) for data in [*NO_PAGE, *LISTS]), *((False, data) for data in [*NO_ANSWER, *LISTS]),
])  # fmt: skip
def test_what_is_no_answer_is_an_error(page: bool, data: bytes) -> None:
    """Lists are asked for by redis-py, so that here one is no answer."""
    with pytest.raises(ProtocolError):
        _land(Reader([_Page(4).record if page else None], 64), data)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def test_commands_are_framed_by_length() -> None:
    names = [b"a\r\nFLUSHALL\r\n", b"b" * 13]
    assert about(b"GET", names) == [_command(b"GET", name) for name in names]
    assert about(b"GET", []) == []


@pytest.mark.parametrize("ttl_ms", [0, 90_000])
def test_a_page_is_sent_from_where_it_lies(ttl_ms: int) -> None:
    page = _Page(100)
    key = b"p:" + b"\r\n$0*" * 6 + b"xx"
    buffers = list(joined([*storing([key], [page.record], ttl_ms), b"GET\r\n", b"X"]))
    assert buffers[1].obj is page.memory  # type: ignore[union-attr]
    assert len(buffers) == 3
    options = (b"NX", b"PX", b"90000") if ttl_ms else (b"NX",)
    assert b"".join(buffers) == _command(b"SET", key, page.value, *options) + b"GET\r\nX"


def test_neighbours_share_a_buffer() -> None:
    requests = storing([b"k%d" % i for i in range(5)], [_Page(100).record for _ in range(5)])
    assert len(list(joined(requests))) == 11
    assert len(list(joined([b"a", b"b", b"c"]))) == 1
    assert list(joined([])) == []


# Settings from a URL and from the environment. Secrets appear nowhere.


def _of(url: str, **environment: str) -> RedisSettings:
    return settings_of(parse_url(url), {f"ASYNCCACHE_REDIS_{name}": value for name, value in environment.items()})


def test_a_host_is_enough() -> None:
    settings = _of("redis://kv.internal")
    assert settings == RedisSettings(seeds=(HostPort("kv.internal", 6379),))
    assert str(settings) == "redis://kv.internal:6379/0?prefix=asynccache:"


def test_everything_said() -> None:
    settings = _of(
        "redis://al%3Aice:s%40cret@[::1]:7000/3?prefix=team-a/llama:&ttl=12h&connections=2&stall=1.5&cluster=off"
    )
    assert settings.seeds == (HostPort("::1", 7000),)
    assert (settings.database, settings.username, settings.password) == (3, "al:ice", "s@cret")
    assert (settings.prefix, settings.ttl, settings.connections, settings.stall) == ("team-a/llama:", 43200, 2, 1.5)
    assert str(settings.seeds[0]) == "[::1]:7000"


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("90", 90), ("1.5m", 90), ("7d", 604800), ("0.0015", 0.002)])
def test_times(text: str, seconds: float) -> None:
    assert _of(f"redis://h?ttl={text}").ttl == seconds


def test_the_environment_says_what_the_url_leaves_out() -> None:
    environment = {"USERNAME": "u", "PASSWORD": "p"}
    for url, user, password in (
        ("redis://h", "u", "p"),
        ("redis://a:b@h", "a", "b"),
        ("redis://:b@h", "", "b"),
        ("redis://a@h", "a", "p"),
    ):
        settings = _of(url, **environment)
        assert (settings.username, settings.password) == (user, password)


def test_a_password_that_is_no_text_is_not_quoted() -> None:
    assert "hunter2" not in repr(_of("redis://h", PASSWORD="hunter2\udcff"))


def test_names_are_of_one_store() -> None:
    settings, longer = _of("redis://h?prefix=a:"), _of("redis://h?prefix=a:b")
    key = bytes(range(32))
    assert settings.key_of(b"a:" + key) == key
    assert [settings.key_of(name) for name in (b"a:b" + key, b"a:", b"b:" + key, b"")] == [None] * 4
    assert longer.key_of(b"a:" + key) is None
    assert _of("redis://h?prefix=a*[x]?^-\\").pattern == rb"a\*\[x\]\?\^\-\\*"


def test_certificates_by_url_and_environment(tmp_path: Path) -> None:
    made = Certificate(tmp_path)
    assert _of("redis://h").tls is None
    for settings in (
        _of(f"rediss://h?ca={made.certificate}&cert={made.certificate}&key={made.key}&tls_name=kv"),
        _of("rediss://h?tls_name=kv", CA=str(made.certificate), CERT=str(made.certificate), KEY=str(made.key)),
    ):
        assert settings.tls is not None
        assert settings.tls.verify_mode is ssl.CERT_REQUIRED
        assert settings.tls.check_hostname
        assert "localhost" in str(settings.tls.get_ca_certs())
        assert settings.tls_name == "kv"


@pytest.mark.parametrize(("url", "says"), [
    ("redis:", "host:port"), ("redis://h:0", "host:port"), ("redis://h,", "host:port"), ("redis://h/x", "database"),
    ("redis://h/1000000", "database"), ("redis://h?prefix=a%0A", "prefix"), ("redis://h?cluster=maybe", "cluster"),
])  # fmt: skip
def test_what_is_wrong_is_named(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _of(url)


def test_no_form_of_the_settings_shows_a_secret() -> None:
    settings = _of("redis://alice:hunter2@h")
    assert "hunter2" not in f"{settings} {settings!r} {[settings]}"
    assert "alice" not in f"{settings} {settings!r}"


def test_without_redis_py_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from asynccache.errors import ConfigError\n"
        "from asynccache.storage.attachment import backend_class\n"
        "try: backend_class('redis')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert f"redis-py: {install('redis')}" in done.stdout
    assert "pip install 'redis" in done.stdout
