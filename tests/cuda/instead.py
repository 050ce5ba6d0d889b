"""A CUDA device with the interface of ``CpuDevice``, for tests that know nothing of GPUs."""

from __future__ import annotations

from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.device import CudaDevice, open_device
from asynccache.memory.host_copies import Faults
from tests.cuda.simulated_cuda import SimulatedCuda

_simulated: list[SimulatedCuda] = []


def device_class(name: str) -> type[CudaDevice]:
    """What stands in for ``CpuDevice``."""
    if name == "simulated-cuda":
        return _Simulated
    opened = open_device(name)  # once: it compiles

    class Real(CudaDevice):
        def __init__(self, name: str = "cpu", *, faults: Faults | None = None) -> None:
            driver: CupyDriver = opened.driver
            super().__init__(driver, opened.name, faults=faults)

    return Real


class _Simulated(CudaDevice):
    def __init__(self, name: str = "cpu", *, faults: Faults | None = None) -> None:
        driver = SimulatedCuda(seed=len(_simulated))
        _simulated.append(driver)
        super().__init__(driver, faults=faults)


def end_drivers() -> list[str]:
    """What the drivers of a test saw; they end."""
    problems = [problem for driver in _simulated for problem in driver.problems]
    for driver in _simulated:
        driver.close()
    _simulated.clear()
    return problems
