"""A whole cache on a CUDA device, with an engine on a stream of its own: order, foreign events, conformance."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asynccache import AsyncCache
from asynccache.errors import CacheClosed, ConfigError, CopyFailed, LoadFailed
from asynccache.memory.cuda.device import ADOPTED_AT_MOST, CudaDevice
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.device import CopyDirection
from asynccache.memory.mover import Mover
from asynccache.memory.pools import PageCopy
from asynccache.memory.signals import call_all
from asynccache.runtime.lease import Lease
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import SimulatedEngine, TorchStream, driver_of, layers_of, parts, races, submitted
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory import test_devices as every_device
from tests.memory import test_mover as the_mover
from tests.memory.small_pools import fill_device, host_page, move, pool
from tests.runtime.runtime_kit import (
    LAYERS,
    PAGE,
    opened,
    page_hashes,
    settings,
    text,
    turns,
    value,
)
from tests.waiting import until

# A whole cache on a CUDA device, with an engine that computes on a stream of its own and never waits on the host.


class Worker:
    """Prefill on a stream: for each layer it waits, on the device, for that layer, checks what is cached, writes the
    rest."""

    def __init__(self, cache: AsyncCache, device: CudaDevice) -> None:
        self.cache = cache
        self.engine = SimulatedEngine(device)
        self.wrong: list[str] = []
        self.checked = 0
        self.loaded = 0

    async def serve(self, tokens: Sequence[int], *, careful: bool = False) -> None:
        """``careful``: it asks whether its loads came, before it publishes what it made of them."""
        async with self.cache.lease(tokens) as lease:
            self.loaded += lease.hits.host
            self._prefill(lease, tokens)
            if careful:
                await lease.loaded()
            ready = self.engine.stream.record()
            await lease.commit(tokens, after=ready)
            lease.release(after=self.engine.stream.record())

    def _prefill(self, lease: Lease, tokens: Sequence[int]) -> None:
        hashes, cached = page_hashes(tokens), lease.cached // PAGE
        for layer in range(LAYERS):
            lease.wait_layer(self.engine.torch, layer)
            memory = self.cache.pools["full"].layer(layer)
            for number, (page, slot) in enumerate(zip(hashes, lease.pages.tolist(), strict=False)):
                row = memory[slot]
                wanted = torch.from_numpy(value(page, "full", layer, row.numel()))
                if number < cached:
                    self._check(row, wanted)
                else:
                    self._write(row, wanted)

    def _check(self, row: torch.Tensor, wanted: torch.Tensor) -> None:
        def check() -> None:
            self.checked += 1
            if not torch.equal(row, wanted):
                self.wrong.append("a cached page has other bytes")

        self.engine.driver.compute(self.engine.handle, check, reads=[row])

    def _write(self, row: torch.Tensor, wanted: torch.Tensor) -> None:
        self.engine.driver.compute(self.engine.handle, lambda: row.copy_(wanted), writes=[row])


@pytest.mark.parametrize("seed", range(4))
async def test_requests_that_evict_and_reload_each_others_pages_read_right_bytes(
    simulated_device: Make, seed: int
) -> None:
    """The device holds a quarter of the prompts. All order is on the device; the driver looks for races."""
    device, rng = simulated_device(), random.Random(seed)
    async with opened(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        for _ in range(8):
            prompts = [text(4, rng.randrange(12), extra=1) for _ in range(3)]
            await asyncio.gather(*(worker.serve(p) for p in prompts))
        await worker.engine.stream.record().wait()
        assert worker.wrong == []
        assert worker.loaded > 0
        assert worker.checked > 0


async def test_cancelled_requests_free_no_page_that_is_in_flight(simulated_device: Make) -> None:
    device, rng = simulated_device(), random.Random(3)
    async with opened(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        for turn in range(12):
            tasks = [asyncio.create_task(worker.serve(text(4, rng.randrange(12), extra=1))) for _ in range(3)]
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            tasks[turn % 3].cancel()
            await asyncio.wait(tasks)
            assert not [t.exception() for t in tasks if not t.cancelled() and t.exception()]
        await worker.engine.stream.record().wait()
        assert worker.wrong == []


async def test_a_device_that_fails_fails_its_loads_and_the_cache_still_closes(simulated_device: Make) -> None:
    device = simulated_device(break_at=400)
    async with AsyncCache(settings(device=16, host=128), device=device) as cache:
        worker = Worker(cache, device)
        failed = 0
        for turn in range(40):
            try:
                await worker.serve(text(4, turn % 12, extra=1))
            except (LoadFailed, CopyFailed, DriverError):  # the last is what the engine meets itself
                failed += 1
        assert device.failure is not None
        assert cache.statistics().stages["backup_host"].errors + failed > 0
    async with asyncio.timeout(30):
        await device.aclose()
    driver_of(device).problems.clear()


# Order between the cache's streams and an engine's: by events on the device, never by luck, never by holding the host.
#
# Each law has its counter-test: without the edge the simulated driver reports a race, so the edge is what orders.


@pytest.mark.parametrize("waits", [True, False])
async def test_a_backup_waits_on_the_device_for_the_engine_that_wrote_the_pages(
    simulated_device: Make, waits: bool
) -> None:
    _, mover, engine = parts(simulated_device)
    engine.driver.hold(engine.handle)
    engine.write(layers_of(mover, 3), 7)
    written = engine.stream.record()
    backup = mover.backup([move([3], [5])], after=[written] if waits else [])
    submitted(backup)
    if waits:
        assert not written.done()
        assert not backup.done()
    else:
        await backup.wait()  # it did not wait, and took what was there
        assert host_page(mover, "full", 5) == bytes(64)
    engine.driver.resume()
    await backup.wait()
    await written.wait()
    if waits:
        assert host_page(mover, "full", 5) == bytes([7]) * 64
    assert bool(races(engine.driver)) is not waits


@pytest.mark.parametrize("waits", [True, False])
async def test_the_engines_stream_waits_for_layer_i_and_the_host_does_not(simulated_device: Make, waits: bool) -> None:
    _, mover, engine = parts(simulated_device)
    mover.host_pools["full"].page(1)[:] = bytes(range(64))
    engine.driver.hold(mover._loads.handle)  # type: ignore[attr-defined]
    load = mover.load([move([1], [2])])
    submitted(load.done)
    found = []
    for i, row in enumerate(layers_of(mover, 2)):
        if waits:
            load.wait_layer(mover.engine_stream(engine.torch), i)
        found.append(engine.read([row]))
    computed = engine.stream.record()
    if not waits:
        await computed.wait()
    assert not load.done.done()
    engine.driver.resume()
    await computed.wait()
    await load.done.wait()
    assert (b"".join(b"".join(layer) for layer in found) == bytes(range(64))) is waits
    assert bool(races(engine.driver)) is not waits


async def test_an_engine_never_waits_for_an_event_that_is_not_recorded_yet(simulated_device: Make) -> None:
    """Such an event reads as complete. The submitter is stopped before it records; the engine's call waits for it."""
    device, mover, engine = parts(simulated_device, depth=4)
    engine.driver.pause()
    loads = [mover.load([move([i], [i])]) for i in range(8)]  # the driver takes four pieces of work, and then blocks

    def use() -> None:
        device.driver.use_device()
        engine.stream.wait_event(loads[-1].done)

    waiting = asyncio.create_task(asyncio.to_thread(use))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    engine.driver.resume()
    await waiting
    found = engine.read(layers_of(mover, 7))
    await engine.stream.record().wait()
    assert len(b"".join(found)) == 64


