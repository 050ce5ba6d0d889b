"""KV events of a host process: what its memory and its stores hold is what a router's picture has, by the names of
blocks that the router knows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import zmq
from asynccache_backends.host import HostBackend

from asynccache import AsyncCache
from asynccache.cli.serve import Options, publish
from asynccache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventStream,
    Fleet,
    Subscriber,
    prompt_blocks,
)
from asynccache.events.wire import Decoder
from asynccache.host.changes import AT_ONCE, HeldChanges
from asynccache.host.server import HostServer
from asynccache.storage import PageKey, Pages, Result
from asynccache.storage.contract import block_in, named_key
from asynccache.testing.backend_suite import get_all, put_all, record_of, same
from tests.host.host_kit import client, serving, socket_path, taken_from
from tests.host.host_processes import HostProcess, pss
from tests.host.test_host_engines import compute, config
from tests.stores.server import free_port

LOCAL = "tcp://127.0.0.1:*"
SOON = 30.0
HIT = Result.HIT


def key_of(block: int, part: int = 0, pool: str = "full") -> PageKey:
    return PageKey(pool, named_key(sha256(f"{block} {part}".encode()).digest(), block))


def keys_of(blocks: Sequence[int]) -> list[PageKey]:
    return [key_of(block) for block in blocks]


async def until(true: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, why()
        await asyncio.sleep(0.01)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(patience=0.5, check=0.2, silence=1.5) as fleet:
        yield fleet
        assert fleet.error is None


def picture(fleet: Fleet, blocks: Sequence[int]) -> tuple[set[int], set[int]]:
    """Those of ``blocks`` that the one server has in memory, and those that only a store has."""
    found = {block: fleet.hits([block])["a"] for block in blocks}
    return {b for b, hits in found.items() if hits.host}, {b for b, hits in found.items() if hits.storage}


@asynccontextmanager
async def published(server: HostServer, fleet: Fleet) -> AsyncIterator[Any]:
    options = Options(listen=f"unix:{server.path}", memory=1 << 20, events=LOCAL, events_replay=LOCAL)
    async with publish(server, options, 0.0) as publisher:
        fleet.add("a", [EventStream(publisher.endpoint, publisher.replay)])
        yield publisher


def truth(server: HostServer) -> tuple[set[int], set[int]]:
    """What is really there: in the table, and in the index of the store."""
    memory = {block_in(key) for key in server.table.index}
    behind: set[Any] = set()
    for store in [] if server.behind is None else server.behind.stores:
        backend: Any = store.backend
        while hasattr(backend, "inner"):
            backend = backend.inner
        index = backend._log.index._locations if hasattr(backend, "_log") else backend._stored
        behind |= {block_in(key) for key in index}
    return memory, behind - memory  # type: ignore[return-value]


# the law


@pytest.mark.parametrize("stores", [["file"], ["memory", "file"], []])
@pytest.mark.parametrize("seed", range(3))
async def test_after_quiet_the_picture_equals_the_servers_index(
    seed: int, stores: list[str], fleet: Fleet, tmp_path: Path
) -> None:
    """Clients store, read, delete, clear and complain; the memory and the stores evict; a label has a limit."""
    urls = {"file": f"file:{tmp_path}/kv?capacity=2MiB&segment=256KiB", "memory": "memory:?capacity=400KiB"}
    random, path, blocks = Random(seed), socket_path(), range(-60, 60)
    async with serving(
        path, memory=1 << 20, stores=[urls[name] for name in stores], limits={"small": 200 << 10}
    ) as server:
        clients = [await client(path), await client(path, "?label=small")]
        await put_all(clients[0], keys_of(range(5)))  # before anybody is told
        async with published(server, fleet):
            for step in range(150):
                backend, some = random.choice(clients), keys_of(random.sample(blocks, random.randint(1, 8)))
                match random.choice(["put"] * 6 + ["get"] * 3 + ["delete", "damaged", "bye"]):
                    case "put":
                        await backend.put(some, [record_of(key) for key in some])
                    case "get":
                        await get_all(backend, some)
                    case "delete":
                        await backend.delete(some)
                    case "damaged":
                        await get_all(backend, some)
                        await backend.damaged(some)
                    case "bye" if step % 5 == 0:
                        await backend.clear()
            await clients[0].flush()
            server.table.audit()
            def differ() -> object:
                return picture(fleet, blocks), truth(server)

            await until(lambda: picture(fleet, blocks) == truth(server), differ)
            assert truth(server)[0]
            await clients[0].clear()
            await until(lambda: picture(fleet, blocks) == (set(), set()))
        await until(lambda: not fleet.stats()["a"][0].connected)
        for backend in clients:
            await backend.aclose()


async def test_what_a_listener_has_no_room_for_waits_and_what_came_and_went_is_not_told() -> None:
    told: list[tuple[str, bool, list[bytes]]] = []
    full = True

    def tell(medium: str, there: bool, keys: Sequence[bytes]) -> bool:
        if not full:
            told.append((medium, there, list(keys)))
        return not full

    changes = HeldChanges(tell)
    place = changes.place("CPU")
    for turn in range(1000):
        for number in range(turn * 10, turn * 10 + 10):
            place.note(True, [b"%d" % number])
        if turn < 990:
            place.note(False, [b"%d" % number for number in range(turn * 10, turn * 10 + 10)])
        await asyncio.sleep(0)
        assert len(place._untold) <= 100, "what waits is bounded by what there is"
    full = False
    await until(lambda: sum(len(keys) for _, _, keys in told) == 100)
    assert told == [("CPU", True, [b"%d" % number for number in range(9900, 10_000)])]
    place.note(True, [b"%d" % number for number in range(10_000, 13_000)])
    place.note(True, [b"10000"])
    await until(lambda: sum(len(keys) for _, _, keys in told) == 3100)
    assert max(len(keys) for _, _, keys in told) <= AT_ONCE
    changes.close()
    place.note(False, [b"10000"])
    await asyncio.sleep(0.02)
    assert all(there for _, there, _ in told)


# names


async def test_a_cache_is_found_by_the_blocks_of_its_prompt(fleet: Fleet, tmp_path: Path) -> None:
    path, prompt = socket_path(), list(range(100, 260))
    async with serving(path, stores=[f"file:{tmp_path}/kv?capacity=16MiB"]) as server, published(server, fleet):
        async with AsyncCache(config(f"host:{path}")) as cache:
            await compute(cache, prompt, 7)
            await cache.flush()
        names = prompt_blocks(prompt, model="weights-a", page_size=16)
        assert len(names) == 10
        await until(lambda: fleet.hits(names)["a"] == (0, 10, 0), fleet.stats)
        assert fleet.hits(prompt_blocks(prompt, model="weights-b", page_size=16))["a"] == (0, 0, 0)
        server.table.clear()
        await until(lambda: fleet.hits(names)["a"] == (0, 0, 10), fleet.stats)


async def test_an_engines_own_names_come_through_and_pages_without_one_are_not_told(fleet: Fleet) -> None:
    path = socket_path()
    async with serving(path) as server, published(server, fleet):
        def stored() -> None:
            memory = bytearray(4 * 4096)
            with Pages.open(f"host:{path}", memory, 4096, "m", blocks=lambda pool, key: key[0] - 2) as pages:
                assert pages.put([b"\0", b"\1", b"\2"], [0, 1, 2]).result() == [HIT] * 3
            with Pages.open(f"host:{path}", memory, 4096, "m") as pages:
                assert pages.put([b"\7"], [0]).result() == [HIT]

        await asyncio.to_thread(stored)
        await until(lambda: picture(fleet, range(-5, 5)) == ({-2, -1, 0}, set()))
        assert len(server.table.index) == 4


async def test_what_any_reader_of_vllms_events_finds(fleet: Fleet) -> None:
    path = socket_path()
    async with serving(path) as server:
        async with published(server, fleet) as publisher:
            with Subscriber(publisher.endpoint, publisher.replay) as subscriber:
                backend = await stored(path, [5])
                await until(lambda: picture(fleet, [5]) == ({5}, set()))
                await backend.delete([key_of(5)])
                await until(lambda: picture(fleet, [5]) == (set(), set()))
                received = await asyncio.to_thread(lambda: list(subscriber.catch_up()))
                assert [event for _, batch in received for event in batch.events] == [
                    AllBlocksCleared(), BlockStored([5], None, [], 0, None, "CPU", None), BlockRemoved([5], "CPU")
                ]  # fmt: skip
                await backend.aclose()
        events = [event for batch in publisher._history._batches for event in Decoder().decode(batch[1]).events]
        assert events[-1] == AllBlocksCleared(), "one that ends holds nothing"


# processes


class Announced(HostProcess):
    """``asynccache serve --events`` in a process of its own."""

    def __init__(self, path: str, *more: str, memory: str = "24MiB") -> None:
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.stream = EventStream(events, replay)
        super().__init__(path, memory, "--events", events, "--events-replay", replay, *more)


@asynccontextmanager
async def announced(fleet: Fleet, blocks: range, *more: str) -> AsyncIterator[tuple[Announced, HostBackend]]:
    """A server that has these blocks, in a process of its own; a client; and the fleet knows it."""
    server = Announced(socket_path(), *more)
    server.start()
    try:
        await server.counts()
        backend = await stored(server.path, blocks)
        fleet.add("a", [server.stream])
        await until(lambda: picture(fleet, range(1000)) == ({*blocks}, set()), fleet.stats)
        yield server, backend
        await backend.aclose()
    finally:
        server.kill()


async def stored(path: str, blocks: Sequence[int]) -> HostBackend:
    backend = await client(path)
    keys = keys_of(blocks)
    assert await backend.put(keys, [record_of(key) for key in keys]) == [HIT] * len(keys)
    return backend


async def test_a_server_that_is_killed_and_started_again_says_what_its_folder_has(fleet: Fleet, tmp_path: Path) -> None:
    async with announced(fleet, range(200), "--storage", f"file:{tmp_path}/kv?capacity=64MiB") as (server, backend):
        await backend.flush()
        server.kill()
        await until(lambda: picture(fleet, range(220)) == (set(), set()), fleet.stats)
        server.start()
        await until(lambda: picture(fleet, range(220)) == (set(), {*range(200)}), fleet.stats)
        await server.counts()
        await asyncio.sleep(0.1)
        await get_all(backend, keys_of(range(50)))
        await until(lambda: picture(fleet, range(220)) == ({*range(50)}, {*range(50, 200)}), fleet.stats)
        assert server.stop() == 0
        await until(lambda: picture(fleet, range(220)) == (set(), set()), fleet.stats)


async def test_a_take_over_ends_in_the_same_picture(fleet: Fleet) -> None:
    async with announced(fleet, range(100)) as (server, _):
        first = server.process
        server.start("--replace")
        assert await asyncio.to_thread(first.wait, 30) == 0
        await server.counts()
        backend = await stored(server.path, range(100, 110))
        await until(lambda: picture(fleet, range(120)) == ({*range(110)}, set()), fleet.stats)
        await backend.delete(keys_of(range(50)))
        await until(lambda: picture(fleet, range(120)) == ({*range(50, 110)}, set()), fleet.stats)
        await backend.aclose()


async def test_a_server_that_is_stopped_is_forgotten_and_is_back_when_it_goes_on(fleet: Fleet) -> None:
    async with announced(fleet, range(10)) as (server, _):
        server.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: picture(fleet, range(12)) == (set(), set()), fleet.stats)
        finally:
            server.process.send_signal(signal.SIGCONT)
        await until(lambda: picture(fleet, range(12)) == ({*range(10)}, set()), fleet.stats)


async def test_a_server_whose_heir_dies_goes_on_and_says_the_same_as_before(fleet: Fleet, tmp_path: Path) -> None:
    """Its stores were closed for the heir, and are opened again."""
    path = socket_path()
    async with serving(path, stores=[f"file:{tmp_path}/kv?capacity=64MiB"]) as server, published(server, fleet):
        backend = await stored(path, range(20))
        await backend.flush()
        taken = await taken_from(path)
        for cell in cast("Any", taken.confirm).__closure__:
            if isinstance(cell.cell_contents, socket.socket):
                cell.cell_contents.close()  # the heir is killed
        taken.listener.close()
        taken.memory.close()
        await until(lambda: not server.handed_over)
        await until(lambda: not server.draining)
        await asyncio.sleep(0.1)
        results, fetched = await get_all(backend, keys_of(range(20)))
        assert results == [HIT] * 20
        assert same([record_of(key) for key in keys_of(range(20))], fetched)
        server.table.clear()
        await until(lambda: picture(fleet, range(30)) == (set(), {*range(20)}), fleet.stats)
        await backend.delete(keys_of(range(5)))
        await until(lambda: picture(fleet, range(30)) == (set(), {*range(5, 20)}), fleet.stats)
        await backend.aclose()


def own(server: HostProcess) -> int:
    """Bytes of memory that only its process has."""
    found = pss(server.process.pid)
    return found["Private_Clean"] + found["Private_Dirty"]


async def test_subscribers_that_do_not_read_cost_bounded_memory_and_delay_nobody(fleet: Fleet) -> None:
    """One subscribes and never reads, one asks for everything again and again and reads none of it."""
    async with announced(fleet, range(500)) as (server, backend):
        with zmq.Context() as context:
            slow, greedy = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            for one in (slow, greedy):
                one.linger = 0
                one.set_hwm(1)
            slow.setsockopt(zmq.RCVBUF, 4096)
            slow.subscribe(b"")
            slow.connect(server.stream.endpoint)
            greedy.connect(str(server.stream.replay))
            before, longest = own(server), 0.0
            for turn in range(40):
                some = keys_of(range(turn * 100 % 1000, turn * 100 % 1000 + 100))
                began = time.monotonic()
                await backend.delete(some)
                await backend.put(some, [record_of(key) for key in some])
                longest = max(longest, time.monotonic() - began)
                for _ in range(20):
                    if greedy.poll(0, zmq.POLLOUT):
                        greedy.send_multipart((b"", bytes(8)), zmq.NOBLOCK)
            held = {block for block in range(1000) if await backend.exists([key_of(block)]) == [HIT]}
            await until(lambda: picture(fleet, range(1000)) == (held, set()), fleet.stats)
            assert longest < 5.0
            assert own(server) - before < 64 << 20
            slow.close()
            greedy.close()


def said(*words: str, **environment: str) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "asynccache", "serve", "--listen", f"unix:{socket_path()}", "--memory", "2MiB", *words],
        capture_output=True, text=True, timeout=60, env=os.environ | environment,
    )  # fmt: skip
    assert made.returncode == 2, made.stderr
    return made.stderr


def test_events_that_cannot_be_published_are_refused_by_name(tmp_path: Path) -> None:
    assert "--events is missing" in said("--events-replay", LOCAL)
    assert "events: cannot bind 'nowhere'" in said("--events", "nowhere")
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(\"No module named 'zmq'\", name='zmq')\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    without = said("--events", LOCAL, PYTHONPATH=paths)
    assert "--events needs the extra [events]: No module named 'zmq'; pip install" in without


def test_a_server_with_events_imports_neither_torch_nor_numpy() -> None:
    code = ("import sys, json; import asynccache.cli.serve as serve; serve._import_events();"
            "print(json.dumps([name for name in ('torch', 'numpy') if name in sys.modules]))")  # fmt: skip
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(found.stdout) == []
