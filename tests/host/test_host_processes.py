"""Real processes: clients and servers that are killed, a new server that takes over, a client that is stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from asyncio.subprocess import Process
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from asynccache.errors import BackendError, ConfigError
from asynccache.host.pages import Writer
from asynccache.host.server import HostServer
from asynccache.host.takeover import take_over
from asynccache.storage import HEADER_BYTES, Result
from asynccache.testing.backend_suite import blank, get_all, keys_of, put_all, record_of, same
from tests.host.host_kit import client, heir, opened, served, serving, socket_path, taken_from
from tests.host.host_processes import (
    ClientProcess,
    HostProcess,
    insist_on_every_slot,
    killed_clients,
    killed_servers,
    server_process,
)
from tests.waiting import until

HIT = Result.HIT


@pytest.mark.slow(20)
async def test_killed_clients_leave_no_slot_behind_and_no_wrong_page() -> None:
    path = socket_path()
    with server_process(path) as server:
        await server.counts()
        witness = await asyncio.to_thread(ClientProcess, path, 7, 12.0)
        await killed_clients(server, seed=35, kills=10)
        found = await asyncio.to_thread(witness.report)
        assert (found["wrong"], found["corrupt"]) == (0, 0)
        assert found["hits"] > 0
        counts = await insist_on_every_slot(server)
        assert counts["died"] > 0
        assert counts["allocated_bytes"] - counts["free_bytes"] >= counts["bytes"] - HEADER_BYTES * counts["pages"]
        assert server.stop() == 0


@pytest.mark.slow(20)
async def test_a_killed_server_costs_misses_and_its_clients_come_back(tmp_path: Path) -> None:
    path = socket_path()
    with server_process(path, "24MiB", "--storage", f"file:{tmp_path}/kv?capacity=64MiB") as server:
        await server.counts()
        clients = [await asyncio.to_thread(ClientProcess, path, seed, 25.0) for seed in (1, 2)]
        await killed_servers(server, 35, 3, clients)
        for process in clients:
            found = await asyncio.to_thread(process.report)
            assert (found["wrong"], found["corrupt"]) == (0, 0)
            assert found["hits"] > 0
        assert (await server.settled())["clients"] >= 1
        assert server.stop() == 0


STOPS = """
import asyncio, os, signal, sys
from asynccache.host import wire
from tests.host.host_kit import client

async def main():
    backend = await client(sys.argv[1])
    channel = await backend._connection.ready()
    keys = [bytes([i]) * 32 for i in range(9)]
    await channel.ask(lambda number: wire.Reserve(number, keys, ["full"] * 9, [16384] * 9))
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


