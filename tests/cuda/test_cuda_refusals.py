"""Errors of the driver, passing and lasting ones: who is told of them, when, and what goes on."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence

import pytest

from asynccache import AsyncCache
from asynccache.errors import CopyFailed, LoadFailed
from asynccache.memory.cuda import events as cuda_events
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import STICKY, DriverError
from asynccache.memory.device import Event
from asynccache.memory.pools import Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import DMA, SimulatedEngine, TorchStream, driver_of, layers_of, races, submitted
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.cuda.test_cuda_cache import Worker
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool
from tests.runtime.runtime_kit import settings, text

ENOUGH = 30.0


def parts(make: Make, **options: object) -> tuple[CudaDevice, SimulatedCuda, Mover]:
    device = make(settings=DMA, **options)
    mover = Mover(device, [pool()])
    fill_device(mover)
    return device, driver_of(device), mover


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
    device, driver, mover = parts(simulated_device)
    engine = SimulatedEngine(device)
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
    await device.aclose()


@pytest.mark.parametrize("call", ["event_record", "event_create"])
async def test_an_event_that_is_refused_is_raised_where_the_engine_asked_for_it(
    simulated_device: Make, call: str
) -> None:
    device, driver, mover = parts(simulated_device)
    engine = SimulatedEngine(device)
    driver.refuse(call, 901)
    with pytest.raises(DriverError, match=r"refused \(901\)"):
        engine.stream.record()
    assert device.failure is None
    await engine.stream.record().wait()
    assert await fires(mover.backup([move([0], [0])])) is None
    await device.aclose()


async def test_a_stream_that_is_captured_in_a_graph_is_told_so_and_nothing_goes_into_the_graph(
    simulated_device: Make
) -> None:
    device, driver, mover = parts(simulated_device)
    engine = SimulatedEngine(device)
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
    await device.aclose()


async def test_what_an_engine_did_to_its_own_event_fails_that_event_alone(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was recorded in a graph never happens, and the driver says so each time."""
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.0, 0.0))
    device, driver, mover = parts(simulated_device)
    engine = SimulatedEngine(device)
    driver.refuse("event_synchronize", 907, times=2)
    captured = engine.stream.record()
    assert "907" in str(await fires(captured))
    assert device.failure is None
    assert await fires(engine.stream.record()) is None
    assert await fires(mover.backup([move([0], [0])])) is None
    await device.aclose()


# a stream of the device


@pytest.mark.parametrize("code", sorted(STICKY))
async def test_an_error_after_which_a_context_does_nothing_is_the_end_of_the_device(
    simulated_device: Make, code: int
) -> None:
    device, driver, mover = parts(simulated_device)
    driver.refuse("event_record", code)
    assert str(code) in str(await fires(mover.backup([move([0], [0])])))
    assert device.failure is not None
    assert device.failure.code == code
    assert await fires(mover.load([move([0], [0])]).done) is device.failure
    async with asyncio.timeout(ENOUGH):
        await device.aclose()


@pytest.mark.parametrize("code", [2, 400, 901, 905, None])
@pytest.mark.parametrize("call", ["event_record", "event_create"])
async def test_a_batch_whose_event_is_refused_fails_when_the_device_has_let_go_of_it(
    simulated_device: Make, call: str, code: int | None
) -> None:
    """Whoever is told earlier gives the pages to somebody else while the copy still writes them."""
    device, driver, mover = parts(simulated_device)
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


async def test_a_batch_that_is_refused_half_way_with_its_events_keeps_its_pages(simulated_device: Make) -> None:
    device, driver, mover = parts(simulated_device, refuse_at=frozenset({1}))
    driver.pause()
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
    await device.aclose()


async def test_a_load_fails_from_the_layer_on_whose_event_is_refused(simulated_device: Make) -> None:
    """The engine's stream did not wait for that layer, so the load must not pass for one that came."""
    device, driver, mover = parts(simulated_device)
    refuse_records(driver, from_the=2, up_to_the=2)
    load = mover.load([move([1], [2])])
    failed = [await fires(event) is not None for event in load.layers]
    assert failed == [False, True, True, True]
    assert device.failure is None
    await device.aclose()


