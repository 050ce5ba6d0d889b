"""Mooncake without a store: settings, names, numbers, refusals, return codes and the door to the library, which is a
stand-in here."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from asynccache_backends.mooncake import backend as module
from asynccache_backends.mooncake import client as mooncake
from asynccache_backends.mooncake import codes
from asynccache_backends.mooncake.backend import MooncakeBackend
from asynccache_backends.mooncake.client import (
    ENVIRONMENT,
    MooncakeClient,
    MooncakeSettings,
    library,
    prepare,
    settings_of,
)

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.storage import HostPort, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, keys_of, record_of
from tests.stores.server import HOST, free_port

# Return codes that a real store gives only in the worst moments. The library is a stand-in that answers by the script;
# everything that a real one can be made to answer is tested against it, in the other modules.


MISS, HIT, CORRUPT, FAILED = Result

Script = Callable[[Sequence[str]], list[int]]


class ReplicateConfig:
    """The library's, as far as it is used."""

    replica_num = 1


class Descriptor:
    """A replica of ``size`` bytes, as the library describes it."""

    def __init__(self, size: int) -> None:
        self.buffer_descriptor = self
        self.size = size

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Descriptor:
        return self


class Scripted:
    """Answers each call by the next of ``answers``: codes, by the place of a key in the call."""

    def __init__(self, *answers: list[int], sizes: Sequence[int] = ()) -> None:
        self._answers = list(answers)
        self._sizes = sizes
        self.asked: list[list[str]] = []

    def setup(self, *args: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def _answer(self, names: Sequence[str], *args: object) -> list[int]:
        self.asked.append(list(names))
        return self._answers.pop(0)

    batch_put_from_multi_buffers = batch_get_into_multi_buffers = batch_is_exist = batch_remove = _answer

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        return self._answers.pop(0)[0]

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Descriptor]]:
        return {name: [Descriptor(size)] for name, size in zip(names, self._sizes, strict=False)}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_WAITS", (0.0, 0.0, 0.0))


@asynccontextmanager
async def opened(library: Scripted) -> AsyncIterator[MooncakeBackend]:
    settings = settings_of(parse_url(f"mooncake://{HOST}:{free_port()}"))  # nobody listens there
    names = {"ReplicateConfig": ReplicateConfig, "MooncakeDistributedStore": staticmethod(lambda: library)}
    backend = MooncakeBackend(settings, MooncakeClient(settings, HOST, type("Module", (), names)))
    yield backend
    await backend.aclose()


async def put(backend: MooncakeBackend, count: int) -> list[Result]:
    keys = keys_of(count)
    return await backend.put(keys, [record_of(key) for key in keys])


async def get(backend: MooncakeBackend, count: int) -> list[Result]:
    keys = keys_of(count)
    return await backend.get(keys, [record_of(key) for key in keys])


CALLS: dict[str, Callable[[MooncakeBackend, int], Awaitable[Any]]] = {
    "put": put, "get": get, "delete": lambda backend, count: backend.delete(keys_of(count)),
    "exists": lambda backend, count: backend.exists(keys_of(count)), "clear": lambda backend, count: backend.clear(),
}  # fmt: skip


@pytest.mark.parametrize(("operation", "codes", "results"), [
    ("put", [0, -600, -705, -1, -800], [HIT, FAILED, HIT, FAILED, FAILED]),
    ("get", [16448, -704, 16447, -703, -901], [HIT, MISS, CORRUPT, MISS, FAILED]),
    ("get", [-800, -600, -800], [FAILED, CORRUPT, CORRUPT]),  # two of them have another length, as is asked then
    ("delete", [0, -706, -704], [HIT, FAILED, MISS]), ("exists", [1, 0, -1, -706], [HIT, MISS, FAILED, FAILED]),
])  # fmt: skip
async def test_each_page_of_a_call_has_its_own_fate(operation: str, codes: list[int], results: list[Result]) -> None:
    async with opened(Scripted(codes, sizes=(16448, 5000, 70000))) as backend:
        assert await CALLS[operation](backend, len(codes)) == results
        assert backend.stats()["pages"] == (results.count(HIT) if operation == "put" else 0)


