"""Stores are attached and detached while requests go on, and whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, PrefetchStatus
from asynccache.config import CacheConfig
from asynccache.core.audit import check
from asynccache.core.plan import BackupHost, BackupStorage
from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import stores as stores_module
from asynccache.runtime.core_calls import holding
from asynccache.storage import CheckedStore, PageKey, Record, Result, attachment
from asynccache.storage import attachment as opening_module
from asynccache.storage.call_guard import LET_GO
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import PAGE, local, opened, parts, push_out, serve, settings, settled, text, turns, until
from tests.runtime.test_hung_storage import Hangs
from tests.runtime.test_hung_storage import serve as serve_hung
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate
from tests.simulated.synchronous import SynchronousRuntime, core_config

# Stores are attached and detached while requests go on.


class Gated(MemoryBackend):
    """Calls that carry pages wait at a gate, if it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.inside = self.closed_times = 0
        self.down = False

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._pass()
        return await super().get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._pass()
        return await super().put(keys, records)

    async def _pass(self) -> None:
        self.inside += 1
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        if self.down:
            raise Unavailable("down")

    async def aclose(self) -> None:
        assert not self.inside, "it is closed while somebody is inside"
        await self.may_close.wait()
        self.closed_times += 1


class Scheme:
    """``gated:``, a scheme whose stores take a while to open and to close."""

    def __init__(self) -> None:
        self.opened: list[Gated] = []
        self.broken = False
        self.unclean = False

    async def open(self, url: Any, layout: Any) -> Gated:
        url.allow_only(("size",))
        await turns(2)
        if self.broken:
            raise Unavailable("not now")
        backend = Gated()
        closed = backend.aclose

        async def aclose() -> None:
            await turns(2)
            await closed()
            if self.unclean:
                raise BackendError("it burns")

        backend.aclose = aclose  # type: ignore[method-assign]
        self.opened.append(backend)
        return backend

    @property
    def left_open(self) -> int:
        return sum(not backend.closed_times for backend in self.opened)


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheme]:
    gated, real = Scheme(), opening_module.backend_class
    monkeypatch.setattr(opening_module, "backend_class", lambda name: gated if name == "gated" else real(name))
    yield gated
    assert not gated.left_open, "a store was left open"
    assert all(backend.closed_times == 1 for backend in gated.opened), "it was closed twice"


def pages_of(backend: Any) -> int:
    return int(backend.stats()["pages"])


# attaching


async def test_hits_come_from_a_store_that_is_attached_later() -> None:
    backend = MemoryBackend()
    async with opened(settings(host=32), storage=backend) as cache:
        await serve(cache, text(4, extra=1))
        await cache.flush()
    async with opened(settings(host=32)) as cache:
        assert cache.prefetch(text(4)).result == (PrefetchStatus.SKIPPED, 0, "no storage")
        assert await serve(cache, text(4, seed=1, extra=1)) == 0
        assert cache.stores == {}
        assert await cache.attach_storage(backend) == "MemoryBackend"
        assert list(cache.stores) == list(cache.statistics().stores) == ["MemoryBackend"]
        assert await serve(cache, text(4, extra=1)) == 4 * PAGE
        assert cache.statistics().lookups.hits["storage"] == 4 * PAGE
    await backend.aclose()


async def test_what_is_on_the_host_already_is_stored_there_too(scheme: Scheme) -> None:
    async with opened(settings(device=40, host=80)) as cache:
        for seed in range(6):
            await serve(cache, text(4, seed=seed))
        await settled(cache)
        await cache.attach_storage("gated:", name="disk")
        await until(lambda: pages_of(scheme.opened[0]) == 24)
        await settled(cache)
        assert (await cache.flush()) == (0, 0)
        await cache.attach_storage("gated:", name="other", backfill=False)
        await serve(cache, text(3, seed=9))
        await cache.flush()
        assert [pages_of(backend) for backend in scheme.opened] == [27, 3]
        await cache.attach_storage("gated:?name=third&write=no")
        await settled(cache)
        assert [pages_of(backend) for backend in scheme.opened] == [27, 3, 0]
        await cache.attach_storage("gated:?name=fourth")
        await until(lambda: pages_of(scheme.opened[3]) == 27)


