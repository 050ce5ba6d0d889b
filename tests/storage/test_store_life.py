"""The stores of a cache, from attaching to closing: several as one, some that lie, some that hang."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from random import Random
from unittest.mock import AsyncMock, Mock

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.runtime.save import HOPELESS_ROUNDS
from asynccache.storage import (
    Breaker,
    CheckedStore,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    attachment,
    open_store,
)
from asynccache.storage.checked import store_layout
from asynccache.storage.promotion import Promotions
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.url import StoreOptions
from asynccache.testing.backend_suite import LAYOUT, blank, keys_of, record_of
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import settings, text
from tests.simulated.backend import HONEST, Hang, Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage import pages_kit
from tests.storage.pages_kit import Misbehaving, in_world
from tests.waiting import until

# A store from attaching to closing: probes that hang, closing at the wrong moment, memory that is refused. In virtual
# time.


KEYS = keys_of(2, "odd")


def frozen() -> tuple[Backend, CheckedStore]:
    """It serves nothing; a question is let go of only when it ``answer()``s, whoever cancels it."""
    backend = Backend("frozen")
    backend.down, backend.hangs = True, [Hang(frozenset({"exists"}), 0.0, inf, stubborn=True)]
    backend.hang()
    return backend, CheckedStore(backend, LAYOUT, threads=0, timeout=1.0, slow=0.5)


@in_world
async def test_a_probe_that_hangs_is_the_only_one(loop: SimulatedLoop) -> None:
    backend, store = frozen()
    for _ in range(300):
        await pages_kit.get(store, KEYS)
        await asyncio.sleep(1.0)
        assert backend.holding <= 1
    assert backend.holding == 1
    backend.answer()
    await store.aclose()


@in_world
async def test_the_backend_is_not_closed_over_a_probe_by_who_is_cancelled(loop: SimulatedLoop) -> None:
    backend, store = frozen()
    while not backend.holding:
        await pages_kit.get(store, KEYS)
        await asyncio.sleep(1.0)
    closing = asyncio.ensure_future(store._guard.aclose())
    await asyncio.sleep(1.0)
    closing.cancel()
    await asyncio.sleep(1.0)
    assert not closing.done()
    backend.answer()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert backend.holding == 0
    await store.aclose()


@in_world
async def test_of_two_who_close_all_stores_both_succeed(loop: SimulatedLoop) -> None:
    store = tiers(Misbehaving(aclose=0.1))
    await asyncio.gather(store.aclose(), store.aclose())
    assert not store._leaving


async def test_a_backend_that_is_none_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Mock(spec=["aclose"], aclose=AsyncMock())
    monkeypatch.setattr(attachment, "backend_class", lambda name: Mock(open=AsyncMock(return_value=half)))
    with pytest.raises(ConfigError, match="backend="):
        await open_store("picky:", LAYOUT)
    half.aclose.assert_awaited_once()


# ``flush`` without a time-out, and detaching, with a store that does not answer: both end after so many times the
# store's own ``timeout``, and say what is not stored. In virtual time.


TIMEOUT, SLOW = 30.0, 10.0                             # as they are if nobody says otherwise


async def publish(cache: AsyncCache, seed: int) -> None:
    async with cache.lease(text(10, seed=seed)) as lease:
        await lease.loaded()
        await lease.commit(text(10, seed=seed))


@pytest.mark.parametrize("durable", [False, True], ids=["nothing to flush", "flushes"])
@pytest.mark.parametrize("texts", [1, 4, 8])
def test_a_flush_ends_and_says_what_is_not_stored(texts: int, durable: bool) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Misbehaving(SimulatedBackend(Random(1), Hostility(delay=0.0)))
        config = settings(400, 800)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0, timeout=TIMEOUT, slow=SLOW)
        async with AsyncCache(config, device=device, storage=store) as cache:
            backend.how = {"put": "hangs", "flush": "hangs" if durable else "works"}
            for seed in range(texts):
                await publish(cache, seed)
            began = loop.time()
            if durable:
                with pytest.raises(Timeout, match="flush: no answer in 30"):
                    await cache.flush()
            else:
                assert (await cache.flush()).storage > 0
            assert loop.time() - began < (HOPELESS_ROUNDS + durable) * TIMEOUT + 1.0
            backend.how = {}
            await asyncio.sleep(60.0)                  # the breaker's longest pause, and some
            await publish(cache, texts)                # has a probe begun, if nothing else has
            await asyncio.sleep(1.0)
            assert await cache.flush() == (0, 0)
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


def test_a_detach_returns_when_the_calls_under_way_have_ended() -> None:
    """A store is closed when nobody is inside: of one that hangs, at the deadline of the call that came last. Whoever
    does not want to wait for it need not."""

    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Misbehaving(SimulatedBackend(Random(1), Hostility(delay=0.0)))
        async with AsyncCache(settings(400, 800), device=device, storage=backend) as cache:
            backend.how = {"put": "hangs"}
            await publish(cache, 1)
            (name,) = cache.stores
            began = loop.time()
            left = await cache.detach_storage(name, timeout=2.0)
            assert left.storage > 0
            assert 2.0 < loop.time() - began <= TIMEOUT + 1.0
            await publish(cache, 2)
            assert loop.time() - began <= TIMEOUT + 2.0
        await device.aclose()

    simulate(main, 1)


# Several stores as one: order, policies, promotion, failures of one of them, and leaving while somebody is inside.


HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED
EIGHT_KEYS = keys_of(8, "odd")
LATE = Hostility(delay=0.05)


class Backend(SimulatedBackend):
    """One that knows which keys it was asked for, how often it was closed, and can be made to fail as a whole."""

    def __init__(self, name: str, hostility: Hostility = HONEST, seed: int = 0) -> None:
        super().__init__(Random(f"{name} {seed}"), hostility)
        self.asked: Counter[PageKey] = Counter()
        self.closed_times = 0
        self.flushed_times = 0
        self.down = False
        self.begun = asyncio.Event()

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.asked.update(keys)
        self.begun.set()
        return await super().get(keys, records)

    async def clear(self) -> None:
        if self.down:
            raise Unavailable("down")
        await super().clear()

    async def flush(self) -> None:
        if self.down:
            raise Unavailable("down")
        self.flushed_times += 1
        await super().flush()

    async def _begin(self) -> None:
        await super()._begin()
        if self.down:
            raise Unavailable("down")

    async def aclose(self) -> None:
        assert not self.holding, "it is closed while somebody is inside"
        self.closed_times += 1
        await super().aclose()


def checked(backend: StorageBackend) -> CheckedStore:
    return CheckedStore(backend, LAYOUT, threads=0, breaker=Breaker(threshold=1 << 30))


def tiers(*backends: StorageBackend, policies: Sequence[StoreOptions] = (), room: int = 1 << 20) -> TieredStore:
    """Stores named a, b, c, nearest first."""
    store = TieredStore(threads=0, room=room)
    named = {options.name: options for options in policies}
    for name, backend in zip("abc", backends, strict=False):
        store.attach(AttachedStore(checked(backend), named.get(name, StoreOptions(name))))
    return store


def payloads(keys: Sequence[PageKey] = EIGHT_KEYS) -> list[memoryview]:
    return [record_of(key).payload for key in keys]


def blanks(keys: Sequence[PageKey] = EIGHT_KEYS) -> list[memoryview]:
    return [blank(key).payload for key in keys]


async def fetched(store: TieredStore, keys: Sequence[PageKey] = EIGHT_KEYS) -> list[Result]:
    """Read; what is a hit must be the page that belongs to the key. Then the buffers are somebody else's."""
    buffers = blanks(keys)
    results = await store.get(keys, buffers)
    for key, result, buffer in zip(keys, results, buffers, strict=True):
        assert result is not HIT or buffer == record_of(key).payload, f"{key}: wrong bytes"
        buffer[:] = b"\xaa" * buffer.nbytes
    return results


