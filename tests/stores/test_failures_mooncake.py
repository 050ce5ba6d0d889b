"""The stress tool on a Mooncake master that hangs, is killed and comes back with nothing, and is slow, as is the owner
of its memory, and on one that is full.

Each course has a master of its own: what is done to it here is felt by every client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.stores import courses
from tests.stores.conftest import served
from tests.stores.mooncake_server import MooncakeMaster


@contextmanager
def master(segment: int) -> Iterator[MooncakeMaster]:
    yield from served(MooncakeMaster(segment=segment))


@pytest.mark.soak
def test_a_mooncake_master_hung_and_killed() -> None:
    with master(256) as server:
        courses.mooncake(server)


@pytest.mark.soak
def test_a_slow_mooncake_master_and_a_slow_owner() -> None:
    with master(256) as server:
        courses.mooncake_slow(server)


@pytest.mark.slow(12)
def test_a_full_mooncake_segment() -> None:
    with master(16) as server:
        courses.mooncake_full(server)
