"""The stress tool on a ``redis-server`` that hangs, is killed, comes back empty, is full and is slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores.failing import Trouble, check, suffer
from tests.stores.slow_proxy import SlowProxy

OPTIONS = "?timeout=2&slow=0.5"


@pytest.mark.slow
def test_hung_killed_and_emptied(redis_server: Any) -> None:
    troubles = [
        Trouble("hung", redis_server.hang, redis_server.resume),
        Trouble("killed", redis_server.kill, redis_server.start),
        Trouble("emptied", lambda: redis_server.restart(empty=True), lambda: None, seconds=3.0, opens=False),
    ]
    check(suffer(redis_server.url + OPTIONS, troubles), troubles)


@pytest.mark.slow
def test_full_and_slow(redis_server: Any) -> None:
    """Full: it takes nothing more, and gives what it has. Slow: all of its answers are late, and they are used."""
    with SlowProxy(redis_server.port) as proxy:
        troubles = [
            Trouble("full", lambda: redis_server.say("CONFIG", "SET", "maxmemory", "1mb"),
                    lambda: redis_server.say("CONFIG", "SET", "maxmemory", "0"), seconds=5.0, opens=False),
            Trouble("slow", lambda: setattr(proxy, "delay", 0.8), lambda: setattr(proxy, "delay", 0.0)),
        ]  # fmt: skip
        seen = suffer(f"redis://127.0.0.1:{proxy.port}{OPTIONS}", troubles)
        check(seen, troubles)
        assert "OOM" not in str(seen.report["problems"])