@pytest.mark.parametrize(("operation", "code", "error"), [
    ("get", -800, Unavailable), ("get", -900, Unavailable), ("get", -901, Timeout), ("exists", -900, Unavailable),
    ("exists", -901, Timeout), ("clear", -901, Timeout), ("clear", -1, BackendError), ("clear", -600, BackendError),
    ("clear", -706, BackendError),
])  # fmt: skip
async def test_a_call_that_reached_nobody_or_is_refused_as_a_whole_raises(
    operation: str, code: int, error: type[BackendError]
) -> None:
    async with opened(Scripted([code] * 2)) as backend:
        with pytest.raises(error, match=str(code) if error is BackendError else None):
            await CALLS[operation](backend, 2)
        if operation == "get":
            assert (backend.stats()["errors"], backend.stats()["lost_calls"]) == (2, 1)


async def test_only_the_pages_that_found_no_room_are_put_again() -> None:
    library = Scripted([0, -200, 0, -200], [-200, 0], [0])
    async with opened(library) as backend:
        assert await put(backend, 4) == [HIT] * 4
        first, second, third = library.asked
        assert (second, third) == ([first[1], first[3]], [first[1]])
        assert (backend.stats()["full_waits"], backend.stats()["full_pages"]) == (2, 0)


async def test_a_store_that_stays_full_fails_the_pages_and_not_the_call() -> None:
    library = Scripted(*[[-200, -101]] * 4)
    async with opened(library) as backend:
        assert await put(backend, 2) == [FAILED] * 2
        assert len(library.asked) == 4
        assert (backend.stats()["full_waits"], backend.stats()["full_pages"]) == (3, 2)


async def test_after_the_master_is_lost_the_library_is_left_alone_until_it_answers() -> None:
    library = Scripted([-900])
    async with opened(library) as backend:
        with pytest.raises(Unavailable):
            await put(backend, 1)
        for _ in range(2):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await put(backend, 1)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await backend.clear()
        assert len(library.asked) == 1


async def test_a_part_that_reached_nobody_spares_the_others_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_PAGES", 1)
    library = Scripted([-800])
    async with opened(library) as backend:
        with pytest.raises(Unavailable):
            await get(backend, 5)
        assert len(library.asked) == 1


async def test_an_answer_of_the_wrong_length_is_no_answer() -> None:
    async with opened(Scripted([0])) as backend:
        with pytest.raises(BackendError, match="1 codes for 2"):
            await put(backend, 2)


async def test_parts_of_a_cancelled_call_that_have_not_begun_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_PAGES", 1)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Scripted):
        def batch_is_exist(self, names: Sequence[str], *args: object) -> list[int]:
            begun.set()
            go_on.wait(10)
            return self._answer(names)

    library = Slow([1], [1], [1])
    async with opened(library) as backend:
        asking = asyncio.ensure_future(backend.exists(keys_of(3)))
        await asyncio.to_thread(begun.wait, 10)
        asking.cancel()
        await asyncio.sleep(0)
        assert not asking.done()
        go_on.set()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert len(library.asked) == 1


# A refusal of the Mooncake store, or of the resolver of names, is an error of the call that met it.


async def test_a_name_that_no_machine_can_have() -> None:
    with pytest.raises(ConfigError, match=r"a\.\.b"):
        await MooncakeBackend.open(parse_url("mooncake://a..b:1"), LAYOUT)


# The door to the library: no call gets in before set-up or after close. The library is a stand-in here, for the real
# one would end the process; ``test_mooncake_backend`` asks that one, in a process of its own.


OPTIONS = MooncakeSettings(master=HostPort("10.0.0.1", 50051), buffer=1 << 20)


