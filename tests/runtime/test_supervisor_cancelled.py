"""The supervisor's own task is cancelled from outside, as a loop that shuts down does: nobody is left waiting."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import AsyncCache, CacheClosed
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.supervisor import Supervisor
from tests.runtime.runtime_kit import machine, settings, text, until


@pytest.mark.asyncio
async def test_every_waiter_hears_of_a_supervisor_that_was_cancelled() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8), device=device).__aenter__()
    lease = await cache.lease(text(8)).__aenter__()
    waiting = asyncio.create_task(cache.lease(text(8, seed=2)).__aenter__())
    await until(lambda: len(machine(cache).driver.line) == 1)
    supervisor = machine(cache).supervisor._task
    assert supervisor is not None
    supervisor.cancel()
    with pytest.raises(CacheClosed):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(CacheClosed):
        await cache.match(text(1))
    lease.release()
    report = await cache.aclose()
    assert isinstance(report.error, asyncio.CancelledError)
    await device.aclose()


@pytest.mark.asyncio
async def test_a_supervisor_that_stops_when_told_did_not_die() -> None:
    deaths: list[BaseException] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start()
    await supervisor.stop()
    assert not deaths