async def killed(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def stopped(path: str) -> Process:
    """A client that reserves nine slots and then is stopped."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", STOPS, path)


async def test_a_client_that_is_stopped_keeps_its_slots_until_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (server, backend):
        process = await stopped(server.path)
        await until(lambda: server.table.reserved_bytes == 9 * 16384)
        for number in range(60):
            await put_all(backend, keys_of(60, "full")[number : number + 1])
        assert server.table.reserved_bytes == 9 * 16384
        assert server.long_reserved() == []
        monkeypatch.setattr("asynccache.host.server.LONG_RESERVED", 0.0)
        [sentence] = server.long_reserved()
        assert f"process {process.pid} has had 9 slots reserved for" in sentence
        await killed(process)
        await until(lambda: server.table.reserved_bytes == 0)
        assert server.table.counts["freed_by_death"] == 9
        server.table.audit()


SERVES_IN_A_CONTAINER = """
import os, sys
from asynccache.cli.main import main

if sys.argv.pop(1) == "old":  # before Linux 6.9 all pidfds have one inode
    os.fstat = lambda fd: os.stat_result([0] * 10)
sys.exit(main(sys.argv[1:]))
"""
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c"]


@pytest.mark.parametrize("kernel", ["old", "new"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process in a container")
async def test_a_death_outside_of_the_servers_container_frees_nothing_of_another_process(kernel: str) -> None:
    path = socket_path()
    server = HostProcess(path, "24MiB")
    server.command = [*CONTAINER, SERVES_IN_A_CONTAINER, kernel]
    server.start()
    try:
        await server.counts()
        clients = [await stopped(path) for _ in range(2)]
        await server.reserved(2 * 9 * 16384)
        for number, process in zip((1, 0), clients, strict=True):
            await killed(process)
            counts = await server.reserved(number * 9 * 16384)
            assert counts["freed_by_death"] == (2 - number) * 9
            assert (await server.counts())[0]["reserved_bytes"] == number * 9 * 16384
    finally:
        server.kill()


async def test_what_a_stopped_client_has_reserved_is_its_own_under_the_next_server_too() -> None:
    keys = keys_of(50)
    async with served() as (first, backend):
        stored = await put_all(backend, keys)
        process = await stopped(first.path)
        await until(lambda: first.table.reserved_bytes == 9 * 16384)
        async with heir(first.path) as second:
            await first.closed.wait()
            assert second.table.reserved_bytes == 9 * 16384
            second.table.audit()
            await asyncio.sleep(0.06)
            assert same(stored, (await get_all(backend, keys))[1])
            await killed(process)
            await until(lambda: second.table.reserved_bytes == 0)
            second.table.audit()


HANGS = """
import asyncio, signal, sys
from contextlib import suppress
from hashlib import sha256
from asynccache.host import behind
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.host.host_kit import serving

behind.DRAIN = behind.LET_GO = 0.2
told = asyncio.Event()

class Hangs(WrappedBackend):
    async def put(self, keys, records):
        print("begun", len(keys), flush=True)
        while not told.is_set():
            with suppress(asyncio.CancelledError):  # as a thread that hangs in a system call
                await told.wait()
        for record in records:
            print(sha256(record.payload).hexdigest(), flush=True)
        await asyncio.Event().wait()

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    async with serving(sys.argv[1], stores=["memory:"]) as server:
        store = server.behind.stores[0]
        store.backend = Hangs(store.backend)
        print("serves", flush=True)
        await server.closed.wait()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("dropped", [False, True])
async def test_what_a_store_that_hangs_is_written_from_stays_under_the_next_server_until_the_first_is_dead(
    dropped: bool,
) -> None:
    path, keys = socket_path(), keys_of(20)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGS, path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"serves\n"
    backend = await client(path)
    stored = await put_all(backend, keys)
    assert await process.stdout.readline() == b"begun 20\n"
    if dropped:
        await backend.delete(keys[:5])
    began = time.monotonic()
    taken = await taken_from(path)
    assert time.monotonic() - began < 5, "the store that hangs keeps nobody"
    second = HostServer(path, taken.memory)
    await second.open(taken)
    await asyncio.sleep(0.06)
    first = 5 if dropped else 0
    assert same(stored[first:], (await get_all(backend, keys[first:]))[1]), "they are found all the same"
    size = 1 << 20
    room = second.table.layout.units * 4096 // size
    others = [bytes([n]) * 32 for n in range(2 * room)]
    writer, label = Writer("w"), second.table.label("")
    for name in others:
        slot = second.table.reserve(writer, name, "full", size, label)
        if slot is not None:
            second.memory.payload(second.table.starts[slot], size)[:] = bytes(size)
            second.table.publish(writer, slot, 1.0)
    assert second.table.counts["evicted"] > room // 2
    process.send_signal(signal.SIGUSR1)
    digests = [(await process.stdout.readline()).decode().strip() for _ in keys]
    assert digests == [sha256(record_of(key).payload).hexdigest() for key in keys], "it is overwritten while it is read"
    second.table.audit()
    [hung] = [peer.writer for peer in second._peers if peer.writer.holds]
    assert (len(hung.reserved), len(hung.pinned)) == (first, 20 - first)
    await killed(process)
    await until(lambda: not hung.holds)
    second.table.audit()
    assert second.table.reserve(writer, keys[0].key, "full", second.table.longest, label) is not None
    await backend.aclose()
    await second.aclose()


ENDS_THOUGH_IT_HANGS = """
import asyncio, sys, threading
from asynccache.cli.main import main
from asynccache.host import behind
from asynccache.testing.wrapped_backend import WrappedBackend

behind.DRAIN = behind.LET_GO = 0.2
opened = behind.StoreBehind.open

class Hangs(WrappedBackend):
    async def put(self, keys, records):
        print("begun", len(keys), flush=True)
        ended = asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        while True:
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                pass

async def open_hanging(self, layout, memory):
    await opened(self, layout, memory)
    self.backend = Hangs(self.backend)

behind.StoreBehind.open = open_hanging
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_server_ends_though_a_thread_of_a_store_hangs(replaced: bool) -> None:
    path, keys = socket_path(), keys_of(20)
    words = ["serve", "--listen", f"unix:{path}", "--memory", "24MiB", "--quiet", "--storage", "memory:"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDS_THOUGH_IT_HANGS, *words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    await HostProcess(path, "24MiB").counts()
    backend = await client(path)
    stored = await put_all(backend, keys)
    assert await process.stdout.readline() == b"begun 20\n"
    try:
        if not replaced:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
            return
        with server_process(path, "24MiB", "--replace") as second:
            assert await asyncio.wait_for(process.wait(), 30) == 0
            await second.counts()
            await asyncio.sleep(0.06)
            assert same(stored, (await get_all(backend, keys))[1])
            assert second.stop() == 0
    finally:
        await backend.aclose()
        with suppress(ProcessLookupError):
            process.kill()


@pytest.mark.slow(5)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_another_user_is_kept_out_by_the_socket_and_if_it_is_open_by_the_server() -> None:
    path = socket_path()
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "try:\n"
        "    sock.connect(sys.argv[1])\n"
        "    print(sock.recv(4096).decode(errors='replace'))\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)\n"
    )

    async def tried() -> str:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, path, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        return out.decode()

    async with serving(path):
        os.chmod(os.path.dirname(path), 0o755)
        assert await tried() == "PermissionError\n"
        os.chmod(path, 0o666)
        assert "is of user 0, and the client of user 65534" in await tried()
    async with serving(path, group="65534"):
        os.chmod(path, 0o666)
        assert await asyncio.wait_for(tried(), 30) == "\n", "it is let in, and given up when it says nothing"


async def test_a_new_server_takes_over_all_pages_and_its_clients_see_a_short_pause(tmp_path: Path) -> None:
    path, keys = socket_path(), keys_of(200)
    with server_process(path, "24MiB", "--storage", f"file:{tmp_path}/kv?capacity=64MiB") as server:
        before = (await server.counts())[0]
        async with opened(f"{path}?label=a") as store:
            pages = [record_of(key).payload for key in keys]
            assert await store.put(keys, pages) == [HIT] * 200
            backend = await client(path)
            first, boot = server.process, (await backend._connection.ready()).boot
            server.start("--replace")
            assert await asyncio.to_thread(first.wait, 60) == 0

            async def is_back() -> bool:
                return await store.exists(keys) == [HIT] * 200

            await until(is_back, seconds=30)
            fetched = [blank(key).payload for key in keys]
            assert await store.get(keys, fetched) == [HIT] * 200
            assert fetched == pages
            assert (await backend._connection.ready()).boot == boot
            counts, labels = await server.counts()
            assert counts["pages"] == before["pages"] + 200
            assert labels["a"]["pages"] == 200
            assert counts["file.waiting"] == 0
            await store.delete(keys[:100])
            stored = await put_all(backend, keys[:100])
            assert same(stored, (await get_all(backend, keys[:100]))[1])
            await backend.aclose()
        assert server.stop() == 0


async def test_an_heir_that_comes_too_late_is_told_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache.host.server.HEIR_PATIENCE", 0.2)
    keys = keys_of(20)
    async with served() as (first, backend):
        stored = await put_all(backend, keys)
        taken = await taken_from(first.path)
        await until(lambda: not first.handed_over)
        second = HostServer(first.path, taken.memory)
        with pytest.raises(ConfigError, match="the host process there has gone on"):
            await second.open(taken)
        await second.aclose()
        await asyncio.sleep(0.06)
        assert same(stored, (await get_all(backend, keys))[1])
        first.table.audit()


async def test_there_is_nobody_to_take_over_from() -> None:
    assert await asyncio.to_thread(take_over, socket_path()) is None
    path = socket_path()
    listener = await asyncio.start_unix_server(lambda reader, writer: writer.close(), path)
    with pytest.raises(ConfigError, match="does not hand over"):
        await asyncio.to_thread(take_over, path)
    listener.close()


async def test_the_next_server_listens_for_prometheus_where_the_one_before_did(unused_tcp_port: int) -> None:
    """The one before listens there until it has heard that all was taken over, so the next one has to try again."""
    path, keys, port = socket_path(), keys_of(20), unused_tcp_port
    with server_process(path, "24MiB", "--metrics", f"127.0.0.1:{port}") as server:
        await server.counts()
        backend = await client(path)
        stored = await put_all(backend, keys)
        first = server.process
        server.start("--replace")
        assert await asyncio.to_thread(first.wait, 60) == 0
        await server.counts()
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            assert server.process.poll() is None, "it has ended, and with it all pages"
            await asyncio.sleep(0.05)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()
        assert same(stored, (await get_all(backend, keys))[1])
        await backend.aclose()
        assert server.stop() == 0


async def test_a_server_that_is_told_to_end_while_it_hands_over_leaves_the_socket_to_its_heir() -> None:
    keys = keys_of(20)
    async with served() as (first, backend):
        stored = await put_all(backend, keys)
        taken = await taken_from(first.path)
        ending = asyncio.create_task(first.aclose())
        await asyncio.sleep(0.1)
        second = HostServer(first.path, taken.memory)
        await second.open(taken)
        await ending
        await asyncio.sleep(0.06)
        assert same(stored, (await get_all(backend, keys))[1])
        await second.aclose()


async def test_who_dies_while_the_memory_is_handed_over_is_freed_by_whoever_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynccache.host.server.HEIR_PATIENCE", 0.6)
    path = socket_path()
    async with serving(path) as first:
        process = await stopped(path)
        await until(lambda: first.table.reserved_bytes == 9 * 16384)
        taken = await taken_from(path)
        await killed(process)
        await asyncio.sleep(0.1)
        if first.handed_over:
            assert first.table.reserved_bytes == 9 * 16384, "the heir may have freed it, and more"
        await until(lambda: not first.handed_over)
        await until(lambda: first.table.reserved_bytes == 0)
        first.table.audit()
        with pytest.raises(ConfigError, match="has gone on"):
            taken.confirm()
        taken.listener.close()
        taken.memory.close()


async def test_a_server_may_have_as_many_descriptors_as_the_machine_allows() -> None:
    """With the usual soft limit of 1024 the fourth hundred of clients would take those of the stores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with server_process(socket_path()) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await server.counts()
            allowed, _ = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == min(1 << 16, hard)


async def test_a_memory_goes_with_the_calls_that_its_server_left_unanswered() -> None:
    path = socket_path()
    with server_process(path) as server:
        await server.counts()
        backend = await client(path)
        keys = keys_of(4)
        await put_all(backend, keys)
        held = backend._connection._mapping
        assert held is not None
        memory = weakref.ref(held[1])
        del held
        gc.disable()  # nothing waits for it
        try:
            server.process.send_signal(signal.SIGSTOP)
            waiting = asyncio.create_task(get_all(backend, keys))
            await asyncio.sleep(0.05)
            server.kill()
            with pytest.raises(BackendError):
                await waiting
            del waiting
            server.start()
            await server.counts()
            await put_all(backend, keys)
            assert memory() is None
        finally:
            gc.enable()
        await backend.aclose()
