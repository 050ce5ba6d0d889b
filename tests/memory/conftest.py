"""The devices that must behave alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynccache.memory.cpu import CpuDevice
from tests.simulated.device import SimulatedDevice


@pytest.fixture(params=[CpuDevice, SimulatedDevice], ids=["cpu", "simulated"])
def make_device(request: pytest.FixtureRequest) -> Callable[..., CpuDevice | SimulatedDevice]:
    make: Callable[..., CpuDevice | SimulatedDevice] = request.param
    return make
