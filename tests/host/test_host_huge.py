"""A host process in huge pages, where some are reserved: clients that are killed, a server that takes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import ClientProcess, insist_on_every_slot, killed_clients, server_process
from tests.waiting import until

FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
PAGES = 12


def free() -> int:
    """How many huge pages are free."""
    return int(FREE.read_text()) if FREE.exists() else 0


@pytest.mark.slow(10)
@pytest.mark.asyncio
async def test_huge_pages_are_taken_used_handed_over_and_given_back() -> None:
    before = free()
    if before < PAGES:
        pytest.skip(f"{before} huge pages are free, and {PAGES} are needed: sysctl vm.nr_hugepages")
    path = socket_path()
    with server_process(path, f"{2 * PAGES}MiB", "--huge") as server:
        counts, _ = await server.counts()
        assert free() == before - PAGES
        await killed_clients(server, seed=3, kills=3)
        first = server.process
        stored = (await insist_on_every_slot(server))["pages"]
        assert stored > 0
        server.start("--replace", "--huge")
        assert await asyncio.to_thread(first.wait, 60) == 0
        counts = await insist_on_every_slot(server)
        assert (counts["pages"], free()) == (stored, before - PAGES), "the same memory"
        one = await asyncio.to_thread(ClientProcess, path, 4, 2.0)
        found = await asyncio.to_thread(one.report)
        assert (found["wrong"], found["corrupt"]) == (0, 0)
        assert found["hits"] > 0
        assert server.stop() == 0
    await until(lambda: free() == before, "huge pages are not given back")