async def test_an_engines_stream_is_not_held_by_the_host_for_a_gate(simulated_device: Make) -> None:
    device, mover, engine = parts(simulated_device)
    gate = device.gate()
    load = mover.load([move([0], [0])], after=[gate])
    behind = mover.backup([move([0], [1])], after=[load.done])
    for event in (gate, load.done, behind):
        with pytest.raises(ConfigError, match="an engine's"):
            engine.stream.wait_event(event)
    gate.open()
    await behind.wait()
    engine.stream.wait_event(behind)


async def test_a_gate_that_is_open_holds_no_engine_back_though_the_submitter_has_not_woken_up(
    simulated_device: Make
) -> None:
    device, mover, engine = parts(simulated_device)
    gate = device.gate()
    load = mover.load([move([0], [0])], after=[gate]).done
    assert isinstance(load, CudaEvent)
    await until(lambda: load.gate() is gate)
    sleeping = gate.note_fired()
    waits = asyncio.create_task(asyncio.to_thread(engine.stream.wait_event, load))
    await asyncio.wait([waits], timeout=0.2)
    assert not waits.done()
    call_all(sleeping)
    await waits


async def test_an_engines_stream_is_one_stream_however_it_is_given(simulated_device: Make) -> None:
    device, _, engine = parts(simulated_device)
    assert device.engine_stream(engine.torch) is device.engine_stream(engine.handle) is engine.stream
    own = device.stream("own")
    assert device.engine_stream(own) is own
    other = simulated_device()
    with pytest.raises(ConfigError, match="cannot wait for"):
        engine.stream.wait_event(other.stream("x").record())


