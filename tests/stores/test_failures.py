"""The stress tool on every kind of store while trouble comes and goes; see ``failing``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stores import failing as courses
from tests.stores.mooncake_server import MooncakeMaster

# The stress tool on a folder: one that is full from the first seconds on, and one on which calls fail and lie.


@pytest.mark.slow(10)
def test_a_full_folder(tmp_path: Path) -> None:
    courses.file_full(tmp_path)


@pytest.mark.slow(9)
def test_calls_that_fail_and_lie(tmp_path: Path) -> None:
    courses.file_faulty(tmp_path)


# The stress tool on a ``redis-server`` that hangs, is killed, comes back empty, is full and is slow.


@pytest.mark.slow(30)
def test_redis_hung_killed_and_emptied(redis_server: Any) -> None:
    courses.redis(redis_server)


@pytest.mark.slow(17)
def test_redis_full_and_slow(redis_server: Any) -> None:
    courses.redis_full(redis_server)


# The stress tool on a cluster of three that hangs, is killed and comes back with nothing, is full and is slow.


@pytest.mark.soak
def test_a_cluster_hung_and_killed(redis_cluster: Any) -> None:
    courses.cluster(redis_cluster)


@pytest.mark.soak
def test_a_cluster_full_and_slow(redis_cluster: Any) -> None:
    courses.cluster_full(redis_cluster)


# The stress tool on an S3 server that hangs, is killed and comes back empty, is full, and is slow; and on Ceph's own,
# where it is installed, over its quota.


@pytest.mark.slow(30)
def test_an_s3_server_hung_over_its_quota_and_slow(s3_server: Any) -> None:
    courses.s3(s3_server)


@pytest.mark.soak
def test_an_s3_server_killed_and_full(s3_server: Any) -> None:
    courses.s3_killed(s3_server)


@pytest.mark.slow(60)
def test_ceph_over_its_quota(ceph_server: Any) -> None:
    courses.ceph_full(ceph_server)


# The stress tool on a Mooncake master that hangs, is killed and comes back with nothing, and is slow, as is the owner
# of its memory, and on one that is full.
#
# Each course has a master of its own: what is done to it here is felt by every client.


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
