"""Every task has an owner, and every wait an end; opening leaves the loop free; errors of the compiled core."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError, Lease, compiled
from asynccache.core.plan import Cleared, Move, Outcome, Status
from asynccache.errors import InvariantViolation
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import Event
from asynccache.memory.signals import HostGate
from asynccache.runtime import head as head_module
from asynccache.runtime.head import Head
from asynccache.runtime.supervisor import Supervisor
from asynccache.worker import local as worker_module
from tests.runtime.runtime_kit import (
    enter,
    entering,
    fence_all,
    gate,
    local,
    on_the_host,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)
from tests.simulated.loop import SimulatedLoop, simulate

# Every task has an owner, and every wait an end, also when a worker dies.


class Boom(Exception):
    pass


async def test_a_worker_that_dies_closes_the_cache_with_its_error_and_nobody_hangs() -> None:
    with pytest.raises(CacheClosed) as closed:
        async with opened(settings(device=8, host=16), idle=False) as cache:
            await die_under_all_who_wait(cache)
    assert isinstance(closed.value.__cause__, Boom)


async def die_under_all_who_wait(cache: AsyncCache) -> None:
    await on_the_host(cache, text(4, seed=1))
    event = gate(cache)
    fence_all(cache, event)
    lease = await cache.lease(text(4, seed=1, extra=1)).__aenter__()
    other = await cache.lease(text(3, seed=3)).__aenter__()
    waiting: list[asyncio.Task[object]] = [
        asyncio.create_task(lease.loaded()),
        asyncio.create_task(cache.lease(text(8, seed=2)).__aenter__()),
    ]
    await until(lambda: len(parts(cache).driver.line) == 1)
    local(cache).mover.backup = broken  # type: ignore[method-assign]
    await other.commit(text(3, seed=3))  # its backup kills the worker
    waiting.append(asyncio.create_task(cache.flush()))

    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [CacheClosed] * 3
    assert {type(result.__cause__) for result in results if isinstance(result, CacheClosed)} == {Boom}
    with pytest.raises(CacheClosed):
        await cache.match(text(1))
    lease.release()
    other.release()
    event.open()


def broken(moves: Sequence[Move], after: Sequence[Event] = ()) -> Event:
    raise Boom("the worker")


def begin(work: Coroutine[Any, Any, Any]) -> None:
    """Up to its first await."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()


def a_subscriber(notice: object) -> None:
    """Raises when everything was forgotten."""
    if isinstance(notice, Cleared):
        raise asyncio.CancelledError


async def fail(cache: AsyncCache, lease: Lease) -> None:
    parts(cache).supervisor.fail(Boom())


async def tell_of_an_operation_that_is_none(cache: AsyncCache, lease: Lease) -> None:
    parts(cache).driver.post(Outcome(12345, Status.DONE))


async def give_the_core_another_type(cache: AsyncCache, lease: Lease) -> None:
    """A compiled core raises an error of its own then."""
    call: Any = parts(cache).core.truncate
    with pytest.raises((TypeError, AttributeError)):
        parts(cache).driver.call_unlocked(call, None, "all")


async def cancel_the_supervisor(cache: AsyncCache, lease: Lease) -> None:
    """As a loop does that shuts down."""
    task = parts(cache).supervisor._task
    assert task is not None
    task.cancel()


async def let_a_subscriber_raise(cache: AsyncCache, lease: Lease) -> None:
    announcer = parts(cache).announcer
    assert announcer is not None
    announcer.put(Cleared())


async def break_a_copy(cache: AsyncCache, lease: Lease) -> None:
    local(cache).mover.backup = broken  # type: ignore[method-assign]
    await lease.commit(text(8))
    await turns()