@pytest.mark.parametrize("seed", range(5))
async def test_loads_and_backups_and_an_engine_on_the_same_pages_never_race(simulated_device: Make, seed: int) -> None:
    """Everything ordered as the runtime orders it: writes, backups behind them, reloads behind both, reads behind."""
    import random

    device, mover, engine = parts(simulated_device)
    rng = random.Random(seed)
    wanted: list[tuple[list[bytes], int]] = []
    for _ in range(60):
        slot, host, value = rng.randrange(8), rng.randrange(8), rng.randrange(1, 256)
        engine.write(layers_of(mover, slot), value)
        written = engine.stream.record()
        backup = mover.backup([move([slot], [host])], after=[written])
        load = mover.load([move([host], [slot + 8])], after=[backup, written])
        for i in range(mover.layers):
            load.wait_layer(engine.stream, i)
        wanted.append((engine.read(layers_of(mover, slot + 8)), value))
        engine.stream.wait_event(backup)
        mover._backups.wait_event(load.done)  # the next one may write the host page that this load reads
    await engine.stream.record().wait()
    assert all(b"".join(found) == bytes([value]) * 64 for found, value in wanted)
    assert driver_of(device).problems == []


# An engine's own events, as torch and cupy make them, stand where the device's stand: ``ready``, ``after``.
#
# Stand-ins take the place of their classes here, since neither library makes an event without a GPU; ``test_cuda_gpu``
# has the real ones.


class TorchEvent:
    """Shaped as ``torch.cuda.Event``: its handle comes when it is first recorded; it has no ``done``."""

    cuda_event = 0

    def __init__(self, driver: SimulatedCuda) -> None:
        self._driver = driver

    def record(self, stream: int) -> None:
        self.cuda_event = self.cuda_event or self._driver.event_create()
        self._driver.event_record(self.cuda_event, stream)

    def query(self) -> bool:
        raise AssertionError("it holds the GIL")

    def synchronize(self) -> None:
        raise AssertionError("it holds the loop")


class CupyEvent:
    """Shaped as ``cupy.cuda.Event``: it has its handle from the start, and ``done`` is a property that asks."""

    done = property(TorchEvent.query)
    synchronize = TorchEvent.synchronize

    def __init__(self, driver: SimulatedCuda) -> None:
        self._driver = driver
        self.ptr = driver.event_create()

    def record(self, stream: int) -> None:
        self._driver.event_record(self.ptr, stream)


class CupyStream:
    """Shaped as ``cupy.cuda.Stream``, which has a ``ptr`` too, and ``done``."""

    done = False

    def __init__(self, handle: int) -> None:
        self.ptr = handle

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


Made = Callable[[SimulatedCuda], TorchEvent | CupyEvent]
KINDS = pytest.mark.parametrize("kind", [TorchEvent, CupyEvent])
OWN = pytest.param(None, id="the stream's own")


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


