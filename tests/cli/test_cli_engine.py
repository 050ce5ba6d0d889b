"""The stand-in engine finds wrong pages, and its work goes on when the request that asked for it has ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from asynccache.cli.engine import NOTHING, PageRun, StandInEngine, Verdict
from asynccache.cli.meter import run_delay
from asynccache.config import CacheConfig, Full, Mamba, SlidingWindow
from asynccache.core.settings import ComponentKind
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import DevicePool

CONFIG = CacheConfig(model="m", page_size=16, components=(
    Full(bytes_per_token=8, layers=2, device_tokens=512),
    SlidingWindow(window=64, bytes_per_token=8, layers=2, device_tokens=512),
    Mamba(state_bytes=96, layers=2, device_states=8),
))


def full(*ids: int, first: int = 0) -> PageRun:
    values = np.arange(100, 100 + len(ids), dtype=np.uint64)
    return PageRun(ComponentKind.FULL, np.array(ids, dtype=np.int32), values, first)


@pytest.fixture
def pools() -> dict[str, DevicePool]:
    device = CpuDevice()
    return {spec.name: DevicePool.allocate(spec, device.device_tensor) for spec in CONFIG.pools()}


@pytest.fixture
def engine(pools: dict[str, DevicePool]) -> Any:
    engine = StandInEngine(CONFIG.pools(), pools, CpuDevice().gate)
    yield engine
    engine.close()


@pytest.mark.asyncio
async def test_what_was_written_is_found(engine: StandInEngine) -> None:
    pieces = [full(3, 9, 1), full(3, 9, 1)._replace(component=ComponentKind.SWA)]
    assert await engine.begin(pieces, verifies=False).verdict() == NOTHING
    assert await engine.begin(pieces, verifies=True).verdict() == Verdict(6, 0)


@pytest.mark.asyncio
async def test_a_page_without_a_slot_and_one_torn_layer_are_named(
    engine: StandInEngine, pools: dict[str, DevicePool]
) -> None:
    engine.write([full(3, 9, 1)])
    pools["full"].layer(1)[9, 5] ^= 1
    verdict = await engine.begin([full(3, 9, 1, first=20)], verifies=True).verdict()
    assert verdict == Verdict(3, 1, ("full page 21 in slot 9 differs from layer 1 on",))
    verdict = await engine.begin([full(3, -1, 1)], verifies=True).verdict()
    assert (verdict.pages, verdict.wrong) == (3, 1)
    assert verdict.what == ("full page 1 has no slot",)


def burn(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() < began + seconds:
        pass


def test_a_machine_is_as_slow_as_its_jobs_wait_for_a_core(
    engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = [0.0]
    monkeypatch.setattr("asynccache.cli.engine.run_delay", lambda: waited[0])

    def waits(seconds: float) -> Verdict:
        burn(0.05)
        waited[0] += seconds
        return NOTHING

    def sleeps() -> Verdict:
        time.sleep(0.3)
        return NOTHING

    assert engine.slowdown == 1.0
    engine.submit(lambda: NOTHING)[0].result()
    assert engine.slowdown == 1.0, "so little tells nothing"
    engine.submit(lambda: waits(0.0))[0].result()
    assert engine.slowdown == 1.0
    engine.submit(lambda: waits(0.15))[0].result()
    assert engine.slowdown == pytest.approx(2.5, rel=0.2)
    engine.submit(sleeps)[0].result()
    assert engine.slowdown == pytest.approx(2.5, rel=0.2), "who waits for something else is not slow"


def test_the_kernel_says_how_long_a_thread_waited_for_a_core() -> None:
    """More threads than there are cores, each in a process of its own, on one core."""
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("the kernel counts no run delays")
    core = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    found: list[float] = []

    def work() -> None:
        os.sched_setaffinity(0, {core})
        before = run_delay()
        burn(0.2)
        found.append(run_delay() - before)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert found[0] > 0.1


@pytest.mark.asyncio
async def test_cancelled_work_goes_on_and_its_event_tells_when_it_is_over(
    engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(pieces: Any) -> None:
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(engine, "write", slow)
    batch = engine.begin([full(1)], verifies=False)
    task = asyncio.create_task(batch.verdict())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work: Any = batch.work
    assert not work.done()
    go_on.set()
    await work.wait()
    assert work.done()
