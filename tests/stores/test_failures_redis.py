"""The stress tool on a ``redis-server`` that hangs, is killed, comes back empty, is full and is slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores import courses


@pytest.mark.slow(30)
def test_redis_hung_killed_and_emptied(redis_server: Any) -> None:
    courses.redis(redis_server)


@pytest.mark.slow(17)
def test_redis_full_and_slow(redis_server: Any) -> None:
    courses.redis_full(redis_server)
