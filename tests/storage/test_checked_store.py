"""CheckedStore against backends that fail, lie, hang and are cancelled, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from random import Random
from typing import Any

import pytest

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import Breaker, BreakerState, CheckedStore, PageKey, Record, Result, checked
from asynccache.storage.contract import is_shared
from asynccache.testing.backend_suite import LAYOUT, blank, content, keys_of, page_key, record_of
from asynccache.testing.slow_backend import SlowBackend
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import HONEST, Hostility, SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage.world_kit import in_world

KEYS = keys_of(12, "odd")


def payloads(keys: Sequence[PageKey] = KEYS) -> list[memoryview]:
    return [record_of(key).payload for key in keys]


def blanks(keys: Sequence[PageKey] = KEYS) -> list[memoryview]:
    return [blank(key).payload for key in keys]


def store_on(backend: Any, **options: Any) -> CheckedStore:
    return CheckedStore(backend, LAYOUT, threads=0, **options)


def simulated(loop: SimulatedLoop, hostility: Hostility = HONEST) -> SimulatedBackend:
    return SimulatedBackend(Random(loop.seed), hostility)


@in_world
async def test_pages_come_back(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop))
    assert await store.put(KEYS, payloads()) == [Result.HIT] * 12
    fetched = blanks()
    asked = [*KEYS, page_key("no", "odd")]
    assert await store.get(asked, [*fetched, *blanks(KEYS[:1])]) == [Result.HIT] * 12 + [Result.MISS]
    assert fetched == payloads()
    await store.aclose()


@pytest.mark.parametrize("lie", ["wrong", "short", "empty"])
def test_a_lie_about_a_page_is_corrupt_deleted_and_counted(lie: str) -> None:
    async def world(loop: SimulatedLoop) -> None:
        backend = simulated(loop)
        store = store_on(backend)
        await store.put(KEYS, payloads())
        backend.hostility = Hostility(**{lie: 0.4})
        fetched = blanks()
        results = await store.get(KEYS, fetched)
        lies = backend.lies[lie]
        assert lies
        assert results.count(Result.CORRUPT) == store.stats()["corrupt_pages"] == lies
        for key, result, page in zip(KEYS, results, fetched, strict=True):
            assert result is Result.CORRUPT or page == content(key, 1000)
        backend.hostility = HONEST
        expected = [Result.MISS if result is Result.CORRUPT else Result.HIT for result in results]
        assert await store.exists(KEYS) == expected
        assert await store.get(KEYS, blanks()) == expected

    simulate(world, 3)


@in_world
async def test_a_page_that_vanishes_after_exists_is_a_miss(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop, Hostility(vanished=1.0)))
    await store.put(KEYS, payloads())
    assert await store.exists(KEYS) == [Result.HIT] * 12
    assert await store.get(KEYS, blanks()) == [Result.MISS] * 12


@in_world
async def test_a_page_under_anothers_key_does_not_verify(loop: SimulatedLoop) -> None:
    backend = simulated(loop)
    store = store_on(backend)
    await store.put(KEYS[:2], payloads(KEYS[:2]))
    backend.pages[KEYS[0]], backend.pages[KEYS[1]] = backend.pages[KEYS[1]], backend.pages[KEYS[0]]
    assert await store.get(KEYS[:2], blanks(KEYS[:2])) == [Result.CORRUPT] * 2


class Empty(WrappedBackend):
    """Claims every page and writes nothing."""

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return [Result.HIT] * len(keys)


@in_world
async def test_no_header_of_an_earlier_call_vouches_for_a_later_one(loop: SimulatedLoop) -> None:
    store = store_on(Empty(simulated(loop)))
    pages = payloads()
    await store.put(KEYS, pages)
    assert await store.get(KEYS, pages) == [Result.CORRUPT] * 12


class Answers(WrappedBackend):
    """Answers for fewer keys than it was asked."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return [Result.HIT] * (len(keys) - 1)


@in_world
async def test_too_few_answers_are_no_answers(loop: SimulatedLoop) -> None:
    store = store_on(Answers(simulated(loop)))
    assert await store.exists(KEYS) == [Result.FAILED] * 12
    assert store.stats()["failed_calls"] == 1


@in_world
async def test_failing_calls_open_the_breaker_and_a_good_probe_closes_it(loop: SimulatedLoop) -> None:
    backend = simulated(loop, Hostility(unavailable=1.0, delay=0.0))
    store = store_on(backend, breaker=Breaker(threshold=3, backoff=10.0))
    for _ in range(3):
        assert await store.exists(KEYS) == [Result.FAILED] * 12
    assert store.breaker.state is BreakerState.OPEN
    calls = backend.calls["exists"]
    assert await store.get(KEYS, blanks()) == await store.put(KEYS, payloads()) == [Result.FAILED] * 12
    assert (backend.calls["exists"], store.stats()["refused_calls"]) == (calls, 2)
    assert isinstance(store.last_error, Unavailable)
    backend.hostility = HONEST
    await asyncio.sleep(10.0)
    assert await store.exists(KEYS) == [Result.FAILED] * 12, "nobody's call is the probe"
    await asyncio.sleep(0.1)
    assert await store.exists(KEYS) == [Result.MISS] * 12
    stats = store.stats()
    assert (stats["breaker"], stats["breaker_opened"]) == (BreakerState.CLOSED, 1)
    assert stats["breaker_open_seconds"] == pytest.approx(10.0, abs=0.2)
    await store.aclose()


