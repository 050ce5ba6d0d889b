"""The stress tool on an S3 server that hangs, is killed and comes back empty, is full, and is slow; and on Ceph's own,
where it is installed, over its quota."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores import courses


@pytest.mark.slow(30)
def test_an_s3_server_hung_over_its_quota_and_slow(s3_server: Any) -> None:
    courses.s3(s3_server)


@pytest.mark.soak
def test_an_s3_server_killed_and_full(s3_server: Any) -> None:
    courses.s3_killed(s3_server)


@pytest.mark.slow(60)
def test_ceph_over_its_quota(ceph_server: Any) -> None:
    courses.ceph_full(ceph_server)
