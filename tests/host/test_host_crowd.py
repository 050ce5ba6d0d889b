"""Many processes on one server at once: eight clients with pages of several sizes, and two stresses."""

from __future__ import annotations

import asyncio

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import Crowd, insist_on_every_slot, memory_use, server_process

MORE = 64 << 20


@pytest.mark.slow(30)
@pytest.mark.asyncio
async def test_a_crowd_gets_right_pages_and_takes_no_more_memory_than_was_asked_for() -> None:
    asked = 96 << 20
    with server_process(socket_path(), "96MiB") as server:
        await server.counts()
        with Crowd(server, 35, "--requests", "160") as crowd:
            uses = []
            while crowd.together:
                uses.append(memory_use(server, crowd.pids))
                await asyncio.sleep(0.4)
            moved, asking = await asyncio.to_thread(crowd.reports)
        assert uses, "nobody has looked"
        assert max(one.shared for one in uses) <= asked
        assert max(one.shared + one.server for one in uses) <= asked + MORE
        for found in moved:
            assert (found["wrong"], found["corrupt"]) == (0, 0)
            assert found["hits"] > 0
        for report in asking:
            assert (report["verify"]["mismatches"], report["storage"]["corrupt_pages"]) == (0, 0)
        assert sum(report["stages"]["prefetch"]["pages"] for report in asking) > 0, "nothing came from the server"
        counts = await insist_on_every_slot(server)
        assert (counts["damaged"], counts["malformed"], counts["freed_by_death"]) == (0, 0, 0)
        assert counts["evicted"] > 0
        assert server.stop() == 0
