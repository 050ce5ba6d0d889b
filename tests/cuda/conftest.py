"""CUDA devices on a simulated driver, which is asked at the end what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from asynccache.memory.cuda.device import CudaDevice, open_device
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.host_copies import Faults
from tests.cuda.cuda_kit import GPU
from tests.cuda.simulated_cuda import SimulatedCuda

Make = Callable[..., CudaDevice]


@pytest.fixture
def drivers() -> Iterator[list[SimulatedCuda]]:
    """All simulated drivers of a test. At the end none may have seen a problem."""
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


@pytest.fixture(scope="session")
def opened_gpu() -> CudaDevice:
    """Opened once: that compiles the kernel."""
    return open_device("cuda:0")


@pytest.fixture
def gpu_device(request: pytest.FixtureRequest) -> Make:
    """Makes devices on the first GPU."""
    opened: CudaDevice = request.getfixturevalue("opened_gpu")

    def make(faults: Faults | None = None, settings: CudaSettings | None = None) -> CudaDevice:
        return CudaDevice(opened.driver, settings=settings, faults=faults)

    return make


@pytest.fixture(params=["simulated", pytest.param("cuda:0", marks=GPU)])
def device_name(request: pytest.FixtureRequest) -> str:
    """The device that a test runs on: the simulated driver, and the first GPU where there is one."""
    name: str = request.param
    return name


@pytest.fixture
def make_device(request: pytest.FixtureRequest, device_name: str) -> Make:
    """For the tests that every device has to pass."""
    make: Make = request.getfixturevalue("simulated_device" if device_name == "simulated" else "gpu_device")
    return make
