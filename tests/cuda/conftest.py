"""CUDA devices on a simulated driver, which is asked at the end what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from asynccache.memory.cuda.device import CudaDevice
from tests.cuda.simulated_cuda import SimulatedCuda

Make = Callable[..., CudaDevice]


@pytest.fixture
def drivers() -> Iterator[list[SimulatedCuda]]:
    """All simulated drivers of a test. None may have seen a problem."""
    made: list[SimulatedCuda] = []
    yield made
    for driver in made:
        driver.close()
    assert [problem for driver in made for problem in driver.problems] == []


@pytest.fixture
def simulated_device(drivers: list[SimulatedCuda]) -> Make:
    """Makes devices; ``faults`` and ``settings`` are the device's, everything else the driver's."""

    def make(faults: object = None, settings: object = None, **options: object) -> CudaDevice:
        driver = SimulatedCuda(seed=len(drivers), **options)  # type: ignore[arg-type]
        drivers.append(driver)
        return CudaDevice(driver, settings=settings, faults=faults)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_device(simulated_device: Make) -> Make:
    """For the tests that every device has to pass."""
    return simulated_device