@pytest.mark.parametrize("kind", [TorchEvent, CupyEvent, OWN])
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_load_is_ordered_behind_the_engines_event(
    simulated_device: Make, kind: Made | None, fenced: bool
) -> None:
    """Which stands behind its last read of those pages. Without the edge the simulated driver reports a race."""
    _, mover, engine = parts(simulated_device)
    fill_device(mover)
    before = b"".join(row.numpy().tobytes() for row in layers_of(mover, 4))
    engine.driver.hold(engine.handle)
    found = engine.read(layers_of(mover, 4))
    event = recorded(engine, kind) if kind is not None else engine.stream.record()
    after = [mover.engine_event(event)] if fenced else []
    load = mover.load([move([0], [4])], after).done
    submitted(load)
    if not fenced:
        await load.wait()
    engine.driver.resume()
    await load.wait()
    await engine.stream.record().wait()
    assert (b"".join(found) == before) is fenced
    assert bool(races(engine.driver)) is not fenced


@KINDS
async def test_an_event_is_taken_as_of_the_call_whatever_the_engine_records_in_it_later(
    simulated_device: Make, kind: Made
) -> None:
    """Else a load would wait for what the engine does behind that load, and neither would ever end."""
    _, mover, engine = parts(simulated_device)
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


@KINDS
async def test_an_event_that_was_never_recorded_has_happened(simulated_device: Make, kind: Made) -> None:
    device = simulated_device()
    assert device.engine_event(kind(driver_of(device))).done()


async def test_one_event_that_was_adopted_can_be_named_for_many_leases(simulated_device: Make) -> None:
    device, _, engine = parts(simulated_device)
    engine.driver.hold(engine.handle)
    event = device.engine_event(recorded(engine, TorchEvent))
    assert device.engine_event(event) is event
    gate = device.gate()
    assert device.engine_event(gate) is gate
    past = device.engine_event(TorchEvent(engine.driver))
    assert device.engine_event(past) is past
    engine.driver.resume()
    await event.wait()


async def test_a_thread_that_captures_a_graph_is_refused_before_the_driver_is_asked(simulated_device: Make) -> None:
    """Asking for an event of the graph would be the graph's end."""
    device, _, engine = parts(simulated_device)
    engine.driver.use_stream(engine.handle)
    engine.driver.captured.add(engine.handle)
    event = recorded(engine, TorchEvent)
    with pytest.raises(ConfigError, match="this thread captures a graph"):
        device.engine_event(event)
    assert engine.driver.lost == []
    engine.driver.captured.clear()
    engine.driver.use_stream(None)
    await device.engine_event(recorded(engine, TorchEvent)).wait()


async def test_events_and_streams_of_torch_that_may_be_of_any_device(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.Event`` and ``torch.Stream``, which vLLM hands out."""
    device, _, engine = parts(simulated_device)
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


async def _call(lease: Lease, call: str, event: object) -> None:
    if call == "release":
        lease.release(after=event)
    else:
        await lease.commit(text(2), after=event)


async def test_many_events_fill_no_queue_of_the_driver(simulated_device: Make) -> None:
    """The caller's thread would block in a call of the driver, and that is the loop's."""
    device, _, engine = parts(simulated_device)
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


async def test_a_device_that_failed_or_is_closed_waits_for_nothing(simulated_device: Make) -> None:
    for end in ("fails", "is closed"):
        device, _, engine = parts(simulated_device)
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


# The tests of ``tests/memory`` that every device must pass, on the CUDA device with a simulated driver.


for _name, _test in vars(every_device).items():
    if _name.startswith("test_"):
        globals()[_name] = _test

test_what_a_copy_waits_for_holds_it_and_what_follows_on_its_stream_but_no_backup = (
    the_mover.test_what_a_copy_waits_for_holds_it_and_what_follows_on_its_stream_but_no_backup
)


async def test_a_batch_without_pages_is_done_like_any_other(make_device: Make) -> None:
    device = make_device()
    mover = Mover(device, [pool()])
    stream, none = device.stream("s"), np.zeros(0, np.int32)
    on_both = PageCopy(mover.device_pools["full"], mover.host_pools["full"], none, none)
    device.copy(stream, CopyDirection.OUT, [on_both])
    await stream.record().wait()
    device.copy(stream, CopyDirection.WITHIN, [PageCopy(mover.device_pools["full"], None, none, none)])
    await stream.record().wait()
    layers = device.load(stream, [on_both], 4)
    assert len(layers) == 4
    for event in layers:
        await event.wait()
    device.copy(stream, CopyDirection.OUT, [])
    await stream.record().wait()


assert sum(name.startswith("test_") for name in list(globals())) > 15
