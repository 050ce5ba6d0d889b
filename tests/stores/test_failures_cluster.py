"""The stress tool on a cluster of three that hangs, and that is killed and comes back with nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores import courses


@pytest.mark.slow
def test_a_cluster_hung_and_killed(redis_cluster: Any) -> None:
    courses.cluster(redis_cluster)
