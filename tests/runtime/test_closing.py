"""Saving, forgetting and closing: from any task, at any moment, whatever fails or hangs on the way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, CacheClosed, CloseReport, ConfigError
from asynccache.core.plan import Cleared, Publish
from asynccache.errors import BackendError
from asynccache.events import Notice, Opened
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import head as head_module
from asynccache.storage import CheckedStore, PageKey, Record, Result
from asynccache.storage.checked import store_layout
from asynccache.worker import local
from asynccache.worker.local import LATE, LocalWorker
from tests.runtime.runtime_kit import (
    PAGE,
    opened,
    page_hashes,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)
from tests.runtime.runtime_kit import local as local_worker
from tests.runtime.test_hung_storage import Hangs, forget_host
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

# Saving, forgetting and closing: what is promised about all pages at once.


class SlowPuts(MemoryBackend):
    """Writes wait until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.writing = 0

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.writing += 1
        try:
            await self.gate.wait()
            return await super().put(keys, records)
        finally:
            self.writing -= 1


async def test_aclose_says_what_it_could_not_save_within_the_deadline() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        await until(lambda: storage.writing == 1)
        report = await cache.aclose(timeout=0.01)
        assert (report.unsaved_host, report.unsaved_storage, report.error) == (0, 6, None)
        assert storage.writing == 0, "closing returns after the store has let go"
    await storage.aclose()


async def test_aclose_waits_for_the_store_within_the_deadline() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        await until(lambda: storage.writing == 1)
        closing = asyncio.create_task(cache.aclose())
        await turns()
        assert not closing.done()
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        storage.gate.set()
        assert await closing == (0, 0, None)
    await storage.aclose()


async def test_closing_tells_those_who_wait_in_line() -> None:
    async with opened(settings(device=4), idle=False) as cache:
        holder = await cache.lease(text(4)).__aenter__()
        waits = asyncio.create_task(cache.lease(text(1, seed=1)).__aenter__())
        await turns()
        await cache.aclose()
        with pytest.raises(CacheClosed):
            await waits
        holder.release()


async def test_flush_has_a_timeout_and_flushing_goes_on() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(6))
        with pytest.raises(TimeoutError):
            await cache.flush(timeout=0.01)
        storage.gate.set()
        assert await cache.flush() == (0, 0)
    await storage.aclose()


async def test_flush_under_write_back_saves_everything() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32, write_policy="write_back"), storage=storage) as cache:
        await serve(cache, text(6))
        await settled(cache)
        assert (await cache.match(text(6))).device == 24
        assert storage.stats()["pages"] == 0
        assert await cache.flush() == (0, 0)
        assert storage.stats()["pages"] == 6
    await storage.aclose()


async def test_invalidate_forgets_a_namespace_on_every_tier() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await serve_in(cache, "tenant")
        await cache.flush()
        await cache.invalidate("tenant")
        assert (await cache.match(text(4), "tenant")).host == 0
        assert (await cache.prefetch(text(4), "tenant")).tokens == 0
        assert (await cache.match(text(4))).device == 16
        assert storage.stats()["pages"] == 4
    async with opened(settings(host=32), storage=storage) as cache:
        assert (await cache.prefetch(text(4), "tenant")).tokens == 0
        assert (await cache.prefetch(text(4))).tokens == 16
    await storage.aclose()


async def serve_in(cache: AsyncCache, namespace: str) -> None:
    async with cache.lease(text(4), namespace=namespace) as lease:
        await lease.commit(text(4))


async def test_a_lease_in_flight_finishes_undisturbed_and_publishes_nothing() -> None:
    async with opened(settings()) as cache:
        await serve(cache, text(2))
        async with cache.lease(text(4)) as lease:
            pages = lease.pages.tolist()
            await cache.invalidate()
            assert lease.pages.tolist() == pages
            await lease.commit(text(4))
            assert (await cache.match(text(4))).device == 0
        await settled(cache)  # whoever takes the tree lock next drops what was left
        assert cache.statistics().device["full"].free == 16


async def test_reset_forgets_everything_in_storage_too() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await serve_in(cache, "tenant")
        await cache.reset()
        assert storage.stats()["pages"] == 0
        assert await serve(cache, text(4, extra=1)) == 0
        await cache.flush()
    async with opened(settings(host=32), storage=storage) as cache:
        assert await serve(cache, text(4, extra=1)) == 16, "what was stored after the reset is found"
    await storage.aclose()


async def test_another_namespace_never_hits() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await cache.flush()
        for other in ("", "a", b"a"):
            assert (await cache.match(text(4), other)).host == 0
            assert (await cache.prefetch(text(4), other)).tokens == 0
    await storage.aclose()


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


