"""Spans of tracing, with OpenTelemetry's own tracer: what a request waited for stands under the request."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from asynccache import AsyncCache, CacheConfig, ConfigError, Full

FULL = Full(bytes_per_token=64, device_tokens=1024, host_tokens=2048)
PROMPT = list(range(500))


async def test_what_a_request_waits_for_stands_under_the_request(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    start = provider.get_tracer("engine").start_as_current_span
    config = CacheConfig(model="m", components=(FULL,), storage=f"file:{tmp_path}?capacity=64MiB")
    for _ in range(2):  # the second cache finds what the first has stored
        exporter.clear()
        async with AsyncCache(config, span=start) as cache:
            with start("request") as request:
                async with cache.lease(PROMPT) as lease:
                    await lease.loaded()
                    await lease.commit(PROMPT)
            assert lease.hits.storage in (0, 496)
            await cache.flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "asynccache.lease", "asynccache.prefetch", "asynccache.load"}
    parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
    top, lease_span = request.get_span_context().span_id, spans["asynccache.lease"].context
    assert parents["asynccache.lease"] == parents["asynccache.load"] == top
    assert lease_span is not None
    assert parents["asynccache.prefetch"] == lease_span.span_id
    assert dict(spans["asynccache.prefetch"].attributes or {}) == {
        "asynccache.tokens": 500, "asynccache.status": "complete",
    }  # fmt: skip
    assert dict(spans["asynccache.load"].attributes or {}) == {"asynccache.tokens": 496}


async def test_writes_to_stores_have_spans_of_their_own(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = CacheConfig(model="m", components=(FULL,), storage=f"file:{tmp_path}?capacity=64MiB")
    async with AsyncCache(config, span=provider.get_tracer("engine").start_as_current_span) as cache:
        async with cache.lease(PROMPT) as lease:
            await lease.commit(PROMPT)
        await cache.flush()
    writes = [span for span in exporter.get_finished_spans() if span.name == "asynccache.backup_storage"]
    assert writes
    assert all(span.parent is None for span in writes)


def test_a_span_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="span"):
        AsyncCache(CacheConfig(model="m", components=(FULL,)), span="tracer")  # type: ignore[arg-type]
