"""One URL for each kind of store, for tests that are about all of them. What a test does to a store must leave it well:
the servers are shared."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from time import time_ns

import pytest

KINDS = ("file", "host", "redis", "cluster", "s3", "mooncake")
FIXTURES = {"host": "host_process", "redis": "redis_server", "cluster": "redis_cluster", "s3": "s3_server",
            "mooncake": "mooncake_master"}  # fmt: skip

_seeds = count(time_ns() // 1_000_000_000 % 5_000)


def store_url(kind: str, request: pytest.FixtureRequest, folder: Path, environment: pytest.MonkeyPatch) -> str:
    """What ``storage=`` takes. The store may hold pages of others already."""
    if kind == "file":
        return f"file:{folder}/kv?capacity=64MiB"
    server = request.getfixturevalue(FIXTURES[kind])
    for name, value in getattr(server, "client_environment", {}).items():
        environment.setenv(name, value)
    return str(server.url)


def fresh_seed() -> int:
    """For a text that no earlier test has stored."""
    return 20 + next(_seeds) % 15_000
