"""Stores are attached and detached while requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, PrefetchStatus
from asynccache.config import CacheConfig
from asynccache.core.audit import check
from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.runtime import stores as stores_module
from asynccache.runtime.core_calls import holding
from asynccache.storage import CheckedStore, PageKey, Record, Result
from asynccache.storage import attachment as opening_module
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import PAGE, opened, parts, push_out, serve, settings, settled, text, turns, until


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