async def test_requests_go_on_while_a_store_is_filled(scheme: Scheme) -> None:
    """No more than a few of its backups are in flight, and nobody waits for them."""
    async with opened(settings(device=80, host=160)) as cache:
        for seed in range(38):
            await serve(cache, text(2, seed=seed))
        await settled(cache)
        await cache.attach_storage("gated:")
        scheme.opened[0].gate.clear()
        await turns()
        assert 0 < len(parts(cache).driver.ops) <= stores_module.BACKFILL_OPS + 1
        async with asyncio.timeout(60):
            assert await serve(cache, text(2, seed=3, extra=1)) == 2 * PAGE
            assert await serve(cache, text(4, seed=99)) == 0
        scheme.opened[0].gate.set()
        await until(lambda: pages_of(scheme.opened[0]) == 80)


async def test_what_cannot_be_attached_changes_nothing(scheme: Scheme) -> None:
    async with opened(settings()) as cache:
        for attempt in (cache.attach_storage("memory:"), cache.detach_storage()):
            with pytest.raises(ConfigError, match="host tier"):
                await attempt
    async with opened(settings(host=16)) as cache:
        await cache.attach_storage("gated:")
        refused: list[tuple[str, dict[str, Any], str]] = [
            ("gated:", {}, "name="),
            ("gated:?name=b", {"position": 2}, "position"),
            ("gated:?write=perhaps&name=b", {}, "write"),
            ("gated:?name=b&colour=red", {}, "colour"),
            ("nowhere:", {}, "nowhere"),
            ("none", {}, "nothing to attach"),
            ("gated:", {"options": {"name": "b", "colour": "red"}}, "colour"),
        ]
        for url, options, match in refused:
            with pytest.raises(ConfigError, match=match):
                await cache.attach_storage(url, **options)
        assert len(scheme.opened) == 1, "it was opened although it could not be attached"
        scheme.broken = True
        with pytest.raises(Unavailable):
            await cache.attach_storage("gated:?name=b")
        backend = MemoryBackend()
        with pytest.raises(ConfigError, match="colour"):
            await cache.attach_storage(backend, options={"colour": "red"})
        other = CheckedStore(backend, store_layout(settings(mamba=2).pools()))
        with pytest.raises(ConfigError, match="pages of"):
            await cache.attach_storage(other)
        assert list(cache.stores) == ["gated"]
        assert scheme.left_open == 1
        await other.aclose()
        with pytest.raises(ConfigError, match="'b'"):
            await cache.detach_storage("b")


async def test_the_nearest_is_asked_first_and_a_position_can_be_chosen(scheme: Scheme) -> None:
    async with opened(settings(device=8, host=16)) as cache:
        await cache.attach_storage("gated:?name=far")
        await cache.attach_storage("gated:?name=near", position=0)
        await cache.attach_storage("gated:?name=farthest")
        assert list(cache.stores) == ["near", "far", "farthest"]


async def test_attaching_may_be_cancelled_at_any_await(scheme: Scheme) -> None:
    async with opened(settings(host=16)) as cache:
        ends = set()
        for number in range(14):
            attaching_it = asyncio.create_task(cache.attach_storage("gated:", name=f"n{number}"))
            await (until(attaching_it.done) if number == 13 else turns(number))
            attaching_it.cancel()
            ends.add((await asyncio.gather(attaching_it, return_exceptions=True))[0] == f"n{number}")
            assert scheme.left_open == len(cache.stores)
            check(parts(cache).core)
        assert ends == {False, True}, "it was never put to the test"


async def test_two_backends_of_one_class_can_be_attached_at_the_same_time() -> None:
    backends = [MemoryBackend() for _ in range(3)]
    async with opened(settings(host=16), storage=backends[0]) as cache:
        async with holding(parts(cache).driver.lock):  # both are open before either is in use
            attaching = [asyncio.create_task(cache.attach_storage(backend)) for backend in backends[1:]]
            await turns(10)
        assert await asyncio.gather(*attaching) == ["MemoryBackend-2", "MemoryBackend-3"]
    for backend in backends:
        await backend.aclose()


