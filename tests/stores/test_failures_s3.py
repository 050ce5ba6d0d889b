"""The stress tool on an S3 server that hangs, is killed and comes back empty, and is slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores import courses


@pytest.mark.slow
def test_an_s3_server_hung_killed_and_slow(s3_server: Any) -> None:
    courses.s3(s3_server)
