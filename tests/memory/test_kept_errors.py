"""A copy that failed keeps no pool alive, neither by its event nor by the stream: a device may outlive many caches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from asynccache.errors import CopyFailed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import CopyDirection, Event
from asynccache.memory.host_copies import Faults
from asynccache.memory.mover import Mover
from tests.memory.small_pools import move, pool


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _asked(mover: Mover, direction: str) -> Event:
    moves = [move([1], [2])]
    if direction == "backup":
        return mover.backup(moves)
    return mover.clone(moves) if direction == "clone" else mover.load(moves).done


@pytest.mark.parametrize("direction", ["backup", "load", "clone", "unheard"])
async def test_the_pools_of_a_failed_copy_are_let_go(direction: str) -> None:
    device = CpuDevice(faults=Faults(failing=1.0))
    mover = Mover(device, [pool()])
    host, full = weakref.ref(mover.host_pools["full"]), weakref.ref(mover.device_pools["full"])
    if direction == "unheard":
        device.copy(mover._backups, CopyDirection.OUT, mover._copies([move([1], [1])]))
        ended = mover._loads.record()
        await ended.wait()
    else:
        ended = _asked(mover, direction)
        with suppress(CopyFailed):
            await ended.wait()
            pytest.fail("it went well")
    mover.close()
    await device.aclose()
    del mover
    assert host() is None
    assert full() is None
    assert ended.done()
