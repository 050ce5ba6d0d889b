"""``aclose`` ends: from any task, at any moment of the cache's life, any number of times and with any deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, CloseReport, ConfigError
from asynccache.core.plan import Cleared
from asynccache.storage import PageKey, Record, Result
from asynccache.worker.local import LocalWorker
from tests.runtime.runtime_kit import parts, serve, settings, text, turns, until

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
