"""A store from attaching to closing: probes that hang, closing at the wrong moment, memory that is refused. In virtual
time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import BackendError, ConfigError
from asynccache.storage import CheckedStore, PageKey, Record, Result, StoreLayout, attachment, open_store
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.url import StoreOptions
from asynccache.testing.backend_suite import LAYOUT, blank, keys_of
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop
from tests.storage.world_kit import in_world

KEYS = keys_of(2, "odd")


class Frozen(WrappedBackend):
    """It serves nothing; a question is let go of only when it ``thaws``, whoever cancels it."""

    def __init__(self) -> None:
        super().__init__(SimulatedBackend(Random(1)))
        self.thaws = asyncio.Event()
        self.inside = 0
        self.closed_over = -1

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        self.inside += 1
        try:
            while not self.thaws.is_set():
                try:
                    await self.thaws.wait()
                except asyncio.CancelledError:
                    continue
        finally:
            self.inside -= 1
        return [Result.MISS] * len(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        raise BackendError("frozen")

    async def aclose(self) -> None:
        self.closed_over = self.inside


async def read(store: CheckedStore) -> list[Result]:
    return await store.get(KEYS, [blank(key).payload for key in KEYS])


@in_world
async def test_a_probe_that_hangs_is_the_only_one(loop: SimulatedLoop) -> None:
    backend = Frozen()
    store = CheckedStore(backend, LAYOUT, threads=0, timeout=1.0, slow=0.5)
    for _ in range(300):
        await read(store)
        await asyncio.sleep(1.0)
        assert backend.inside <= 1
    assert backend.inside == 1
    backend.thaws.set()
    await store.aclose()
    assert backend.closed_over == 0


@in_world
async def test_the_backend_is_not_closed_over_a_probe_by_who_is_cancelled(loop: SimulatedLoop) -> None:
    backend = Frozen()
    store = CheckedStore(backend, LAYOUT, threads=0, timeout=1.0, slow=0.5)
    while not backend.inside:
        await read(store)
        await asyncio.sleep(1.0)
    closing = asyncio.ensure_future(store._guard.aclose())
    await asyncio.sleep(1.0)
    closing.cancel()
    await asyncio.sleep(1.0)
    assert not closing.done()
    backend.thaws.set()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert backend.inside == 0
    await store.aclose()


@in_world
async def test_of_two_who_close_all_stores_both_succeed(loop: SimulatedLoop) -> None:
    class Slow(WrappedBackend):
        async def aclose(self) -> None:
            await asyncio.sleep(0.1)

    store = TieredStore(threads=0)
    store.attach(AttachedStore(CheckedStore(Slow(SimulatedBackend(Random(1))), LAYOUT, threads=0), StoreOptions("a")))
    await asyncio.gather(store.aclose(), store.aclose())
    assert not store._leaving


async def test_a_backend_that_is_none_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        closed_times = 0

        async def aclose(self) -> None:
            self.closed_times += 1

    backend = Half()

    class Scheme:
        async def open(self, url: Any, layout: Any) -> Any:
            return backend

    monkeypatch.setattr(attachment, "backend_class", lambda name: Scheme())
    with pytest.raises(ConfigError, match="backend="):
        await open_store("picky:", LAYOUT)
    assert backend.closed_times == 1


async def test_a_store_that_was_closed_fails_calls_and_raises_nothing() -> None:
    layout = StoreLayout({"full": 1 << 20}, bytes(32))
    key, payload = PageKey("full", bytes(32)), memoryview(bytearray(1 << 20))
    store = CheckedStore(MemoryBackend(), layout)
    assert await store.put([key], [payload]) == [Result.HIT]
    await store.aclose()
    assert await store.put([key], [payload]) == [Result.FAILED]
    assert await store.get([key], [payload]) == [Result.FAILED]
    await store.aclose()