async def ended(promotions: Promotions) -> None:
    """Wait until no page is being promoted."""
    while batches := list(promotions._batches):
        await asyncio.wait(batches)


async def stored(store: TieredStore, keys: Sequence[PageKey] = EIGHT_KEYS) -> list[Result]:
    buffers = payloads(keys)
    results = await store.put(keys, buffers)
    for buffer in buffers:
        buffer[:] = b"\xbb" * buffer.nbytes
    return results


def has(backend: SimulatedBackend, keys: Sequence[PageKey] = EIGHT_KEYS) -> list[bool]:
    return [key in backend.pages for key in keys]


# order and policies


@in_world
async def test_without_a_store_nothing_is_there_and_nothing_is_stored(loop: SimulatedLoop) -> None:
    store = tiers()
    assert not store
    assert await stored(store) == [FAILED] * 8
    assert await fetched(store) == await store.exists(EIGHT_KEYS) == await store.delete(EIGHT_KEYS) == [MISS] * 8
    await store.clear()
    await store.flush()
    assert store.stats() == {}
    await store.aclose()


@in_world
async def test_the_nearest_is_asked_first_and_farther_ones_only_for_what_is_missing(loop: SimulatedLoop) -> None:
    near, far = Backend("near"), Backend("far")
    store = tiers(near, far, policies=[StoreOptions("a", promote=False)])
    await checked(near).put(EIGHT_KEYS[:3], payloads(EIGHT_KEYS[:3]))
    await checked(far).put(EIGHT_KEYS[2:6], payloads(EIGHT_KEYS[2:6]))
    assert await store.exists(EIGHT_KEYS) == await fetched(store) == [HIT] * 6 + [MISS] * 2
    assert set(near.asked) == set(EIGHT_KEYS)
    assert set(far.asked) == set(EIGHT_KEYS[3:])
    assert await fetched(store, EIGHT_KEYS[:3]) == [HIT] * 3
    assert set(far.asked) == set(EIGHT_KEYS[3:]), "the farther one was asked for what the nearer one had"
    await store.aclose()


