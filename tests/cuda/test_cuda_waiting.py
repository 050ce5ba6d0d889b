"""Submitters and waiters, and errors of the driver, passing and lasting ones."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time

import numpy as np
import pytest

from asynccache import AsyncCache
from asynccache.core.plan import Move
from asynccache.errors import CacheClosed, CopyFailed, LoadFailed
from asynccache.memory.cuda import events as cuda_events
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import STICKY, DriverError
from asynccache.memory.cuda.streams import APART, CAP, CudaStream
from asynccache.memory.device import CopyDirection, Event
from asynccache.memory.mover import Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import DMA, KERNEL, SimulatedEngine, TorchStream, driver_of, layers_of, parts, races, submitted
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.cuda.test_cuda_cache import Worker
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool
from tests.runtime.runtime_kit import settings, text

# Submitters and waiters: bursts, thousands in flight, errors, pools of events, buffers that stay, and the end.


ENOUGH = 30.0
SOON = 3.0


def scattered(pages: int, seed: int = 0) -> Move:
    """No two pages are neighbours on both sides, so nothing merges."""
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(pages).astype("<i4").tobytes() for _ in range(2))
    return Move(0, src, dst)


async def test_waits_too_leave_room_in_the_drivers_queue(simulated_device: Make) -> None:
    """One for each request that an engine has released before a load: the engine is busy for long."""
    _, driver, mover, engine = filled(simulated_device)
    driver.hold(engine.handle)
    engine.write(layers_of(mover, 1), 1)
    load = mover.load([move([0], [0])], [engine.stream.record() for _ in range(1500)]).done
    handle = mover._loads.handle  # type: ignore[attr-defined]
    assert await asyncio.to_thread(driver.await_entries, handle, CAP - APART)
    await asyncio.sleep(0.2)  # would it go on, it would be far beyond the cap by now
    assert driver._taken(handle) <= CAP + 1
    driver.resume()
    await load.wait()


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.slow(1)
async def test_the_drivers_queue_is_never_full(simulated_device: Make, batches: bool) -> None:
    """Else the driver would block the submitter with its locks held, and an engine's launches too."""
    device = simulated_device(batches=batches, settings=DMA)
    mover, driver = Mover(device, [pool(device_pages=1024, host_pages=1024)]), driver_of(device)
    fill_device(mover)
    driver.pause()
    large = [mover.backup([scattered(1024)]) for _ in range(4)]  # 4,096 pieces each
    small = [mover.backup([move([i % 32], [i % 32])]) for i in range(1000)]
    handle = mover._backups.handle  # type: ignore[attr-defined]
    assert await asyncio.to_thread(driver.await_entries, handle, CAP)
    assert not large[-1].recorded  # type: ignore[attr-defined]
    driver.resume()
    await asyncio.gather(*(event.wait() for event in (*large, *small)))
    assert driver.calls["blocked"] == 0
    assert driver.deepest < 1024


async def test_an_engine_whose_stream_is_full_holds_up_nobody_but_itself(simulated_device: Make) -> None:
    """It is held in the driver's call, which lasts as long as its stream's work. Meanwhile the loop awaits events of
    the copy's stream, and a handle that is in the driver's hands is not used again."""
    _, mover, engine = parts(simulated_device, depth=64)
    driver = engine.driver
    driver.hold(engine.handle)
    for _ in range(64):
        driver.compute(engine.handle, lambda: None)
    driver.hold(mover._loads.handle)  # type: ignore[attr-defined]
    first, second = (mover.load([move([i], [i])]).done for i in range(2))
    submitted(second)
    held = asyncio.create_task(asyncio.to_thread(engine.stream.wait_event, first))
    await asyncio.to_thread(blocked, driver)
    began = time.monotonic()
    waiting = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    assert time.monotonic() - began < SOON, "the loop was held"
    with driver._state:
        driver.held.discard(mover._loads.handle)  # type: ignore[attr-defined]
        driver._state.notify_all()
    async with asyncio.timeout(ENOUGH):
        await waiting
    assert not held.done()
    assert first._handle is not None, "the driver has it"  # type: ignore[attr-defined]
    driver.resume()
    async with asyncio.timeout(ENOUGH):
        await held
    assert first._handle is None  # type: ignore[attr-defined]


def blocked(driver: SimulatedCuda) -> None:
    """Return when a call for a full stream has blocked."""
    with driver._state:
        assert driver._state.wait_for(lambda: driver.calls["blocked"] > 0, ENOUGH)