@pytest.mark.parametrize(
    ("happens", "error"),
    [(fail, Boom), (break_a_copy, Boom), (tell_of_an_operation_that_is_none, InvariantViolation),
     (give_the_core_another_type, (TypeError, AttributeError)), (cancel_the_supervisor, asyncio.CancelledError),
     (let_a_subscriber_raise, asyncio.CancelledError)],
)  # fmt: skip
async def test_whatever_kills_a_worker_closes_the_cache_with_it_and_every_waiter_hears_of_it(
    happens: Callable[[AsyncCache, Lease], Coroutine[Any, Any, None]], error: Any
) -> None:
    hears = a_subscriber if happens is let_a_subscriber_raise else None
    cache = await AsyncCache(settings(device=9, host=16), on_event=hears).__aenter__()
    lease = await enter(cache, 8)
    waiting = entering(cache, 8, 2)
    await until(lambda: len(parts(cache).driver.line) == 1)
    await asyncio.create_task(happens(cache, lease))
    with pytest.raises(CacheClosed):
        await waiting
    with pytest.raises(CacheClosed):
        await cache.match(text(1))
    await turns()  # a cancellation of whoever opened the cache would arrive here
    lease.release()
    assert isinstance((await cache.aclose()).error, error)
    assert len(parts(cache).supervisor) == 0


async def test_another_threads_call_raises() -> None:
    async with opened(settings(host=16)) as cache:
        await serve(cache, text(2))
        kept, handle, left = await cache.keep(text(2)), cache.prefetch(text(1)), cache.lease(text(1))
        async with cache.lease(text(1)) as lease:
            calls: dict[str, Callable[[], object]] = {
                "match": lambda: begin(cache.match(text(1))),
                "prefetch": lambda: cache.prefetch(text(1)),
                "keep": lambda: begin(cache.keep(text(1))),
                "aclose": lambda: begin(cache.aclose()),
                "enter": lambda: begin(left.__aenter__()),
                "loaded": lambda: begin(lease.loaded()),
                "layer": lambda: begin(lease.layer(0)),
                "extend": lambda: begin(lease.extend(1)),
                "commit": lambda: begin(lease.commit(text(1))),
                "adopt": lease.adopt,
                "advance": lambda: lease.advance(4),
                "truncate": lambda: lease.truncate(4),
                "release": lease.release,
                "await a handle": lambda: next(handle.__await__()),
                "cancel a handle": handle.cancel,
                "release what is kept": kept.release,
            }  # fmt: skip
            for name, call in calls.items():
                with pytest.raises(RuntimeError, match="thread") as caught:
                    await asyncio.to_thread(call)
                assert "belongs to" in str(caught.value), name
        kept.release()


# The supervisor's task or a worker's is cancelled by somebody else, as a loop that shuts down does: nobody is left
# waiting.


async def test_a_worker_that_somebody_cancels_has_died_and_the_others_end() -> None:
    deaths: list[BaseException] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start()
    first = supervisor.spawn(asyncio.sleep(60), "first")
    second = supervisor.spawn(asyncio.sleep(60), "second")
    assert first is not None
    assert second is not None
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([second])
    assert [str(death) for death in deaths] == ["first was cancelled"]
    await supervisor.stop()
    assert not len(supervisor)


def test_a_task_that_fails_is_what_the_supervisor_names_even_if_those_that_its_end_cancels_are_heard_first() -> None:
    async def main(loop: SimulatedLoop) -> BaseException | None:
        supervisor = Supervisor(lambda error: None)
        await supervisor.start()
        for number in range(10):
            supervisor.spawn(asyncio.sleep(60), f"sleeps {number}")
        supervisor.spawn(fails(), "fails")
        await asyncio.sleep(1)
        await supervisor.stop()
        return supervisor.error

    async def fails() -> None:
        await asyncio.sleep(0.1)
        raise KeyError

    assert {type(simulate(main, seed)) for seed in range(20)} == {KeyError}


def test_from_the_moment_when_a_task_has_failed_nothing_is_spawned_and_nobody_gets_an_error_for_asking() -> None:
    async def main(loop: SimulatedLoop) -> None:
        supervisor = Supervisor(lambda error: None)
        await supervisor.start()
        failing = supervisor.spawn(fails(), "fails")
        assert failing is not None
        while supervisor.spawn(asyncio.sleep(0), "asks") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert failing.done()
        await supervisor.stop()

    async def fails() -> None:
        await asyncio.sleep(0.0002)
        raise KeyError

    for seed in range(20):
        simulate(main, seed)


