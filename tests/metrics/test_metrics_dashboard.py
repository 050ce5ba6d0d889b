"""The dashboard that ships: each of its queries names metrics, and labels of theirs, that a cache has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheConfig, Full

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from asynccache.metrics import CacheCollector, LoopLag
from tests.stores.server import NowhereRequired, path_of

ROOT = Path(__file__).parents[2]
KV = Full(bytes_per_token=64, device_tokens=1024, host_tokens=4096)
CONFIG = CacheConfig(model="demo", components=(KV,), storage="memory:")
SERIES = re.compile(r"(asynccache_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)(?:=~|=|!=|!~)\"")
GROUPED = re.compile(r"by \(([^)]*)\)")


async def known() -> dict[str, set[str]]:
    """The labels of each metric of a cache with a store, by name."""
    registry = CollectorRegistry()
    async with AsyncCache(CONFIG) as cache:
        registry.register(CacheCollector(cache, lag=LoopLag()))
        return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def queries() -> list[tuple[str, str]]:
    """The expression and the legend of every query."""
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    chosen = [(each["query"], "") for each in board["templating"]["list"] if each["type"] == "query"]
    return chosen + [(query["expr"], query["legendFormat"]) for panel in board["panels"] for query in panel["targets"]]


async def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    metrics, asked = await known(), queries()
    assert len(asked) > 15
    for expression, legend in asked:
        labels: set[str] = set()
        found = SERIES.findall(LABEL.sub("\"", expression))
        assert found, expression
        for name, _ in found:
            assert name in metrics, f"{name} in {expression}"
            labels |= metrics[name]
        used = {*LABEL.findall(expression), *re.findall(r"\{\{(\w+)\}\}", legend)}
        used |= {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        assert used <= labels, expression


def test_every_kind_of_figure_is_on_it() -> None:
    """Whoever looks at it sees hits, misses, room, transfers and failures."""
    asked = " ".join(expression for expression, _ in queries())
    for name in ("hit", "miss", "pool_free", "stage_latency", "stage_errors", "storage_breaker", "loop_lag", "closed"):
        assert f"asynccache_{name}" in asked


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """Each expression is a recording rule, with what Grafana puts in for its variables."""
    promtool = path_of("promtool", install="apt-get install prometheus", missing=NowhereRequired)
    asked = [expression for expression, legend in queries() if not expression.startswith("label_values")]
    asked = [each.replace("$cache", ".*").replace("$__rate_interval", "1m") for each in asked]
    rules = [{"record": f"q{number}", "expr": expression} for number, expression in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
