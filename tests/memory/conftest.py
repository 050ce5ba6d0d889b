"""The devices that must behave alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from asynccache.memory.cpu import CpuDevice
from tests.simulated.device import SimulatedDevice

Device = CpuDevice | SimulatedDevice


@pytest_asyncio.fixture(params=[CpuDevice, SimulatedDevice], ids=["cpu", "simulated"])
async def make_device(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Device]]:
    """Makes devices, which are closed at the end."""
    made: list[Device] = []

    def make(**options: Any) -> Device:
        made.append(request.param(**options))
        return made[-1]

    yield make
    for device in made:
        await device.aclose()


@pytest_asyncio.fixture
async def cpu() -> AsyncIterator[CpuDevice]:
    """A device of one kind, which is closed at the end."""
    device = CpuDevice()
    yield device
    await device.aclose()