async def test_the_loop_goes_on_while_somebody_holds_the_drivers_lock(simulated_device: Make) -> None:
    """To pin 100 GiB, or to load a module, takes that long. Copies are asked for and events awaited meanwhile."""
    _, mover, engine = parts(simulated_device)
    with engine.driver.locked():
        began = time.monotonic()
        events = [mover.backup([move([i], [i])]) for i in range(8)]
        waiting = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < SOON
        assert not any(task.done() for task in waiting)
    async with asyncio.timeout(ENOUGH):
        await asyncio.gather(*waiting)


async def test_a_forked_child_is_told_that_its_streams_do_nothing(simulated_device: Make) -> None:
    """Their threads are not there, so an event of such a stream would never fire."""
    _, mover, _ = parts(simulated_device)
    seen, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            mover.backup([move([0], [0])])
            os.write(told, b"took it")
        except CacheClosed as error:
            os.write(told, str(error).encode())
        finally:
            os._exit(0)
    assert b"forked" in os.read(seen, 1000)
    await asyncio.to_thread(os.waitpid, child, 0)
    os.close(seen)
    os.close(told)
    await mover.backup([move([0], [0])]).wait()


async def test_a_shared_device_gets_its_streams_back(simulated_device: Make) -> None:
    device = simulated_device(settings=KERNEL)
    driver, made, before = driver_of(device), list[CudaStream](), set(threading.enumerate())
    for _ in range(5):
        mover = Mover(device, [pool()])
        fill_device(mover)
        streams = list(device._streams)
        gate = device.gate()
        backup = mover.backup([move([3], [4])], after=[gate])
        for stream in streams:
            device.release(stream)
        assert not backup.done()
        with pytest.raises(CacheClosed):
            mover.backup([move([0], [0])])
        gate.open()
        await backup.wait()
        assert host_page(mover, "full", 4) == device_page(mover, "full", 3)
        for stream in streams:
            await asyncio.to_thread(stream.join)
            assert stream.handle not in driver._streams
        made += streams
    assert len({stream.handle for stream in made}) == len(made) >= 10
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("asynccache-")]
    with pytest.raises(CacheClosed, match="released"):
        device.copy(made[0], CopyDirection.OUT, [])
    assert len(driver._memory) == 5  # pools
    await device.aclose()
    assert driver._streams == {}


@pytest.mark.parametrize("end", ["released", "closed"])
async def test_a_stream_is_given_back_when_nothing_is_in_it_any_more(simulated_device: Make, end: str) -> None:
    """Also what was put on it behind its last event: the device still works on that."""
    device = simulated_device()
    driver, engine, stream = driver_of(device), SimulatedEngine(device), device.stream("s")
    driver.hold(engine.handle)
    engine.driver.compute(engine.handle, lambda: None)
    stream.wait_event(engine.stream.record())
    ends = asyncio.create_task(device.aclose() if end == "closed" else asyncio.to_thread(stream.join))
    device.release(stream)
    await asyncio.wait([ends], timeout=0.1)
    assert not ends.done()
    assert len(driver._streams[stream.handle]) > 0
    driver.resume()
    async with asyncio.timeout(ENOUGH):
        await ends
    assert stream.handle not in driver._streams  # the driver would have told that there was work in it


async def test_an_error_of_the_device_fails_all_that_is_in_flight_and_all_that_follows(simulated_device: Make) -> None:
    device, mover, engine = parts(simulated_device, break_at=2)
    driver = engine.driver
    driver.pause()
    backups = [mover.backup([move([i], [i])]) for i in range(20)]
    load = mover.load([move([40], [9])])
    load.wait_layer(engine.stream, 3)
    computed = engine.stream.record()
    driver.resume()
    results = await asyncio.gather(*(e.wait() for e in (*backups, *load.layers, computed)), return_exceptions=True)
    assert sum(isinstance(r, CopyFailed) for r in results) >= len(results) - 3  # three pieces of work have ended
    assert "illegal memory access" in str(results[-1])
    assert isinstance(device.failure, DriverError)
    for event in (mover.backup([move([0], [0])]), *mover.load([move([0], [0])]).layers, engine.stream.record(),
                  mover.clone([move([0], [1])], after=[backups[-1]])):  # fmt: skip
        with pytest.raises(CopyFailed, match="illegal memory access"):
            await event.wait()


async def test_pools_that_nobody_has_any_more_stay_until_the_device_has_let_go(simulated_device: Make) -> None:
    device = simulated_device()
    driver = driver_of(device)
    mover = Mover(device, [pool(size=1 << 16)])
    (memory,) = driver.pinned
    driver.pause()
    waiter = asyncio.create_task(mover.backup([move([0, 2, 4], [1, 3, 5])]).wait())
    load = mover.load([move([10, 12, 14], [11, 13, 15])]).done
    load.await_recorded()  # type: ignore[attr-defined]
    waiter.cancel()
    await asyncio.wait([waiter])
    del mover
    gc.collect()
    assert memory in driver.pinned
    driver.resume()
    await load.wait()
    del load, waiter
    await device.aclose()
    gc.collect()
    assert driver.pinned == {}