async def test_two_backends_of_one_class_can_be_attached() -> None:
    backends = [MemoryBackend(), MemoryBackend()]
    async with opened(settings(host=16), storage=backends[0]) as cache:
        assert await cache.attach_storage(backends[1]) == "MemoryBackend-2"
        assert list(cache.stores) == ["MemoryBackend", "MemoryBackend-2"]
        with pytest.raises(ConfigError, match="attached already"):
            await cache.attach_storage(MemoryBackend(), name="MemoryBackend-2")
    for backend in backends:
        await backend.aclose()


async def test_what_is_given_is_left_to_its_owner() -> None:
    backend = Gated()
    checked = CheckedStore(MemoryBackend(), store_layout(settings().pools()))
    async with opened(settings(host=16)) as cache:
        await cache.attach_storage(backend)
        await cache.attach_storage(checked)
        await cache.detach_storage("MemoryBackend")
        assert await checked.exists([PageKey("full", bytes(32))]) == [Result.MISS], "it was closed"
    assert not backend.closed_times
    await checked.aclose()


# detaching


async def test_what_is_not_stored_yet_is_stored_before_it_goes(scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32, write_policy="write_back", storage="gated:")) as cache:
        await serve(cache, text(4))
        assert pages_of(scheme.opened[0]) == 0
        assert await cache.detach_storage() == (0, 0)
        assert pages_of(scheme.opened[0]) == 4
        assert scheme.opened[0].closed_times == 1
        assert await cache.flush() == (0, 0)
        assert await serve(cache, text(4, extra=1)) == 4 * PAGE
        assert cache.prefetch(text(6)).result == (PrefetchStatus.SKIPPED, 0, "no storage")
        with pytest.raises(ConfigError, match="attached: none"):
            await cache.detach_storage()


async def test_what_could_not_be_stored_is_said(scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32, storage="gated:")) as cache:
        scheme.opened[0].down = True
        await serve(cache, text(4))
        assert await cache.detach_storage() == (0, 4)
        await cache.attach_storage("gated:", backfill=False)
        scheme.opened[1].gate.clear()
        detaching = asyncio.create_task(cache.detach_storage(timeout=0.05))
        await until(lambda: not cache.stores)
        scheme.opened[1].gate.set()
        assert await detaching == (0, 4)
        assert await cache.flush() == (0, 0), "there is no storage"


async def test_without_draining_it_goes_at_once(scheme: Scheme) -> None:
    config = settings(device=16, host=32, write_policy="write_back", storage="gated:")
    async with opened(config) as cache:
        await serve(cache, text(4))
        assert await cache.detach_storage(timeout=0) == (4, 0)
        assert pages_of(scheme.opened[0]) == 0


async def test_a_request_that_is_fetching_from_it_computes_what_it_did_not_get(scheme: Scheme) -> None:
    config = settings(device=12, host=24, storage="gated:", prefetch_policy="wait_complete")
    async with opened(config) as cache:
        await cache.attach_storage("gated:?name=other&write=no")
        await serve(cache, text(8, extra=1))
        await cache.flush()
        for seed in range(1, 5):
            await serve(cache, text(8, seed=seed))
        await cache.flush()
        first = scheme.opened[0]
        first.gate.clear()
        request = asyncio.create_task(serve(cache, text(8, extra=1)))
        await until(lambda: first.inside > 0)
        detaching = asyncio.create_task(cache.detach_storage("gated", timeout=0))
        await until(lambda: list(cache.stores) == ["other"])
        await turns()
        assert not detaching.done()
        assert not first.closed_times
        first.gate.set()
        await detaching
        assert await request in (0, 8 * PAGE), "whatever was read is right, see serve"
        assert await serve(cache, text(8, seed=7)) == 0


async def test_pages_that_are_being_written_are_let_go_of_before_it_is_closed(scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32, storage="gated:")) as cache:
        await cache.attach_storage("gated:?name=other")
        first, other = scheme.opened
        first.gate.clear()
        await serve(cache, text(4))
        await until(lambda: first.inside > 0)
        detaching = asyncio.create_task(cache.detach_storage("gated", timeout=0))
        await until(lambda: list(cache.stores) == ["other"])
        first.gate.set()
        await detaching
        await settled(cache)
        before = cache.statistics().stages["backup_storage"].ops
        assert await cache.flush() == (0, 0)
        assert cache.statistics().stages["backup_storage"].ops > before, "it passed for stored, and nobody knows where"
        assert pages_of(other) == 4


