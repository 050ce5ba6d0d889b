"""What the head knows of its ranks and batches, how they end, and who waits for them; and a worker by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import pytest_asyncio

from asynccache import (
    AsyncCache,
    BatchFailed,
    CacheConfig,
    ConfigError,
    CopyFailed,
    Full,
    RankFailure,
    Replicated,
    Sidecar,
)
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Move, Status, StoredPages
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.mover import Mover
from asynccache.storage import PageKey, Result
from asynccache.storage.checked import storage_key
from asynccache.storage.contract import StoreLayout
from asynccache.version import VERSION
from asynccache.worker import RankWorker, Topology, connect, group, listen
from asynccache.worker.link import Link, open_link
from asynccache.worker.local import BATCH_PAGES, SWEEP, EmbedderParts, LocalBatches, LocalWorker
from asynccache.worker.messages import BatchOver, Died, Hello, Message, WorksOver, encode
from asynccache.worker.pool_layout import FULL, PoolMap
from asynccache.worker.rank_server import ORDERS, EngineBatch, RankServer, SentBatches
from asynccache.worker.watched_keys import WatchedKeys
from asynccache.worker.work import CopyKind, ReadOrder, StoredBatch, StoreQuestion, Work, WriteOrder
from tests.runtime.runtime_kit import settings
from tests.simulated.device import SimulatedDevice
from tests.simulated.links import SimulatedGroup
from tests.simulated.loop import SimulatedLoop, simulate
from tests.waiting import until
from tests.worker.test_links import ANYWHERE, SECRET

# The head's knowledge of a batch, whenever it asks: before the batch is over, afterwards, and when the group has
# failed.


Body = Callable[[AsyncCache, SimulatedGroup], Awaitable[None]]


def play(body: Body) -> None:
    """``body`` with a cache of two workers."""

    async def world(loop: SimulatedLoop) -> None:
        made = SimulatedGroup(Random(1), Topology(tp=2))
        try:
            async with AsyncCache(settings(), workers=made.workers) as cache:
                await body(cache, made)
        finally:
            await made.ended()

    simulate(world, 1)


async def end(cache: AsyncCache, made: SimulatedGroup, number: int, reason: str = "") -> None:
    """Both ranks have done with the batch; the other one could not run it, if there is a reason."""
    await made.processes[1].opened.wait()
    assert cache.worker is not None
    for face, why in ((cache.worker, ""), (made.processes[1].face, reason)):
        batch = await face.heard(number)
        assert batch is not None
        if why:
            batch.fail(why)
        else:
            batch.end()


def test_a_batch_that_could_not_run_is_told_of_also_when_it_is_over() -> None:
    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        number = cache.send_batch()
        await end(cache, made, number, "out of memory")
        await asyncio.sleep(1)
        for _ in range(2):
            with pytest.raises(BatchFailed, match="batch 1: rank 1: out of memory"):
                await cache.batch_ended(number)
        await end(cache, made, again := cache.send_batch())
        await cache.batch_ended(again)

    play(body)


def test_what_is_remembered_of_batches_that_could_not_run_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "UNABLE", 2)

    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        numbers = [cache.send_batch() for _ in range(3)]
        for number in numbers:
            await end(cache, made, number, "out of memory")
        await asyncio.sleep(1)
        await cache.batch_ended(numbers[0])
        for number in numbers[1:]:
            with pytest.raises(BatchFailed):
                await cache.batch_ended(number)

    play(body)


def test_who_asks_for_a_batch_of_a_group_that_has_failed_is_told() -> None:
    told: list[bool] = []

    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        number = cache.send_batch()
        made.processes[1].kill()
        await asyncio.sleep(1)
        with pytest.raises(RankFailure, match="rank 1"):
            await cache.batch_ended(number)
        told.append(True)

    with pytest.raises(RankFailure, match="rank 1"):  # so ends the cache
        play(body)
    assert told


# Batches are ended once, from any thread, and a worker that is closed says so, whatever it is asked.


def overs(worker: Opened) -> list[Message]:
    return [message for message in worker.told if isinstance(message, BatchOver)]


async def test_a_batch_that_a_thread_ends_twice_is_over_once_and_the_second_end_is_refused() -> None:
    """Also before the loop has had a turn to take note of the first."""
    async with opened() as worker:
        batch = worker.loaded(1)
        told: list[BaseException] = []

        ends: list[Callable[[], None]] = [
            batch.end, batch.end, lambda: batch.fail("no"), lambda: worker.face.end_batch(1),
        ]  # fmt: skip

        def end_twice() -> None:
            for end in ends:
                try:
                    end()
                except ConfigError as error:
                    told.append(error)

        thread = threading.Thread(target=end_twice)
        thread.start()
        thread.join()  # the loop waits: no callback of it runs meanwhile
        assert [str(error) for error in told] == ["batch 1 was ended before"] * 3
        assert not overs(worker)
        await asyncio.sleep(0.01)
        assert overs(worker) == [BatchOver(1, "")]
        assert await worker.face.heard(1) is None


async def test_a_copy_waits_for_a_batch_that_is_ended_in_a_thread_until_the_loop_knows_its_event() -> None:
    """From when a thread has ended it, nobody may take it for over."""
    async with opened() as worker:
        batch = worker.loaded(1)
        thread = threading.Thread(target=batch.end)
        thread.start()
        thread.join()
        assert worker.server.batches.lacks_event((1,))
        await asyncio.sleep(0.01)
        assert not worker.server.batches.lacks_event((1,))


async def test_a_worker_that_is_closed_says_so_whatever_its_engine_asks() -> None:
    async with opened() as worker:
        batch = worker.loaded(1)
        await worker.server.aclose(1.0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            worker.face.wait_layers(worker.stream, batch, 0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            await worker.face.layer(batch, 0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            batch.end(worker.stream.record())
        batch.end()


@pytest.mark.parametrize("how", ["the worker is closed", "rank 3: closed the connection"])
async def test_who_waits_for_a_load_that_is_held_is_told_at_once_when_the_worker_closes_or_the_group_fails(
    how: str
) -> None:
    """Not only when the worker has closed, which may take as long as a store does."""
    async with opened() as worker:
        first = worker.loaded(1)
        second = worker.loaded(2, after=(1,))
        waiting = asyncio.create_task(worker.face.layer(second, 0))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "the load stands behind a batch without an event"
        if how == "the worker is closed":
            await worker.server.aclose(1.0)
        else:
            worker.server.finish(RankFailure("closed the connection", 3))
        for asked in (waiting, worker.face.layer(second, 0)):
            with pytest.raises(RankFailure, match=how):
                async with asyncio.timeout(10):
                    await asked
        first.end()


async def test_an_engine_is_told_of_a_load_that_failed_before_it_asked() -> None:
    """It computes nothing on pages that never came; also if the head has heard of it before the engine asks."""
    async with opened() as worker:
        server = worker.server
        asked = worker.loaded(1)
        server.batches.lose({1})
        with pytest.raises(CopyFailed, match="a load that batch 1 needs has failed on rank 0"):
            await worker.face.layer(asked, 0)
        server._failed.add(7)
        slots = bytes(4)
        server.take(send_batch(8, b"", (7,)))
        server.take(ORDERS["forget_load"].message(7))
        server.take(perform(Work(CopyKind.LOAD, (9,), (Move(FULL, slots, slots),))))
        with pytest.raises(CopyFailed):
            await worker.face.layer(server.batches.find(8), 0)
        server.take(send_batch(10, b"", (7,)))
        await worker.face.layer(server.batches.find(10), 0)
        assert all(message.status is Status.DONE for message in worker.told if isinstance(message, WorksOver))


@pytest.mark.parametrize("asked_at_once", [True, False])
async def test_loads_that_the_device_refuses_are_not_taken_for_loads_that_have_come(asked_at_once: bool) -> None:
    """A worker that cannot go on tells its engine, which does not wait for the head to hear of it and to answer."""
    async with opened() as worker:

        def refuse(*_: object) -> None:
            raise OSError("the driver is gone")

        worker.mover.load = refuse  # type: ignore[method-assign, assignment]
        batch = worker.loaded(1)
        for turns in range(0 if asked_at_once else 5):
            await asyncio.sleep(0)
            with pytest.raises((RankFailure, OSError), match="the driver is gone"):
                await worker.face.layer(batch, turns % 2)
        with pytest.raises((RankFailure, OSError), match="the driver is gone"):
            worker.face.wait_layers(worker.stream, batch, 0)
        with pytest.raises(RankFailure, match="rank 0: OSError: the driver is gone"):
            await anext(worker.face)
        assert Died("OSError: the driver is gone") in worker.told


async def test_a_worker_whose_group_has_failed_says_why_whatever_its_engine_asks() -> None:
    """And hands out no batch, though one was not read: nobody wants it any more."""
    async with opened() as worker:
        batch = worker.loaded(1)
        assert await anext(worker.face) is batch
        worker.loaded(2)
        worker.server.finish(RankFailure("closed the connection", 3))
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: anext(worker.face), lambda: worker.face.heard(2), worker.face.ended,
        ]  # fmt: skip
        for ask in asked:
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                await ask()
        await worker.server.aclose(1.0)
        for ask in (*asked, lambda: worker.face.layer(batch, 0)):
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                await ask()
        calls: list[Callable[[], None]] = [
            lambda: worker.face.wait_layers(worker.stream, batch, 0), lambda: batch.end(worker.stream.record()),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                call()


@pytest.mark.parametrize("when", ["done", "wait"])
async def test_an_event_that_raises_is_the_end_of_the_group_and_its_batch_is_not_lost_in_silence(when: str) -> None:
    class Broken:
        def done(self) -> bool:
            if when == "done":
                raise OSError("an illegal memory access")
            return False

        async def wait(self) -> None:
            raise OSError("an illegal memory access")

    async with opened() as worker:
        batch = worker.loaded(1)
        assert worker.server.local is not None
        worker.server.local.engine_event = lambda event: event  # type: ignore[method-assign]
        batch.end(Broken())
        await asyncio.sleep(0.01)
        died = [one for one in worker.told if isinstance(one, Died)]
        assert died == [Died("OSError: an illegal memory access")]
        assert not overs(worker)


def test_a_load_that_fails_marks_the_batches_that_need_it_until_they_are_over() -> None:
    """Also those that the engine has ended by an event which has not fired: its stream may still ask for their layers,
    and was told that all had come."""

    async def main(loop: SimulatedLoop) -> None:
        over: list[int] = []
        sent = SentBatches(lambda number, _: over.append(number), lambda: None, lambda _: None)
        device = SimulatedDevice()
        gate = device.gate()
        batches = [EngineBatch(number, b"", (7,), lambda *_: None) for number in (1, 2, 3)]
        for batch in batches:
            sent.add(batch)
        sent.end(1, gate, "")
        sent.end(2, None, "")
        sent.lose({7})
        assert [batch.lost for batch in batches] == [True, False, True]
        gate.open()
        await asyncio.sleep(1.0)
        assert over == [2, 1]
        assert not sent._running
        await device.aclose()

    simulate(main, 1)


# The ranks of a group: complete when each has come once; a rank that has gone again counts as not come.


async def come(address: str, rank: int) -> Link:
    link, _ = await open_link(address, SECRET, encode(Hello(VERSION, rank)), timeout=30.0)
    return link


async def test_a_worker_that_restarts_before_all_have_come_takes_its_place_and_nobody_does_afterwards() -> None:
    async with listen(ANYWHERE, Topology(tp=3), secret=SECRET) as workers:
        arriving = asyncio.create_task(workers.arrived())
        first = await come(workers.address, 1)
        with pytest.raises(RankFailure, match="rank 1 has come before"):
            await come(workers.address, 1)
        first.abort()
        await until(lambda: "0 of 2 have come" in repr(workers), "nobody noticed that rank 1 went")
        others = [await come(workers.address, 2)]
        await asyncio.sleep(0.01)
        assert not arriving.done(), "rank 1 is not there"
        others.append(await come(workers.address, 1))
        links = await arriving
        assert sorted(links) == [1, 2]
        assert not any(link.ended for link in links.values())
        others[1].abort()
        await until(lambda: links[1].ended, "nobody noticed that rank 1 went again")
        with pytest.raises(RankFailure, match="rank 1 has come before"):
            await come(workers.address, 1)
        for link in (*others, *links.values()):
            link.abort()


@pytest.mark.slow(2)
async def test_each_worker_that_comes_gives_the_next_one_as_long_and_one_that_comes_again_does_not() -> None:
    loop, patience = asyncio.get_running_loop(), 1.0
    async with listen(ANYWHERE, Topology(tp=3), secret=SECRET, arrival=patience) as workers:
        arriving, began = asyncio.create_task(workers.arrived()), loop.time()
        await asyncio.sleep(0.6 * patience)
        links = [await come(workers.address, 1)]
        newest = loop.time()
        await asyncio.sleep(0.6 * patience)
        assert not arriving.done(), "rank 1 came in between"
        links[0].abort()
        await until(lambda: "0 of 2 have come" in repr(workers), "nobody noticed that rank 1 went")
        links.append(await come(workers.address, 1))
        with pytest.raises(RankFailure, match="rank 2: did not come within 1 s"):
            await arriving
        assert began + 1.6 * patience < loop.time() < newest + 1.55 * patience
        for link in links:
            link.abort()


async def test_a_rank_that_no_hello_can_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^rank="):
        async with connect(ANYWHERE, 1 << 64, secret=SECRET):
            pass


# The pages whose names the head keeps: those of which a worker may yet report something.


PAGE = bytes(range(32))
ONE, TWO = b"d" * 32, b"e" * 32


def ignore(store: int, there: bool, keys: Sequence[bytes]) -> None:
    """Nobody asks what was reported."""


def told_everywhere(holdings: WatchedKeys, store: int) -> None:
    for rank, digest in holdings.digests.items():
        holdings.told(store, rank, True, [storage_key(PAGE, digest)])


def test_pages_of_stores_that_one_worker_writes_are_not_named() -> None:
    holdings = WatchedKeys(ignore)
    holdings.digests = {0: ONE, 1: ONE}
    holdings.watch(1, shared=True)
    holdings.name([PAGE])
    assert not holdings._named


def test_the_names_of_pages_go_with_the_last_store_that_has_them() -> None:
    holdings = WatchedKeys(ignore)
    holdings.digests = {0: ONE, 1: TWO}
    for store in (1, 2):
        holdings.watch(store, shared=False)
        told_everywhere(holdings, store)
    holdings.name([PAGE])
    holdings.watch(3, shared=False)
    assert holdings.unwatch(1)
    assert len(holdings._named) == 2, "the second store still has it"
    assert holdings.unwatch(2)
    assert not holdings._named
    holdings.name([PAGE])
    assert holdings.unwatch(3)
    assert not holdings._named, "nobody is left who might have it"
    assert not holdings.unwatch(3)


def test_a_page_is_there_as_long_as_one_rank_of_its_writer_has_it() -> None:
    for digests in ({0: ONE, 1: ONE}, {0: ONE, 1: ONE, 2: TWO, 3: TWO}):
        said: list[bool] = []
        holdings = WatchedKeys(lambda store, there, keys, said=said: said.append(there))  # type: ignore[misc]
        holdings.digests = digests
        holdings.watch(1, shared=True)
        holdings.name([PAGE])
        told_everywhere(holdings, 1)
        holdings.told(1, 0, False, [storage_key(PAGE, ONE)])  # rank 1 has stored it anew, and has said so before
        assert set(said) == {True}
        holdings.told(1, 1, False, [storage_key(PAGE, ONE)])
        assert said[-1] is False


# An engine that runs in a thread of its own waits for layers beside the worker's loop, on a real device.


T = TypeVar("T")

LAYERS, PAGES = 3, 4
CONFIG = CacheConfig(
    model="test", page_size=1,
    components=(Full(bytes_per_token=LAYERS, device_tokens=PAGES, host_tokens=PAGES, layers=LAYERS),),
)  # fmt: skip


perform, send_batch = ORDERS["perform"].message, ORDERS["send_batch"].message


class Opened:
    """A worker that is open, and what it has told its head."""

    def __init__(self, device: CpuDevice) -> None:
        self.told: list[Message] = []
        self.stream = device.stream("engine")
        self.server = RankServer(0, Topology(), EmbedderParts(device), None, self.told.append)
        self.face = self.server.worker

    @property
    def mover(self) -> Mover:
        assert self.server.local is not None
        return self.server.local.mover

    async def open(self) -> None:
        self.server.take(ORDERS["open"].message(1, CONFIG, False))
        await until(lambda: bool(self.told))
        assert type(self.told[0]) is ORDERS["open"].answer, self.told
        memory = self.mover.host_pools["full"].memory
        memory[:] = bytes([7]) * len(memory)

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
        load, loaders = worker.mover.load, set[int]()

        def noted(*order: Any) -> Any:
            loaders.add(threading.get_ident())
            return load(*order)

        worker.mover.load = noted  # type: ignore[method-assign, assignment]
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
        assert loaders == {threading.get_ident()}


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


def test_a_thread_whose_loop_has_ended_is_told() -> None:
    async def live() -> tuple[RankWorker, EngineBatch, object]:
        async with opened() as worker:
            return worker.face, worker.loaded(1), worker.stream

    face, batch, stream = asyncio.run(live())
    with pytest.raises(RankFailure, match="the loop of its worker has ended"):
        face._server.wait_batch(stream, batch, 0)


# A worker by itself: events by number, reading up to the first page that is missing, what it is told to give up.


HASHES = b"".join(bytes([page]) * HASH_BYTES for page in range(PAGES))
SLOTS = np.arange(PAGES, dtype=np.int32).tobytes()


class Host:
    """Pages of one byte, each its slot."""

    def page(self, slot: int) -> memoryview:
        return memoryview(bytearray([slot % 256]))


SPECS = CacheConfig(
    model="m", components=(Full(bytes_per_token=1, device_tokens=1024, host_tokens=1024),), page_size=1,
    sidecars=(Sidecar(name="side", indices_from="full", bytes_per_page=1),),
).pools()  # fmt: skip


def pools() -> PoolMap:
    return PoolMap(SPECS, 1, {"full": Host(), "side": Host()})


OPENED: list[CpuDevice] = []


@pytest_asyncio.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """Devices are closed after each test, so that none of their threads is left."""
    yield
    while OPENED:
        await OPENED.pop().aclose()


def worker(store: object, mapped: PoolMap) -> LocalWorker:
    """A worker on the CPU that has ``store`` for its stores, and ``mapped`` for its host pages."""
    OPENED.append(CpuDevice())
    mover = Mover(OPENED[-1], SPECS)
    return LocalWorker(mover, mapped, cast("Any", store), StoreLayout({}, b""), takes_stores=True, own_device=True)


class Stores:
    """A worker's stores (see ``TieredStore``), of which some are shared: they have all pages but ``lacking``, and note
    what is asked of them and put into them. Puts wait for ``go``."""

    def __init__(self, *lacking: PageKey, own: int = 1, shared: int = 0) -> None:
        self.lacking = lacking
        self.asked: list[list[str]] = []
        self.own: list[list[PageKey]] = [[] for _ in range(own)]
        self.shared: list[list[PageKey]] = [[] for _ in range(shared)]
        self.puts = 0
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def exists(self, keys: Sequence[PageKey], _: object = None) -> list[Result]:
        self.asked.append([key.pool for key in keys])
        return [Result.MISS if key in self.lacking else Result.HIT for key in keys]

    get = exists

    def writers(self, *, shared: bool = True) -> list[list[PageKey]]:
        return self.own + (self.shared if shared else [])

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]:
        self.puts += 1
        self.begun.set()
        await self.go.wait()
        for store in self.writers(shared=shared):
            store.extend(keys)
        return [Result.HIT if self.writers(shared=shared) else Result.FAILED] * len(keys)


MANY = StoredPages(0, b"".join(page.to_bytes(HASH_BYTES, "big") for page in range(2 * BATCH_PAGES)),
                   np.arange(2 * BATCH_PAGES, dtype=np.int32).tobytes())  # fmt: skip
"""The pages of two calls."""


async def test_a_run_is_read_in_each_pool_up_to_the_first_page_that_one_lacks() -> None:
    mapped = pools()
    store = Stores(mapped.key("full", HASHES[2 * HASH_BYTES : 3 * HASH_BYTES]))
    reads = [ReadOrder(pool, HASHES, SLOTS) for pool in ("full", "side")]
    assert await worker(store, mapped).read(reads, run=True) == [bytes([1, 1, 0, 1]), bytes([1, 1])]
    assert store.asked == [["full"] * 4, ["side"] * 2]
    assert await worker(store, mapped).read(reads, run=False) == [bytes([1, 1, 0, 1]), bytes([1, 1, 1, 1])]


async def test_what_is_asked_of_several_pools_is_answered_page_by_page_in_order() -> None:
    mapped = pools()
    store = Stores(mapped.key("side", HASHES[:HASH_BYTES]))
    asked = [StoreQuestion("side", HASHES), StoreQuestion("full", HASHES[: 2 * HASH_BYTES])]
    assert await worker(store, mapped).ask(asked) == [bytes([0, 1, 1, 1]), bytes([1, 1])]


async def test_a_batch_that_is_given_up_writes_nothing_after_the_call_that_is_under_way() -> None:
    count = 2 * BATCH_PAGES
    for give_up, outcome in ((True, StoredBatch(frozenset({7}), BATCH_PAGES, 0, BATCH_PAGES)),
                             (False, StoredBatch(frozenset(), 2 * count, count, 2 * count))):  # fmt: skip
        store = Stores()
        store.go.clear()
        stage = worker(store, pools())
        storing = asyncio.ensure_future(stage.store([WriteOrder(7, (MANY,))]))
        await store.begun.wait()
        if give_up:
            stage.give_up(7)
        store.go.set()
        assert await storing == outcome
        assert store.puts == (1 if give_up else 4)


async def test_a_batch_that_is_given_up_in_the_turn_in_which_it_comes_and_another_ends_is_given_up() -> None:
    store = Stores()
    store.go.clear()
    stage = worker(store, pools())
    other = asyncio.ensure_future(stage.store([WriteOrder(1, (StoredPages(0, HASHES, SLOTS),))]))
    await store.begun.wait()
    store.go.set()
    for _ in range(5):  # in one of them the other one ends before this one begins
        storing = asyncio.ensure_future(stage.store([WriteOrder(7, (MANY,))]))
        stage.give_up(7)
        assert (await storing).failed == {7}
    await other
    assert not stage._given_up


@pytest.mark.parametrize(("own", "shared"), [(1, 0), (0, 1), (1, 1), (2, 2), (0, 0)])
async def test_of_pages_that_workers_have_alike_each_writes_to_its_own_stores_and_one_to_those_they_share(
    own: int, shared: int
) -> None:
    config = CacheConfig(
        model="m", components=(Full(bytes_per_token=1, device_tokens=64, host_tokens=64),), page_size=1,
        sidecars=(Sidecar(name="side", indices_from="full", bytes_per_page=1, replicated=Replicated.TP),),
    )  # fmt: skip
    for rank in (0, 1):
        mapped = PoolMap([spec.on_rank(rank, 2) for spec in config.pools()], 1, {"full": Host(), "side": Host()})
        store = Stores(own=own, shared=shared)
        stored = await worker(store, mapped).store([WriteOrder(1, (StoredPages(0, HASHES, SLOTS),))])
        assert stored.failed == (frozenset() if own or shared else frozenset({1}))
        assert all([key.pool for key in keys] == ["side"] * PAGES + ["full"] * PAGES for keys in store.own)
        expected = (["side"] * PAGES if rank == 0 else []) + ["full"] * PAGES
        assert all([key.pool for key in keys] == expected for keys in store.shared)
        written = PAGES if not own and rank == 1 else 2 * PAGES
        assert stored.pages == (written if own or shared else 0)


async def test_of_a_pool_without_bytes_here_nothing_lacks() -> None:
    mapped = pools()
    store = Stores()
    assert await worker(store, mapped).ask([StoreQuestion("elsewhere", HASHES)]) == [bytes([1] * PAGES)]
    orders = [ReadOrder("elsewhere", HASHES, SLOTS)]
    assert await worker(store, mapped).read(orders, run=True) == [bytes([1] * PAGES)]
    assert store.asked == []


async def test_an_event_is_one_batch_until_it_is_over_and_a_number_is_never_used_again() -> None:
    device, batches = CpuDevice(), LocalBatches()
    first, second = device.gate(), device.gate()
    one, two = batches.of(first), batches.of(second)
    assert batches.of(first) is one
    assert batches.events([one.number, two.number, 99]) == [first, second]
    first.open()
    await one.wait()
    assert batches.events([one.number, two.number]) == [second]
    numbers = set[int]()
    for _ in range(4 * SWEEP):
        gate = device.gate()
        numbers.add(batches.of(gate).number)
        gate.open()
    assert len(numbers) == 4 * SWEEP
    assert not numbers & {one.number, two.number}
    assert len(batches) <= 2 * SWEEP, "batches that are over pile up"
    assert batches.events([two.number]) == [second]
    second.open()
    await device.aclose()


@pytest.mark.parametrize("odd", [1.5, True, "2", 0, -1, None])
@pytest.mark.parametrize("name", ["tp", "cp", "pp"])
def test_a_topology_takes_whole_numbers_from_one_on(name: str, odd: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        Topology(**{name: odd})  # type: ignore[arg-type]
    assert Topology(**{name: np.int64(3)}) == Topology(**{name: 3})  # type: ignore[arg-type]
