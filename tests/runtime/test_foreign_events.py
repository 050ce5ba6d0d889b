"""Events that the device's streams cannot wait for are refused by name, and the lease stays as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from asynccache import ConfigError, Lease
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import PAGE, compute, opened, parts, serve, settings, settled, text, turns, until


class QueriedEvent:
    """As an event of torch's, without its handle: it can be queried, and has no ``done``."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host would wait")


class AwaitedEvent:
    """A coroutine can wait for it, and no stream."""

    def done(self) -> bool:
        return False

    async def wait(self) -> None:
        raise AssertionError("nobody can order a copy behind it")


FOREIGN: list[Callable[[], object]] = [
    QueriedEvent, AwaitedEvent, object, asyncio.Event, threading.Event, Future, lambda: 3, lambda: "E1", lambda: True,
    list, lambda: CpuDevice,
]  # fmt: skip


async def _release(lease: Lease, event: Any) -> None:
    lease.release(after=event)


async def _advance(lease: Lease, event: Any) -> None:
    lease.advance(3 * PAGE, after=event)


async def _truncate(lease: Lease, event: Any) -> None:
    lease.truncate(3 * PAGE, after=event)


async def _adopt(lease: Lease, event: Any) -> None:
    lease.adopt(after=event)


async def _commit(lease: Lease, event: Any) -> None:
    await lease.commit(text(3), after=event)


CALLS = [_release, _advance, _truncate, _adopt, _commit]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
async def test_a_foreign_event_is_refused_before_anything_changes(
    call: Callable[[Lease, Any], Awaitable[None]],
) -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=16, swa=8), device=device) as cache:
        lease = await cache.lease(text(3), new_tokens=PAGE).__aenter__()
        compute(cache, lease, text(3), ("full", "swa"))
        await lease.commit(text(2))
        before = lease.pages.tolist(), lease.page_table("swa").tolist(), repr(lease)
        for make in FOREIGN:
            event = make()
            with pytest.raises(ConfigError, match=rf"^{call.__name__[1:]}: (after|ready): ") as told:
                await call(lease, event)
            assert repr(event) in str(told.value)
            await turns()
            assert (lease.pages.tolist(), lease.page_table("swa").tolist(), repr(lease)) == before
        assert not len(parts(cache).batches.fences), "a refused event became a fence"
        gate = device.gate()
        await call(lease, gate)
        gate.open()
        lease.release()
        await until(lambda: not len(parts(cache).driver.ops))
        await settled(cache)
        await serve(cache, text(3, seed=1), ("full", "swa"))
    await device.aclose()


async def test_a_released_lease_refuses_nothing_and_an_unused_one_needs_no_event() -> None:
    async with opened(settings(device=8)) as cache:
        lease = await cache.lease(text(2)).__aenter__()
        lease.release(after=None)
        lease.release(after=None)
        assert cache.statistics().device["full"].free == 8
