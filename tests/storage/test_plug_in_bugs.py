"""CheckedStore and plug-ins with bugs of their own: errors that no contract names, and calls that never come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from asynccache.errors import Timeout
from asynccache.storage import Breaker, BreakerState, CheckedStore, PageKey, Record, Result
from asynccache.testing.backend_suite import LAYOUT, blank, keys_of, record_of
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop
from tests.storage.world_kit import in_world

KEYS = keys_of(3, "odd")


def store_on(backend: type[WrappedBackend], **options: Any) -> CheckedStore:
    return CheckedStore(backend(SimulatedBackend(Random(1))), LAYOUT, threads=0, **options)


class Buggy(WrappedBackend):
    """Raises what no contract names, or answers nothing at all."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return None  # type: ignore[return-value]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        raise ValueError("a bug")

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        raise KeyError("another bug")


@in_world
async def test_a_plug_ins_bug_is_a_failed_call_that_the_breaker_is_told_of(loop: SimulatedLoop) -> None:
    store = store_on(Buggy, breaker=Breaker(threshold=3))
    assert await store.exists(KEYS) == [Result.FAILED] * 3
    assert await store.put(KEYS, [record_of(key).payload for key in KEYS]) == [Result.FAILED] * 3
    assert await store.get(KEYS, [blank(key).payload for key in KEYS]) == [Result.FAILED] * 3
    assert store.stats()["failed_calls"] == 3
    assert store.breaker.state is BreakerState.OPEN
    assert isinstance(store.last_error, ValueError)


class Hung(WrappedBackend):
    """Never answers."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        await asyncio.Event().wait()
        raise AssertionError

    async def clear(self) -> None:
        await asyncio.Event().wait()

    async def flush(self) -> None:
        await asyncio.Event().wait()


@in_world
async def test_a_cancelled_call_is_cancelled_and_no_failure(loop: SimulatedLoop) -> None:
    store = store_on(Hung, breaker=Breaker(threshold=1))
    call = asyncio.ensure_future(store.exists(KEYS))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert store.breaker.state is BreakerState.CLOSED


@in_world
async def test_clear_and_flush_have_a_deadline_and_the_breaker_is_told(loop: SimulatedLoop) -> None:
    store = store_on(Hung, breaker=Breaker(threshold=2), timeout=1.0)
    for call in (store.clear, store.flush):
        with pytest.raises(Timeout):
            await asyncio.wait_for(call(), 10)
    assert store.stats()["timeouts"] == 2
    assert store.breaker.state is BreakerState.OPEN


class Gated(WrappedBackend):
    """``exists`` answers when it is told to, in any order."""

    def __init__(self, inner: SimulatedBackend) -> None:
        super().__init__(inner)
        self.calls: list[asyncio.Future[list[Result]]] = []
        self.called = asyncio.Event()

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        self.called.set()
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]


async def begin(store: CheckedStore, backend: Gated) -> asyncio.Future[list[Result]]:
    """A call of the store that waits for its backend."""
    backend.called.clear()
    task = asyncio.ensure_future(store.exists(KEYS))
    await backend.called.wait()
    return task


@in_world
async def test_an_answer_from_before_the_trouble_does_not_close_the_breaker(loop: SimulatedLoop) -> None:
    backend = Gated(SimulatedBackend(Random(1)))
    store = CheckedStore(backend, LAYOUT, threads=0, breaker=Breaker(threshold=1, backoff=5.0))
    bad, stale = await begin(store, backend), await begin(store, backend)
    backend.calls[0].set_exception(Timeout("gone"))
    assert await bad == [Result.FAILED] * 3
    await asyncio.sleep(6)
    assert await (await begin(store, backend)) == [Result.FAILED] * 3  # and the probe is asked beside it
    backend.calls[1].set_result([Result.HIT] * 3)
    assert await stale == [Result.HIT] * 3
    assert store.breaker.state is BreakerState.HALF_OPEN
    assert await store.exists(KEYS) == [Result.FAILED] * 3
    backend.calls[2].set_exception(Timeout("still gone"))
    await asyncio.sleep(0.1)
    assert store.stats()["breaker"] == BreakerState.OPEN