async def test_detaching_may_be_cancelled_at_any_await(scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32)) as cache:
        closing, done = 40, 41
        ends = set()
        for number in range(42):
            await cache.attach_storage("gated:", name="it", backfill=number % 2 == 0)
            await serve(cache, text(2, seed=number))
            store = scheme.opened[-1]
            if number == closing:
                store.may_close.clear()
            detaching = asyncio.create_task(cache.detach_storage())
            await (until(lambda: not cache.stores) if number == closing else turns(number))
            if number == done:
                await detaching
            detaching.cancel()
            store.may_close.set()
            await asyncio.gather(detaching, return_exceptions=True)
            ends.add((detaching.cancelled(), bool(cache.stores)))
            if cache.stores:
                await cache.detach_storage()
            await until(lambda: scheme.left_open == 0)
            check(parts(cache).core)
        assert ends == {(True, True), (True, False), (False, False)}, "it was never put to the test"


async def test_of_two_who_detach_the_same_store_one_does(scheme: Scheme) -> None:
    async with opened(settings(host=16, storage="gated:")) as cache:
        scheme.opened[0].gate.clear()
        await serve(cache, text(2))
        detaching = [asyncio.create_task(cache.detach_storage()) for _ in range(2)]
        await turns()
        scheme.opened[0].gate.set()
        answers = await asyncio.gather(*detaching, return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["ConfigError", "Unsaved"]


async def test_a_store_that_cannot_close_is_gone_all_the_same(scheme: Scheme) -> None:
    async with opened(settings(host=16, storage="gated:")) as cache:
        scheme.unclean = True
        with pytest.raises(BackendError, match="burns"):
            await cache.detach_storage()
        assert cache.closed is None
        assert await serve(cache, text(2)) == 0
        scheme.unclean = False
        await cache.attach_storage("gated:")


@pytest.mark.parametrize("when", range(0, 12, 2))
async def test_the_cache_may_be_closed_while_stores_come_and_go(scheme: Scheme, when: int) -> None:
    async with opened(settings(device=16, host=32, storage="gated:?name=first"), idle=False) as cache:
        await serve(cache, text(4))
        doing = [asyncio.create_task(cache.attach_storage("gated:")),
                 asyncio.create_task(cache.detach_storage("first"))]  # fmt: skip
        await turns(when)
        await cache.aclose()
        for answer in await asyncio.gather(*doing, return_exceptions=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, (CacheClosed, RuntimeError))
    assert not scheme.left_open


# everything else, with several of them


async def test_what_is_forgotten_is_forgotten_in_every_store(scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32, storage=("gated:?name=a", "gated:?name=b"))) as cache:
        await serve(cache, text(4), namespace=None)
        await cache.flush()
        assert [pages_of(backend) for backend in scheme.opened] == [4, 4]
        await cache.invalidate()
        assert [pages_of(backend) for backend in scheme.opened] == [0, 0]
        await serve(cache, text(4, seed=1), namespace=None, pools=())
        await cache.flush()
        scheme.opened[0].down = True
        await cache.reset()
        assert [pages_of(backend) for backend in scheme.opened] == [0, 0]
        await cache.detach_storage("a")
        await cache.reset()
        assert cache.statistics().core.nodes == 0


async def test_a_page_that_one_store_lost_comes_from_the_other(scheme: Scheme) -> None:
    async with opened(settings(device=12, host=12, storage=("gated:?name=a", "gated:?name=b"))) as cache:
        for seed in range(4):
            await serve(cache, text(4, seed=seed))
        await cache.flush()
        await MemoryBackend.clear(scheme.opened[0])
        assert await serve(cache, text(4, extra=1)) == 4 * PAGE
        assert cache.statistics().stores["b"]["get_pages"] == 4
        await until(lambda: pages_of(scheme.opened[0]) >= 4)
        assert cache.statistics().storage["promoted_pages"] == 4
        assert cache.statistics().storage["pages"] == sum(map(pages_of, scheme.opened))


async def test_closing_closes_those_that_are_ours(scheme: Scheme) -> None:
    async with opened(settings(host=16, storage=("gated:?name=a", "gated:?name=b"))) as cache:
        await cache.attach_storage("gated:?name=c")
    assert [backend.closed_times for backend in scheme.opened] == [1, 1, 1]