@in_world
async def test_a_store_that_fails_is_passed_over(loop: SimulatedLoop) -> None:
    near, far = Backend("near"), Backend("far")
    store = tiers(near, far)
    await stored(store, EIGHT_KEYS[:4])
    near.down = True
    assert await store.exists(EIGHT_KEYS) == await fetched(store) == [HIT] * 4 + [FAILED] * 4
    assert await stored(store) == [HIT] * 8, "one of them took it"
    assert store.store_stats()["a"]["failed_calls"] == 3
    assert store.store_stats()["b"]["failed_calls"] == 0
    far.down = True
    assert await stored(store) == await store.delete(EIGHT_KEYS) == [FAILED] * 8
    for whole in (store.clear, store.flush):
        with pytest.raises(BackendError):
            await whole()
    near.down = False
    with pytest.raises(BackendError):
        await store.clear()
    assert not near.pages, "the one that could was not cleared"
    await store.aclose()


@in_world
async def test_what_a_nearer_store_has_damaged_comes_from_a_farther_one(loop: SimulatedLoop) -> None:
    near, far = Backend("near"), Backend("far")
    store = tiers(near, far)
    await stored(store)
    header, payload = near.pages[EIGHT_KEYS[0]]
    near.pages[EIGHT_KEYS[0]] = header, payload[:-1] + bytes([payload[-1] ^ 1])
    assert await fetched(store) == [HIT] * 8
    await ended(store.promotions)
    assert near.pages[EIGHT_KEYS[0]] == (header, payload), "it was not repaired"
    await store.aclose()


# promotion