class Library:
    """Notes what it is asked."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[str] = []
        self.arguments: tuple[object, ...] = ()
        self._code = code

    def setup(self, *args: object) -> int:
        self.calls.append("setup")
        self.arguments = args
        return self._code

    def close(self) -> int:
        self.calls.append("close")
        return 0


def ready(library: Library) -> MooncakeClient:
    return MooncakeClient(OPTIONS, "10.0.0.7", type("Module", (), {"MooncakeDistributedStore": lambda: library}))


def test_set_up_opens_the_door_if_it_succeeds() -> None:
    library = Library()
    client = ready(library)
    with client as store:
        assert store is library
    refusing = Library(-1)
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:50051"):
        ready(refusing)
    assert refusing.calls == ["setup"], "no client is left"
    assert library.arguments == ("10.0.0.7", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", "10.0.0.1:50051")


def test_a_closed_client_lets_nobody_in_and_is_closed_once() -> None:
    library = Library()
    client = ready(library)
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="CLOSED"), client:
        pytest.fail("inside")
    assert library.calls == ["setup", "close"]


def test_close_waits_for_those_inside_and_lets_nobody_else_in() -> None:
    library = Library()
    client = ready(library)
    inside, leave = Event(), Event()

    def call() -> None:
        with client:
            inside.set()
            leave.wait(10)

    with _thread(call):
        assert inside.wait(10)
        with _thread(client.close) as closing:
            while client.state != "CLOSING":
                leave.wait(0.001)
            with pytest.raises(Unavailable, match="CLOSING"), client:
                pytest.fail("inside")
            assert library.calls == ["setup"]
            assert closing.is_alive()
            leave.set()
    assert library.calls == ["setup", "close"]
    assert repr(client) == "MooncakeClient(10.0.0.1:50051, CLOSED, users=1, calls=0)"


def test_an_error_inside_opens_the_way_out() -> None:
    client = ready(Library())
    with pytest.raises(ZeroDivisionError), client:
        raise ZeroDivisionError
    client.close()
    assert client.state == "CLOSED"


def test_the_environment_bounds_the_client_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "250")
    prepare()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "250"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_a_missing_shared_library_is_a_setting_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mooncake", Broken())
    with pytest.raises(ConfigError, match="apt-get install libibverbs1 libnuma1"):
        library()


@contextmanager
def _thread(work: Any) -> Iterator[Thread]:
    thread = Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(10)
        assert not thread.is_alive()


# The meanings of the client's numbers, number by number.


@pytest.mark.parametrize(
    ("code", "put", "get", "delete"),
    [
        (0, HIT, CORRUPT, HIT),                    # a get of no bytes at all is not the page
        (-1, FAILED, FAILED, FAILED),
        (-101, FAILED, FAILED, FAILED),
        (-200, FAILED, FAILED, FAILED),
        (-600, FAILED, FAILED, FAILED),
        (-703, FAILED, MISS, MISS),
        (-704, FAILED, MISS, MISS),
        (-705, HIT, FAILED, FAILED),
        (-706, FAILED, FAILED, FAILED),            # removal is forced, so a lease that still stands in its way is news
        (-707, FAILED, FAILED, FAILED),
        (-712, FAILED, MISS, MISS),
        (-800, FAILED, FAILED, FAILED),
        (-900, FAILED, FAILED, FAILED),
        (-901, FAILED, FAILED, FAILED),
        (-12345, FAILED, FAILED, FAILED),
    ],
)  # fmt: skip
def test_each_code_has_a_meaning(code: int, put: Result, get: Result, delete: Result) -> None:
    assert codes.put_result(code) is put
    assert codes.get_result(code, 1064) is get
    assert codes.delete_result(code) is delete


def test_a_get_is_a_hit_only_to_the_byte_and_presence_is_one() -> None:
    assert [codes.get_result(written, 1064) for written in (1063, 1064, 1065)] == [CORRUPT, HIT, CORRUPT]
    assert [codes.exists_result(code) for code in (1, 0, -1, -901)] == [HIT, MISS, FAILED, FAILED]


def test_a_call_reached_nobody_if_no_key_of_it_did() -> None:
    assert codes.is_nobody([-800, -900, -901, codes.NOT_TRIED])
    assert not codes.is_nobody([-800, -704])
    assert not codes.is_nobody([-800, 0])
    assert not codes.is_nobody([])


def test_a_transfer_that_fails_does_not_mean_that_the_master_is_lost() -> None:
    assert codes.lost_master([0, -900])
    assert codes.lost_master([-901])
    assert not codes.lost_master([-800, -200, 0])


def test_the_error_says_who_does_not_answer() -> None:
    assert isinstance(codes.nobody_error([-900, -901], "m:1"), Timeout)
    assert isinstance(codes.nobody_error([-900], "m:1"), Unavailable)
    assert "m:1" in str(codes.nobody_error([-900], "m:1"))
    assert "owners" in str(codes.nobody_error([-800], "m:1"))


# The settings in a mooncake URL, and the keys that pages have in the store.


KEY = bytes(range(32))


def test_a_url_with_nothing_but_a_master_is_a_pure_client() -> None:
    settings = settings_of(parse_url("mooncake://10.0.0.1:51000"))
    assert settings.master == HostPort("10.0.0.1", 51000)
    assert (settings.segment, settings.buffer) == (0, 16 << 20)
    assert (settings.protocol, settings.metadata) == ("tcp", "P2PHANDSHAKE")
    assert (settings.replicas, settings.threads, settings.admin) == (1, 1, None)


def test_all_options() -> None:
    settings = settings_of(
        parse_url(
            "mooncake://[::1]?segment=512MiB&buffer=32MiB&protocol=rdma&device=mlx5_0&metadata=http://m:8080/metadata"
            "&host=10.0.0.7&replicas=2&threads=3&namespace=team/a.&admin=10.0.0.1:9003"
        )
    )
    assert str(settings.master) == "[::1]:50051"
    assert (settings.segment, settings.buffer) == (512 << 20, 32 << 20)
    assert (settings.protocol, settings.device) == ("rdma", "mlx5_0")
    assert settings.metadata == "http://m:8080/metadata"
    assert (settings.host, settings.admin) == ("10.0.0.7", HostPort("10.0.0.1", 9003))
    assert (settings.replicas, settings.threads) == (2, 3)
    assert settings.name(KEY).startswith("team/a.")


def test_names_are_a_namespace_and_hex_and_lead_back() -> None:
    settings = settings_of(parse_url("mooncake://h:1?namespace=a.b-"))
    name = settings.name(KEY)
    assert name == "a.b-" + KEY.hex()
    assert settings.key_of(name) == KEY
    for other in ("aXb-" + KEY.hex(), name + "0", name[:-1], "x" + name, name.upper(), "a.b-" + "g" * 64, name + "\n"):
        assert settings.key_of(other) is None


def test_the_pattern_finds_its_own_namespace_and_no_other() -> None:
    settings = settings_of(parse_url("mooncake://h:1?namespace=a.b"))
    assert re.search(settings.pattern, settings.name(KEY))
    assert not re.search(settings.pattern, "aXb" + KEY.hex())
    assert not re.search(settings.pattern, "z" + settings.name(KEY))
    assert not re.search(settings.pattern, "a.bc" + KEY.hex())


def test_keys_of_one_namespace_meet_no_longer_one() -> None:
    """A namespace that ends in hex digits must not make a shorter one's pattern match."""
    short, long = (settings_of(parse_url(f"mooncake://h:1?namespace={name}")) for name in ("n", "n00"))
    assert short.key_of(long.name(KEY)) is None


# The admin server of a master.


@contextmanager
def admin(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[HostPort]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer((HOST, 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield HostPort(HOST, server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Names without an end, until nobody listens any more."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"asynccache.0000\n" * 4096)
    except OSError:
        return


def test_names_come_whole() -> None:
    def some(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for number in range(3000):
            handler.wfile.write(b"name-%d\n" % number)

    with admin(some) as place:
        assert mooncake.object_names(place) == [f"name-{number}" for number in range(3000)]


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 1 << 20), ("LIST_WITHIN", 0.2)])
def test_a_list_of_names_without_an_end_is_unavailable(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, limit, value)
    with admin(endless) as place, pytest.raises(Unavailable, match=f"{HOST}.* has no end of its answer"):
        mooncake.object_names(place)