async def test_a_cache_whose_second_store_cannot_be_opened_leaves_none_open(scheme: Scheme) -> None:
    for urls in (("gated:", "gated:"), ("gated:", "nowhere:"), ("gated:", "gated:?name=b&size=1&colour=red")):
        with pytest.raises(ConfigError):
            async with AsyncCache(settings(host=16, storage=urls)):
                pass
    with pytest.raises(ConfigError, match="storage_options"):
        settings(host=16, storage=("gated:", "memory:"), storage_options={"size": "1"})


class Attachers:
    """Requests over a few conversations, while stores of two kinds come and go every few of them."""

    def __init__(self, cache: AsyncCache, folder: Path, seed: int) -> None:
        self.cache = cache
        self.folder = folder
        self.random = Random(seed)
        self.served = self.cached = self.changes = 0

    async def requests(self) -> None:
        while self.changes < 14:
            tokens = text(self.random.randint(1, 6), seed=self.random.randrange(6), extra=1)
            self.cached += await serve(self.cache, tokens)
            self.served += 1

    async def stores(self, every: int) -> None:
        while self.changes < 14:
            at = self.served + every
            await until(lambda at=at: self.served >= at)  # type: ignore[misc]
            for name, url in (("near", "memory:?capacity=64KiB"), ("disk", f"file:{self.folder}/kv?capacity=1MiB")):
                self.changes += 1
                if name not in self.cache.stores:
                    await self.cache.attach_storage(url, name=name, position=0 if name == "near" else None)
                elif self.random.random() < 0.7:
                    await self.cache.detach_storage(name, timeout=self.random.choice((0, 0.01)))


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.slow(1)
async def test_under_stress_every_byte_is_right_and_no_request_fails(policy: str, tmp_path: Path) -> None:
    config: CacheConfig = settings(device=24, host=24, write_policy=policy, prefetch_policy="wait_complete")
    async with opened(config) as cache:
        world = Attachers(cache, tmp_path, 1)
        await asyncio.gather(*[world.requests() for _ in range(3)], world.stores(every=7))
        assert world.served > 40
        assert cache.statistics().lookups.hits["storage"] > 0, "no store was ever of use"
        assert all(figures["corrupt_pages"] == 0 for figures in cache.statistics().stores.values())
        await push_out(cache, 4)


# Attaching and detaching when a store fails as a whole: what was opened is closed, what cannot be kept is not.