@in_world
async def test_what_came_from_afar_is_copied_to_all_that_were_asked_before(loop: SimulatedLoop) -> None:
    near, middle, far = Backend("near"), Backend("middle"), Backend("far")
    store = tiers(near, middle, far, policies=[StoreOptions("a", write=False), StoreOptions("c", promote=False)])
    await checked(middle).put(EIGHT_KEYS[:2], payloads(EIGHT_KEYS[:2]))
    await checked(far).put(EIGHT_KEYS[:5], payloads(EIGHT_KEYS[:5]))
    assert await fetched(store) == [HIT] * 5 + [MISS] * 3
    await ended(store.promotions)
    assert has(near) == has(middle) == has(far) == [True] * 5 + [False] * 3
    assert store.stats()["promoted_pages"] == 5 + 3
    await store.aclose()


@in_world
async def test_stores_that_pages_are_written_or_promoted_to_are_flushed(loop: SimulatedLoop) -> None:
    """A power loss after ``flush`` loses no page that was promoted before it; and no store is flushed that nothing was
    written to, since a flush that it cannot make would fail."""
    written, promoted, far = Backend("written"), Backend("promoted"), Backend("far")
    store = tiers(written, promoted, far, policies=[StoreOptions("b", write=False), StoreOptions("c", write=False)])
    await store.flush()
    assert (written.flushed_times, promoted.flushed_times, far.flushed_times) == (1, 0, 0)
    await checked(far).put(EIGHT_KEYS[:2], payloads(EIGHT_KEYS[:2]))
    await fetched(store, EIGHT_KEYS[:2])
    await ended(store.promotions)
    await store.flush()
    assert (written.flushed_times, promoted.flushed_times, far.flushed_times) == (2, 1, 0)
    await store.aclose()


@in_world
async def test_what_there_is_no_room_for_is_not_promoted_and_counted(loop: SimulatedLoop) -> None:
    near, far = Backend("near", LATE), Backend("far")
    store = tiers(near, far, room=mmap.PAGESIZE)  # four pages
    await checked(far).put(EIGHT_KEYS, payloads())
    assert await fetched(store) == [HIT] * 8
    await ended(store.promotions)
    assert has(near) == [True] * 4 + [False] * 4
    assert store.stats()["unpromoted_pages"] == 4
    assert await fetched(store) == [HIT] * 8
    await ended(store.promotions)
    assert has(near) == [True] * 8
    await store.aclose()


@in_world
async def test_what_is_forgotten_is_not_promoted_any_more(loop: SimulatedLoop) -> None:
    near, far = Backend("near", LATE), Backend("far", LATE)
    store = tiers(near, far)
    for forget in (lambda: store.delete(EIGHT_KEYS), store.clear):
        await checked(far).put(EIGHT_KEYS, payloads())
        assert await fetched(store, EIGHT_KEYS[:4]) == [HIT] * 4
        reading = loop.create_task(fetched(store, EIGHT_KEYS[4:]))
        await asyncio.sleep(0.01)
        await forget()
        await reading
        await ended(store.promotions)
        assert not near.pages
        assert not far.pages
    assert store.promotions.held == 0
    await store.aclose()


@in_world
async def test_what_is_deleted_takes_nothing_else_with_it(loop: SimulatedLoop) -> None:
    """Neither from the batches that wait nor from the one that is under way, for which nobody waits."""
    near, far = Backend("near"), Backend("far")
    near.hangs = [Hang(frozenset({"put"}), 0.0, inf, stubborn=False)]
    near.hang()
    store = tiers(near, far)
    await checked(far).put(EIGHT_KEYS, payloads())
    for part in (EIGHT_KEYS[:3], EIGHT_KEYS[3:5], EIGHT_KEYS[5:]):
        assert await fetched(store, part) == [HIT] * len(part)
    await until(lambda: bool(near.hung))
    await store.delete(EIGHT_KEYS[3:4])
    near.answer()
    await ended(store.promotions)
    assert has(near) == [True] * 3 + [False] * 2 + [True] * 3
    assert (store.stats()["promoted_pages"], store.stats()["unpromoted_pages"]) == (6, 2)
    assert store.promotions.held == 0
    await store.aclose()