async def test_closing_ends_threads_and_streams_and_lets_transfers_finish(simulated_device: Make) -> None:
    device, driver, mover, engine = filled(simulated_device)
    driver.pause()
    backups = [mover.backup([move([i], [i])]) for i in range(31)]
    gate = device.gate()
    held = mover.load([move([40], [31])], after=[gate])
    handles = {stream.handle for stream in device._streams}
    closing = asyncio.create_task(device.aclose())
    await asyncio.sleep(0.02)
    assert not closing.done()
    driver.resume()
    async with asyncio.timeout(ENOUGH):
        await closing
    assert all(e.done() for e in (*backups, held.done, gate))
    assert [host_page(mover, "full", s) for s in range(31)] == [device_page(mover, "full", s) for s in range(31)]
    assert handles
    assert not handles & driver._streams.keys()
    with pytest.raises(CacheClosed):
        mover.backup([move([0], [0])])
    with pytest.raises(CacheClosed):
        device.engine_stream(TorchStream(driver.stream_create()))
    with pytest.raises(CacheClosed):
        engine.stream.record()
    names = [t.name for t in threading.enumerate()]
    assert not [n for n in names if n in ("asynccache-backup_host", "asynccache-load_back-waiter")]


async def test_an_event_that_has_fired_holds_no_stream(simulated_device: Make) -> None:
    """Its handle may stand for somebody else's work by now."""
    device = simulated_device()
    driver, a, b = driver_of(device), device.stream("a"), device.stream("b")
    old = a.record()
    await old.wait()
    driver.hold(a.handle)
    new = a.record()
    new.await_recorded()
    old.hold(b.handle)
    async with asyncio.timeout(ENOUGH):
        await b.record().wait()
    assert not new.done()
    driver.resume()
    await new.wait()


# Errors of the driver, passing and lasting ones: who is told of them, when, and what goes on.


def filled(make: Make) -> tuple[CudaDevice, SimulatedCuda, Mover, SimulatedEngine]:
    """All by the copy engines."""
    device, mover, engine = parts(make, settings=DMA)
    fill_device(mover)
    return device, engine.driver, mover, engine


async def fires(event: Event) -> BaseException | None:
    """What it failed of, or None. A hang is an error of the test."""
    async with asyncio.timeout(ENOUGH):
        try:
            await event.wait()
        except CopyFailed as error:
            return error.__cause__
    return None


def refuse_records(driver: SimulatedCuda, *, from_the: int, up_to_the: int = 1 << 31) -> None:
    """Of the events that are recorded from now on, counted from 1."""
    seen = []

    def record(event: int, stream: int) -> None:
        seen.append(event)
        if from_the <= len(seen) <= up_to_the:
            raise DriverError("not now", 901)
        SimulatedCuda.event_record(driver, event, stream)

    driver.event_record = record  # type: ignore[method-assign]


# an engine's stream


@pytest.mark.parametrize("code", [400, 901, 905, None])
async def test_a_wait_that_is_refused_is_raised_where_the_engine_asked_for_it(
    simulated_device: Make, code: int | None
) -> None:
    """Its stream is not held: whoever reads on would read pages before they are there."""
    device, driver, mover, engine = filled(simulated_device)
    driver.hold(mover._loads.handle)  # type: ignore[attr-defined]
    load = mover.load([move([1], [2])])
    submitted(load.done)
    driver.refuse("stream_wait_event", stream=engine.handle, error=DriverError("the stream is captured", code))
    with pytest.raises(DriverError, match="captured"):
        load.wait_layer(engine.stream, 0)
    assert device.failure is None
    load.wait_layer(engine.stream, 3)  # the next one is not refused
    found = engine.read(layers_of(mover, 2))
    driver.resume()
    assert await fires(load.done) is None
    await engine.stream.record().wait()
    assert b"".join(found) == host_page(mover, "full", 1)
    assert await fires(mover.backup([move([0], [0])])) is None


@pytest.mark.parametrize("call", ["event_record", "event_create"])
async def test_an_event_that_is_refused_is_raised_where_the_engine_asked_for_it(
    simulated_device: Make, call: str
) -> None:
    device, driver, mover, engine = filled(simulated_device)
    driver.refuse(call, 901)
    with pytest.raises(DriverError, match=r"refused \(901\)"):
        engine.stream.record()
    assert device.failure is None
    await engine.stream.record().wait()
    assert await fires(mover.backup([move([0], [0])])) is None


