"""The stress tool on a cluster of three that hangs, is killed and comes back with nothing, is full and is slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores import courses


@pytest.mark.soak
def test_a_cluster_hung_and_killed(redis_cluster: Any) -> None:
    courses.cluster(redis_cluster)


@pytest.mark.soak
def test_a_cluster_full_and_slow(redis_cluster: Any) -> None:
    courses.cluster_full(redis_cluster)
