"""An engine's own events, as torch and cupy make them, stand where the device's stand: ``ready``, ``after``.

Stand-ins take the place of their classes here, since neither library makes an event without a GPU; ``test_cuda_gpu``
has the real ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from asynccache.errors import CacheClosed, ConfigError
from asynccache.memory.cuda.device import ADOPTED_AT_MOST, CudaDevice
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.pools import Mover
from asynccache.runtime.lease import Lease
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import SimulatedEngine, TorchStream, driver_of, layers_of, races, submitted
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import fill_device, move, pool
from tests.runtime.runtime_kit import PAGE, compute, opened, push_out, serve, settings, settled, text, turns, until


class TorchEvent:
    """Shaped as ``torch.cuda.Event``: its handle comes when it is first recorded; it has no ``done``."""

    def __init__(self, driver: SimulatedCuda) -> None:
        self._driver = driver
        self._handle = 0

    @property
    def cuda_event(self) -> int:
        return self._handle

    def record(self, stream: int) -> None:
        self._handle = self._handle or self._driver.event_create()
        self._driver.event_record(self._handle, stream)

    def query(self) -> bool:
        raise AssertionError("it holds the GIL")

    def synchronize(self) -> None:
        raise AssertionError("it holds the loop")


class CupyEvent:
    """Shaped as ``cupy.cuda.Event``: it has its handle from the start, and ``done`` is a property that asks."""

    def __init__(self, driver: SimulatedCuda) -> None:
        self._driver = driver
        self.ptr = driver.event_create()

    def record(self, stream: int) -> None:
        self._driver.event_record(self.ptr, stream)

    @property
    def done(self) -> bool:
        raise AssertionError("it holds the GIL")

    def synchronize(self) -> None:
        raise AssertionError("it holds the loop")


class CupyStream:
    """Shaped as ``cupy.cuda.Stream``, which has a ``ptr`` too, and ``done``."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle

    @property
    def done(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


Made = Callable[[SimulatedCuda], TorchEvent | CupyEvent]
KINDS = pytest.mark.parametrize("kind", [TorchEvent, CupyEvent])


def recorded(engine: SimulatedEngine, kind: Made) -> TorchEvent | CupyEvent:
    event = kind(engine.driver)
    event.record(engine.handle)
    return event


@KINDS
async def test_released_pages_retire_until_the_engines_event_has_happened(simulated_device: Make, kind: Made) -> None:
    device = simulated_device()
    async with opened(settings(device=8), device=device) as cache:
        engine = SimulatedEngine(device)
        engine.driver.hold(engine.handle)
        lease = await cache.lease(text(8)).__aenter__()
        lease.release(after=recorded(engine, kind))
        waits = asyncio.create_task(cache.lease(text(1, seed=2)).__aenter__())
        await turns(50)
        assert cache.statistics().device["full"].free == 0
        assert not waits.done()
        engine.driver.resume()
        (await waits).release()
        assert cache.statistics().device["full"].free == 8
    await device.aclose()


@KINDS
async def test_a_backup_waits_on_the_device_for_the_engines_event(simulated_device: Make, kind: Made) -> None:
    device = simulated_device()
    async with opened(settings(host=16), device=device) as cache:
        engine, tokens = SimulatedEngine(device), text(4)
        engine.driver.hold(engine.handle)
        async with cache.lease(tokens) as lease:
            engine.driver.compute(engine.handle, lambda: compute(cache, lease, tokens))
            await lease.commit(tokens, after=recorded(engine, kind))
            await turns(50)
            assert cache.statistics().stages["backup_host"].ops == 0
            engine.driver.resume()
            await until(lambda: cache.statistics().stages["backup_host"].ops > 0)
        await settled(cache)
        await push_out(cache, 16)
        assert await serve(cache, [*tokens, 1]) == 4 * PAGE
    await device.aclose()


@KINDS
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_load_is_ordered_behind_the_engines_event(simulated_device: Make, kind: Made, fenced: bool) -> None:
    """Without the edge the simulated driver reports a race."""
    device = simulated_device()
    mover, engine = Mover(device, [pool()]), SimulatedEngine(device)
    fill_device(mover)
    before = b"".join(row.numpy().tobytes() for row in layers_of(mover, 4))
    engine.driver.hold(engine.handle)
    found = engine.read(layers_of(mover, 4))
    after = [mover.engine_event(recorded(engine, kind))] if fenced else []
    load = mover.load([move([0], [4])], after).done
    submitted(load)
    if not fenced:
        await load.wait()
    engine.driver.resume()
    await load.wait()
    await engine.stream.record().wait()
    assert (b"".join(found) == before) is fenced
    assert bool(races(engine.driver)) is not fenced
    await device.aclose()


@KINDS
async def test_an_event_is_taken_as_of_the_call_whatever_the_engine_records_in_it_later(
    simulated_device: Make, kind: Made
) -> None:
    """Else a load would wait for what the engine does behind that load, and neither would ever end."""
    device = simulated_device()
    mover, engine = Mover(device, [pool()]), SimulatedEngine(device)
    engine.driver.hold(engine.handle)
    engine.write(layers_of(mover, 4), 1)
    event = recorded(engine, kind)
    after = [mover.engine_event(event)]
    load = mover.load([move([0], [4])], after)
    submitted(load.done)
    load.wait_layer(mover.engine_stream(engine.torch), mover.layers - 1)
    event.record(engine.handle)
    again = mover.load([move([1], [4])], after).done
    engine.driver.resume()
    async with asyncio.timeout(60):
        await again.wait()
    await device.aclose()


@KINDS
async def test_an_event_that_was_never_recorded_has_happened(simulated_device: Make, kind: Made) -> None:
    device = simulated_device()
    assert device.engine_event(kind(driver_of(device))).done()
    await device.aclose()


async def test_one_event_that_was_adopted_can_be_named_for_many_leases(simulated_device: Make) -> None:
    device = simulated_device()
    engine = SimulatedEngine(device)
    engine.driver.hold(engine.handle)
    event = device.engine_event(recorded(engine, TorchEvent))
    assert device.engine_event(event) is event
    gate = device.gate()
    assert device.engine_event(gate) is gate
    past = device.engine_event(TorchEvent(engine.driver))
    assert device.engine_event(past) is past
    engine.driver.resume()
    await event.wait()
    await device.aclose()


async def test_a_thread_that_captures_a_graph_is_refused_before_the_driver_is_asked(simulated_device: Make) -> None:
    """Asking for an event of the graph would be the graph's end."""
    device = simulated_device()
    engine = SimulatedEngine(device)
    engine.driver.use_stream(engine.handle)
    engine.driver.captured.add(engine.handle)
    event = recorded(engine, TorchEvent)
    with pytest.raises(ConfigError, match="this thread captures a graph"):
        device.engine_event(event)
    assert engine.driver.lost == []
    engine.driver.captured.clear()
    engine.driver.use_stream(None)
    await device.engine_event(recorded(engine, TorchEvent)).wait()
    await device.aclose()


async def test_events_and_streams_of_torch_that_may_be_of_any_device(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.Event`` and ``torch.Stream``, which vLLM hands out."""
    device = simulated_device()
    engine = SimulatedEngine(device)
    made: list[dict[str, int]] = []

    def stream(**parts: int) -> object:
        made.append(parts)
        return engine.torch

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    anys = SimpleNamespace(device=cuda, stream_id=35, device_index=1, device_type=1)
    assert device.engine_stream(anys) is engine.stream
    assert made == [{"stream_id": 35, "device_index": 1, "device_type": 1}]
    event = recorded(engine, TorchEvent)
    assert isinstance(event, TorchEvent)
    handle = event.cuda_event
    await device.engine_event(SimpleNamespace(device=cuda, event_id=handle)).wait()
    for wrong in (SimpleNamespace(device=cpu, event_id=handle), SimpleNamespace(device=cuda, event_id=None)):
        with pytest.raises(ConfigError, match="no event that a CUDA stream can wait for"):
            device.engine_event(wrong)
    await device.aclose()


@pytest.mark.parametrize("call", ["release", "commit"])
@pytest.mark.parametrize("what", ["a stream of torch", "a stream of cupy", "a captured event", "refused", "another's"])
async def test_what_cannot_be_waited_for_is_refused_and_the_lease_goes_on(
    simulated_device: Make, what: str, call: str
) -> None:
    device, other = simulated_device(), simulated_device()
    async with opened(settings(device=8), device=device) as cache:
        engine, stranger = SimulatedEngine(device), SimulatedEngine(other)
        engine.driver.hold(engine.handle)
        event: object
        if what == "a captured event":
            engine.driver.captured.add(engine.handle)
            event = recorded(engine, TorchEvent)
        elif what == "refused":
            event = recorded(engine, TorchEvent)
            engine.driver.refuse("stream_wait_event", 400)
        else:
            event = {"a stream of torch": engine.torch, "a stream of cupy": CupyStream(engine.handle),
                     "another's": stranger.stream.record()}[what]  # fmt: skip
        async with cache.lease(text(2)) as lease:
            with pytest.raises(ConfigError, match=f"^{call}: ") as told:
                await _call(lease, call, event)
            assert type(event).__name__ in str(told.value)
            assert lease.pages.size == 2
            assert cache.statistics().device["full"].free == 6
            await lease.commit(text(2))
        engine.driver.resume()
    await device.aclose()
    await other.aclose()


async def _call(lease: Lease, call: str, event: object) -> None:
    if call == "release":
        lease.release(after=event)
    else:
        await lease.commit(text(2), after=event)


async def test_engines_threads_name_their_events_too(simulated_device: Make) -> None:
    """The event is taken in the thread that calls: what it records a moment later does not count."""
    device = simulated_device()
    async with opened(settings(device=8), device=device) as cache:
        engine = SimulatedEngine(device)
        engine.driver.hold(engine.handle)
        lease = await cache.lease(text(2), new_tokens=6 * PAGE).__aenter__()
        loop = asyncio.get_running_loop()

        def work() -> None:
            event = recorded(engine, CupyEvent)
            asyncio.run_coroutine_threadsafe(lease.commit(text(2), after=event), loop).result(10)
            loop.call_soon_threadsafe(lease.release, event)

        await asyncio.to_thread(work)
        await turns(50)
        assert cache.statistics().device["full"].free == 0
        engine.driver.resume()
        await until(lambda: cache.statistics().device["full"].free == 6)
    await device.aclose()


async def test_many_events_fill_no_queue_of_the_driver(simulated_device: Make) -> None:
    """The caller's thread would block in a call of the driver, and that is the loop's."""
    device = simulated_device()
    engine = SimulatedEngine(device)
    engine.driver.hold(engine.handle)
    engine.driver.compute(engine.handle, lambda: None)
    event = recorded(engine, TorchEvent)
    adopted = [device.engine_event(event) for _ in range(5 * ADOPTED_AT_MOST)]
    assert engine.driver.deepest <= 2 * ADOPTED_AT_MOST
    engine.driver.resume()
    await asyncio.gather(*(one.wait() for one in adopted))
    engine.driver.hold(engine.handle)
    engine.driver.compute(engine.handle, lambda: None)
    event.record(engine.handle)
    device.engine_event(event)
    assert len(device._adopting) == 5, "streams whose events have happened are used again"
    engine.driver.resume()
    await device.aclose()


async def test_a_device_that_failed_or_is_closed_waits_for_nothing(simulated_device: Make) -> None:
    for end in ("fails", "is closed"):
        device: CudaDevice = simulated_device()
        engine = SimulatedEngine(device)
        engine.driver.hold(engine.handle)
        engine.driver.compute(engine.handle, lambda: None)
        event = recorded(engine, TorchEvent)
        waits = device.engine_event(event)
        assert not waits.done()
        if end == "fails":
            engine.driver.refuse("event_query", 700, error=DriverError("an illegal memory access", 700))
        else:
            await device.aclose()
        assert device.engine_event(event).done()
        assert device.engine_event(event).done()
        engine.driver.resume()
        await device.aclose()


async def test_an_event_that_is_recorded_while_the_device_closes_fires_or_is_refused(simulated_device: Make) -> None:
    device: CudaDevice = simulated_device()
    driver = driver_of(device)
    handle_of_the_engine = driver.stream_create()
    stream = device.engine_stream(TorchStream(handle_of_the_engine))
    inside, go, record = threading.Event(), threading.Event(), driver.event_record

    def slow(event: int, handle: int) -> None:
        if handle == handle_of_the_engine:
            inside.set()
            assert go.wait(30)  # after it was asked whether the stream is closed, and before the waiter has the event
        record(event, handle)

    driver.event_record = slow  # type: ignore[assignment, method-assign]
    recording = asyncio.get_running_loop().run_in_executor(None, stream.record)
    await asyncio.to_thread(inside.wait, 30)
    closing = asyncio.create_task(device.aclose())
    await asyncio.sleep(0.05)
    go.set()
    event = await recording
    await asyncio.wait_for(event.wait(), 5)
    await closing
    with pytest.raises(CacheClosed):
        stream.record()