async def test_what_is_kept_goes_when_its_time_is_over() -> None:
    async with opened(settings()) as cache:
        await serve(cache, text(4))
        kept = await cache.keep(text(4), ttl=0.005)
        assert kept.tokens == 16
        await until(lambda: cache.statistics().kept_tokens == 0)


async def test_events_are_told_in_order_and_host_events_after_their_ack() -> None:
    heard: list[Notice] = []
    events: list[Publish] = []

    def hear(notice: Notice) -> None:
        heard.append(notice)
        if isinstance(notice, Publish):
            events.append(notice)

    device = CpuDevice()
    async with opened(settings(host=16), device=device, on_event=hear) as cache:
        ready = device.gate()
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
    await device.aclose()


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
    await storage.aclose()


async def test_it_says_what_it_is() -> None:
    async with opened(settings(host=16)) as cache:
        assert "0 leases" in repr(cache)
        async with cache.lease(text(2)) as lease:
            assert "reserved" in repr(lease)
            assert "1 leases" in repr(cache)
        assert "released" in repr(lease)
        statistics = cache.statistics()
        assert set(statistics.stages) == {"backup_host", "load_back", "backup_storage", "prefetch"}
        assert parts(cache).supervisor.running


# ``aclose`` ends: from any task, at any moment of the cache's life, any number of times and with any deadline.


DEADLINES = (None, 0, 0.0, -1.0, 1e-9, 0.01, 30.0, 1e9)
NOTHING_UNSAVED = CloseReport(0, 0, None)


class HangingPuts(MemoryBackend):
    """No write ends by itself. ``closed``: how often it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = self.closed = 0

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.writing += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None:
        self.closed += 1
        await super().aclose()


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


async def test_a_cache_that_is_not_open_closes_at_once_and_can_be_opened_later() -> None:
    async with nothing_left():
        cache = AsyncCache(settings(host=16))
        assert await asyncio.gather(*map(cache.aclose, DEADLINES)) == [NOTHING_UNSAVED] * len(DEADLINES)
        async with cache:
            await serve(cache, text(2))
        assert await cache.aclose() == NOTHING_UNSAVED


async def test_all_calls_at_one_time_and_later_have_one_report() -> None:
    async with nothing_left():
        cache = await AsyncCache(settings(host=16)).__aenter__()
        await serve(cache, text(4))
        reports = await asyncio.gather(*map(cache.aclose, DEADLINES))
        assert reports == [reports[0]] * len(DEADLINES)
        for deadline in DEADLINES:
            assert await cache.aclose(deadline) == reports[0]
        await cache.__aexit__(None, None, None)


@pytest.mark.parametrize("later", [0, -1, 0.01])
async def test_the_deadline_that_is_over_first_counts(later: float) -> None:
    async with nothing_left():
        storage = HangingPuts()
        cache = await AsyncCache(settings(host=32), storage=storage).__aenter__()
        await serve(cache, text(4))
        await until(lambda: storage.writing > 0)
        first = asyncio.create_task(cache.aclose(1e9))
        await turns(50)
        assert not first.done()
        longer = asyncio.create_task(cache.aclose(1e8))
        await turns(50)
        assert not longer.done()
        assert (await cache.aclose(later)).unsaved_storage == 4
        assert (await first).unsaved_storage == (await longer).unsaved_storage == 4


async def test_a_shorter_deadline_at_any_moment_is_heard_or_too_late() -> None:
    async with nothing_left():
        for count in range(0, 60, 3):
            cache = await AsyncCache(settings(host=32), storage=HangingPuts()).__aenter__()
            await serve(cache, text(2))
            first = asyncio.create_task(cache.aclose(0.0))
            await turns(count)
            assert await cache.aclose(-1) == await first


async def test_cancelled_callers_stop_waiting_and_closing_goes_on() -> None:
    async with nothing_left():
        storage = HangingPuts()
        cache = await AsyncCache(settings(host=32), storage=storage).__aenter__()
        await serve(cache, text(4))
        await until(lambda: storage.writing > 0)
        for deadline in (1e9, None, 30.0):
            caller = asyncio.create_task(cache.aclose(deadline))
            await turns(5)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        assert not parts(cache).driver.closed
        assert (await cache.aclose(0)).unsaved_storage == 4


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


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_cache_whose_opening_fails_closes_at_once_and_may_be_opened_again(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """At each of its awaits, up to the workers' start."""
    async with nothing_left():
        cache = AsyncCache(settings(host=16), storage=MemoryBackend())
        if how == "fails":
            with monkeypatch.context() as patched:
                patched.setattr(cache._given, "storage", "memory:?no-such-option=1")
                with pytest.raises(ConfigError):
                    await cache.__aenter__()
            assert await asyncio.gather(*map(cache.aclose, DEADLINES)) == [NOTHING_UNSAVED] * len(DEADLINES)
        count, cut = 0, how == "is cancelled"
        while cut:
            opening = asyncio.create_task(cache.__aenter__())
            await turns(count)
            cut = opening.cancel()
            await asyncio.wait([opening])
            if opening.cancelled():
                assert await asyncio.gather(*map(cache.aclose, DEADLINES)) == [NOTHING_UNSAVED] * len(DEADLINES)
            else:
                await cache.aclose()
                cache = AsyncCache(settings(host=16), storage=MemoryBackend())
            count += 1
        async with cache:
            await serve(cache, text(2))


