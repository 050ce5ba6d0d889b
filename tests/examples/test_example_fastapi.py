"""A cache in a FastAPI app: it lives as long as the app, and its pages are mounted beside the app's own."""

from __future__ import annotations

import fastapi_app
from fastapi.testclient import TestClient


def test_the_cache_lives_in_the_lifespan_and_its_pages_are_mounted() -> None:
    with TestClient(fastapi_app.server) as client:
        answers = [client.post("/serve", json={"tokens": list(range(11))}).json() for _ in range(2)]
        assert answers == [{"cached": 0, "computed": 11}, {"cached": 8, "computed": 3}]
        assert client.get("/cache/healthz").text == "ok\n"
        assert client.get("/cache/statistics").json()["lookups"]["requests"] == 2
        assert "asynccache_loop_lag_seconds_bucket" in client.get("/cache/metrics").text
        explained = client.post("/cache/explain", json={"tokens": list(range(11))}).json()
        assert explained["device"] == 8
        assert client.get("/cache/nothing").status_code == 404
        assert client.get("/metrics").status_code == 404, "the cache has its own place only"
    assert fastapi_app.cache.closed is not None


def test_a_closed_cache_is_not_healthy_there() -> None:
    client = TestClient(fastapi_app.server)  # without the block, the lifespan does not run
    answer = client.get("/cache/healthz")
    assert answer.status_code == 503
    assert answer.json()["error"]
