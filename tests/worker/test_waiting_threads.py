"""An engine that runs in a thread of its own waits for layers beside the worker's loop, on a real device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np
import pytest

from asynccache import CacheConfig, ConfigError, Full, RankFailure
from asynccache.core.plan import Move
from asynccache.memory.cpu import CpuDevice
from asynccache.worker import EngineBatch, RankWorker, Topology
from asynccache.worker.local import EmbedderParts
from asynccache.worker.messages import Message
from asynccache.worker.pool_layout import FULL
from asynccache.worker.rank_server import ORDERS, RankServer
from asynccache.worker.work import CopyKind, Work

T = TypeVar("T")

LAYERS, PAGES = 3, 4
CONFIG = CacheConfig(
    model="test", page_size=1,
    components=(Full(bytes_per_token=LAYERS, device_tokens=PAGES, host_tokens=PAGES, layers=LAYERS),),
)  # fmt: skip


perform, send_batch = ORDERS["perform"].message, ORDERS["send_batch"].message


class Opened:
    """A worker that is open, and what it has told its head. ``loaders``: the threads in which loads were submitted."""

    def __init__(self, device: CpuDevice) -> None:
        self.told: list[Message] = []
        self.heard = asyncio.Event()
        self.stream = device.stream("engine")
        self.server = RankServer(0, Topology(), EmbedderParts(device), None, self.tell)
        self.face = self.server.worker
        self.loaders: set[int] = set()

    def tell(self, message: Message) -> None:
        self.told.append(message)
        self.heard.set()

    async def open(self) -> None:
        self.server.take(ORDERS["open"].message(1, CONFIG, False))
        await asyncio.wait_for(self.heard.wait(), 30)
        assert type(self.told[0]) is ORDERS["open"].answer, self.told
        assert self.server.local is not None
        mover = self.server.local.mover
        mover.host_pools["full"].memory[:] = bytes([7]) * len(mover.host_pools["full"].memory)
        load = mover.load

        def noted(*order):  # type: ignore[no-untyped-def]
            self.loaders.add(threading.get_ident())
            return load(*order)

        mover.load = noted  # type: ignore[method-assign]

    def loaded(self, number: int, after: tuple[int, ...] = ()) -> EngineBatch:
        """A batch that needs a load of all pages, which the worker has just heard of."""
        slots = np.arange(PAGES, dtype=np.int32).tobytes()
        self.server.take(perform(Work(CopyKind.LOAD, (number,), (Move(FULL, slots, slots),), 0, after)))
        self.server.take(send_batch(number, b"", (number,)))
        return self.server.batches.find(number)

    def bytes_of(self, layer: int) -> set[int]:
        """The bytes that later work of the engine's stream finds in ``layer``."""
        seen: set[int] = set()
        over = threading.Event()

        def look() -> None:
            seen.update(self.face.pools["full"].layer(layer).flatten().tolist())
            over.set()

        self.stream._thread.submit(look)
        assert over.wait(30)
        return seen


@asynccontextmanager
async def opened() -> AsyncIterator[Opened]:
    device = CpuDevice()
    worker = Opened(device)
    try:
        await worker.open()
        yield worker
    finally:
        await worker.server.aclose(30.0)
        await device.aclose()


async def beside(call: Callable[[], T]) -> T:
    return await asyncio.wait_for(asyncio.to_thread(call), 60)


async def test_what_a_thread_waits_for_is_submitted_by_the_loop_alone_and_is_there() -> None:
    async with opened() as worker:
        batch = worker.loaded(1)
        asked = threading.Event()

        def engine() -> list[set[int]]:
            asked.set()
            found = []
            for layer in range(LAYERS):
                worker.face.wait_layers(worker.stream, batch, layer)
                found.append(worker.bytes_of(layer))
            batch.end()
            return found

        running = asyncio.get_running_loop().run_in_executor(None, engine)
        assert asked.wait(30)  # the loop stands still while the thread asks
        assert await running == [{7}] * LAYERS
        assert worker.loaders == {threading.get_ident()}


async def test_a_thread_that_has_ended_a_batch_may_wait_at_once_for_loads_that_waited_for_it() -> None:
    async with opened() as worker:
        first, second = worker.loaded(1), worker.loaded(2, after=(1,))

        def engine() -> set[int]:
            with pytest.raises(ConfigError, match="load 2 waits for the batches"):
                worker.face.wait_layers(worker.stream, second, 0)
            first.end()
            worker.face.wait_layers(worker.stream, second, LAYERS - 1)
            return worker.bytes_of(LAYERS - 1)

        assert await beside(engine) == {7}


async def test_a_thread_that_waits_when_the_worker_is_closed_is_told() -> None:
    async with opened() as worker:
        batch = worker.loaded(1)
        await worker.server.aclose(30.0)
        with pytest.raises((RankFailure, ConfigError)):
            await beside(lambda: worker.face.wait_layers(worker.stream, batch, 0))


def test_a_thread_whose_loop_has_ended_is_told() -> None:
    async def live() -> tuple[RankWorker, EngineBatch, object]:
        async with opened() as worker:
            return worker.face, worker.loaded(1), worker.stream

    face, batch, stream = asyncio.run(live())
    with pytest.raises(RankFailure, match="the loop of its worker has ended"):
        face._server.wait_batch(stream, batch, 0)
