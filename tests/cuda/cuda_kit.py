"""Shared by the tests of this folder: an engine with a stream of its own, pools on a simulated driver, the mark of
tests that need a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

import pytest
import torch

from asynccache.memory.cuda.cupy_driver import find
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.cuda.streams import CudaEngineStream
from asynccache.memory.device import Event
from asynccache.memory.mover import Mover
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import pool

# The mark of tests that need a GPU: they say why they are skipped, and never pass without having run.
#
# With ``ASYNCCACHE_GPU=required``, as ``make test-gpu`` has it, such a test fails instead (``tests/conftest.py``).


# A warning is an error in tests. One of cupy's, or of what cupy imports, says nothing about the GPU.
with warnings.catch_warnings(), suppress(Exception):  # ``find`` says what is wrong
    warnings.simplefilter("ignore")
    import_module("cupy")

MISSING = find().missing

GPU = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=f"needs a GPU: {MISSING}")]


# Shared by the tests of this folder: an engine with a stream of its own, and pools on a simulated driver.


DMA = CudaSettings(kernel_loads_below=0)
KERNEL = CudaSettings(kernel_loads_below=1 << 62, kernel_backups_below=1 << 62)
"""Everything by the copy engines; all that can go by the kernel, but where there are few pieces."""


class TorchStream:
    """Looks like ``torch.cuda.Stream``."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def driver_of(device: CudaDevice) -> SimulatedCuda:
    assert isinstance(device.driver, SimulatedCuda)
    return device.driver


class SimulatedEngine:
    """Computes on a stream that the cache knows nothing of, as torch would."""

    def __init__(self, device: CudaDevice) -> None:
        self.driver = driver_of(device)
        self.torch = TorchStream(self.driver.stream_create())
        stream = device.engine_stream(self.torch)
        assert isinstance(stream, CudaEngineStream)
        self.stream = stream

    @property
    def handle(self) -> int:
        return self.torch.cuda_stream

    def write(self, rows: Sequence[torch.Tensor], value: int) -> None:
        """Enqueue a kernel that fills these rows."""

        def fill() -> None:
            for row in rows:
                row.fill_(value)

        self.driver.compute(self.handle, fill, writes=rows)

    def read(self, rows: Sequence[torch.Tensor]) -> list[bytes]:
        """Enqueue a kernel that reads these rows. The list that is returned gets the values when the kernel has run."""
        found: list[bytes] = []
        self.driver.compute(self.handle, lambda: found.extend(row.numpy().tobytes() for row in rows), reads=rows)
        return found


def parts(make: Callable[..., CudaDevice], **options: object) -> tuple[CudaDevice, Mover, SimulatedEngine]:
    """A device with memory and an engine; their driver is the engine's."""
    device = make(**options)
    return device, Mover(device, [pool()]), SimulatedEngine(device)


def layers_of(mover: Mover, slot: int, name: str = "full") -> list[torch.Tensor]:
    """A page on the device, layer by layer."""
    pool = mover.device_pools[name]
    return [pool.layer(i)[slot] for i in range(pool.spec.layers)]


def submitted(event: Event) -> None:
    """Return when the driver has all work up to ``event``, so that no later call of the host is ordered before that
    work."""
    assert isinstance(event, CudaEvent)
    event.await_recorded()


def races(driver: SimulatedCuda) -> list[str]:
    """The races that were seen; they are forgotten, so that the test may go on."""
    found = [problem for problem in driver.problems if problem.startswith("a race")]
    driver.problems = [problem for problem in driver.problems if problem not in found]
    return found
