"""The tests of ``tests/memory`` that every device must pass, on the CUDA device with a simulated driver."""

from __future__ import annotations

import numpy as np

from asynccache.memory.device import CopyDirection, PageCopy
from asynccache.memory.pools import Mover
from tests.cuda.conftest import Make
from tests.memory import test_devices as every_device
from tests.memory import test_mover as the_mover
from tests.memory.small_pools import pool

for _name, _test in vars(every_device).items():
    if _name.startswith("test_"):
        globals()[_name] = _test

test_what_a_copy_waits_for_holds_it_and_what_follows_on_its_stream_but_no_backup = (
    the_mover.test_what_a_copy_waits_for_holds_it_and_what_follows_on_its_stream_but_no_backup
)


async def test_a_batch_without_pages_is_done_like_any_other(make_device: Make) -> None:
    device = make_device()
    mover = Mover(device, [pool()])
    stream, none = device.stream("s"), np.zeros(0, np.int32)
    on_both = PageCopy(mover.device_pools["full"], mover.host_pools["full"], none, none)
    device.copy(stream, CopyDirection.OUT, [on_both])
    await stream.record().wait()
    device.copy(stream, CopyDirection.WITHIN, [PageCopy(mover.device_pools["full"], None, none, none)])
    await stream.record().wait()
    layers = device.load(stream, [on_both], 4)
    assert len(layers) == 4
    for event in layers:
        await event.wait()
    device.copy(stream, CopyDirection.OUT, [])
    await stream.record().wait()
    await device.aclose()


assert sum(name.startswith("test_") for name in list(globals())) > 15