@pytest.mark.parametrize("refused", ["stream_wait_event", "event_record"])
async def test_what_the_device_does_not_order_the_submitter_does(simulated_device: Make, refused: str) -> None:
    """The load writes the page that the backup reads: it may not begin before."""
    device, driver, mover = parts(simulated_device)
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
    await device.aclose()  # and the driver has seen no race


async def test_a_driver_that_does_not_tell_for_a_while_is_asked_again(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread captures a graph it refuses such calls, and nothing has failed."""
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.001,) * 8)
    device, driver, mover = parts(simulated_device)
    driver.refuse("event_synchronize", 900, times=3)
    driver.refuse("event_query", 900, times=3)
    backups = [mover.backup([move([i], [i])]) for i in range(4)]
    assert [await fires(backup) for backup in backups] == [None] * 4
    assert device.failure is None
    assert [host_page(mover, "full", i) for i in range(4)] == [device_page(mover, "full", i) for i in range(4)]
    await device.aclose()


@pytest.mark.parametrize("error", [DriverError("refused", 900), TypeError("a bug")])
async def test_a_driver_that_never_tells_again_has_failed(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(cuda_events, "PATIENCE", (0.0, 0.0))
    device, driver, mover = parts(simulated_device)
    for call in ("event_synchronize", "event_query", "stream_synchronize"):
        driver.refuse(call, error=error, times=1 << 30)
    assert "does not tell" in str(await fires(mover.backup([move([0], [0])])))
    assert await fires(mover.load([move([0], [0])]).done) is device.failure
    async with asyncio.timeout(ENOUGH):
        await device.aclose()


# threads that outlive errors


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("error", [DriverError("invalid argument", 1), ValueError("a bug")])
async def test_work_that_raises_in_a_submitter_is_told_by_the_next_event(
    simulated_device: Make, error: Exception
) -> None:
    device = simulated_device()
    stream = device.stream("s")
    stream.call(raising(error))
    assert await fires(stream.record()) is error
    assert await fires(stream.record()) is None
    assert device.failure is None
    await device.aclose()


@pytest.mark.parametrize("call", ["event_record", "event_create", "stream_wait_event"])
async def test_a_bug_in_a_call_of_the_driver_ends_no_thread(simulated_device: Make, call: str) -> None:
    device, driver, mover = parts(simulated_device)
    driver.pause()
    first = mover.backup([move([0], [0])])
    submitted(first)
    driver.refuse(call, error=AttributeError("a bug"))
    second = mover.load([move([1], [1])], after=[first]).done
    driver.resume()
    assert await fires(first) is None
    await fires(second)
    assert await fires(mover.load([move([1], [1])]).done) is None
    await device.aclose()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_device_that_cannot_be_chosen_fails_what_is_asked_of_it(simulated_device: Make, times: int) -> None:
    """In the thread that waits, or in both."""
    device, driver, _ = parts(simulated_device)
    driver.refuse("use_device", 46, times=times)
    stream = device.stream("late")
    assert "46" in str(await fires(stream.record()))
    async with asyncio.timeout(ENOUGH):
        await device.aclose()


async def test_an_engines_stream_that_comes_after_the_device_has_failed_is_told(simulated_device: Make) -> None:
    device, _, mover = parts(simulated_device, break_at=0)
    assert await fires(mover.backup([move([0], [0])])) is device.failure
    late = device.engine_stream(TorchStream(0x77))
    assert await fires(late.record()) is device.failure
    async with asyncio.timeout(ENOUGH):
        await device.aclose()


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


async def carefully(worker: Worker, tokens: Sequence[int]) -> None:
    """A request that asks whether its loads came, before it publishes what it made of them."""
    async with worker.cache.lease(tokens) as lease:
        worker.loaded += lease.hits.host
        worker._prefill(lease, tokens)
        await lease.loaded()
        await lease.commit(tokens, after=worker.engine.stream.record())
        lease.release(after=worker.engine.stream.record())


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
                    await carefully(worker, text(4, rng.randrange(12), extra=1))
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
