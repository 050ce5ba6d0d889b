"""The clocks of ``asynccache bench cuda``: what they stand for, and what the benchmark chooses by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asynccache.cli import cuda_clock, cuda_waking
from asynccache.memory.cuda.calibration import Bench, forced
from asynccache.memory.cuda.driver import DriverError, Towards
from asynccache.memory.cuda.paths import Path, Settings
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import driver_of


def test_the_hosts_clock_is_read_around_a_point_that_has_happened() -> None:
    """The second look comes after the point, or the tie between the clocks would be worth nothing."""
    done: list[str] = []
    driver: Any = SimpleNamespace(
        event_create=lambda timed: 5, event_record=lambda event, stream: done.append("recorded"),
        event_synchronize=lambda event: done.append("happened"),
    )  # fmt: skip
    stream: Any = SimpleNamespace(handle=7, call=lambda work: work())
    clock = cuda_clock.Clock(driver, stream)
    clock.begin_here(lambda: done.append("look"))
    stream.call(lambda: done.append("look"))
    assert done == ["look", "recorded", "happened", "look"]


def test_the_devices_time_holds_the_copies_and_not_what_is_before_them(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = simulated_device()
    driver = driver_of(device)
    bench = Bench(driver, 1 << 20)
    rows, chooser = bench.rows(Towards.OUT, Path.DMA, 4096, 8), forced(Towards.OUT, Path.DMA)
    order: list[str] = []
    record, copy = driver.event_record, driver.copy

    def recorded(event: int, stream: int) -> None:
        order.append("timed" if driver._events[event].timed else "record")
        record(event, stream)

    def copied(*arguments: Any) -> Any:
        order.append(f"copy of {len(arguments[2].size)}")
        return copy(*arguments)

    monkeypatch.setattr(driver, "event_record", recorded)
    monkeypatch.setattr(driver, "copy", copied)
    plug = cuda_clock.one_copy(bench, Towards.OUT, 4096)
    assert cuda_clock.device_seconds(bench, lambda: bench.submit(rows, chooser), plug) > 0
    began, ended = (i for i, name in enumerate(order) if name == "timed")
    assert "copy of 1" in order[:began]  # the plug
    assert "copy of 8" in order[began:ended]
    bench.close()


def test_a_copy_that_fails_is_no_time(simulated_device: Make) -> None:
    device = simulated_device(break_at=0)
    bench = Bench(driver_of(device), 1 << 20)
    rows, chooser = bench.rows(Towards.OUT, Path.DMA, 4096, 8), forced(Towards.OUT, Path.DMA)
    with pytest.raises(DriverError, match="illegal memory access"):
        cuda_clock.device_seconds(bench, lambda: bench.submit(rows, chooser))
    bench.close()


def test_the_best_of_some_rounds_and_of_fewer_that_take_long() -> None:
    times = iter([3.0, 1.0, 2.0, 0.5])
    assert cuda_clock.best(lambda: next(times), 3, budget=100.0) == 1.0
    assert cuda_clock.best(lambda: 0.6, 5) == 0.6
    taken: list[float] = []
    cuda_clock.best(lambda: taken.append(0.6) or 0.6, 5, budget=1.0)  # type: ignore[func-returns-value]
    assert len(taken) == 2


@pytest.mark.asyncio
async def test_what_is_submitted_by_the_kernel_goes_by_it(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_waking, "IN_FLIGHT", 2)
    monkeypatch.setattr(cuda_waking, "PAGES", 64)
    device = simulated_device(settings=Settings(out=Path.DMA, inward=Path.DMA))
    found = await cuda_waking.measure(device, 2)
    assert len(found["submitting"]) == 3
    assert driver_of(device).calls["launch"] > 0
    await device.aclose()