async def test_a_stream_that_is_captured_in_a_graph_is_told_so_and_nothing_goes_into_the_graph(
    simulated_device: Make
) -> None:
    device, driver, mover, engine = filled(simulated_device)
    driver.captured.add(engine.handle)
    before = driver.calls["event_record"], driver.calls["stream_wait_event"]
    load = mover.load([move([0], [0])]).done
    for use in (engine.stream.record, lambda: engine.stream.wait_event(load)):
        with pytest.raises(DriverError, match="captured in a graph"):
            use()
    assert await fires(load) is None
    assert driver.calls["stream_wait_event"] == before[1]
    assert device.failure is None
    driver.captured.clear()
    assert await fires(engine.stream.record()) is None


async def test_what_an_engine_did_to_its_own_event_fails_that_event_alone(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was recorded in a graph never happens, and the driver says so each time."""
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.0, 0.0))
    device, driver, mover, engine = filled(simulated_device)
    driver.refuse("event_synchronize", 907, times=2)
    captured = engine.stream.record()
    assert "907" in str(await fires(captured))
    assert device.failure is None
    assert await fires(engine.stream.record()) is None
    assert await fires(mover.backup([move([0], [0])])) is None


# a stream of the device


@pytest.mark.parametrize("code", sorted(STICKY))
async def test_an_error_after_which_a_context_does_nothing_is_the_end_of_the_device(
    simulated_device: Make, code: int
) -> None:
    device, driver, mover, _ = filled(simulated_device)
    driver.refuse("event_record", code)
    assert str(code) in str(await fires(mover.backup([move([0], [0])])))
    assert device.failure is not None
    assert device.failure.code == code
    assert await fires(mover.load([move([0], [0])]).done) is device.failure


@pytest.mark.parametrize("code", [2, 400, 901, 905, None])
@pytest.mark.parametrize("call", ["event_record", "event_create"])
async def test_a_batch_whose_event_is_refused_fails_when_the_device_has_let_go_of_it(
    simulated_device: Make, call: str, code: int | None
) -> None:
    """Whoever is told earlier gives the pages to somebody else while the copy still writes them."""
    device, driver, mover, _ = filled(simulated_device)
    memory = set(driver.pinned)
    driver.pause()
    driver.refuse(call, error=DriverError("not now", code), times=2)
    backup = mover.backup([move([0, 2, 4], [1, 3, 5])])
    submitted(backup)
    del mover
    gc.collect()
    assert driver.pending() > 0
    await asyncio.sleep(0.05)
    assert not backup.done()
    assert memory <= driver.pinned.keys()  # the copy owns it
    driver.resume()
    assert str(await fires(backup)) == "not now"
    assert driver.pending() == 0
    assert device.failure is None
    async with asyncio.timeout(ENOUGH):
        await device.aclose()
    gc.collect()
    assert driver.pinned == {}


@pytest.mark.parametrize("events", [True, False], ids=["with its events", "alone"])
async def test_a_batch_that_is_refused_half_way_keeps_its_pages(simulated_device: Make, events: bool) -> None:
    """Until the device has let go of them: whoever is told of the failure gives them to somebody else."""
    device, driver, mover, _ = filled(simulated_device)
    driver.refuse("copy", 1, after=1)
    driver.pause()
    if events:
        refuse_records(driver, from_the=2)
    load = mover.load([move([1, 3], [0, 2])])  # the first layer is in flight when the second is refused
    for event in load.layers:
        submitted(event)
    await asyncio.sleep(0.05)
    assert not any(event.done() for event in load.layers)
    driver.resume()
    assert [isinstance(await fires(event), DriverError) for event in load.layers] == [False, True, True, True]
    assert driver.pending() == 0
    refuse_records(driver, from_the=1 << 30)
    assert device.failure is None
    assert await fires(mover.load([move([1, 3], [0, 2])]).done) is None
    assert device_page(mover, "full", 2) == host_page(mover, "full", 3)


@pytest.mark.parametrize("refused", ["stream_wait_event", "event_record"])
async def test_what_the_device_does_not_order_the_submitter_does(simulated_device: Make, refused: str) -> None:
    """The load writes the page that the backup reads: it may not begin before."""
    device, driver, mover, _ = filled(simulated_device)
    wanted = device_page(mover, "full", 0)
    driver.pause()
    driver.refuse(refused, 901, times=2 if refused == "event_record" else 1)
    backup = mover.backup([move([0], [0])])
    submitted(backup)
    load = mover.load([move([9], [0])], after=[backup])
    driver.resume()
    failed = await fires(backup)
    assert (failed is None) is (refused == "stream_wait_event")
    assert await fires(load.done) is None
    assert host_page(mover, "full", 0) == wanted
    assert device.failure is None


async def test_a_driver_that_does_not_tell_for_a_while_is_asked_again(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread captures a graph it refuses such calls, and nothing has failed."""
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.001,) * 8)
    device, driver, mover, _ = filled(simulated_device)
    driver.refuse("event_synchronize", 900, times=3)
    driver.refuse("event_query", 900, times=3)
    backups = [mover.backup([move([i], [i])]) for i in range(4)]
    assert [await fires(backup) for backup in backups] == [None] * 4
    assert device.failure is None
    assert [host_page(mover, "full", i) for i in range(4)] == [device_page(mover, "full", i) for i in range(4)]


