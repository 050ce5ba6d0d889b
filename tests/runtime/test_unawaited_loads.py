"""A lease with loads publishes nothing before somebody has waited for all of them: what an engine computes from pages
that have not arrived is wrong for everybody. It counts who asked, and not whether the loads have arrived by chance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from asynccache import AsyncCache, Lease, LoadFailed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Fates, Faults
from tests.runtime.runtime_kit import (
    LAYERS,
    PAGE,
    compute,
    fence_all,
    opened,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
)

PROMPT = text(6, extra=1)
REFUSAL = r"^commit: nobody has waited for the pages .* await loaded\(\)"


@asynccontextmanager
async def on_the_host(device: CpuDevice) -> AsyncIterator[AsyncCache]:
    """A cache that has four pages of the prompt, on the host alone."""
    async with opened(settings(host=64), device=device) as cache:
        await serve(cache, text(4))
        await settled(cache)
        await push_out(cache, 16)
        yield cache


async def _refused(cache: AsyncCache, lease: Lease) -> None:
    """A commit of ``lease`` is refused, and has changed nothing."""
    before = repr(lease), lease.pages.tolist(), (await cache.match(PROMPT)).host
    with pytest.raises(RuntimeError, match=REFUSAL):
        await lease.commit(PROMPT)
    assert (repr(lease), lease.pages.tolist(), (await cache.match(PROMPT)).host) == before


@pytest.mark.parametrize("arrived", [False, True], ids=["under way", "arrived"])
async def test_a_commit_before_anybody_has_waited_is_refused_whether_the_loads_have_arrived_or_not(
    arrived: bool,
) -> None:
    device = CpuDevice()
    async with on_the_host(device) as cache:
        gate = device.gate()
        fence_all(cache, gate)
        async with cache.lease(PROMPT) as lease:
            if arrived:
                gate.open()
                await settled(cache)
            assert lease.loading is not arrived
            await _refused(cache, lease)
            gate.open()
            await lease.loaded()
            compute(cache, lease, PROMPT)
            await lease.commit(PROMPT)
        assert await serve(cache, [*PROMPT, 1]) == 6 * PAGE
    await device.aclose()


async def test_a_lease_whose_states_are_copied_for_it_has_loads_too() -> None:
    async with opened(settings(mamba=8)) as cache:
        async with cache.lease(text(2)) as lease:
            compute(cache, lease, text(2))
            await lease.commit(text(2), checkpoint=(2 * PAGE, int(lease.states[1])))
        async with cache.lease(text(3)) as lease:
            assert lease.cached == 2 * PAGE
            with pytest.raises(RuntimeError, match=REFUSAL):
                await lease.commit(text(3))
            await lease.loaded()
            compute(cache, lease, text(3))
            await lease.commit(text(3))


async def test_a_lease_without_loads_needs_nobody_to_wait() -> None:
    async with opened(settings()) as cache:
        for tokens in (text(2), text(3)):
            async with cache.lease(tokens) as lease:
                compute(cache, lease, tokens)
                await lease.commit(tokens)
        assert (await cache.match(text(3))).device == 3 * PAGE


async def _layers(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    for i in range(LAYERS):
        await lease.layer(i)


async def _stream(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    stream = device.stream("engine")
    for i in range(LAYERS):
        lease.wait_layer(stream, i)


async def _loaded(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    await lease.loaded()


async def _in_a_task(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    task = asyncio.create_task(lease.loaded())
    await asyncio.sleep(0)
    assert not task.done(), "the commit waits for it"


Wait = Callable[[AsyncCache, CpuDevice, Lease], Awaitable[None]]


@pytest.mark.parametrize("wait", [_loaded, _layers, _stream, _in_a_task], ids=lambda wait: wait.__name__[1:])
async def test_each_way_of_waiting_for_all_layers_counts(wait: Wait) -> None:
    device = CpuDevice()
    async with on_the_host(device) as cache, cache.lease(PROMPT) as lease:
        assert lease.loading
        await wait(cache, device, lease)
        compute(cache, lease, PROMPT)
        await lease.commit(PROMPT)
        assert (await cache.match(PROMPT)).device == 6 * PAGE
    await device.aclose()


async def _first_layer(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    await lease.layer(0)
    lease.wait_layer(device.stream("engine"), 0)


async def _cancelled(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    gate = device.gate()
    fence_all(cache, gate)
    for waiting in (lease.loaded(), lease.layer(LAYERS - 1)):
        task = asyncio.create_task(waiting)
        await turns(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.open()


async def _refused_call(cache: AsyncCache, device: CpuDevice, lease: Lease) -> None:
    with pytest.raises(Exception, match="stream"):
        lease.wait_layer("no stream", LAYERS - 1)


@pytest.mark.parametrize("wait", [_first_layer, _cancelled, _refused_call], ids=lambda wait: wait.__name__[1:])
async def test_who_has_waited_for_some_layers_or_was_cancelled_has_not_waited(wait: Wait) -> None:
    device = CpuDevice(faults=Faults(delayed=1.0, delay=(0.02, 0.02)))
    async with on_the_host(device) as cache, cache.lease(PROMPT) as lease:
        await wait(cache, device, lease)
        await _refused(cache, lease)
    await device.aclose()


async def test_a_commit_after_a_load_that_failed_says_so() -> None:
    device = CpuDevice()
    async with on_the_host(device) as cache:
        device._fates = Fates(Faults(failing=1.0))
        async with cache.lease(PROMPT) as lease:
            with pytest.raises(LoadFailed):
                await lease.loaded()
            with pytest.raises(LoadFailed):
                await lease.commit(PROMPT)
        device._fates = Fates(Faults())
    await device.aclose()
