"""Saving, forgetting and closing: from any task, at any moment, whatever fails or hangs on the way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, CacheClosed, CloseReport, ConfigError
from asynccache.core.plan import Cleared, Publish
from asynccache.errors import BackendError
from asynccache.events import Notice, Opened
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import head as head_module
from asynccache.storage import Breaker, CheckedStore, PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from asynccache.worker import local as worker_module
from asynccache.worker.local import LATE
from tests.runtime.runtime_kit import (
    PAGE,
    Hangs,
    HeldBackend,
    cache_over,
    gate,
    local,
    now,
    opened,
    page_hashes,
    parts,
    publish,
    push_out,
    serve,
    settings,
    settled,
    simulated,
    store_only,
    text,
    turns,
    until,
)
from tests.simulated.backend import Hostility, SimulatedBackend

# Saving, forgetting and closing: what is promised about all pages at once.


@pytest.mark.parametrize("timeout", [None, 0.01])
async def test_aclose_waits_for_the_store_within_the_deadline_and_says_what_it_could_not_save(
    timeout: float | None,
) -> None:
    storage = HeldBackend("put", held=True)
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        await until(lambda: storage.waiting == 1)
        closing = asyncio.create_task(cache.aclose(timeout))
        await turns()
        assert not closing.done()
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        if timeout is None:
            storage.let()
        assert await closing == (0, 0 if timeout is None else 6, None)
        assert storage.waiting == 0, "closing returns after the store has let go"


@pytest.mark.parametrize("tenant_alone", [True, False])
async def test_what_is_forgotten_is_forgotten_on_every_tier(tenant_alone: bool) -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        for namespace in (None, "tenant"):
            async with cache.lease(text(4), namespace=namespace) as lease:
                await lease.commit(text(4))
        await cache.flush()
        await (cache.invalidate("tenant") if tenant_alone else cache.reset())
        left = 16 if tenant_alone else 0
        assert [(await cache.match(text(4), namespace)).host for namespace in (None, "tenant")] == [left, 0]
        assert (await cache.prefetch(text(4), "tenant")).tokens == 0
        assert storage.stats()["pages"] == left // PAGE
        await publish(cache, text(4, 1))
        await cache.flush()
    async with opened(settings(host=32), storage=storage) as cache:
        found = [await cache.prefetch(tokens, space) for tokens, space in
                 ((text(4), "tenant"), (text(4), None), (text(4, 1), None))]  # fmt: skip
        assert [each.tokens for each in found] == [0, left, 16], "what was stored after it is found"


async def test_flush_has_a_timeout_and_flushing_goes_on() -> None:
    storage = HeldBackend("put", held=True)
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(6))
        with pytest.raises(TimeoutError):
            await cache.flush(timeout=0.01)
        storage.let()
        assert await cache.flush() == (0, 0)


@simulated
async def test_flush_goes_on_as_long_as_each_round_saves_something() -> None:
    """Each page is refused once more often than the one before it."""
    class Reluctant(WrappedBackend):
        async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
            results = [Result.FAILED] * len(keys)
            for at, (key, record) in enumerate(zip(keys, records, strict=True)):
                tries[key] += 1
                if tries[key] > list(tries).index(key):
                    [results[at]] = await super().put([key], [record])
            return results

    tries: Counter[PageKey] = Counter()
    storage = Reluctant(SimulatedBackend(Random(1), Hostility(delay=0.0)))
    async with cache_over(storage, settings(host=32), breaker=Breaker(threshold=1 << 30)) as cache:
        for number in range(10):
            await serve(cache, text(1, seed=number))
        assert await cache.flush() == (0, 0)
        assert tries.total() == sum(range(1, 11))


async def test_flush_under_write_back_saves_everything() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32, write_policy="write_back"), storage=storage) as cache:
        await serve(cache, text(6))
        await settled(cache)
        assert (await cache.match(text(6))).device == 24
        assert storage.stats()["pages"] == 0
        assert await cache.flush() == (0, 0)
        assert storage.stats()["pages"] == 6


async def test_another_namespace_never_hits() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await cache.flush()
        for other in ("", "a", b"a"):
            assert (await cache.match(text(4), other)).host == 0
            assert (await cache.prefetch(text(4), other)).tokens == 0


async def test_keep_pins_a_prefix_within_the_cap_until_released() -> None:
    async with opened(settings(device=16, kept_fraction=0.25)) as cache:
        await serve(cache, text(8))
        kept = await cache.keep(text(8))
        assert kept.tokens == 4 * PAGE
        assert (await cache.keep(text(8))).tokens == 0
        async with cache.lease(text(12, seed=1)):
            assert (await cache.match(text(8))).device == 4 * PAGE
        kept.release()
        kept.release()
        async with cache.lease(text(16, seed=1)):
            assert (await cache.match(text(8))).device == 0
        with pytest.raises(ConfigError, match="ttl=0"):
            await cache.keep(text(1), ttl=0)


async def test_events_are_told_in_order_and_host_events_after_their_ack() -> None:
    heard: list[Notice] = []
    events: list[Publish] = []

    def hear(notice: Notice) -> None:
        heard.append(notice)
        if isinstance(notice, Publish):
            events.append(notice)

    async with opened(settings(host=16), on_event=hear) as cache:
        ready = gate(cache)
        async with cache.lease(text(3)) as lease:
            await lease.commit(text(3), after=ready)
        await turns()
        assert isinstance(heard[0], Opened)
        assert [event.medium.value for event in events] == ["GPU"]
        assert events[0].hashes == b"".join(page_hashes(text(3)))
        ready.open()
        await settled(cache)
        await turns()
        assert [event.medium.value for event in events] == ["GPU", "CPU"]
        await push_out(cache, 16)
        await turns()
        assert (events[-1].medium.value, events[-1].stored) == ("GPU", False)


async def test_a_pool_that_does_not_fit_and_an_unknown_device_say_so() -> None:
    with pytest.raises(ConfigError, match="full"):
        async with AsyncCache(settings(device=1 << 50)):
            pass
    with pytest.raises(ConfigError, match="tpu"):
        async with AsyncCache(replace(settings(), device="tpu")):
            pass
    with pytest.raises(RuntimeError, match="not open"):
        await AsyncCache(settings()).match(text(1))
    storage = MemoryBackend()
    with pytest.raises(ConfigError, match="host tier"):
        async with AsyncCache(settings(), storage=storage):
            pass


# ``aclose`` ends: from any task, at any moment of the cache's life, any number of times and with any deadline.


DEADLINES = (None, 0, 0.0, -1.0, 1e-9, 0.01, 30.0, 1e9)
NOTHING_UNSAVED = CloseReport(0, 0, None)


@asynccontextmanager
async def nothing_left(threads: bool = True) -> AsyncIterator[None]:
    """In time, and without a task or a thread of the cache's that outlives it."""
    before, running = asyncio.all_tasks(), _threads()
    async with asyncio.timeout(60):
        yield
        while asyncio.all_tasks() - before:  # noqa: ASYNC110 - they end by themselves
            await asyncio.sleep(0)
        await until(lambda: _threads() <= running or not threads)


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("asynccache")}