class Kept(MemoryBackend):
    """It knows whether it was closed, and may refuse to be cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_times = 0
        self.stubborn = False
        self.refused = ""

    def register(self, pool: str, memory: memoryview) -> None:
        if pool == self.refused:
            raise BackendError(f"no {pool}")
        super().register(pool, memory)

    async def clear(self) -> None:
        if self.stubborn:
            raise Unavailable("stubborn")
        await super().clear()

    async def aclose(self) -> None:
        self.closed_times += 1
        self.stubborn = False
        await super().aclose()


class KeptScheme:
    """``kept:``; ``error``: what opening raises."""

    def __init__(self) -> None:
        self.opened: list[Kept] = []
        self.error: Exception | None = None
        self.refused = ""

    async def open(self, url: Any, layout: Any) -> Kept:
        if self.error is not None:
            raise self.error
        self.opened.append(Kept())
        self.opened[-1].refused = self.refused
        return self.opened[-1]


@pytest.fixture
def kept_scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptScheme]:
    found = KeptScheme()
    monkeypatch.setattr(attachment, "backend_class", lambda name: found)
    yield found
    assert [backend.closed_times for backend in found.opened] == [1] * len(found.opened)


async def test_a_store_that_refuses_the_memory_of_the_pages_is_closed_again(kept_scheme: KeptScheme) -> None:
    kept_scheme.refused = "full"
    with pytest.raises(BackendError, match="no full"):
        async with opened(settings(host=16, storage=["kept:?name=a", "kept:?name=b"])):
            pytest.fail("it was opened")
    assert [backend.closed_times for backend in kept_scheme.opened] == [1, 1]
    kept_scheme.refused = ""
    async with opened(settings(host=16, storage="kept:?name=a")) as cache:
        kept_scheme.refused = "full"
        with pytest.raises(BackendError, match="no full"):
            await cache.attach_storage("kept:?name=b")
        assert list(cache.stores) == ["a"]


@pytest.mark.parametrize("stubborn", [0, 1])
async def test_of_two_stores_the_one_that_can_is_cleared(kept_scheme: KeptScheme, stubborn: int) -> None:
    async with opened(settings(device=8, host=16)) as cache:
        await cache.attach_storage("kept:?name=a")
        await cache.attach_storage("kept:?name=b")
        await serve(cache, text(4, extra=1))
        await cache.flush()
        assert [pages_of(backend) for backend in kept_scheme.opened] == [4, 4]
        kept_scheme.opened[stubborn].stubborn = True
        with pytest.raises(BackendError, match="stubborn"):
            await cache.reset()
        assert [pages_of(backend) for backend in kept_scheme.opened] == ([4, 0] if stubborn == 0 else [0, 4])
        assert (await cache.match(text(4))).device == 0
        await serve(cache, text(4, 1, extra=1))
        await cache.flush()
        assert [pages_of(backend) for backend in kept_scheme.opened] == ([8, 4] if stubborn == 0 else [4, 8])


@pytest.mark.slow(4)
def test_what_has_left_the_tree_while_the_store_was_away_is_not_kept() -> None:
    run, random = SynchronousRuntime(core_config(device=32, host=64)), Random(1)
    unstored = run.core._transfers.unstored
    for _ in range(500):
        run.insert("".join(random.choices(ascii_letters, k=4)))
        run.complete(*run.in_flight(BackupHost))
        run.fail(*run.in_flight(BackupStorage))
    assert len(unstored) > 10, "it was never put to the test"
    assert len(unstored) < 2 * run.core.world.counters.nodes


# Requests go on while storage is cleared: what they publish is stored afterwards, and nothing older is.


class SlowClears(MemoryBackend):
    """Clearing waits for a permit first."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)
        self.clearing = 0

    async def clear(self) -> None:
        self.clearing += 1
        await self.permits.acquire()
        await super().clear()


async def test_what_is_published_while_storage_is_cleared_is_stored_afterwards() -> None:
    storage = SlowClears()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(2))
        await cache.flush()
        resetting = asyncio.create_task(cache.reset())
        await until(lambda: storage.clearing == 1)
        await serve(cache, text(4, seed=1))
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: local(cache).backup_host.meter.ops > 1)
        await turns()
        assert not flushing.done()
        storage.permits.release()
        await resetting
        assert await flushing == (0, 0)
    assert storage.stats()["pages"] == 4
    storage.permits.release()  # closing clears
    await storage.aclose()


async def test_the_first_of_two_resets_to_finish_does_not_end_the_other() -> None:
    storage = SlowClears()
    async with opened(settings(host=32), storage=storage) as cache:
        resets = [asyncio.create_task(cache.reset()) for _ in range(2)]
        await until(lambda: storage.clearing == 2)
        await serve(cache, text(4))
        storage.permits.release()
        await asyncio.wait(resets, return_when=asyncio.FIRST_COMPLETED)
        await turns()
        assert cache.prefetch(text(6)).result == (PrefetchStatus.SKIPPED, 0, "storage is being cleared")
        assert storage.stats()["pages"] == 0
        storage.permits.release()
        await asyncio.gather(*resets)
        assert await cache.flush() == (0, 0)
        assert storage.stats()["pages"] == 4
    storage.permits.release()  # closing clears
    await storage.aclose()


async def test_a_backup_held_back_before_the_tree_is_forgotten_is_never_stored() -> None:
    storage, device = SlowClears(), CpuDevice()
    storage.permits.release()
    async with opened(settings(host=32), device=device, storage=storage) as cache:
        driver, ready = parts(cache).driver, device.gate()
        async with cache.lease(text(4)) as lease:
            await lease.commit(text(4), after=ready)
        async with holding(driver.lock):
            resetting = asyncio.create_task(cache.reset())
            await turns()
            ready.open()
            await until(lambda: driver.unapplied > 0)
            driver.apply_outcomes()
            assert driver.saving, "the ack began a backup_storage"
        await resetting
        await settled(cache)
        assert storage.stats()["pages"] == 0
        assert cache.statistics().host["full"].free == 32
    storage.permits.release()  # closing clears
    await storage.aclose()
    await device.aclose()