# The slow parts of opening, measuring a GPU and pinning memory, leave the loop free.


class Slow(CpuDevice):
    """Memory that somebody has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go, self.ended = threading.Event(), threading.Event(), False

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.set()
        assert self.go.wait(60)
        return super().host_tensor(shape)

    async def aclose(self) -> None:
        await super().aclose()
        self.ended = True


@pytest.mark.parametrize("cancelled", ["nothing", "the call", "every task, as asyncio.run does"])
async def test_the_loop_goes_on_while_memory_is_pinned_and_who_is_cancelled_gives_it_back(
    cancelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, others = Slow(), asyncio.all_tasks()
    monkeypatch.setattr(worker_module, "open_device", lambda name: device)
    opening = asyncio.create_task(AsyncCache(settings(device=8, host=8)).__aenter__())
    await asyncio.to_thread(device.asked.wait, 60)
    if cancelled != "nothing":
        for task in {opening} if cancelled == "the call" else asyncio.all_tasks() - others:
            task.cancel()
    await turns(100)
    assert not opening.done()
    device.go.set()
    if cancelled == "nothing":
        await (await opening).aclose()
    else:
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert device.ended


@pytest.mark.parametrize("by", ["aclose", "cancel"])
async def test_ended_in_any_turn_of_its_opening_it_leaves_nothing_open(by: str) -> None:
    """Also when the opening has just ended. The opener hears that it was closed."""
    before = asyncio.all_tasks()
    for later in range(1000):
        cache = AsyncCache(settings(device=8, host=8))
        opening = asyncio.create_task(cache.__aenter__())
        while cache._worker is None:
            await turns(1)
        await turns(later)
        if opening.done():
            await cache.aclose()
            break
        with pytest.raises(RuntimeError, match="opened once"):
            await cache.__aenter__()
        if by == "cancel":
            opening.cancel()
        else:
            await cache.aclose()
        with pytest.raises(CacheClosed if by == "aclose" else asyncio.CancelledError):
            await opening
        assert cache.closed is not None
        assert by == "aclose" or cache._worker is None
        assert asyncio.all_tasks() <= before
    assert later > 2


@pytest.mark.parametrize("turns_between", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("by", ["aclose", "cancel"])
async def test_what_ends_an_opening_again_does_not_interrupt_its_clean_up(
    turns_between: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, device, before = MemoryBackend(), Slow(), asyncio.all_tasks()
    device.go.set()
    monkeypatch.setattr(worker_module, "open_device", lambda name: device)
    started = asyncio.Event()

    async def start(parts: Head) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Head, "start", start)
    cache = AsyncCache(settings(device=8, host=8), storage=backend)
    opening = asyncio.create_task(cache.__aenter__())
    await started.wait()
    closing = [asyncio.create_task(cache.aclose())]
    for _ in range(3):
        await turns(turns_between)
        if by == "cancel":
            opening.cancel()
        else:
            closing.append(asyncio.create_task(cache.aclose()))
    await asyncio.wait([opening, *closing])
    assert device.ended
    assert cache.closed == "the cache is not open"
    assert opening.cancelled() if by == "cancel" else isinstance(opening.exception(), CacheClosed)
    assert asyncio.all_tasks() <= before
    await backend.aclose()


async def test_a_device_that_outlives_its_caches_has_its_streams_back() -> None:
    device = CpuDevice()
    before = set(threading.enumerate())
    for _ in range(5):
        async with AsyncCache(settings(device=8, host=8), device=device) as cache:
            await serve(cache, text(2))
        with pytest.raises(ConfigError):
            await AsyncCache(settings(device=8, host=8, storage="nowhere:"), device=device).__aenter__()
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asynccache-"):
                await asyncio.to_thread(thread.join, 60)
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("asynccache-")]
    device.stream("engine")
    assert len(device._streams) == 1
    await device.aclose()


async def held(cache: AsyncCache) -> tuple[Lease, HostGate]:
    """A lease that is loading, for as long as the gate is shut."""
    await on_the_host(cache, text(4))
    event = gate(cache)
    fence_all(cache, event)
    return await enter(cache, 4, extra=1), event


async def test_closing_waits_for_the_copies_on_a_device_that_outlives_it() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8, host=16), device=device).__aenter__()
    lease, gate = await held(cache)
    loading = asyncio.create_task(lease.loaded())
    await turns()
    lease.release()
    closing = asyncio.create_task(cache.aclose())
    await turns(1000)
    assert not closing.done()
    gate.open()
    await closing
    await asyncio.wait([loading])
    await device.aclose()


async def test_closing_does_not_wait_for_ever_for_an_engine_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr(head_module, "MOMENT", 0.05)
    config = settings(device=8, host=16, close_timeout=0.05)
    async with AsyncCache(config, device=device) as cache:
        lease, _ = await held(cache)
        lease.release()
    await device.aclose()


async def test_closing_that_is_cancelled_while_it_waits_for_copies_gives_the_streams_back() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8, host=16), device=device).__aenter__()
    lease, _ = await held(cache)
    await turns()
    lease.release()
    closing = asyncio.create_task(cache.aclose())
    await turns(1000)
    assert cache._closer is not None
    cache._closer.cancel()
    await closing
    with pytest.raises(CacheClosed):
        local(cache).mover._backups.record()
    await device.aclose()


async def test_a_batch_that_is_refused_while_another_is_on_its_way_ends_the_cache() -> None:
    """The worker waits for the first, and could not tell."""
    device = CpuDevice()
    cache = await AsyncCache(settings(device=12, host=64, close_timeout=0.05), device=device).__aenter__()
    for seed in (1, 2):
        await serve(cache, text(3, seed=seed))
        await settled(cache)
    await push_out(cache, 12)
    mover, gate = local(cache).mover, device.gate()
    fence_all(cache, gate)
    one = await cache.lease(text(3, seed=1, extra=1)).__aenter__()
    await turns(100)
    two = await cache.lease(text(3, seed=2, extra=1)).__aenter__()

    def refuse(*_: object) -> None:
        raise ValueError("not this one")

    mover.load = refuse  # type: ignore[assignment]
    with pytest.raises(ValueError, match="not this one"):
        await two.layer(0)
    with pytest.raises(CacheClosed):
        await two.loaded()
    gate.open()
    one.release()
    two.release()
    report = await cache.aclose()
    assert isinstance(report.error, ValueError)
    await device.aclose()


# Fail-stop holds for errors that only a compiled core raises: an argument of another type is the caller's error.
# Modules that are compiled besides the core never wait, because compiled coroutines are not tested.


@pytest.mark.parametrize("module", compiled.ALSO)
def test_what_is_compiled_besides_the_core_never_waits(module: str) -> None:
    tree = ast.parse(Path(compiled.source_of(module)).read_text("utf-8"))
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, waiting)] == []


@pytest.mark.parametrize("number", [2**63, 2**80])
async def test_an_integer_beyond_a_machine_word_is_refused_or_works_on_both_cores(number: int) -> None:
    """Never an ``OverflowError``, which would close the cache of whoever asked."""
    async with AsyncCache(settings()) as cache:
        for wrong, options, error in (([1, number], {}, ConfigError), ([1], {"new_tokens": number}, CacheFull),
                                      ([1], {"states": number}, ConfigError)):  # fmt: skip
            given: Any = options
            with pytest.raises(error, match=str(number) if error is ConfigError else "are asked for"):
                await cache.lease(wrong, wait=False, **given).__aenter__()
        async with cache.lease([1, 2, 3], chunk=number, swa_chunk=number, shared_tokens=number) as lease:
            with pytest.raises(CacheFull):
                await lease.extend(number)
            with pytest.raises(ConfigError, match=str(number)):
                lease.advance(number)
            lease.truncate(number)
