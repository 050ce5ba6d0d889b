"""CUDA devices on a simulated driver, which is asked at the end what it saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

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


@pytest_asyncio.fixture
async def simulated_device(drivers: list[SimulatedCuda]) -> AsyncIterator[Make]:
    """Makes devices, which are closed at the end; ``faults`` and ``settings`` are the device's, everything else the
    driver's."""
    made: list[CudaDevice] = []

    def make(faults: object = None, settings: object = None, **options: object) -> CudaDevice:
        driver = SimulatedCuda(seed=len(drivers), **options)  # type: ignore[arg-type]
        drivers.append(driver)
        made.append(CudaDevice(driver, settings=settings, faults=faults))  # type: ignore[arg-type]
        return made[-1]

    yield make
    await _closed(made)


async def _closed(devices: list[CudaDevice]) -> None:
    async with asyncio.timeout(30):
        for device in devices:
            await device.aclose()


@pytest.fixture(scope="session")
def opened_gpu() -> CudaDevice:
    """Opened once: that compiles the kernel."""
    return open_device("cuda:0")


@pytest_asyncio.fixture
async def gpu_device(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes devices on the first GPU, which are closed at the end."""
    opened, made = request.getfixturevalue("opened_gpu"), list[CudaDevice]()

    def make(faults: Faults | None = None, settings: CudaSettings | None = None) -> CudaDevice:
        made.append(CudaDevice(opened.driver, settings=settings, faults=faults))
        return made[-1]

    yield make
    await _closed(made)


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
