"""Order between the cache's streams and an engine's: by events on the device, never by luck, never by holding the host.

Each law has its counter-test: without the edge the simulated driver reports a race, so the edge is what orders.
"""

from __future__ import annotations

import asyncio

import pytest

from asynccache.errors import ConfigError
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.pools import Mover
from asynccache.memory.signals import call_all
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import SimulatedEngine, driver_of, layers_of, races, submitted
from tests.memory.small_pools import fill_device, host_page, move, pool
from tests.waiting import until


def parts(make: Make, **options: object) -> tuple[CudaDevice, Mover, SimulatedEngine]:
    device = make(**options)
    return device, Mover(device, [pool()]), SimulatedEngine(device)


@pytest.mark.parametrize("waits", [True, False])
async def test_a_backup_waits_on_the_device_for_the_engine_that_wrote_the_pages(
    simulated_device: Make, waits: bool
) -> None:
    device, mover, engine = parts(simulated_device)
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
    await device.aclose()


@pytest.mark.parametrize("waits", [True, False])
async def test_the_engines_stream_waits_for_layer_i_and_the_host_does_not(simulated_device: Make, waits: bool) -> None:
    device, mover, engine = parts(simulated_device)
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
    await device.aclose()


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_load_into_reused_pages_waits_for_the_engine_that_still_reads_them(
    simulated_device: Make, fenced: bool
) -> None:
    device, mover, engine = parts(simulated_device)
    fill_device(mover)
    before = b"".join(row.numpy().tobytes() for row in layers_of(mover, 4))
    engine.driver.hold(engine.handle)
    found = engine.read(layers_of(mover, 4))
    load = mover.load([move([0], [4])], [engine.stream.record()] if fenced else []).done
    submitted(load)
    if not fenced:
        await load.wait()
    engine.driver.resume()
    await load.wait()
    await engine.stream.record().wait()
    assert (b"".join(found) == before) is fenced
    assert bool(races(engine.driver)) is not fenced
    await device.aclose()


@pytest.mark.parametrize("after", [True, False])
async def test_a_load_into_a_page_waits_for_the_backup_that_still_reads_it(simulated_device: Make, after: bool) -> None:
    """The core reuses a page after its backup's outcome; a test of the device does not have to."""
    device, mover, engine = parts(simulated_device)
    fill_device(mover)
    engine.driver.hold(mover._backups.handle)  # type: ignore[attr-defined]
    backup = mover.backup([move([6], [6])])
    submitted(backup)
    load = mover.load([move([0], [6])], after=[backup] if after else []).done
    if not after:
        await load.wait()
    engine.driver.resume()
    await asyncio.gather(backup.wait(), load.wait())
    assert bool(races(engine.driver)) is not after
    await device.aclose()


async def test_what_the_host_has_seen_to_be_done_needs_no_edge(simulated_device: Make) -> None:
    device, mover, engine = parts(simulated_device)
    engine.write(layers_of(mover, 3), 9)
    await engine.stream.record().wait()
    await mover.backup([move([3], [5])]).wait()
    await mover.load([move([5], [3])]).done.wait()
    assert host_page(mover, "full", 5) == bytes([9]) * 64
    await device.aclose()


async def test_an_engine_never_waits_for_an_event_that_is_not_recorded_yet(simulated_device: Make) -> None:
    """Such an event reads as complete. The submitter is stopped before it records; the engine's call waits for it."""
    device, mover, engine = parts(simulated_device, depth=4)
    engine.driver.pause()
    loads = [mover.load([move([i], [i])]) for i in range(8)]  # the driver takes four pieces of work, and then blocks
    waiting = asyncio.create_task(asyncio.to_thread(_as_an_engine, device, loads[-1].done, engine))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    engine.driver.resume()
    await waiting
    found = engine.read(layers_of(mover, 7))
    await engine.stream.record().wait()
    assert len(b"".join(found)) == 64
    await device.aclose()


def _as_an_engine(device: CudaDevice, event: object, engine: SimulatedEngine) -> None:
    device.driver.use_device()
    engine.stream.wait_event(event)  # type: ignore[arg-type]


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
    await device.aclose()


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
    await device.aclose()


async def test_an_engines_stream_is_one_stream_however_it_is_given(simulated_device: Make) -> None:
    device, _, engine = parts(simulated_device)
    assert device.engine_stream(engine.torch) is device.engine_stream(engine.handle) is engine.stream
    own = device.stream("own")
    assert device.engine_stream(own) is own
    other = simulated_device()
    with pytest.raises(ConfigError, match="cannot wait for"):
        engine.stream.wait_event(other.stream("x").record())
    await device.aclose()
    await other.aclose()


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
    await device.aclose()