@in_world
async def test_failed_pages_alone_do_not_open_the_breaker(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop, Hostility(failed=1.0)), breaker=Breaker(threshold=1))
    assert await store.put(KEYS, payloads()) == [Result.FAILED] * 12
    assert store.breaker.state is BreakerState.CLOSED
    assert store.stats()["failed_pages"] == 12


@in_world
async def test_a_call_that_misses_its_deadline_is_failed_and_counted(loop: SimulatedLoop) -> None:
    store = store_on(SlowBackend(simulated(loop), latency=100.0), timeout=1.0)
    began = loop.time()
    assert await store.get(KEYS, blanks()) == [Result.FAILED] * 12
    assert loop.time() - began == pytest.approx(1.0, abs=0.1)
    assert store.stats()["timeouts"] == 1


@in_world
async def test_after_a_missed_deadline_the_buffers_are_free(loop: SimulatedLoop) -> None:
    backend = simulated(loop, Hostility(delay=50.0))
    store = store_on(backend, timeout=0.5)
    for call in (store.put(KEYS, payloads()), store.get(KEYS, blanks())):
        assert await call == [Result.FAILED] * 12
        assert backend.holding == 0


def test_a_cancelled_call_returns_when_the_backend_has_let_go() -> None:
    """Whichever await is hit: no buffer is held, the breaker lets the next call through."""

    async def world(loop: SimulatedLoop, verb: str, hit: int) -> bool:
        backend = simulated(loop)
        store = store_on(backend)
        await store.put(KEYS, payloads())
        backend.hostility = Hostility(wrong=0.3)
        call: Awaitable[list[Result]] = store.put(KEYS, payloads()) if verb == "put" else store.get(KEYS, blanks())
        task = asyncio.ensure_future(call)
        loop.cancel_at(task, hit)
        await asyncio.wait([task])
        assert backend.holding == 0
        backend.hostility = HONEST
        assert Result.FAILED not in await store.exists(KEYS)
        return task.cancelled()

    cancelled = 0
    for seed in range(40):
        for verb in ("put", "get"):
            cancelled += simulate(lambda loop, v=verb, h=1 + seed % 2: world(loop, v, h), seed)  # type: ignore[misc]
    assert cancelled > 20


@in_world
async def test_a_long_call_goes_in_parts(loop: SimulatedLoop) -> None:
    backend = simulated(loop)
    store = store_on(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "PART_PAGES", 5)
        assert await store.put(KEYS, payloads()) == [Result.HIT] * 12
        fetched = blanks()
        assert await store.get(KEYS, fetched) == [Result.HIT] * 12
    assert fetched == payloads()
    assert (backend.calls["put"], backend.calls["get"]) == (3, 3)


@in_world
async def test_payloads_of_a_wrong_size_or_pool_are_refused(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop))
    with pytest.raises(ConfigError, match=r"'odd'.*1001 bytes, expected 1000"):
        await store.put(KEYS[:1], [memoryview(bytearray(1001))])
    with pytest.raises(ConfigError, match="'tea'"):
        await store.get([PageKey("tea", bytes(32))], [memoryview(bytearray(1000))])


@in_world
async def test_a_released_payload_is_refused_by_name(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop))
    given = payloads()
    given[3].release()
    with pytest.raises(ConfigError, match=r"payloads: <released memory .* is no memoryview of bytes in a row"):
        await store.put(KEYS, given)
    with pytest.raises(ConfigError, match="released memory"):
        await store.get(KEYS, given)
    await store.aclose()


@in_world
async def test_a_key_whose_pool_is_no_text_is_refused_by_every_call(loop: SimulatedLoop) -> None:
    store = store_on(simulated(loop))
    odd = [*KEYS[:2], PageKey(5, KEYS[2].key)]  # type: ignore[arg-type]
    pages = payloads(KEYS[:3])
    for call in (store.exists(odd), store.delete(odd), store.put(odd, pages), store.get(odd, pages)):
        with pytest.raises(ConfigError, match="no PageKey of a text and bytes"):
            await call
    await store.aclose()


def test_a_backend_around_one_that_processes_share_is_shared() -> None:
    inner = [SimulatedBackend(Random(0), HONEST, shared=shared) for shared in (True, False)]
    assert [is_shared(WrappedBackend(one)) for one in inner] == [True, False]


async def test_checksums_in_threads_say_the_same(tmp_path: object) -> None:
    keys = keys_of(40)
    backend = SimulatedBackend(Random(1), Hostility(delay=0.0))
    store = CheckedStore(backend, LAYOUT, threads=2)
    await store.put(keys, payloads(keys))
    header, payload = backend.pages[keys[7]]
    backend.pages[keys[7]] = header, payload[:-1] + bytes([payload[-1] ^ 1])
    fetched = blanks(keys)
    assert await store.get(keys, fetched) == [Result.CORRUPT if i == 7 else Result.HIT for i in range(40)]
    assert fetched[6] == content(keys[6], LAYOUT.page_bytes["full"])
    await store.aclose()