# A store that hangs delays an invalidation, a reset or its own detaching by its own time-outs at most, and only if it
# has something to do with it. In virtual time.


TIMEOUT = 5.0
BOUND = 2 * TIMEOUT + 1.0


class Deaf(Hangs):
    """The verb that hangs, alone, may also be ``delete`` or ``flush``."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb, alone=True)

    async def flush(self) -> None:
        await self._hang("flush")

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        await self._hang("delete")
        return await self.inner.delete(keys)


@asynccontextmanager
async def with_a_deaf(verb: str) -> AsyncIterator[tuple[AsyncCache, Deaf]]:
    device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Deaf(verb)
    config = settings(20, 40, close_timeout=1.0)
    store = CheckedStore(backend, store_layout(config.pools()), threads=0, timeout=TIMEOUT)
    async with AsyncCache(config, device=device) as cache:
        await cache.attach_storage(store, options={"timeout": str(TIMEOUT)})
        await publish(cache, "other", seed=3)
        await cache.flush()
        backend.hung.set()
        try:
            yield cache, backend
        finally:
            backend.answers.set()
            await asyncio.sleep(0.1)
    await store.aclose()
    await device.aclose()


async def publish(cache: AsyncCache, namespace: str, seed: int) -> None:
    async with cache.lease(text(5, seed=seed), namespace=namespace) as lease:
        await lease.commit(text(5, seed=seed))


def simulated(verb: str, test: Callable[[AsyncCache, Deaf], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: SimulatedLoop) -> None:
        async with with_a_deaf(verb) as (cache, backend):
            await test(cache, backend)

    simulate(main, 1)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_invalidation_does_not_wait_for_a_write_of_another_namespace() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        await cache.invalidate("other")
        assert now() - begun < 0.05
        assert backend.stats()["pages"] == 0

    simulated("put", test)


def test_backups_of_the_namespace_that_wait_for_the_store_are_given_up() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        for seed in range(4, 7):
            await publish(cache, "other", seed)
        await asyncio.sleep(0.05)
        assert backend.holding >= 1
        begun = now()
        await cache.invalidate("other")
        assert now() - begun <= BOUND + 0.1

    simulated("put", test)


@pytest.mark.parametrize("verb", ["put", "delete"])
def test_an_invalidation_waits_no_longer_than_the_stores_time_outs_for_its_own_pages(verb: str) -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        if verb == "put":
            await publish(cache, "other", seed=1)
            await asyncio.sleep(0.05)
        begun = now()
        await cache.invalidate("other")
        assert TIMEOUT < now() - begun <= BOUND + 0.1
        assert await serve_hung(cache, text(5, seed=3)) == 0

    simulated(verb, test)


@pytest.mark.parametrize("verb", ["put", "clear"])
def test_a_reset_says_that_a_store_hangs_after_its_time_outs(verb: str) -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "other", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        with pytest.raises(BackendError):
            await cache.reset()
        assert TIMEOUT < now() - begun <= BOUND + 0.1
        assert await serve_hung(cache, text(5, seed=9)) == 0
        assert cache.closed is None

    simulated(verb, test)


def test_a_store_that_hangs_is_detached_and_closes_when_it_lets_go() -> None:
    async def test(cache: AsyncCache, backend: Deaf) -> None:
        await publish(cache, "hangs", seed=1)
        await asyncio.sleep(0.05)
        begun = now()
        with pytest.raises(BackendError, match="does not end"):
            await cache.detach_storage(timeout=0)
        assert now() - begun <= BOUND + 0.1
        assert not list(cache.stores)
        assert backend.holding, "the store has let go: this shows nothing"
        assert await serve_hung(cache, text(5, seed=9)) == 0

    simulated("put", test)


def test_a_flush_with_a_time_out_ends_by_it_though_the_store_lets_nothing_go() -> None:
    async def main(loop: SimulatedLoop) -> None:
        device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Deaf("flush")
        backend.hung.set()
        async with AsyncCache(settings(20, 40), device=device, storage=backend) as cache:
            await publish(cache, "other", seed=1)
            begun = now()
            with pytest.raises(TimeoutError):
                await cache.flush(timeout=1.0)
            assert now() - begun <= 1.0 + LET_GO + 0.1
            backend.answers.set()
        await device.aclose()

    simulate(main, 1)
