"""Stores are attached and detached while requests go on, and whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from random import Random
from string import ascii_letters
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, PrefetchStatus
from asynccache.core.audit import check
from asynccache.core.plan import BackupHost, BackupStorage
from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.runtime import stores as stores_module
from asynccache.runtime.core_calls import holding
from asynccache.storage import CheckedStore, PageKey, Result, attachment
from asynccache.storage.call_guard import LET_GO
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import (
    PAGE,
    Attended,
    Hangs,
    cache_over,
    gate,
    now,
    opened,
    parts,
    publish,
    serve,
    settings,
    settled,
    simulated,
    text,
    turns,
    until,
)
from tests.simulated.synchronous import SynchronousRuntime, core_config


class Gated(Attended):
    """Calls that carry pages wait at a gate, if it is closed; closing takes a while. It may fail in ``fails``."""

    def __init__(self, fails: set[str]) -> None:
        super().__init__()
        self.gate, self.may_close, self.permits = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(1000)
        self.gate.set()
        self.may_close.set()
        self.inside = self.clearing = self.closed_times = 0
        self.fails = fails

    def register(self, pool: str, memory: memoryview) -> None:
        if pool in self.fails:
            raise BackendError(f"no {pool}")
        super().register(pool, memory)

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if verb == "clear":
            self.clearing += 1
            await self.permits.acquire()
            if "clear" in self.fails:
                raise Unavailable("stubborn")
        elif verb in ("get", "put"):
            self.inside += 1
            try:
                await self.gate.wait()
            finally:
                self.inside -= 1
            if "down" in self.fails:
                raise Unavailable("down")

    async def aclose(self) -> None:
        assert not self.inside, "it is closed while somebody is inside"
        await self.may_close.wait()
        await turns(2)
        self.closed_times += 1
        if "close" in self.fails:
            raise BackendError("it burns")


class Scheme:
    """``gated:``, a scheme whose stores take a while to open. ``fails``: what the next ones fail in."""

    def __init__(self) -> None:
        self.opened: list[Gated] = []
        self.fails: set[str] = set()

    async def open(self, url: Any, layout: Any) -> Gated:
        url.allow_only(("size",))
        await turns(2)
        if "open" in self.fails:
            raise Unavailable("not now")
        self.opened.append(Gated(self.fails))
        return self.opened[-1]

    @property
    def left_open(self) -> int:
        return sum(not backend.closed_times for backend in self.opened)

    @property
    def pages(self) -> list[int]:
        return [pages_of(backend) for backend in self.opened]


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheme]:
    gated, real = Scheme(), attachment.backend_class
    monkeypatch.setattr(attachment, "backend_class", lambda name: gated if name == "gated" else real(name))
    yield gated
    assert [backend.closed_times for backend in gated.opened] == [1] * len(gated.opened)


def pages_of(backend: Any) -> int:
    return int(backend.stats()["pages"])


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


async def test_what_is_on_the_host_already_is_stored_there_too(scheme: Scheme) -> None:
    async with opened(settings(device=40, host=80)) as cache:
        for seed in range(6):
            await serve(cache, text(4, seed=seed))
        await settled(cache)
        await cache.attach_storage("gated:", name="disk")
        await until(lambda: pages_of(scheme.opened[0]) == 24)
        await settled(cache)
        assert await cache.flush() == (0, 0)
        await cache.attach_storage("gated:", name="other", backfill=False)
        await serve(cache, text(3, seed=9))
        await cache.flush()
        assert scheme.pages == [27, 3]
        await cache.attach_storage("gated:?name=third&write=no")
        await settled(cache)
        assert scheme.pages == [27, 3, 0]
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


async def test_what_is_given_is_left_to_its_owner() -> None:
    backend = Gated(set())
    checked = CheckedStore(MemoryBackend(), store_layout(settings().pools()))
    async with opened(settings(host=16)) as cache:
        await cache.attach_storage(backend)
        await cache.attach_storage(checked)
        await cache.detach_storage("MemoryBackend")
        assert await checked.exists([PageKey("full", bytes(32))]) == [Result.MISS], "it was closed"
    assert not backend.closed_times
    await checked.aclose()


async def test_two_backends_of_one_class_can_be_attached_at_the_same_time() -> None:
    backends = [MemoryBackend() for _ in range(3)]
    async with opened(settings(host=16), storage=backends[0]) as cache:
        async with holding(parts(cache).driver.lock):  # both are open before either is in use
            attaching = [asyncio.create_task(cache.attach_storage(backend)) for backend in backends[1:]]
            await turns(10)
        assert await asyncio.gather(*attaching) == ["MemoryBackend-2", "MemoryBackend-3"]
        with pytest.raises(ConfigError, match="attached already"):
            await cache.attach_storage(MemoryBackend(), name="MemoryBackend-2")
        await cache.attach_storage(MemoryBackend(), name="near", position=0)
        assert list(cache.stores)[:2] == ["near", "MemoryBackend"]


# The table of what cannot be attached: nothing is changed then, and nothing left open.


REFUSED: list[tuple[str, dict[str, Any], set[str], type[Exception], str]] = [
    ("gated:", {}, set(), ConfigError, "name="),
    ("gated:?name=b", {"position": 2}, set(), ConfigError, "position"),
    ("gated:?write=perhaps&name=b", {}, set(), ConfigError, "write"),
    ("gated:?name=b&colour=red", {}, set(), ConfigError, "colour"),
    ("nowhere:", {}, set(), ConfigError, "nowhere"),
    ("none", {}, set(), ConfigError, "nothing to attach"),
    ("gated:", {"options": {"name": "b", "colour": "red"}}, set(), ConfigError, "colour"),
    ("gated:?name=b", {}, {"open"}, Unavailable, "not now"),
    ("gated:?name=b", {}, {"full"}, BackendError, "no full"),
    ("a backend", {"options": {"colour": "red"}}, set(), ConfigError, "colour"),
    ("of other pages", {}, set(), ConfigError, "pages of"),
]


@pytest.mark.parametrize(("what", "options", "fails", "error", "says"), REFUSED)
async def test_what_cannot_be_attached_changes_nothing(
    what: str, options: dict[str, Any], fails: set[str], error: type[Exception], says: str, scheme: Scheme
) -> None:
    other = CheckedStore(MemoryBackend(), store_layout(settings(mamba=2).pools()))
    given: Any = {"a backend": MemoryBackend(), "of other pages": other}.get(what, what)
    async with opened(settings(host=16)) as cache:
        await cache.attach_storage("gated:")
        scheme.fails |= fails
        with pytest.raises(error, match=says):
            await cache.attach_storage(given, **options)
        assert list(cache.stores) == ["gated"]
        assert len(scheme.opened) == (2 if "full" in fails else 1), "it was opened although it could not be attached"
        assert scheme.left_open == 1
        with pytest.raises(ConfigError, match="'b'"):
            await cache.detach_storage("b")
    await other.aclose()


async def test_without_a_host_tier_nothing_is_attached() -> None:
    async with opened(settings()) as cache:
        for attempt in (cache.attach_storage("memory:"), cache.detach_storage()):
            with pytest.raises(ConfigError, match="host tier"):
                await attempt


@pytest.mark.parametrize(
    ("urls", "fails"),
    [(("gated:", "gated:"), ""), (("gated:", "nowhere:"), ""), (("gated:", "gated:?name=b&size=1&colour=red"), ""),
     (("gated:", "gated:?name=b"), "full")],
)  # fmt: skip
async def test_a_cache_whose_second_store_cannot_be_opened_leaves_none_open(
    urls: tuple[str, ...], fails: str, scheme: Scheme
) -> None:
    scheme.fails |= {fails}
    with pytest.raises((ConfigError, BackendError)):
        async with AsyncCache(settings(host=16, storage=urls)):
            pytest.fail("it was opened")


# Both may be cancelled at any await.


@pytest.mark.parametrize("backfill", [True, False])
async def test_attaching_and_detaching_may_be_cancelled_at_any_await(backfill: bool, scheme: Scheme) -> None:
    async with opened(settings(device=16, host=32)) as cache:
        ends, number, cut = set[tuple[bool, bool]](), 0, True
        while cut:
            attaching = asyncio.create_task(cache.attach_storage("gated:", name="it", backfill=backfill))
            await turns(number)
            cut = attaching.cancel()
            await asyncio.gather(attaching, return_exceptions=True)
            assert scheme.left_open == len(cache.stores)
            ends.add((attaching.cancelled(), bool(cache.stores)))
            if cache.stores:
                await cache.detach_storage()
            number += 1
        assert ends >= {(True, False), (False, True)}, "it was never put to the test"
        ends, number, cut = set(), 0, True
        while cut:
            await cache.attach_storage("gated:", name="it", backfill=backfill)
            await serve(cache, text(2, seed=number))
            store = scheme.opened[-1]
            if number == 20:
                store.may_close.clear()
            detaching = asyncio.create_task(cache.detach_storage())
            await (until(lambda: not cache.stores) if number == 20 else turns(number))
            cut = detaching.cancel()
            store.may_close.set()
            await asyncio.gather(detaching, return_exceptions=True)
            ends.add((detaching.cancelled(), bool(cache.stores)))
            if cache.stores:
                await cache.detach_storage()
            await until(lambda: scheme.left_open == 0)
            check(parts(cache).core)
            number += 1
        assert ends >= {(True, True), (True, False), (False, False)}, "it was never put to the test"


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


@pytest.mark.parametrize(
    ("policy", "fails", "timeout", "unsaved"),
    [("write_through", "down", None, (0, 4)), ("write_through", "gate", 0.05, (0, 4)), ("write_back", "", 0, (4, 0))],
)
async def test_what_could_not_be_stored_is_said(
    policy: str, fails: str, timeout: float | None, unsaved: tuple[int, int], scheme: Scheme
) -> None:
    async with opened(settings(device=16, host=32, storage="gated:", write_policy=policy)) as cache:
        scheme.fails |= {fails}
        if fails == "gate":
            scheme.opened[0].gate.clear()
        await serve(cache, text(4))
        detaching = asyncio.create_task(cache.detach_storage(timeout=timeout))
        await until(lambda: not cache.stores)
        scheme.opened[0].gate.set()
        assert await detaching == unsaved
        assert await cache.flush() == (0, 0), "there is no storage"


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
        scheme.fails |= {"close"}
        with pytest.raises(BackendError, match="burns"):
            await cache.detach_storage()
        assert cache.closed is None
        assert await serve(cache, text(2)) == 0
        scheme.fails.clear()
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
        assert scheme.pages == [4, 4]
        await cache.invalidate()
        assert scheme.pages == [0, 0]
        await serve(cache, text(4, seed=1), namespace=None, pools=())
        await cache.flush()
        scheme.opened[0].fails = {"down"}
        await cache.reset()
        assert scheme.pages == [0, 0]
        await cache.detach_storage("a")
        await cache.reset()
        assert cache.statistics().core.nodes == 0


async def test_a_page_that_one_store_lost_comes_from_the_other(scheme: Scheme) -> None:
    async with opened(settings(device=12, host=12, storage=("gated:?name=a", "gated:?name=b"))) as cache:
        for seed in range(4):
            await serve(cache, text(4, seed=seed))
        await cache.flush()
        await scheme.opened[0].inner.clear()
        assert await serve(cache, text(4, extra=1)) == 4 * PAGE
        assert cache.statistics().stores["b"]["get_pages"] == 4
        await until(lambda: pages_of(scheme.opened[0]) >= 4)
        assert cache.statistics().storage["promoted_pages"] == 4
        assert cache.statistics().storage["pages"] == sum(scheme.pages)


@pytest.mark.parametrize("stubborn", [0, 1])
async def test_of_two_stores_the_one_that_can_is_cleared(stubborn: int, scheme: Scheme) -> None:
    async with opened(settings(device=8, host=16, storage=("gated:?name=a", "gated:?name=b"))) as cache:
        for seed, before in ((0, [0, 0]), (1, [4, 0] if stubborn == 0 else [0, 4])):
            assert scheme.pages == before
            await serve(cache, text(4, seed, extra=1))
            await cache.flush()
            assert scheme.pages == [pages + 4 for pages in before]
            if not seed:
                scheme.opened[stubborn].fails = {"clear"}
                with pytest.raises(Unavailable, match="stubborn"):
                    await cache.reset()
                assert (await cache.match(text(4))).device == 0


@pytest.mark.slow(2)
def test_what_has_left_the_tree_while_the_store_was_away_is_not_kept() -> None:
    run, random = SynchronousRuntime(core_config(device=32, host=64)), Random(1)
    unstored = run.core._transfers.unstored
    for _ in range(250):
        run.insert("".join(random.choices(ascii_letters, k=4)))
        run.complete(*run.in_flight(BackupHost))
        run.fail(*run.in_flight(BackupStorage))
    assert 10 < len(unstored) < 2 * run.core.world.counters.nodes


# Requests go on while storage is cleared: what they publish is stored afterwards, and nothing older is.


async def test_the_first_of_two_resets_to_finish_does_not_end_the_other() -> None:
    storage = Gated(set())
    async with opened(settings(host=32), storage=storage) as cache:
        storage.permits = asyncio.Semaphore(0)
        resets = [asyncio.create_task(cache.reset()) for _ in range(2)]
        await until(lambda: storage.clearing == 2)
        await serve(cache, text(4))
        flushing = asyncio.create_task(cache.flush())
        storage.permits.release()
        await asyncio.wait(resets, return_when=asyncio.FIRST_COMPLETED)
        await turns()
        assert cache.prefetch(text(6)).result == (PrefetchStatus.SKIPPED, 0, "storage is being cleared")
        assert (pages_of(storage), flushing.done()) == (0, False)
        storage.permits.release()
        await asyncio.gather(*resets)
        assert await flushing == (0, 0)
        assert pages_of(storage) == 4


async def test_a_backup_held_back_before_the_tree_is_forgotten_is_never_stored() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        driver, ready = parts(cache).driver, gate(cache)
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
        assert pages_of(storage) == 0
        assert cache.statistics().host["full"].free == 32


# A store that hangs delays an invalidation, a reset, a flush or its own detaching by its own time-outs at most, and
# only if it has something to do with it. In virtual time.


TIMEOUT = 5.0
BOUND = 2 * TIMEOUT + 1.1

Call = Callable[[AsyncCache], Awaitable[object]]


async def invalidate(cache: AsyncCache) -> None:
    await cache.invalidate("other")


async def reset(cache: AsyncCache) -> None:
    await cache.reset()


async def detach(cache: AsyncCache) -> None:
    await cache.detach_storage(timeout=0)


async def flush(cache: AsyncCache) -> None:
    await cache.flush(timeout=1.0)


@pytest.mark.parametrize(
    ("verb", "published", "call", "within", "error"),
    [
        ("put", {"hangs": (1,)}, invalidate, (0.0, 0.05), None),
        ("put", {"hangs": (1,), "other": (4, 5, 6)}, invalidate, (0.0, BOUND), None),
        ("put", {"other": (1,)}, invalidate, (TIMEOUT, BOUND), None),
        ("delete", {}, invalidate, (TIMEOUT, BOUND), None),
        ("put", {"other": (1,)}, reset, (TIMEOUT, BOUND), BackendError),
        ("clear", {"other": (1,)}, reset, (TIMEOUT, BOUND), BackendError),
        ("put", {"hangs": (1,)}, detach, (0.0, BOUND), BackendError),
        ("flush", {"other": (1,)}, flush, (1.0, 1.1 + LET_GO), TimeoutError),
    ],
)
@simulated
async def test_a_store_that_hangs_delays_no_call_by_more_than_its_time_outs(
    verb: str, published: dict[str, Sequence[int]], call: Call, within: tuple[float, float],
    error: type[Exception] | None,
) -> None:  # fmt: skip
    """``published``: seeds of what is written before the call, by namespace."""
    backend = Hangs(verb, alone=True)
    options = {"timeout": str(TIMEOUT)}
    async with cache_over(backend, settings(20, 40, close_timeout=1.0), options, timeout=TIMEOUT) as cache:
        await publish(cache, text(5, seed=3), namespace="other")
        await cache.flush()
        backend.hung.set()
        for namespace, seeds in published.items():
            for seed in seeds:
                await publish(cache, text(5, seed=seed), namespace=namespace)
            await asyncio.sleep(0.05)
        began = now()
        with nullcontext() if error is None else pytest.raises(error):
            await call(cache)
        assert within[0] <= now() - began <= within[1]
        assert await publish(cache, text(5, seed=9)) == 0
        assert cache.closed is None
        if call is detach:
            assert (list(cache.stores), backend.holding > 0) == ([], True)
        elif call is invalidate:
            assert await publish(cache, text(5, seed=3), namespace="other") == 0
        backend.answers.set()
        await asyncio.sleep(0.1)
