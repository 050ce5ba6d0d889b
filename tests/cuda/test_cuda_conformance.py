"""What every device must do, done by the CUDA device on a simulated driver: the very tests of ``tests/memory``."""

from __future__ import annotations

import pytest

from tests.memory import test_devices as every_device
from tests.memory.test_mover import test_a_fence_holds_later_loads_and_clones_but_no_backup as _fence

pytestmark = pytest.mark.asyncio


for _name, _test in vars(every_device).items():
    if _name.startswith("test_"):
        globals()[_name] = _test

test_a_fence_holds_later_loads_and_clones_but_no_backup = _fence

assert sum(name.startswith("test_") for name in list(globals())) > 15
