"""``CheckedStore``: whatever a backend does, fail, lie, hang, be cancelled or have bugs of its own, its caller sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.errors import ConfigError, Timeout, Unavailable
from asynccache.storage import Breaker, BreakerState, CheckedStore, PageKey, Record, Result, checked
from asynccache.storage.checked import pool_digest, seal, storage_key, store_layout, verify
from asynccache.storage.contract import is_shared
from asynccache.testing.backend_suite import LAYOUT, aligned, blank, content, keys_of, page_key, put_all, record_of
from asynccache.testing.faulty_backend import Fault, FaultyBackend, draw_fault
from asynccache.testing.slow_backend import SlowBackend
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import HONEST, Hostility, SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage.pages_kit import Misbehaving, in_world

# CheckedStore against backends that fail, lie, hang and are cancelled, in virtual time.


KEYS = keys_of(12, "odd")


def payloads(keys: Sequence[PageKey] = KEYS) -> list[memoryview]:
    return [record_of(key).payload for key in keys]


def blanks(keys: Sequence[PageKey] = KEYS) -> list[memoryview]:
    return [blank(key).payload for key in keys]


def store_on(backend: Any, **options: Any) -> CheckedStore:
    return CheckedStore(backend, LAYOUT, threads=0, **options)


def simulated(loop: SimulatedLoop, hostility: Hostility = HONEST) -> SimulatedBackend:
    return SimulatedBackend(Random(loop.seed), hostility)


# A backend that lies: wrong bytes, another page's bytes, bytes of another length, a hit without data, answers for fewer
# keys or for more, and answers that are no answers.


Lie = Callable[[list[Result], Sequence[Record]], Any]


def _wrong(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records[:4]:
        record.payload[record.payload.nbytes // 2] ^= 1
    return results


def _headless(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records[:4]:
        record.header[50] ^= 1
    return results


def _swapped(results: list[Result], records: Sequence[Record]) -> list[Result]:
    """Whole records, each under another's key."""
    for one, other in ((records[0], records[1]), (records[2], records[3])):
        for a, b in ((one.header, other.header), (one.payload, other.payload)):
            a[:], b[:] = bytes(b), bytes(a)
    return results