def closer() -> asyncio.Task[object] | None:
    return next((task for task in asyncio.all_tasks() if task.get_name() == "asynccache-close"), None)


@pytest.mark.parametrize("state", ["not open", "its opening failed", "open", "it closed itself"])
async def test_all_calls_at_one_time_and_later_have_one_report(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was not open can be opened later."""
    async with nothing_left():
        cache, error = AsyncCache(settings(host=16), storage=MemoryBackend()), None
        if state == "its opening failed":
            with monkeypatch.context() as patched:
                patched.setattr(cache._given, "storage", "memory:?no-such-option=1")
                with pytest.raises(ConfigError):
                    await cache.__aenter__()
        elif state != "not open":
            await cache.__aenter__()
            await serve(cache, text(4))
        if state == "it closed itself":
            error = ValueError("a bug")
            parts(cache).supervisor.fail(error)
        reports = await asyncio.gather(*map(cache.aclose, DEADLINES))
        reports += [await cache.aclose(deadline) for deadline in DEADLINES]
        assert reports == [reports[0]] * len(reports)
        assert reports[0].error is error
        if state in ("not open", "its opening failed"):
            assert reports[0] == NOTHING_UNSAVED
            async with cache:
                await serve(cache, text(2))


@pytest.mark.parametrize("later", [0, -1, 0.01])
async def test_the_deadline_that_is_over_first_counts_and_who_is_cancelled_stops_waiting(later: float) -> None:
    async with nothing_left():
        storage = HeldBackend("put", held=True)
        cache = await AsyncCache(settings(host=32), storage=storage).__aenter__()
        await serve(cache, text(4))
        await until(lambda: storage.waiting > 0)
        waiting = [asyncio.create_task(cache.aclose(deadline)) for deadline in (1e9, None, 1e8, 30.0)]
        await turns(50)
        waiting[0].cancel()
        await turns(50)
        assert [call.done() for call in waiting] == [True, False, False, False]
        assert not parts(cache).driver.closed
        assert (await cache.aclose(later)).unsaved_storage == 4
        assert [(await call).unsaved_storage for call in waiting[1:]] == [4] * 3


async def test_a_shorter_deadline_at_any_moment_is_heard_or_too_late() -> None:
    async with nothing_left():
        for count in range(0, 60, 3):
            cache = await AsyncCache(settings(host=32), storage=HeldBackend("put", held=True)).__aenter__()
            await serve(cache, text(2))
            first = asyncio.create_task(cache.aclose(0.0))
            await turns(count)
            assert await cache.aclose(-1) == await first


async def test_a_closing_that_is_cancelled_from_outside_is_taken_up_by_the_next_call() -> None:
    """Somebody cancels all the tasks that there are, as a loop does that ends; at each await of the closing one."""
    async with nothing_left():
        count, cut = 0, True
        while cut:
            storage = MemoryBackend()
            cache = await AsyncCache(settings(host=32), storage=storage).__aenter__()
            await serve(cache, text(2))
            first = asyncio.create_task(cache.aclose())
            await turns(1 + count)
            task = closer()
            cut = task is not None
            if task is not None:
                task.cancel()
            report = await first
            assert isinstance(report, CloseReport)
            assert await cache.aclose(5) == await cache.aclose() == report
            assert len(parts(cache).supervisor) == 0
            assert cache.closed is not None
            count += 1
        assert count > 3


async def test_a_subscriber_that_raises_at_the_very_end_leaves_nothing_open() -> None:
    ended = False

    def subscriber(notice: object) -> None:
        if ended:
            raise ValueError("a bug")

    def announce_late(worker: asyncio.Task[object]) -> None:
        nonlocal ended
        ended = True
        events = parts(cache).announcer
        assert events is not None
        events.put(Cleared())  # as an ack does that is applied in the turn in which the worker is cancelled

    async with nothing_left():
        cache = await AsyncCache(settings(host=16), on_event=subscriber).__aenter__()
        await serve(cache, text(2))
        (worker,) = (task for task in asyncio.all_tasks() if task.get_name() == "asynccache-events")
        worker.add_done_callback(announce_late)
        report = await cache.aclose()
        assert isinstance(report.error, ValueError)
        assert await cache.aclose() == report
        assert "a bug" in str(cache.closed)


# Closing goes through to the end, whatever fails on the way.


async def test_a_store_that_cannot_be_closed_does_not_keep_the_device_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    device = CpuDevice()
    close_device, close_store = device.aclose, CheckedStore.aclose

    async def closing() -> None:
        closed.append(device)
        await close_device()

    async def failing(store: CheckedStore) -> None:
        await close_store(store)
        raise OSError("the disk is gone")

    monkeypatch.setattr(device, "aclose", closing)
    monkeypatch.setattr(CheckedStore, "aclose", failing)
    monkeypatch.setattr(worker_module, "open_device", lambda name: device)
    cache = AsyncCache(settings(host=16), storage=MemoryBackend())
    await cache.__aenter__()
    with pytest.raises(OSError, match="the disk is gone"):
        await cache.aclose()
    assert closed == [device]


async def test_an_unexpected_error_while_saving_leaves_no_worker_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(driver: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(head_module, "drain", failing)
    cache = AsyncCache(settings(host=16))
    await cache.__aenter__()
    with pytest.raises(ValueError, match="a bug"):
        await cache.aclose()
    assert cache.statistics().tasks == 0


# Closing ends by its deadline and a grace, also if a store never lets go. What such a store uses is not freed, and the
# process can end.


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("deaf", [20.0, 1e6])
@pytest.mark.parametrize("verb", ["put", "get", "exists"])
@simulated
async def test_closing_ends_by_its_deadline_and_says_which_store_did_not_let_go(verb: str, deaf: float) -> None:
    backend = Hangs(verb, deaf=deaf)
    with pytest.raises(BackendError):  # noqa: PT012  leaving the cache closes it again
        async with cache_over(backend, settings(40, 80, prefetch_policy="best_effort")) as cache:
            if verb == "get":
                await store_only(cache, text(5, seed=1))
            backend.hung.set()
            if verb == "put":
                await publish(cache, text(5, seed=2))
            handle = cache.prefetch(text(5, seed=1))
            await asyncio.sleep(0.05)
            assert backend.holding == 1, handle
            begun = now()
            for call in [asyncio.ensure_future(cache.aclose(seconds)) for seconds in (30.0, 1.0)]:
                with pytest.raises(BackendError, match="Hangs"):
                    await call
            assert now() - begun <= 1.0 + LATE + 0.1
            with pytest.raises(CacheClosed):
                await cache.match(text(1))
            assert backend.holding == 1
            assert local(cache)._tiers.busy == ["Hangs"], "nothing that it uses was closed"
            backend.answers.set()
            await asyncio.sleep(1.0)
            assert local(cache)._tiers.busy == []


@pytest.mark.slow(6)
@pytest.mark.parametrize("kind", ["file", "own"])
def test_a_process_ends_though_a_thread_of_its_store_hangs(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("hung_thread_child.py"))]
    ended = subprocess.run(
        [*command, str(tmp_path / "store") if kind == "file" else "own"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    took, _, said = ended.stdout.partition(" ")
    assert float(took) < 0.2 + LATE + 2.0
    assert ("file" if kind == "file" else "Own") in said