async def test_closing_while_it_is_opened_ends_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nothing_left():
        cache, entered = AsyncCache(settings(host=16)), asyncio.Event()

        async def hanging(*_: object) -> None:
            entered.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(LocalWorker, "open_first", hanging)
        opening = asyncio.create_task(cache.__aenter__())
        await entered.wait()
        with pytest.raises(RuntimeError, match="opened once"):
            await cache.__aenter__()
        assert await asyncio.gather(*map(cache.aclose, DEADLINES)) == [NOTHING_UNSAVED] * len(DEADLINES)
        with pytest.raises(CacheClosed, match="closed while it was being opened"):
            await opening
        monkeypatch.undo()
        async with cache:
            await serve(cache, text(2))


async def test_closing_at_any_moment_of_an_opening_ends_both() -> None:
    async with nothing_left():
        ends: set[str] = set()
        count = 0
        while "opened before" not in ends:
            cache = AsyncCache(settings(host=16), storage=MemoryBackend())

            async def enter(cache: AsyncCache = cache) -> str:
                try:
                    async with cache:
                        await asyncio.sleep(0)
                        return "opened"
                except CacheClosed:
                    return "ended"
                finally:
                    task = asyncio.current_task()
                    assert task is not None
                    assert not task.cancelling(), "whoever opens was not cancelled"

            opening = asyncio.create_task(enter())
            await turns(count)
            before = opening.done()
            reports = await asyncio.gather(*(cache.aclose(deadline) for deadline in (0, None, 1.0)))
            assert reports == [NOTHING_UNSAVED] * 3
            ends.add(await opening + (" before" if before else ""))
            count += 1
        assert ends >= {"opened before", "ended"}


async def test_a_cancellation_of_the_opening_task_stays_one_when_others_close_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with nothing_left():
        cache, entered = AsyncCache(settings(host=16)), asyncio.Event()

        async def hanging(*_: object) -> None:
            entered.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(LocalWorker, "open_first", hanging)
        opening = asyncio.create_task(cache.__aenter__())
        await entered.wait()
        closing = asyncio.create_task(cache.aclose())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert opening.cancelled()
        assert await closing == NOTHING_UNSAVED


async def test_a_cache_that_closed_itself_reports_why_as_often_as_it_is_asked() -> None:
    async with nothing_left():
        cache = await AsyncCache(settings(host=16)).__aenter__()
        error = ValueError("a bug")
        parts(cache).supervisor.fail(error)
        reports = await asyncio.gather(*map(cache.aclose, DEADLINES))
        assert {report.error for report in reports} == {error}
        assert (await cache.aclose(0)).error is error


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
    monkeypatch.setattr(local, "open_device", lambda name: device)
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
def test_closing_ends_by_its_deadline_and_says_which_store_did_not_let_go(verb: str, deaf: float) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device, backend = SimulatedDevice(seed=1, latency=(0.0, 0.001)), Hangs(verb, deaf=deaf)
        config = settings(40, 80, prefetch_policy="best_effort")
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        cache = await AsyncCache(config, device=device, storage=store).__aenter__()
        if verb == "get":
            async with cache.lease(text(5, seed=1)) as lease:
                await lease.commit(text(5, seed=1))
            await forget_host(cache)
        backend.hung.set()
        if verb == "put":
            async with cache.lease(text(5, seed=2)) as lease:
                await lease.commit(text(5, seed=2))
        handle = cache.prefetch(text(5, seed=1))
        await asyncio.sleep(0.05)
        assert backend.holding == 1, handle
        begun = loop.time()
        waiting = [asyncio.ensure_future(cache.aclose(seconds)) for seconds in (30.0, 1.0)]
        for call in waiting:
            with pytest.raises(BackendError, match="Hangs"):
                await call
        assert loop.time() - begun <= 1.0 + LATE + 0.1
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        assert backend.holding == 1
        assert local_worker(cache)._tiers.busy == ["Hangs"], "nothing that it uses was closed"
        backend.answers.set()
        await asyncio.sleep(1.0)
        assert local_worker(cache)._tiers.busy == []
        with pytest.raises(BackendError):
            await cache.aclose()
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


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