@in_world
async def test_a_slow_store_does_not_hold_up_promotions_to_another_one(loop: SimulatedLoop) -> None:
    slow, target, promotions = Misbehaving(put="hangs"), Misbehaving(put=1.0), Promotions(threads=0)
    near, far = checked(slow), checked(target)
    for key, payload in zip(EIGHT_KEYS, payloads(), strict=True):
        await promotions.offer([key], [payload], [(near, [0]), (far, [0])], 0)
    await asyncio.sleep(len(EIGHT_KEYS) + 1.0)
    assert await far.exists(EIGHT_KEYS) == [HIT] * 8
    assert target.most == 1
    assert slow.now["put"] == 1
    async with promotions.paused(5.0):
        assert not slow.now["put"], "no store has the copies any more"
    await ended(promotions)
    assert promotions.counts == {"promoted": len(EIGHT_KEYS), "unpromoted": len(EIGHT_KEYS)}
    await promotions.aclose()


@pytest.mark.source
@in_world
async def test_pages_for_whose_copies_there_is_no_memory_are_not_promoted(loop: SimulatedLoop) -> None:
    promotions, pages = Promotions(threads=0), payloads()
    for error in (OSError(12, "Cannot allocate memory"), MemoryError()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asynccache.storage.promotion.mmap.mmap", Mock(side_effect=error))
            await promotions.offer(EIGHT_KEYS, pages, [(checked(Backend("far")), range(8))], 0)
    await ended(promotions)
    assert promotions.counts == {"unpromoted": 16}
    assert promotions.held == 0
    await promotions.aclose()


@in_world
async def test_a_copy_takes_whole_pages_of_memory(loop: SimulatedLoop) -> None:
    """Each batch is a mapping of its own, of which a process can have 65,530."""
    promotions = Promotions(threads=0, room=3 * mmap.PAGESIZE)
    for key, page in zip(EIGHT_KEYS, payloads(), strict=True):
        await promotions.offer([key], [page], [(checked(Misbehaving(put=1.0)), [0])], 0)
    assert promotions.held == 3 * mmap.PAGESIZE
    await ended(promotions)
    assert promotions.counts == {"promoted": 3, "unpromoted": 5}
    await promotions.aclose()


async def test_large_copies_are_made_in_a_thread() -> None:
    large = StoreLayout({"odd": 300_000}, LAYOUT.schema)
    promotions, target = Promotions(room=4 << 20), CheckedStore(MemoryBackend(), large)
    pages = [record_of(key, large).payload for key in EIGHT_KEYS]
    await promotions.offer(EIGHT_KEYS, pages, [(target, range(8))], 0)
    await ended(promotions)
    assert await pages_kit.get(target, EIGHT_KEYS) == [HIT] * 8
    assert promotions.counts["promoted"] == 8
    await promotions.aclose()
    await target.aclose()


@in_world
async def test_what_is_read_while_it_is_being_deleted_is_not_promoted_afterwards(loop: SimulatedLoop) -> None:
    """The farther store is asked before it has deleted the pages, and answers when all stores have."""
    read, deleted = asyncio.Event(), asyncio.Event()

    class Far(Backend):
        async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
            results = await super().get(keys, records)
            read.set()
            await deleted.wait()
            return results

        async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
            await read.wait()
            return await super().delete(keys)

    near, far = Backend("near"), Far("far")
    store = tiers(near, far)
    await checked(far).put(EIGHT_KEYS, payloads())
    deleting = loop.create_task(store.delete(EIGHT_KEYS))
    await asyncio.sleep(0.001)
    reading = loop.create_task(fetched(store))
    assert await deleting == [HIT] * 8
    deleted.set()
    assert await reading == [HIT] * 8
    await ended(store.promotions)
    assert not near.pages, "they are back in the nearer store"
    await store.aclose()


# coming and going


@in_world
async def test_names_and_positions(loop: SimulatedLoop) -> None:
    store = tiers(Backend("near"), Backend("far"))
    with pytest.raises(ConfigError, match="name="):
        store.attach(AttachedStore(checked(Backend("other")), StoreOptions("a")))
    with pytest.raises(ConfigError, match="position"):
        store.attach(AttachedStore(checked(Backend("other")), StoreOptions("c")), 3)
    with pytest.raises(ConfigError, match="a, b"):
        store.find(None)
    with pytest.raises(ConfigError, match=r"'x'.*a, b"):
        store.find("x")
    store.attach(AttachedStore(checked(Backend("other")), StoreOptions("c")), 1)
    assert store.names == ("a", "c", "b")
    store.detach(store.find("c"))
    store.detach(store.find("a"))
    assert store.find(None).options.name == "b"
    await store.aclose()


@in_world
async def test_who_is_inside_a_store_that_leaves_finishes_and_nobody_else_enters(loop: SimulatedLoop) -> None:
    near, far = Backend("near", LATE), Backend("far", LATE)
    store = tiers(near, far, policies=[StoreOptions("a", promote=False)])
    await stored(store, EIGHT_KEYS[:4])
    reading = loop.create_task(fetched(store))
    await near.begun.wait()
    leaving = store.find("a"), store.find("b")
    for attached in leaving:
        store.detach(attached)
    closing = [loop.create_task(store.aclose_detached(attached)) for attached in leaving]
    assert await store.exists(EIGHT_KEYS) == [MISS] * 8
    assert await reading == [HIT] * 4 + [MISS] * 4, "the nearer one was left in the middle"
    await asyncio.gather(*closing)
    assert not far.asked, "it was asked although it had been detached"
    assert (near.closed_times, far.closed_times) == (1, 1)
    await store.aclose()
    assert (near.closed_times, far.closed_times) == (1, 1)


@in_world
async def test_what_is_not_ours_is_not_closed(loop: SimulatedLoop) -> None:
    mine, yours = Backend("mine"), Backend("yours")
    store = tiers(mine)
    store.attach(AttachedStore(checked(yours), StoreOptions("yours"), owned=False), 0)
    store.detach(store.find("yours"))
    await store.aclose()
    assert (mine.closed_times, yours.closed_times) == (1, 0)


# everything at once


class Crowd:
    """Tasks that do anything to the same stores at any time; some are cancelled at some await."""

    def __init__(self, loop: SimulatedLoop, hostility: Hostility) -> None:
        self.loop = loop
        self.random = Random(f"crowd {loop.seed}")
        self.hostility = hostility
        self.backends: list[Backend] = []
        self.store = TieredStore(threads=0, room=mmap.PAGESIZE)
        self.hits = 0

    async def run(self) -> None:
        self.attach()
        self.attach()
        tasks = [self.loop.create_task(self.client(Random(f"{self.loop.seed} {i}"))) for i in range(6)]
        for task in tasks[:3]:
            if self.random.random() < 0.5:
                self.loop.cancel_at(task, self.random.randint(1, 80))
        for _ in range(10):
            await asyncio.sleep(self.random.random() * 0.1)
            await self.change()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        await ended(self.store.promotions)
        self.nothing_is_held()
        await self.store.aclose()
        assert [backend.closed_times for backend in self.backends] == [1] * len(self.backends)

    def attach(self) -> None:
        name = f"s{len(self.backends)}"
        backend = Backend(name, self.hostility, self.loop.seed)
        options = StoreOptions(name, write=self.random.random() < 0.8, promote=self.random.random() < 0.8)
        self.backends.append(backend)
        self.store.attach(AttachedStore(checked(backend), options), self.random.randint(0, len(self.store.names)))

    async def change(self) -> None:
        match self.random.randrange(4):
            case 0 if len(self.store.names) < 3:
                self.attach()
            case 1 if self.store:
                attached = self.store.find(self.random.choice(self.store.names))
                self.store.detach(attached)
                await self.store.aclose_detached(attached)
            case 2:
                with suppress(BackendError):
                    await self.store.clear()

    async def client(self, random: Random) -> None:
        for _ in range(15):
            keys = random.sample(EIGHT_KEYS, random.randint(1, 6))
            match random.randrange(5):
                case 0 | 1:
                    assert set(await stored(self.store, keys)) <= {HIT, FAILED}
                case 2 | 3:
                    self.hits += (await fetched(self.store, keys)).count(HIT)
                case _:
                    await self.store.delete(keys[:1])

    def nothing_is_held(self) -> None:
        assert all(backend.holding == 0 for backend in self.backends)
        assert self.store.promotions.held == 0


@pytest.mark.parametrize(
    "hostility", [HONEST, Hostility(unavailable=0.1, failed=0.1, wrong=0.1, short=0.1, empty=0.1, vanished=0.1)]
)
@pytest.mark.slow(1)
def test_anything_at_any_time(hostility: Hostility) -> None:
    hits = promoted = 0
    for seed in range(16):
        crowds: list[Crowd] = []

        async def main(loop: SimulatedLoop, crowds: list[Crowd] = crowds) -> None:
            crowds.append(Crowd(loop, hostility))
            await crowds[0].run()

        simulate(main, seed)
        hits += crowds[0].hits
        promoted += crowds[0].store.promotions.counts["promoted"]
    assert hits > 100
    assert promoted > 10


@in_world
async def test_honest_stores_agree_with_a_dict(loop: SimulatedLoop) -> None:
    random = Random(loop.seed)
    backends = [Backend(name) for name in "abc"]
    policies = {name: StoreOptions(name, write=random.random() < 0.6, promote=random.random() < 0.6) for name in "abc"}
    store = tiers(*backends, policies=list(policies.values()))
    model: list[set[PageKey]] = [set(), set(), set()]
    for _ in range(60):
        keys = random.sample(EIGHT_KEYS, random.randint(1, 6))
        there = [HIT if any(key in held for held in model) else MISS for key in keys]
        match random.randrange(5):
            case 0:
                writes = [held for name, held in zip("abc", model, strict=True) if policies[name].write]
                assert await stored(store, keys) == [HIT if writes else FAILED] * len(keys)
                for held in writes:
                    held.update(keys)
            case 1:
                assert await store.exists(keys) == there
            case 2:
                assert await store.delete(keys[:2]) == there[:2]
                for held in model:
                    held.difference_update(keys[:2])
            case 3:
                far = random.randrange(3)
                await checked(backends[far]).put(keys, payloads(keys))
                model[far].update(keys)
            case _:
                assert await fetched(store, keys) == there
                await ended(store.promotions)
                for key in keys:
                    first = next((i for i in range(3) if key in model[i]), 0)
                    for i in range(first):
                        if policies["abc"[i]].promote:
                            model[i].add(key)
        assert [set(backend.pages) for backend in backends] == model
    await store.aclose()


async def test_a_page_is_written_to_all_stores_at_once() -> None:
    class Meets(WrappedBackend):
        async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
            await both.wait()
            return await super().put(keys, records)

    both = asyncio.Barrier(2)
    store = tiers(Meets(MemoryBackend()), Meets(MemoryBackend()))
    async with asyncio.timeout(20):
        assert await store.put(EIGHT_KEYS, payloads()) == [HIT] * 8
    await store.aclose()


async def test_no_thread_is_left_by_promotions_whose_closing_was_cancelled() -> None:
    class LetsGoLate:
        async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
            return [HIT] * len(keys)

    promotions = Promotions()
    page = memoryview(bytearray(1 << 20))  # so large that a thread copies it
    await promotions.offer([EIGHT_KEYS[0]], [page], [(LetsGoLate(), [0])], 0)
    closing = asyncio.create_task(promotions.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await ended(promotions)
    assert not [thread for thread in threading.enumerate() if "promotion" in thread.name]
