"""Mooncake: settings, names, numbers, refusals, return codes and the door to the library, which is a stand-in here;
then the backend against a real store."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from asynccache_backends.mooncake import MooncakeBackend, client
from asynccache_backends.mooncake import backend as module
from asynccache_backends.mooncake.client import (
    ENVIRONMENT,
    MooncakeClient,
    MooncakeSettings,
    acquire,
    library,
    prepare,
    settings_of,
)
from asynccache_backends.mooncake.transfers import STAGE_BYTES

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.storage import HEADER_BYTES, HostPort, Record, Result, parse_url
from asynccache.testing.backend_suite import (
    LAYOUT,
    aligned,
    blank,
    content,
    keys_of,
    page_key,
    put_all,
    record_of,
    same,
)
from tests.stores.mooncake_child import Child, Pool
from tests.stores.mooncake_server import MooncakeMaster, answer
from tests.stores.server import HOST, free_port

# Return codes that a real store gives only in the worst moments. The library is a stand-in that answers by the script;
# everything that a real one can be made to answer is tested against it, further below.


MISS, HIT, CORRUPT, FAILED = Result

Script = Callable[[Sequence[str]], list[int]]


def descriptor(size: int) -> object:
    """A replica of ``size`` bytes, as the library describes it."""
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=size))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


class Scripted:
    """Answers each call by the next of ``answers``: codes, by the place of a key in the call."""

    def __init__(self, *answers: list[int], sizes: Sequence[int] = (), code: int = 0) -> None:
        self._answers = list(answers)
        self._sizes = sizes
        self._code = code
        self.asked: list[list[str]] = []
        self.life: list[str] = []
        self.arguments: tuple[object, ...] = ()

    def setup(self, *args: object) -> int:
        self.life.append("setup")
        self.arguments = args
        return self._code

    def close(self) -> int:
        self.life.append("close")
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

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[object]]:
        return {name: [descriptor(size)] for name, size in zip(names, self._sizes, strict=False)}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_WAITS", (0.0, 0.0, 0.0))


@asynccontextmanager
async def opened(library: Scripted) -> AsyncIterator[MooncakeBackend]:
    settings = settings_of(parse_url(f"mooncake://{HOST}:{free_port()}"))  # nobody listens there
    names = {"ReplicateConfig": SimpleNamespace, "MooncakeDistributedStore": staticmethod(lambda: library)}
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


REFUSED = [-1, -600, -707, -800, -900, -901, -12345]


@pytest.mark.parametrize(("operation", "codes", "results"), [
    ("put", [0, -705, *REFUSED, -703, -704, -706, -712], [HIT, HIT, *[FAILED] * 11]),
    ("get", [16448, 16447, 16449, 0], [HIT, CORRUPT, CORRUPT, CORRUPT]),  # no bytes at all are not the page
    ("get", [16448, -703, -704, -712, *REFUSED, -705, -706, -101, -200], [HIT, MISS, MISS, MISS, *[FAILED] * 11]),
    ("get", [-800, -600, -800], [FAILED, CORRUPT, CORRUPT]),  # two of them have another length, as is asked then
    # removal is forced, so a lease that still stands in its way (-706) is news
    ("delete", [0, -703, -704, -712, *REFUSED, -705, -706, -101, -200], [HIT, MISS, MISS, MISS, *[FAILED] * 11]),
    ("exists", [1, 0, *REFUSED, -706], [HIT, MISS, *[FAILED] * 8]),
])  # fmt: skip
async def test_each_page_of_a_call_has_its_own_fate(operation: str, codes: list[int], results: list[Result]) -> None:
    sizes = (16448, 5000, 70000) if len(codes) == 3 else [16448] * len(codes)
    async with opened(Scripted(codes, sizes=sizes)) as backend:
        assert await CALLS[operation](backend, len(codes)) == results
        assert backend.stats()["pages"] == (results.count(HIT) if operation == "put" else 0)


@pytest.mark.parametrize(("operation", "code", "error", "said"), [
    ("get", -800, Unavailable, "owners"), ("get", -900, Unavailable, HOST), ("get", -901, Timeout, HOST),
    ("exists", -900, Unavailable, HOST), ("exists", -901, Timeout, HOST), ("clear", -901, Timeout, HOST),
    *(("clear", code, BackendError, str(code)) for code in (-1, -600, -706)),
])  # fmt: skip
async def test_a_call_that_reached_nobody_or_is_refused_as_a_whole_raises(
    operation: str, code: int, error: type[BackendError], said: str
) -> None:
    """Whom a call did not reach is left alone if that is the master, and not if it is the owner of a page."""
    library = Scripted([code] * 2, [0] * 2)
    async with opened(library) as backend:
        with pytest.raises(error, match=said):
            await CALLS[operation](backend, 2)
        if operation == "get":
            assert (backend.stats()["errors"], backend.stats()["lost_calls"]) == (2, 1)
            with pytest.raises(Unavailable) if code != -800 else nullcontext():
                assert await backend.exists(keys_of(2)) == [MISS] * 2
            assert len(library.asked) == (1 if code != -800 else 2)


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


# The door to the library: no call gets in before set-up or after close. The library is a stand-in here, for the real
# one would end the process.


OPTIONS = MooncakeSettings(master=HostPort("10.0.0.1", 50051), buffer=1 << 20)


def ready(library: Scripted) -> MooncakeClient:
    return MooncakeClient(OPTIONS, "10.0.0.7", type("Module", (), {"MooncakeDistributedStore": lambda: library}))


def test_set_up_opens_the_door_if_it_succeeds() -> None:
    library = Scripted()
    client = ready(library)
    with client as store:
        assert store is library
    refusing = Scripted(code=-1)
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:50051"):
        ready(refusing)
    assert refusing.life == ["setup"], "no client is left"
    assert library.arguments == ("10.0.0.7", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", "10.0.0.1:50051")


def test_a_closed_client_lets_nobody_in_and_is_closed_once() -> None:
    library = Scripted()
    client = ready(library)
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="CLOSED"), client:
        pytest.fail("inside")
    assert library.life == ["setup", "close"]


def test_close_waits_for_those_inside_and_lets_nobody_else_in() -> None:
    library = Scripted()
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
            assert library.life == ["setup"]
            assert closing.is_alive()
            leave.set()
    assert library.life == ["setup", "close"]
    assert repr(client) == "MooncakeClient(10.0.0.1:50051, CLOSED, users=1, calls=0)"


def test_an_error_inside_opens_the_way_out() -> None:
    client = ready(Scripted())
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
        assert client.object_names(place) == [f"name-{number}" for number in range(3000)]


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 1 << 20), ("LIST_WITHIN", 0.2)])
def test_a_list_of_names_without_an_end_is_unavailable(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, limit, value)
    with admin(endless) as place, pytest.raises(Unavailable, match=f"{HOST}.* has no end of its answer"):
        client.object_names(place)


# The Mooncake backend against a real store, as the runtime uses it: pools registered once, pages straight from and
# into them.


_numbers = count()


async def open_at(master: Any, namespace: str, **options: str) -> MooncakeBackend:
    return await MooncakeBackend.open(parse_url(master.url, {"namespace": namespace, **options}), LAYOUT)


@pytest.fixture
def namespace() -> str:
    """One that no other test has."""
    return f"backend{next(_numbers)}."


@pytest_asyncio.fixture
async def backend(mooncake_master: Any, namespace: str) -> AsyncIterator[MooncakeBackend]:
    """Open and empty."""
    opened = await open_at(mooncake_master, namespace)
    yield opened
    await opened.aclose()


async def test_payloads_in_registered_pools_are_copied_by_nobody(backend: MooncakeBackend) -> None:
    pool, keys = Pool(backend, 131077, 60), keys_of(30)  # no even size, so all but one begin at odd addresses
    assert await backend.put(keys, pool.fill(keys)) == [HIT] * 30
    assert await backend.get(keys, pool.records[30:]) == [HIT] * 30
    assert not any(pool.wrong(keys, at=30))
    stats = backend.stats()
    assert (stats["staged_pages"], stats["refused_regions"]) == (0, 0)
    assert stats["registered_bytes"] == 60 * 131077 + 2 * STAGE_BYTES  # of the threads that read and write


@pytest.mark.parametrize("name", sorted(LAYOUT.page_bytes))
async def test_short_pages_go_through_the_stage_in_one_transfer(backend: MooncakeBackend, name: str) -> None:
    pool, keys = Pool(backend, LAYOUT.page_bytes[name], 200), keys_of(100, name)
    assert await backend.put(keys, pool.fill(keys)) == [HIT] * 100
    assert await backend.get(keys, pool.records[100:]) == [HIT] * 100
    assert not any(pool.wrong(keys, at=100))
    assert backend.stats()["staged_pages"] == 200


async def test_short_and_long_pages_in_one_call(backend: MooncakeBackend) -> None:
    short, long = Pool(backend, 4096, 2), Pool(backend, 1 << 20, 2)
    keys = keys_of(2)
    records = [short.fill(keys[:1])[0], long.records[1]]
    records[1].header[:], records[1].payload[:] = bytes(HEADER_BYTES), content(keys[1], 1 << 20)
    assert await backend.put(keys, records) == [HIT] * 2
    assert await backend.get(keys, [short.records[1], long.records[0]]) == [HIT] * 2
    assert same(records, [short.records[1], long.records[0]])
    assert backend.stats()["staged_pages"] == 2


async def test_a_page_longer_than_the_stage(backend: MooncakeBackend) -> None:
    key = page_key("long")
    long = Record(aligned(HEADER_BYTES), aligned(9 << 20))
    long.payload[:] = content(key, 9 << 20)
    assert await backend.put([key], [long]) == [HIT]
    back = Record(aligned(HEADER_BYTES), aligned(9 << 20))
    assert await backend.get([key], [back]) == [HIT]
    assert same([long], [back])


async def test_two_caches_may_share_a_pool_and_part_in_any_order(mooncake_master: Any, namespace: str) -> None:
    one, two = await open_at(mooncake_master, namespace), await open_at(mooncake_master, namespace)
    slab = aligned(1 << 20)
    keys = keys_of(4)
    for backend in (one, two):
        backend.register("full", slab)
        assert await backend.exists(keys) == [MISS] * 4
        assert backend.stats()["registered_bytes"] == slab.nbytes
    await one.aclose()
    headers = memoryview(bytearray(4 * HEADER_BYTES))
    size = slab.nbytes // 4
    records = [Record(headers[i * 64 : i * 64 + 64], slab[i * size : (i + 1) * size]) for i in range(4)]
    assert await two.put(keys, records) == [HIT] * 4
    assert two.stats()["staged_pages"] == 0
    await two.aclose()


async def test_memory_that_overlaps_is_refused_and_staged(backend: MooncakeBackend) -> None:
    slab = aligned(1 << 20)
    backend.register("full", slab)
    backend.register("swa", slab[4096 : 2 * 4096])
    assert await backend.exists(keys_of(1)) == [MISS]
    assert backend.stats()["refused_regions"] == 1
    assert backend.stats()["registered_bytes"] == slab.nbytes
    keys = keys_of(2, "swa")
    await put_all(backend, keys)


@pytest.mark.parametrize("size", [16384 - 1, 16384 + 1, 16384 * 2, 1])
async def test_a_page_of_another_length_is_corrupt_and_the_others_are_not(backend: MooncakeBackend, size: int) -> None:
    keys = keys_of(3)
    stored = await put_all(backend, keys)
    records = [blank(keys[0]), Record(aligned(HEADER_BYTES), aligned(size)), blank(keys[2])]
    assert await backend.get(keys, records) == [HIT, CORRUPT, HIT]
    assert same([stored[0], stored[2]], [records[0], records[2]])


async def test_a_page_that_was_just_read_can_be_deleted(backend: MooncakeBackend) -> None:
    """A read leases an object; a corrupt page must leave all the same."""
    key = page_key("leased")
    await put_all(backend, [key])
    assert await backend.get([key], [blank(key)]) == [HIT]
    assert await backend.exists([key]) == [HIT]
    assert await backend.delete([key]) == [HIT]
    assert await backend.exists([key]) == [MISS]


async def test_a_list_needs_to_know_where_the_admin_server_is(mooncake_master: Any, namespace: str) -> None:
    url = mooncake_master.url.partition("?")[0]
    blind = await MooncakeBackend.open(parse_url(url, {"namespace": namespace}), LAYOUT)
    with pytest.raises(ConfigError, match="admin="):
        await anext(blind.listing())
    await blind.aclose()
    wrong = await open_at(mooncake_master, namespace, admin=f"{HOST}:{free_port()}")
    with pytest.raises(Unavailable):
        await anext(wrong.listing())
    await wrong.aclose()


async def test_other_options_are_refused_while_the_client_is_used(mooncake_master: Any, namespace: str) -> None:
    one = await open_at(mooncake_master, namespace)
    for option in ({"segment": "16MiB"}, {"buffer": "1MiB"}, {"host": "127.0.0.2"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            await open_at(mooncake_master, namespace, **option)
    assert await one.exists(keys_of(1)) == [MISS]
    await one.aclose()


async def test_the_client_is_shared_and_stays(mooncake_master: Any, namespace: str) -> None:
    settings = settings_of(parse_url(mooncake_master.url))
    one, two = await acquire(settings), await acquire(settings)
    assert one is two
    users = one.users
    one.release()
    two.release()
    three = await acquire(settings)
    assert three is one
    assert three.users == users - 1
    three.release()


@pytest.mark.parametrize("every", [False, True], ids=["the call", "every task, as asyncio.run does"])
async def test_an_open_that_is_cancelled_leaves_nothing_in_use(
    mooncake_master: Any, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    options = settings_of(parse_url(mooncake_master.url))
    one = await acquire(options)
    users, begun, go_on, set_up = one.users, threading.Event(), threading.Event(), client._acquire

    def slow(options: MooncakeSettings, host: str) -> client.MooncakeClient:
        begun.set()
        go_on.wait(10)
        return set_up(options, host)

    monkeypatch.setattr(client, "_acquire", slow)
    others = asyncio.all_tasks()
    opening = asyncio.ensure_future(acquire(options))
    await asyncio.to_thread(begun.wait, 10)
    for task in asyncio.all_tasks() - others if every else {opening}:
        task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not opening.done(), "what has begun is waited for"
    go_on.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert one.users == users
    one.release()


# Tests that need a process of their own: two that share a store, other options, and the client's end.


@pytest.fixture(scope="module")
def other_master() -> Iterator[MooncakeMaster]:
    """A second store."""
    with MooncakeMaster() as master:
        yield master


def segments(master: MooncakeMaster) -> int:
    return len(answer(master.admin, "/get_all_segments").split())


@pytest.mark.slow
def test_another_store_only_when_the_first_is_not_used(mooncake_master: Any, other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="first.")
        refused = child.ask("open", url=other_master.url)
        assert refused["error"] == "ConfigError"
        assert "master" in refused["message"]
        assert child.ask("put", count=5)["HIT"] == 5
        child.ask("close")
        assert "error" not in child.ask("open", url=other_master.url)
        assert child.ask("get", count=5)["MISS"] == 5
        assert child.ask("put", count=5)["HIT"] == 5


@pytest.mark.slow
def test_a_segment_is_contributed_and_leaves_with_the_process(other_master: Any) -> None:
    """At once, and not when the master has missed it for a while."""
    before = segments(other_master)
    with Child() as child:
        assert "error" not in child.ask("open", url=other_master.url, segment="64MiB", namespace="own.")
        assert segments(other_master) == before + 1
        assert child.ask("put", count=100)["HIT"] == 100
        child.ask("close")
        assert child.end() == 0
        began = time.monotonic()
        while segments(other_master) != before:
            assert time.monotonic() - began < 3
            time.sleep(0.05)


@pytest.mark.slow
def test_set_up_freezes_the_loop_shortly(mooncake_master: Any) -> None:
    with Child() as child:
        opened = child.ask("open", url=mooncake_master.url, namespace="freeze.")
        assert opened["lag"] < 2, opened
        again = child.ask("open", url=mooncake_master.url, namespace="freeze2.")
        assert again["lag"] < 0.5, again


@pytest.mark.slow
def test_a_process_that_ends_while_a_call_is_under_way_ends_well(other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=other_master.url, namespace="inside.")
        other_master.hang()
        try:
            child.ask("leave_inside")
            assert child.end() == 0
        finally:
            other_master.resume()


@pytest.mark.slow
def test_a_process_that_ends_without_closing_anything_ends_well(mooncake_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="end.")
        child.ask("put", count=5)
        assert child.end() == 0


# Masters and owners of segments that are killed, hung, restarted and full. The cache is in a child process, which
# also says how long its loop stood still meanwhile.


TTL = 4                                            # seconds after which the master gives a silent owner up
LAG = 0.5                                          # the loop may stand still so long, on a machine that is busy


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """A small store."""
    with MooncakeMaster(segment=64, ttl=TTL) as master:
        yield master


@pytest.fixture
def child(master: MooncakeMaster) -> Iterator[Child]:
    """With 64 pages stored."""
    with Child() as process:
        assert "error" not in process.ask("open", url=master.url)
        assert process.ask("put", count=64)["HIT"] == 64
        yield process


def until_true(what: Callable[[], bool], seconds: float) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "how", "calls", "error", "seconds"), [
    ("master", "kill", ("put",), "Unavailable", 10),   # and from then on its port is asked, and not the client
    ("master", "hang", ("get", "exists", "put"), "Timeout", 3),
    ("owner", "kill", ("get", "put"), "Unavailable", 10),
    ("owner", "hang", ("get",), "Unavailable", 20),    # the buffers are held until the client's transfers time out
])  # fmt: skip
def test_what_is_away_fails_calls_freezes_no_loop_and_comes_back(
    who: str, how: str, calls: Sequence[str], error: str, seconds: float, master: MooncakeMaster, child: Child
) -> None:
    server: Any = master if who == "master" else master.owner
    getattr(server, how)()
    for order in calls:
        answered = child.ask(order, count=64, name="new" if order == "put" else "")
        assert answered["error"] == error
        assert (answered["seconds"] < seconds, answered["lag"] < LAG) == (True, True), answered
    if (who, how) == ("master", "kill"):
        for order in ("get", "exists", "put"):
            later = child.ask(order, count=64)
            assert (later["error"], later["seconds"] < 1) == ("Unavailable", True), later
    if who == "owner":
        until_true(lambda: child.ask("get", count=64).get("MISS") == 64, 3 * TTL + 5)
    server.start() if how == "kill" else server.resume()
    if (who, how) != ("master", "hang"):               # all others come back empty
        until_true(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    until_true(lambda: child.ask("get", count=64).get("HIT") == 64, 10)
    assert child.ask("get", count=64)["wrong"] == 0


@pytest.mark.slow
def test_a_get_of_a_hung_master_that_is_cancelled_lets_go_soon(master: MooncakeMaster, child: Child) -> None:
    master.hang()
    answered = child.ask("cancel", count=64, after=0.2)
    assert answered["cancelled"]
    assert answered["held"] < 3
    again = child.ask("cancel", count=64, after=0.2)
    assert again["held"] < 0.2, "who waits for a greeting holds no buffer"
    master.resume()


@pytest.mark.slow
def test_a_cache_that_opens_at_a_hung_master_freezes_nothing(master: MooncakeMaster) -> None:
    master.hang()
    with Child() as child:
        opened = child.ask("open", url=master.url)
        assert opened["error"] == "Timeout"
        assert opened["seconds"] < 3
        assert opened["lag"] < LAG
        master.resume()
        until_true(lambda: "error" not in child.ask("open", url=master.url), 10)


@pytest.mark.slow
def test_a_full_store_fails_pages_or_evicts_and_never_lies(master: MooncakeMaster, child: Child) -> None:
    """Nearly twice what it holds."""
    stored = 0
    for batch in range(30):
        answered = child.ask("put", count=256, name=f"{batch}/")
        assert "error" not in answered, answered
        assert answered["seconds"] < 5
        stored += answered.get("HIT", 0)
    assert stored > 64 << 20 >> 14, "nothing was evicted"
    found = 0
    for batch in range(30):
        got = child.ask("get", count=256, name=f"{batch}/")
        assert got["wrong"] == 0
        found += got.get("HIT", 0)
    assert 0 < found < stored
    assert child.ask("stats")["full_waits"] > 0
