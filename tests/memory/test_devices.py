"""The behaviour that every device must have: order within streams, none between them but by events, real events, honest
failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheClosed, ConfigError, CopyFailed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import CopyDirection
from asynccache.memory.host_copies import Faults
from asynccache.memory.mover import Mover
from tests.memory.small_pools import device_page, fill_device, filled, host_page, move, pool
from tests.simulated.device import SimulatedDevice

Make = Callable[..., CpuDevice | SimulatedDevice]
SLOW = Faults(delayed=1.0, delay=(0.001, 0.002))


async def test_work_of_one_stream_keeps_its_order(make_device: Make) -> None:
    mover = filled(make_device(faults=SLOW))
    wanted = [device_page(mover, "full", s) for s in range(8)]
    events = [mover.backup([move([s], [0])]) for s in range(8)]  # all onto one host page
    for i, event in enumerate(events):
        await event.wait()
        assert all(e.done() for e in events[:i])
    assert host_page(mover, "full", 0) == wanted[-1]


async def test_a_clone_finds_what_the_load_that_it_needs_brought(make_device: Make) -> None:
    mover = Mover(make_device(faults=SLOW), [pool()])
    mover.host_pools["full"].page(5)[:] = bytes(range(64))
    load = mover.load([move([5], [6])])
    await mover.clone([move([6], [7])], after=[load.done]).wait()
    assert device_page(mover, "full", 7) == bytes(range(64))


async def test_streams_run_past_each_other_and_a_missing_wait_shows(make_device: Make) -> None:
    device = make_device()
    mover = filled(device)
    wanted = device_page(mover, "full", 1)
    gate = device.gate()
    backup = mover.backup([move([1], [1])], after=[gate])
    await mover.load([move([1], [2])]).done.wait()  # no wait for the backup: reads the page too early
    assert device_page(mover, "full", 2) == bytes(64)
    assert not backup.done()
    ordered = mover.load([move([1], [3])], after=[backup])
    gate.open()
    await ordered.done.wait()
    assert device_page(mover, "full", 3) == wanted


async def test_layers_arrive_in_order_and_each_event_keeps_its_word(make_device: Make) -> None:
    specs = [pool(layers=4), pool("aux", ComponentKind.FULL, size=30, layers=2, indices_from="full")]
    mover = Mover(make_device(faults=SLOW), specs)
    mover.host_pools["full"].page(1)[:] = bytes([1]) * 64
    mover.host_pools["aux"].page(1)[:] = bytes([2]) * 30
    load = mover.load([move([1], [0])])
    assert len(load.layers) == mover.layers == 4
    for i, event in enumerate(load.layers):
        await event.wait()
        assert all(e.done() for e in load.layers[:i])
        for name, value in (("full", 1), ("aux", 2)):
            p = mover.device_pools[name]
            assert all(bool((p.layer(j)[0] == value).all()) for j in range(min(i + 1, p.spec.layers)))
    assert load.done is load.layers[-1]


async def test_wait_layer_holds_an_engines_stream_on_the_device(make_device: Make) -> None:
    device = make_device()
    mover = Mover(device, [pool()])
    mover.host_pools["full"].page(0)[:] = bytes(range(64))
    engine, gate = device.stream("engine"), device.gate()
    load = mover.load([move([0], [0])], after=[gate])
    load.wait_layer(engine, 2)
    reached = engine.record()
    await mover.backup([move([9], [9])]).wait()  # time passes elsewhere
    assert not reached.done()
    gate.open()
    await reached.wait()
    assert [mover.device_pools["full"].layer(i)[0].tolist() for i in range(3)] == [
        list(range(16 * i, 16 * i + 16)) for i in range(3)
    ]


async def test_a_failure_reaches_every_waiter_and_only_that_batch(make_device: Make) -> None:
    mover = Mover(make_device(faults=replace(SLOW, fail_at=frozenset({1}))), [pool()])
    fill_device(mover)
    first, bad, third = (mover.backup([move([s], [s])]) for s in (1, 2, 3))
    results = await asyncio.gather(*(bad.wait() for _ in range(5)), return_exceptions=True)
    assert [type(r) for r in results] == [CopyFailed] * 5
    assert len({id(r) for r in results}) == 5  # an exception of one's own each: tracebacks do not mix
    assert bad.done()
    await first.wait()
    await third.wait()
    assert host_page(mover, "full", 3) == device_page(mover, "full", 3)
    with pytest.raises(CopyFailed, match="injected"):
        await bad.wait()


async def test_a_load_that_fails_fails_from_one_layer_on(make_device: Make) -> None:
    struck = set()
    for seed in range(12):
        mover = Mover(make_device(faults=Faults(seed=seed, fail_at=frozenset({0}))), [pool(layers=4)])
        load = mover.load([move([0], [0])])
        results = await asyncio.gather(*(e.wait() for e in load.layers), return_exceptions=True)
        failed = [isinstance(r, CopyFailed) for r in results]
        assert failed == sorted(failed)
        assert failed[-1]
        struck.add(failed.index(True))
        await mover.load([move([1], [1])]).done.wait()
        await mover.clone([move([1], [2])]).wait()  # the failure was reported; it does not follow later work
        await mover.device.aclose()
    assert len(struck) > 1


async def test_a_cancelled_waiter_stops_nothing(make_device: Make) -> None:
    device = make_device()
    mover = filled(device)
    gate = device.gate()
    backup = mover.backup([move([4], [4])], after=[gate])
    waiters = [asyncio.create_task(backup.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    await asyncio.wait([waiters[1]])
    gate.open()
    await asyncio.gather(waiters[0], waiters[2])
    assert waiters[1].cancelled()
    assert host_page(mover, "full", 4) == device_page(mover, "full", 4)


async def test_aclose_finishes_what_is_queued_and_takes_no_more(make_device: Make) -> None:
    device = make_device(faults=SLOW)
    mover = filled(device)
    events = [mover.backup([move([s], [s])]) for s in range(6)]
    await device.aclose()
    assert all(e.done() for e in events)
    assert [host_page(mover, "full", s) for s in range(6)] == [device_page(mover, "full", s) for s in range(6)]
    with pytest.raises(CacheClosed):
        mover.backup([move([0], [0])])


async def test_a_cancelled_aclose_can_be_repeated_and_forgotten_gates_open(make_device: Make) -> None:
    device = make_device(faults=SLOW)
    mover = filled(device)
    backups = [mover.backup([move([s], [s])], after=[device.gate()]) for s in range(4)]
    closing = asyncio.create_task(device.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await device.aclose()
    assert all(b.done() for b in backups)
    assert host_page(mover, "full", 3) == device_page(mover, "full", 3)


async def test_failed_work_does_not_break_aclose(make_device: Make) -> None:
    device = make_device(faults=Faults(failing=1.0))
    mover = Mover(device, [pool()])
    event = mover.backup([move([0], [0])])
    await device.aclose()
    with pytest.raises(CopyFailed):
        await event.wait()


async def test_things_of_another_device_are_refused(make_device: Make) -> None:
    device = make_device()
    other = SimulatedDevice() if isinstance(device, CpuDevice) else CpuDevice()
    stream = other.stream("b")
    stream.wait_event(other.gate())
    with pytest.raises(ConfigError, match="cannot wait for"):
        device.stream("a").wait_event(stream.record())
    with pytest.raises(ConfigError, match="cannot copy on"):
        device.copy(stream, CopyDirection.WITHIN, [])
    await device.aclose()
    await other.aclose()


async def test_many_batches_in_both_directions_agree_with_a_model(make_device: Make) -> None:
    """Random copies over two streams, each ordered behind the one before: the result is that of doing them in turn."""
    rng = np.random.default_rng(3)
    mover = Mover(make_device(faults=Faults(seed=3, delayed=0.2, delay=(0.0, 0.001))), [pool(size=6, layers=3)])
    fill_device(mover)
    device = {s: device_page(mover, "full", s) for s in range(32)}
    host = {s: bytes(6) for s in range(48)}
    last = mover.backup([])
    for _, n in itertools.product(range(40), (1, 5, 11)):
        d, h = rng.permutation(32)[:n].tolist(), rng.permutation(48)[:n].tolist()
        if rng.random() < 0.5:
            last = mover.backup([move(d, h)], after=[last])
            host.update(zip(h, [device[s] for s in d], strict=True))
        else:
            last = mover.load([move(h, d)], after=[last]).done
            device.update(zip(d, [host[s] for s in h], strict=True))
    await last.wait()
    assert {s: device_page(mover, "full", s) for s in range(32)} == device
    assert {s: host_page(mover, "full", s) for s in range(48)} == host


async def test_opened_gates_are_forgotten(make_device: Make) -> None:
    device = make_device()
    gates = [device.gate() for _ in range(50)]
    for gate in gates[1:]:
        gate.open()
    assert list(device._gates) == gates[:1]
    await device.aclose()
    assert gates[0].done()
