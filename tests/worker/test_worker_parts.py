"""A worker by itself: events by number, reading up to the first page that is missing, what it is told to give up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio

from asynccache import CacheConfig, ConfigError, Full, Replicated, Sidecar
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import StoredPages
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.mover import Mover
from asynccache.storage import PageKey, Result
from asynccache.storage.contract import StoreLayout
from asynccache.worker import Topology
from asynccache.worker.local import BATCH_PAGES, SWEEP, LocalBatches, LocalWorker
from asynccache.worker.pool_layout import PoolMap
from asynccache.worker.work import ReadOrder, StoredBatch, StoreQuestion, WriteOrder

PAGES = 4
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


class Lacking:
    """A store of all pages but some, which notes what is asked of it."""

    def __init__(self, *lacking: PageKey) -> None:
        self.lacking = lacking
        self.asked: list[list[str]] = []

    def _answers(self, keys: Sequence[PageKey]) -> list[Result]:
        self.asked.append([key.pool for key in keys])
        return [Result.MISS if key in self.lacking else Result.HIT for key in keys]

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return self._answers(keys)

    async def get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        return self._answers(keys)


async def test_a_run_is_read_in_each_pool_up_to_the_first_page_that_one_lacks() -> None:
    mapped = pools()
    store = Lacking(mapped.key("full", HASHES[2 * HASH_BYTES : 3 * HASH_BYTES]))
    reads = [ReadOrder(pool, HASHES, SLOTS) for pool in ("full", "side")]
    assert await worker(store, mapped).read(reads, run=True) == [bytes([1, 1, 0, 1]), bytes([1, 1])]
    assert store.asked == [["full"] * 4, ["side"] * 2]
    assert await worker(store, mapped).read(reads, run=False) == [bytes([1, 1, 0, 1]), bytes([1, 1, 1, 1])]


async def test_what_is_asked_of_several_pools_is_answered_page_by_page_in_order() -> None:
    mapped = pools()
    store = Lacking(mapped.key("side", HASHES[:HASH_BYTES]))
    asked = [StoreQuestion("side", HASHES), StoreQuestion("full", HASHES[: 2 * HASH_BYTES])]
    assert await worker(store, mapped).ask(asked) == [bytes([0, 1, 1, 1]), bytes([1, 1])]


class Slow:
    """A store whose puts take until they are let through."""

    def __init__(self) -> None:
        self.puts = 0
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    def writers(self, *, shared: bool = True) -> Sequence[object]:
        return [self]

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]:
        self.puts += 1
        self.begun.set()
        await self.go.wait()
        return [Result.HIT] * len(keys)


async def test_a_batch_that_is_given_up_writes_nothing_after_the_call_that_is_under_way() -> None:
    count = 2 * BATCH_PAGES
    hashes = b"".join(page.to_bytes(HASH_BYTES, "big") for page in range(count))
    effect = WriteOrder(7, (StoredPages(0, hashes, np.arange(count, dtype=np.int32).tobytes()),))
    for give_up, outcome in ((True, StoredBatch(frozenset({7}), BATCH_PAGES, 0, BATCH_PAGES)),
                             (False, StoredBatch(frozenset(), 2 * count, count, 2 * count))):  # fmt: skip
        store = Slow()
        stage = worker(store, pools())
        storing = asyncio.ensure_future(stage.store([effect]))
        await store.begun.wait()
        if give_up:
            stage.give_up(7)
        store.go.set()
        assert await storing == outcome
        assert store.puts == (1 if give_up else 4)


async def test_a_batch_that_is_given_up_in_the_turn_in_which_it_comes_and_another_ends_is_given_up() -> None:
    count = 2 * BATCH_PAGES
    hashes = b"".join(page.to_bytes(HASH_BYTES, "big") for page in range(count))
    pages = (StoredPages(0, hashes, np.arange(count, dtype=np.int32).tobytes()),)
    store = Slow()
    stage = worker(store, pools())
    other = asyncio.ensure_future(stage.store([WriteOrder(1, (pages[0]._replace(hashes=HASHES, slots=SLOTS),))]))
    await store.begun.wait()
    store.go.set()
    for _ in range(5):  # in one of them the other one ends before this one begins
        storing = asyncio.ensure_future(stage.store([WriteOrder(7, pages)]))
        stage.give_up(7)
        assert (await storing).failed == {7}
    await other
    assert not stage._given_up


class Tiered:
    """Stores of which some are shared, each a dictionary; ``put`` and ``writers`` as ``TieredStore`` has them."""

    def __init__(self, own: int, shared: int) -> None:
        self.own: list[list[PageKey]] = [[] for _ in range(own)]
        self.shared: list[list[PageKey]] = [[] for _ in range(shared)]

    def writers(self, *, shared: bool = True) -> list[list[PageKey]]:
        return self.own + (self.shared if shared else [])

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]:
        for store in self.writers(shared=shared):
            store.extend(keys)
        return [Result.HIT if self.writers(shared=shared) else Result.FAILED] * len(keys)


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
        store = Tiered(own, shared)
        stored = await worker(store, mapped).store([WriteOrder(1, (StoredPages(0, HASHES, SLOTS),))])
        assert stored.failed == (frozenset() if own or shared else frozenset({1}))
        assert all([key.pool for key in keys] == ["side"] * PAGES + ["full"] * PAGES for keys in store.own)
        expected = (["side"] * PAGES if rank == 0 else []) + ["full"] * PAGES
        assert all([key.pool for key in keys] == expected for keys in store.shared)
        written = PAGES if not own and rank == 1 else 2 * PAGES
        assert stored.pages == (written if own or shared else 0)


async def test_of_a_pool_without_bytes_here_nothing_lacks() -> None:
    mapped = pools()
    store = Lacking()
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