@pytest.mark.parametrize("error", [DriverError("refused", 900), TypeError("a bug")])
async def test_a_driver_that_never_tells_again_has_failed(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.0, 0.0))
    device, driver, mover, _ = filled(simulated_device)
    for call in ("event_synchronize", "event_query", "stream_synchronize"):
        driver.refuse(call, error=error, times=1 << 30)
    assert "does not tell" in str(await fires(mover.backup([move([0], [0])])))
    assert await fires(mover.load([move([0], [0])]).done) is device.failure


# threads that outlive errors


@pytest.mark.parametrize("error", [DriverError("invalid argument", 1), ValueError("a bug")])
async def test_work_that_raises_in_a_submitter_is_told_by_the_next_event(
    simulated_device: Make, error: Exception
) -> None:
    device = simulated_device()
    stream = device.stream("s")

    def work() -> None:
        raise error

    stream.call(work)
    assert await fires(stream.record()) is error
    assert await fires(stream.record()) is None
    assert device.failure is None


@pytest.mark.parametrize("call", ["event_record", "event_create", "stream_wait_event"])
async def test_a_bug_in_a_call_of_the_driver_ends_no_thread(simulated_device: Make, call: str) -> None:
    _, driver, mover, _ = filled(simulated_device)
    driver.pause()
    first = mover.backup([move([0], [0])])
    submitted(first)
    driver.refuse(call, error=AttributeError("a bug"))
    second = mover.load([move([1], [1])], after=[first]).done
    driver.resume()
    assert await fires(first) is None
    await fires(second)
    assert await fires(mover.load([move([1], [1])]).done) is None


@pytest.mark.parametrize("times", [1, 2])
async def test_a_device_that_cannot_be_chosen_fails_what_is_asked_of_it(simulated_device: Make, times: int) -> None:
    """In the thread that waits, or in both."""
    device, driver, *_ = filled(simulated_device)
    driver.refuse("use_device", 46, times=times)
    stream = device.stream("late")
    assert "46" in str(await fires(stream.record()))


# all of it together


class Moody(SimulatedCuda):
    """Refuses one call in eight of those that keep order on the device's own streams, and some copies."""

    spared = 0
    refused = 0

    def _admit(self, call: str, stream: int | None = None, *, here: bool = False) -> None:
        super()._admit(call, stream, here=here)
        orders = call in ("event_record", "stream_wait_event") and stream != self.spared
        asks = call in ("event_query", "event_synchronize", "stream_synchronize")
        if self._random.random() < (0.125 if orders or asks else 0.02 if call == "copy" else 0.0):
            self.refused += 1
            raise DriverError(f"{call}: not now", 901)


@pytest.mark.parametrize("seed", range(4))
async def test_a_moody_driver_costs_batches_and_never_a_byte_or_the_device(
    drivers: list[SimulatedCuda], seed: int
) -> None:
    driver, rng = Moody(seed), random.Random(seed)
    drivers.append(driver)
    device, served = CudaDevice(driver), 0
    async with AsyncCache(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        driver.spared = worker.engine.handle
        for _ in range(40):
            try:
                async with asyncio.timeout(ENOUGH):
                    await worker.serve(text(4, rng.randrange(12), extra=1), careful=True)
                served += 1
            except (LoadFailed, CopyFailed):
                await worker.engine.stream.record().wait()
                worker.wrong.clear()  # it was told that what it read is not good
                races(driver)
            await worker.engine.stream.record().wait()
            assert worker.wrong == []
            assert races(driver) == []
        assert worker.loaded > 0
    assert served > 0
    assert driver.refused > 10
    assert device.failure is None
    async with asyncio.timeout(ENOUGH):
        await device.aclose()
