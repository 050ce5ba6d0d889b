"""The supervisor's task or a worker's is cancelled by somebody else, as a loop that shuts down does: nobody is left
waiting."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import AsyncCache, CacheClosed
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.supervisor import Supervisor
from tests.runtime.runtime_kit import parts, serve, settings, text, until
from tests.simulated.loop import SimulatedLoop, simulate


async def test_every_waiter_hears_of_a_supervisor_that_was_cancelled() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8), device=device).__aenter__()
    lease = await cache.lease(text(8)).__aenter__()
    waiting = asyncio.create_task(cache.lease(text(8, seed=2)).__aenter__())
    await until(lambda: len(parts(cache).driver.line) == 1)
    supervisor = parts(cache).supervisor._task
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


async def test_a_subscriber_that_raises_a_cancellation_closes_the_cache_as_any_error_of_it_does() -> None:
    def subscriber(notice: object) -> None:
        raise asyncio.CancelledError

    device = CpuDevice()
    cache = await AsyncCache(settings(device=8, host=16), device=device, on_event=subscriber).__aenter__()
    await serve(cache, text(2))
    await until(lambda: cache.closed is not None)
    assert "asynccache-events was cancelled" in str(cache.closed)
    assert isinstance((await cache.aclose()).error, asyncio.CancelledError)
    await device.aclose()


async def test_a_worker_that_somebody_cancels_has_died_and_the_others_end() -> None:
    deaths: list[BaseException] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start()
    first = supervisor.spawn(asyncio.sleep(60), "first")
    second = supervisor.spawn(asyncio.sleep(60), "second")
    assert first is not None
    assert second is not None
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([second])
    assert [str(death) for death in deaths] == ["first was cancelled"]
    await supervisor.stop()
    assert not len(supervisor)


async def test_a_supervisor_that_stops_when_told_did_not_die() -> None:
    deaths: list[BaseException] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start()
    await supervisor.stop()
    assert not deaths


def test_a_task_that_fails_is_what_the_supervisor_names_even_if_those_that_its_end_cancels_are_heard_first() -> None:
    async def main(loop: SimulatedLoop) -> BaseException | None:
        supervisor = Supervisor(lambda error: None)
        await supervisor.start()
        for number in range(10):
            supervisor.spawn(asyncio.sleep(60), f"sleeps {number}")
        supervisor.spawn(fails(), "fails")
        await asyncio.sleep(1)
        await supervisor.stop()
        return supervisor.error

    async def fails() -> None:
        await asyncio.sleep(0.1)
        raise KeyError

    assert {type(simulate(main, seed)) for seed in range(20)} == {KeyError}