def _short(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records[:4]:
        record.payload[record.payload.nbytes - 1 :] = b"\0"
        record.header[8:16] = (record.payload.nbytes - 1).to_bytes(8, "little")
    return results


def _empty(results: list[Result], records: Sequence[Record]) -> list[Result]:
    for record in records[:4]:
        record.header[:] = bytes(64)
        record.payload[:] = bytes(record.payload.nbytes)
    return results


LIES: dict[str, Lie] = {
    "wrong bytes": _wrong, "a wrong header": _headless, "another page": _swapped, "another length": _short,
    "nothing": _empty, "fewer answers": lambda results, records: results[:-1],
    "more answers": lambda results, records: [*results, Result.HIT], "no answer": lambda results, records: None,
    "numbers": lambda results, records: [17] * len(results),
}  # fmt: skip


class Liar(WrappedBackend):
    """Lies about what it gives."""

    lie: Lie | None = None

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await self.inner.get(keys, records)
        return results if self.lie is None else self.lie(results, records)


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_served(lie: str) -> None:
    """A page that does not verify is corrupt, deleted and counted; answers that are none are a failed call."""

    async def world(loop: SimulatedLoop) -> None:
        store = store_on(liar := Liar(simulated(loop)))
        assert await store.put(KEYS, payloads()) == [Result.HIT] * 12
        liar.lie, fetched = LIES[lie], blanks()
        results = await store.get(KEYS, fetched)
        verified = lie not in ("fewer answers", "more answers", "no answer", "numbers")
        assert results == ([Result.CORRUPT] * 4 + [Result.HIT] * 8 if verified else [Result.FAILED] * 12)
        stats = store.stats()
        assert (stats["corrupt_pages"], stats["failed_calls"]) == ((4, 0) if verified else (0, 1))
        assert not verified or fetched[4:] == payloads(KEYS[4:])
        liar.lie = None
        left = [Result.MISS if verified else Result.HIT] * 4 + [Result.HIT] * 8
        assert await store.exists(KEYS) == await store.get(KEYS, blanks()) == left
        assert await store.put(KEYS, payloads()) == await store.get(KEYS, blanks()) == [Result.HIT] * 12

    simulate(world, 3)


@in_world
async def test_no_header_of_an_earlier_call_vouches_for_a_later_one(loop: SimulatedLoop) -> None:
    """The store claims every page and writes nothing."""

    class Claims(WrappedBackend):
        async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
            return [Result.HIT] * len(keys)

    store = store_on(Claims(simulated(loop)))
    pages = payloads()
    await store.put(KEYS, pages)
    assert await store.get(KEYS, pages) == [Result.CORRUPT] * 12


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
async def test_after_a_missed_deadline_the_buffers_are_free(loop: SimulatedLoop) -> None:
    backend = simulated(loop, Hostility(delay=50.0))
    store = store_on(backend, timeout=0.5)
    for call in (store.put(KEYS, payloads()), store.get(KEYS, blanks())):
        assert await call == [Result.FAILED] * 12
        assert backend.holding == 0
    store, began = store_on(SlowBackend(simulated(loop), latency=100.0), timeout=1.0), loop.time()
    assert await store.get(KEYS, blanks()) == [Result.FAILED] * 12
    assert loop.time() - began == pytest.approx(1.0, abs=0.1)
    assert store.stats()["timeouts"] == 1


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
async def test_payloads_and_keys_that_are_none_are_refused_by_name(loop: SimulatedLoop) -> None:
    """Of a wrong size or pool, released, of a pool whose name is no text."""
    store, given = store_on(simulated(loop)), payloads()
    given[3].release()
    odd, pages = [*KEYS[:2], PageKey(5, KEYS[2].key)], payloads(KEYS[:3])  # type: ignore[arg-type]
    for call, complaint in (
        (store.put(KEYS[:1], [memoryview(bytearray(1001))]), r"'odd'.*1001 bytes, expected 1000"),
        (store.get([PageKey("tea", bytes(32))], [memoryview(bytearray(1000))]), "'tea'"),
        (store.put(KEYS, given), r"payloads: <released memory .* is no memoryview of bytes in a row"),
        (store.get(KEYS, given), "released memory"),
        *((call, "no PageKey of a text and bytes") for call in (
            store.exists(odd), store.delete(odd), store.put(odd, pages), store.get(odd, pages))),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=complaint):
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


# CheckedStore and plug-ins with bugs of their own: errors that no contract names, and calls that never come back.


@in_world
async def test_a_plug_ins_bug_is_a_failed_call_that_the_breaker_is_told_of(loop: SimulatedLoop) -> None:
    buggy = Misbehaving(exists="answers too little", get="has a bug", put="has two")
    store = store_on(buggy, breaker=Breaker(threshold=3))
    for answers in (await store.exists(KEYS), await store.put(KEYS, payloads()), await store.get(KEYS, blanks())):
        assert answers == [Result.FAILED] * 12
    assert store.stats()["failed_calls"] == 3
    assert store.breaker.state is BreakerState.OPEN
    assert isinstance(store.last_error, ValueError)


@in_world
async def test_a_cancelled_call_is_cancelled_and_no_failure(loop: SimulatedLoop) -> None:
    store = store_on(Misbehaving(exists="hangs"), breaker=Breaker(threshold=1))
    call = asyncio.ensure_future(store.exists(KEYS))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert store.breaker.state is BreakerState.CLOSED


@in_world
async def test_clear_and_flush_have_a_deadline_and_the_breaker_is_told(loop: SimulatedLoop) -> None:
    store = store_on(Misbehaving(clear="hangs", flush="hangs"), breaker=Breaker(threshold=2), timeout=1.0)
    for call in (store.clear, store.flush):
        with pytest.raises(Timeout):
            await asyncio.wait_for(call(), 10)
    assert store.stats()["timeouts"] == 2
    assert store.breaker.state is BreakerState.OPEN


# Headers, keys and digests.


SPEC = PoolSpec(
    name="full", component=ComponentKind.FULL, bytes_per_page=4096, layers=4, device_pages=8, host_pages=8,
    hit_policy=HitPolicy.ALL_PAGES,
)


def sealed() -> tuple[PageKey, Record]:
    key, record = page_key("k"), Record(aligned(64), aligned(4096))
    record.payload[:] = bytes(range(256)) * 16
    seal([key], [record])
    return key, record


def test_a_sealed_record_verifies() -> None:
    key, record = sealed()
    assert verify([key], [record]) == [True]
    assert bytes(record.header[:4]) == b"acKV"
    assert bytes(record.header[16:48]) == key.key


@pytest.mark.parametrize(("part", "bit"), [
    *(("header", bit) for bit in range(0, 64 * 8, 7)), *(("payload", 8 * byte + 7) for byte in (0, 1, 2047, 4095)),
])  # fmt: skip
def test_any_flipped_bit_shows(part: str, bit: int) -> None:
    key, record = sealed()
    getattr(record, part)[bit // 8] ^= 1 << bit % 8
    assert verify([key], [record]) == [False]


def test_a_record_of_another_key_or_length_does_not_verify() -> None:
    key, record = sealed()
    assert verify([page_key("other")], [record]) == [False]
    assert verify([key], [Record(record.header, record.payload[:2048])]) == [False]


def test_a_storage_key_is_made_of_the_hash_of_hash_and_digest_and_names_the_block() -> None:
    digest, page = sha256(bytes(range(32)) + b"d" * 32).digest(), bytes(range(32))
    assert storage_key(page, b"d" * 32) == digest[:23] + b"\1" + page[24:]
    assert storage_key(page, b"d" * 32, named=False) == digest[:23] + b"\0" + digest[24:]


def test_the_digest_changes_with_all_that_changes_the_bytes_and_with_nothing_else() -> None:
    """And its fields do not run into each other. How many pages there are does not matter."""
    digests = {
        *(pool_digest(replace(SPEC, **other), 16)
          for other in ({"name": "swa"}, {"dtype": "bfloat16"}, {"bytes_per_page": 8192}, {"layers": 8},
                        {"name": "ab", "dtype": "c"}, {"name": "a", "dtype": "bc"})),
        pool_digest(SPEC, 16), pool_digest(SPEC, 32), pool_digest(SPEC, 16, layout="layer_first"),
        pool_digest(replace(SPEC, covers=tuple(range(4, 4 + SPEC.layers))), 16), pool_digest(SPEC, 16, shard="tp 0/2"),
        pool_digest(SPEC, 16, shard="tp 1/2"),
    }
    assert len(digests) == 12
    assert pool_digest(replace(SPEC, device_pages=1, host_pages=99), 16) == pool_digest(SPEC, 16)


def test_logical_pools_have_no_stored_object() -> None:
    assert store_layout([SPEC, replace(SPEC, name="anchor", bytes_per_page=0)]).page_bytes == {"full": 4096}


# The shipped backends that fail, wait and lie do it as often as they say, and again for the same seed.


def test_faults_come_in_their_shares() -> None:
    rng = Random(1)
    drawn = Counter(draw_fault(rng, 0.4) for _ in range(20_000))
    for fault, share in ((Fault.NONE, 0.6), (Fault.DELAYED, 0.2), (Fault.FAILED, 0.1), (Fault.CORRUPTED, 0.1)):
        assert drawn[fault] / 20_000 == pytest.approx(share, abs=0.01)


async def _use(loop: SimulatedLoop) -> tuple[Counter[str], list[list[Result]]]:
    """Four pages, put and read many times over a faulty store."""
    faulty = FaultyBackend(MemoryBackend(), 0.8, loop.seed)
    store = CheckedStore(faulty, LAYOUT, threads=0)
    keys = keys_of(4, "odd")
    answers = []
    for _ in range(30):
        answers.append(await store.put(keys, [record_of(key).payload for key in keys]))
        pages = [blank(key).payload for key in keys]
        answers.append(await store.get(keys, pages))
        for key, page, result in zip(keys, pages, answers[-1], strict=True):
            assert result is not Result.HIT or page == record_of(key).payload
    return faulty.faults, answers


def test_what_a_faulty_backend_corrupts_is_never_served() -> None:
    faults, answers = simulate(_use, 7)
    assert min(faults["delayed"], faults["failed"], faults["corrupted"]) > 0
    assert sum(answer.count(Result.CORRUPT) for answer in answers) == faults["corrupted"]


def test_a_seed_gives_the_same_faults_again() -> None:
    assert simulate(_use, 7) == simulate(_use, 7)
    assert simulate(_use, 7) != simulate(_use, 8)


def test_a_slow_backend_takes_latency_and_bandwidth() -> None:
    async def world(loop: SimulatedLoop) -> None:
        slow = SlowBackend(MemoryBackend(), latency=2.0, bandwidth=1000.0)
        began = loop.time()
        await put_all(slow, keys_of(3, "odd"))
        assert loop.time() - began == pytest.approx(5.0, abs=0.01)
        await slow.exists(keys_of(3, "odd"))
        assert loop.time() - began == pytest.approx(7.0, abs=0.01)

    simulate(world, 1)
