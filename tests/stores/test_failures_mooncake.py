"""The stress tool on a Mooncake master that hangs, is killed and comes back with nothing, and is slow, as is the owner
of its memory, and on one that is full.

Each course has a master of its own: what is done to it here is felt by every client.
"""

from __future__ import annotations

import pytest

from tests.stores import courses
from tests.stores.mooncake_server import MooncakeMaster


@pytest.mark.soak
def test_a_mooncake_master_hung_and_killed() -> None:
    with MooncakeMaster(segment=256) as server:
        courses.mooncake(server)


@pytest.mark.soak
def test_a_slow_mooncake_master_and_a_slow_owner() -> None:
    with MooncakeMaster(segment=256) as server:
        courses.mooncake_slow(server)


@pytest.mark.slow(12)
def test_a_full_mooncake_segment() -> None:
    with MooncakeMaster(segment=16) as server:
        courses.mooncake_full(server)
