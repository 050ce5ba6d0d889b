"""What a cache tells people: why a prompt hits or misses, counters, logs, spans, settings that waste room."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from asynccache import AsyncCache, CacheConfig, CacheFull, ConfigError, Full, Mamba, SlidingWindow
from asynccache.cli.traces import Trace, TraceRequest, paths_of, read_trace
from asynccache.cli.workloads import block_tokens
from asynccache.config import wasted
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig, WritePolicy
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.distinct import DistinctPages
from asynccache.runtime.explain import Where
from asynccache.runtime.lookups import LookupStats
from asynccache.storage import PageKey
from tests.runtime.runtime_kit import PAGE, HeldBackend, opened, parts, serve, settings, settled, text, turns, until

# ``cache.explain``: over all tiers, with what the store says, and nothing changed by asking.


async def tiers(cache: AsyncCache) -> list[tuple[int, int, Where]]:
    return [span[:3] for span in (await cache.explain(text(8))).spans]


async def test_a_prompt_over_three_tiers() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=6, host=6, prefetch_quota=1.0), storage=backend) as cache:
        await serve(cache, text(4))
        await settled(cache)
        assert await tiers(cache) == [(0, 16, Where.DEVICE), (16, 32, Where.NOWHERE)]
        async with cache.lease(text(6, seed=1)):
            pass
        assert await tiers(cache) == [(0, 16, Where.HOST), (16, 32, Where.NOWHERE)]
        found = await cache.explain(text(8))
        assert (found.device, found.host, found.storage, found.ends) == (0, 16, 16, "full")
        assert found.loads == {"full": 4}
        for seed in (2, 3):
            await serve(cache, text(6, seed=seed))
            await settled(cache)
        assert await tiers(cache) == [(0, 16, Where.STORAGE), (16, 32, Where.NOWHERE)]
        found = await cache.explain(text(8))
        assert (found.host, found.storage, found.fetch) == (0, 16, "up to 16")
        assert "was in storage then" in found.why


async def test_what_storage_has_is_not_fetched_where_it_is_less_than_the_threshold() -> None:
    backend = MemoryBackend()
    config = settings(device=12, host=12, prefetch_quota=1.0, prefetch_threshold=20)
    async with opened(config, storage=backend) as cache:
        await serve(cache, text(4))
        await cache.flush()
    async with opened(config, storage=backend) as cache:
        found = (await cache.explain(text(8))).fetch
        assert found == "nothing: storage has 16 tokens of what is missing, less than prefetch_threshold=20"
        assert (await cache.prefetch(text(8))).tokens == 0


async def test_what_a_prefetch_is_said_to_fetch_is_what_it_fetches() -> None:
    """Where there are windows, a prefetch leaves out the last page of a prompt that has whole pages alone."""
    backend = MemoryBackend()
    config = settings(device=6, host=6, swa=6, prefetch_quota=1.0)
    async with opened(config, storage=backend) as cache:
        await serve(cache, text(4), pools=("full", "swa"))
        await cache.flush()
    async with opened(config, storage=backend) as cache:
        assert (await cache.explain(text(1))).fetch.startswith("nothing: what is missing is shorter")
        assert (await cache.explain(text(4, extra=1))).fetch == "up to 16"
        found = await cache.explain(text(4))
        assert (found.fetch, found.storage) == ("up to 12", 16)
        assert (await cache.prefetch(text(4))).tokens == 12


async def test_asking_keeps_nothing_warm() -> None:
    async with opened(settings(device=8)) as cache:
        await serve(cache, text(4))
        await serve(cache, text(4, seed=1))
        for _ in range(3):
            await cache.explain(text(4))
        await serve(cache, text(4, seed=2))
        assert (await cache.match(text(4))).device == 0
        assert (await cache.match(text(4, seed=1))).device == 4 * PAGE


async def test_components_that_end_a_match_are_named() -> None:
    async with opened(settings(swa=8, mamba=8)) as cache:
        await serve(cache, text(4), pools=("full", "swa"))
        found = await cache.explain(text(4))
        assert (found.device, found.ends) == (0, "mamba")
        assert found.spans[0].states["full"] == ("present", "absent")
        assert found.spans[0].states["mamba"] == ("absent", "absent")


async def test_a_store_that_does_not_answer_leaves_it_unknown() -> None:
    async with opened(settings(host=8), storage=Down(), idle=False) as cache:
        found = await cache.explain(text(4))
        assert [span.where for span in found.spans] == [Where.UNKNOWN]
        assert found.fetch == "storage does not answer"


async def test_it_can_be_read_and_sent() -> None:
    async with opened(settings(host=8, eviction="lru")) as cache:
        await serve(cache, text(4))
        found = await cache.explain(text(4, extra=2))
        assert json.loads(json.dumps(found.plain()))["spans"][0]["where"] == "device"
        lines = found.lines()
        assert lines[0] == "18 tokens, 16 of them in whole pages"
        assert "0 .. 16" in lines[1]
        assert lines[-2] == "the whole prompt is there"
        assert (await cache.explain([1])).spans == ()


async def taught(cache: AsyncCache) -> None:
    """A hundred requests, most of which come twice."""
    for seed in range(50):
        await serve(cache, text(8, seed=seed))
        await serve(cache, text(8, seed=seed if seed % 5 else seed + 1000))


async def test_what_the_eviction_policy_has_learned_is_told() -> None:
    async with opened(settings(device=64, eviction="p2c")) as cache:
        await serve(cache, text(8, seed=2000))
        early = (await cache.explain(text(8))).lines()
        assert early[-1] == "p2c has learned from 1 requests, which is too few to choose by"
        await taught(cache)
        found = await cache.explain(text(8, seed=49))
        (span,) = found.spans
        assert span.judged is not None
        assert (span.judged.kind, span.judged.worth > 0) == ("used twice", True)
        lines = found.lines()
        assert ", worth " in lines[1]
        start = next(i for i, line in enumerate(lines) if line.startswith("p2c has learned from 101 requests"))
        assert lines[start + 1].split()[:2] == ["used", "once"]
        assert len(lines[start + 1].split("%")) == 6
        plain = json.loads(json.dumps(found.plain()))
        assert plain["spans"][0]["judged"]["kind"] == "used twice"
        assert [len(kind["again"]) for kind in plain["learned"]["kinds"]] == [len(plain["learned"]["ages_s"])] * 8
        learned = cache.learned()
        assert learned is not None
        assert (learned.requests, learned.lessons) == (101, 1)


async def test_under_lru_nothing_of_it_appears() -> None:
    async with opened(settings(device=64, eviction="lru")) as cache:
        await serve(cache, text(8))
        found = await cache.explain(text(8))
        assert cache.learned() is None
        assert not {"learned", "policy", "judged"} & {*found.plain(), *found.plain()["spans"][0]}
        assert not any("worth" in line or "learned" in line for line in found.lines())


async def test_a_question_tells_ages_as_of_now() -> None:
    async with opened(settings(device=64, eviction="p2c")) as cache:
        now = 100.0
        parts(cache).driver.clock = lambda: now
        await serve(cache, text(4))
        now = 160.0
        (span,) = (await cache.explain(text(4))).spans
        assert span.judged is not None
        assert span.judged.age == 60.0
        assert "used once, 60.0 s ago" in (await cache.explain(text(4))).lines()[1]
        once = next(curve for curve in cache.learned().curves if curve.name == "used once")  # type: ignore[union-attr]
        assert once.reached[-20] > 0, "it is known to have been unused for a minute"


# What a cache tells people: its log, its ``repr``, its statistics as a table, and what is too long.


FULL = Full.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32", device="1MiB", host="2MiB")
ROOMS = "full: 2 layers, 256 bytes a token; device 1 MiB for 4,096 tokens, host 2 MiB for 8,192 tokens"
PROMPT = list(range(500))


def config(folder: Path) -> CacheConfig:
    return CacheConfig(model="m", components=(FULL,), storage=f"file:{folder / 'kv'}?capacity=64MiB")


async def use(cache: AsyncCache) -> None:
    async with cache.lease(PROMPT) as lease:
        await lease.loaded()
        await lease.commit(PROMPT)


async def test_the_log_says_what_was_opened_and_what_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynccache")
    for pages in (0, 31):
        caplog.clear()
        async with AsyncCache(config(tmp_path)) as cache:
            await use(cache)
            await cache.flush()
        assert caplog.messages == [f"open: {ROOMS}; stores: file ({pages} pages)", "closed"]


async def test_what_a_closed_cache_could_not_save_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        await use(cache)
        report = await cache.aclose(0)
    assert sum(report[:2])
    told = [record for record in caplog.records if record.name == "asynccache"]
    assert [record.levelname for record in told] == ["WARNING"]
    assert told[0].getMessage() == (
        f"closed; lost: {report.unsaved_host} pages neither on the host nor stored, {report.unsaved_storage} not stored"
    )


async def test_leases_that_nobody_has_left_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        lease = await cache.lease(PROMPT).__aenter__()
        await cache.keep(list(range(40)))
    assert lease.cached == 0
    assert "leases still held when the cache was closed: 1; leave every lease" in caplog.messages


async def test_statistics_read_as_a_table_with_the_hit_ratio(tmp_path: Path) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        assert cache.statistics().lookups.hit_ratio == 0
        await use(cache)
        await use(cache)
        await cache.flush()
        found = cache.statistics()
        assert found.lookups.hit_ratio == 0.5
        lines = str(found).splitlines()
        assert lines[0] == "requests 2, tokens 992: 50.0% cached (device 50.0%, host 0.0%, storage 0.0%)"
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines if line] == [
            "requests", "no", "leases", "slots", "full", "stage", *found.stages, "store", "file",
        ]  # fmt: skip
        assert repr(cache) == f"AsyncCache('m', 0 leases; {ROOMS})"
    assert repr(AsyncCache(config(tmp_path))) == "AsyncCache('m', not open)"


async def test_too_long_a_prompt_is_refused_by_the_call_in_tokens() -> None:
    async with AsyncCache(CacheConfig(model="m", components=(FULL,))) as cache:
        cache.lease(list(range(4096)))
        with pytest.raises(CacheFull, match=r"^full: 4097 tokens are asked for, the device has room for 4096$"):
            cache.lease(list(range(4000)), new_tokens=97)
    components = (FULL, Mamba(state_bytes=16, device_states=4, host_states=4))
    async with AsyncCache(CacheConfig(model="m", components=components)) as cache:
        with pytest.raises(CacheFull, match=r"^mamba: 5 states are asked for, the device has room for 4$"):
            cache.lease(PROMPT, states=5)


async def test_a_cache_shows_its_device_and_the_block_table_of_a_step() -> None:
    async with AsyncCache(CacheConfig(model="m", components=(FULL,))) as cache:
        assert isinstance(cache.device, CpuDevice)
        async with cache.lease(PROMPT, new_tokens=20) as one, cache.lease(PROMPT[:40], namespace="a") as other:
            table = cache.block_table([one, other], [501, 40])
            assert table.pages.shape == (2, 32)
            assert table.pages[0].tolist() == one.pages[:32].tolist()
            assert table.pages[1].tolist() == [*other.pages[:3].tolist(), *[4096 // 16] * 29]
            with pytest.raises(ConfigError, match="'ful' is no pool; did you mean 'full'"):
                cache.block_table([one], [1], pool="ful")
            with pytest.raises(ConfigError, match="need 34 pages, the page table has 33"):
                cache.block_table([one], [529])
        with pytest.raises(RuntimeError, match="is released"):
            cache.block_table([one], [1])


# Each token that a request missed counts for one reason, and every token is counted once.


class Down(HeldBackend):
    """Answers no question while it is ``down``."""

    down = True

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if self.down and verb == "exists":
            raise OSError("gone")


def stats(cache: AsyncCache) -> LookupStats:
    found = cache.statistics().lookups
    assert sum(found.hits.values()) + sum(found.misses.values()) == found.tokens
    return found


def missed(cache: AsyncCache) -> dict[str, int]:
    return {reason: tokens for reason, tokens in stats(cache).misses.items() if tokens}


def prompt(pages: int, seed: int = 0) -> list[int]:
    """A page's worth and a token more, so that all of the pages are wanted."""
    return text(pages, seed=seed, extra=1)


SMALL = {"device": 6, "host": 6}


@pytest.mark.parametrize(
    ("terms", "seeds", "misses"),
    [
        ({}, (0, 0), {"never_stored": 4}),
        ({"device": 6}, (0, 1, 0), {"never_stored": 8, "evicted_device": 4}),
        (SMALL, (0, 1, 2, 3, 0), {"never_stored": 16, "evicted_host": 4}),
        ({"mamba": 8}, (0, 0), {"never_stored": 4, "no_state": 4}),
        (SMALL | {"storage": "memory:", "prefetch_quota": 1.0}, (0, 1, 2, 0), {"never_stored": 12}),
        (SMALL | {"storage": "memory:", "prefetch_quota": 0.5}, (0, 1, 2, 0), {"never_stored": 12, "no_host_room": 1}),
        (SMALL | {"storage": "memory:", "prefetch_threshold": 100}, (0, 1, 2, 0),
         {"never_stored": 12, "prefetch_too_short": 4}),
    ],
    ids=["never here", "evicted from the device", "evicted from the host", "no state", "a hit of storage",
         "the quota of the host", "too short to be fetched"],
)  # fmt: skip
async def test_each_reason_of_a_miss(terms: dict[str, Any], seeds: Sequence[int], misses: dict[str, int]) -> None:
    async with opened(settings(**terms)) as cache:
        for seed in seeds:
            await serve(cache, prompt(4, seed=seed))
            await settled(cache)
        assert missed(cache) == {reason: pages * PAGE for reason, pages in misses.items()}
        found = stats(cache)
        assert (found.requests, found.tokens) == (len(seeds), 4 * PAGE * len(seeds))
        assert found.hits["storage"] == (4 - misses.get("no_host_room", 0)) * PAGE * ("prefetch_quota" in terms)
        assert found.missed_requests["never_stored"] == len(set(seeds))


async def fill_and_push_out(cache: AsyncCache) -> None:
    """Prompt 0 is in storage alone."""
    for seed in (0, 1, 2):
        await serve(cache, prompt(4, seed=seed))
        await settled(cache)


@pytest.mark.parametrize(
    ("trouble", "reason"), [("down", "backend_down"), ("rotten", "checksum"), ("forgetful", "evicted_storage")]
)
async def test_what_storage_did_not_give(trouble: str, reason: str) -> None:
    backend = Down()
    backend.down = False
    async with opened(settings(device=6, host=6), storage=backend) as cache:
        await fill_and_push_out(cache)
        before = missed(cache)
        assert set(before) == {"never_stored"}
        backend.down = trouble == "down"
        backend.corrupt = range(1000) if trouble == "rotten" else ()
        if trouble == "forgetful":
            await backend.clear()
        await serve(cache, prompt(4))
        after = missed(cache)
        assert {name: tokens - before.get(name, 0) for name, tokens in after.items()} == {"never_stored": 0, reason: 16}
        backend.down = False


async def test_a_host_without_room_for_a_window_is_the_reason_of_a_miss() -> None:
    """Pages of the window that storage has, and for which the host has no slots."""
    backend = MemoryBackend()
    config = settings(device=6, host=6, swa=6)
    async with opened(config, storage=backend) as cache:
        await serve(cache, prompt(4), pools=("full", "swa"))
        assert (await cache.flush()).storage == 0
    full, swa = config.components
    assert isinstance(swa, SlidingWindow)
    small = replace(config, components=(full, replace(swa, host_tokens=PAGE)))  # a match ends in two pages of it
    async with opened(small, storage=backend) as cache:
        assert await serve(cache, prompt(4), pools=("full", "swa")) == PAGE
        assert missed(cache) == {"no_host_room": 3 * PAGE}


async def test_too_late() -> None:
    backend = HeldBackend()
    async with opened(settings(device=6, host=6), storage=backend) as cache:
        await fill_and_push_out(cache)
        backend.hold()
        handle = cache.prefetch(prompt(4))
        await until(lambda: backend.waiting == 1)
        entering = asyncio.create_task(cache.lease(prompt(4), prefetch=handle).__aenter__())
        await turns()
        handle.cancel()
        backend.let()
        (await entering).release()
        assert missed(cache)["prefetch_too_late"] == 4 * PAGE


async def test_what_a_prefetch_has_brought_counts_once_however_many_leases_come_with_it() -> None:
    """One after the other, or at the same time: the others find it on the host."""
    backend = MemoryBackend()
    async with opened(settings(16, 32), storage=backend) as cache:
        await serve(cache, prompt(4))
        await cache.flush()
    config = settings(32, 32, prefetch_policy="wait_complete")
    async with opened(config, storage=backend) as cache:
        handle = cache.prefetch(prompt(4))
        leases = [cache.lease(prompt(4), prefetch=handle) for _ in range(3)]
        await asyncio.gather(*(lease.__aenter__() for lease in leases))
        late = await cache.lease(prompt(4), prefetch=handle).__aenter__()
        assert [lease.cached for lease in (*leases, late)] == [4 * PAGE] * 4
        assert sorted(lease.hits.storage for lease in (*leases, late)) == [0, 0, 0, 4 * PAGE]
        found = stats(cache)
        assert (found.hits["storage"], found.tokens) == (4 * PAGE, 4 * 4 * PAGE)
        for lease in (*leases, late):
            lease.release()


# Spans of tracing, with OpenTelemetry's own tracer: what a request waited for stands under the request.


SMALL_FULL = Full(bytes_per_token=64, device_tokens=1024, host_tokens=2048)


async def test_what_a_request_waits_for_stands_under_the_request(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    start = provider.get_tracer("engine").start_as_current_span
    config = CacheConfig(model="m", components=(SMALL_FULL,), storage=f"file:{tmp_path}?capacity=64MiB")
    for life in (1, 2):  # the second cache finds what the first has stored
        exporter.clear()
        async with AsyncCache(config, span=start) as cache:
            with start("request") as request:
                async with cache.lease(PROMPT) as lease:
                    await lease.loaded()
                    await lease.commit(PROMPT)
            assert lease.hits.storage in (0, 496)
            await cache.flush()
        writes = [span for span in exporter.get_finished_spans() if span.name == "asynccache.backup_storage"]
        assert [span.parent for span in writes] == [None] * len(writes) != ([] if life == 1 else None)
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


def test_a_span_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="span"):
        AsyncCache(CacheConfig(model="m", components=(SMALL_FULL,)), span="tracer")  # type: ignore[arg-type]


# Settings that waste room are told of, in a sentence each, when the cache is opened; others are not.


def core_settings(
    swa: tuple[int, int] | None = None, host: int = 50, window: int = 64, states: int | None = None, **more: Any
) -> CoreConfig:
    slots = [ComponentSlots(ComponentKind.FULL, 100, host)]
    if swa is not None:
        slots.append(ComponentSlots(ComponentKind.SWA, *swa, window=window))
    if states is not None:
        slots.append(ComponentSlots(ComponentKind.MAMBA, 8, states))
    return CoreConfig(page_size=16, components=tuple(slots), **more)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (core_settings(write_back_watermark=0.9), "write_back_watermark=0.9: up to 45 pages"),
        (core_settings(swa=(50, 3)), "swa: the host has room for 3 of its pages, a match that ends there needs 4"),
        (core_settings(states=0), "mamba: the host has room for 0 of its pages, a match that ends there needs 1"),
        (core_settings(host=501, states=5), "mamba: the host has room for 5 states and for 501 pages of full."),
    ],
)
def test_a_setting_that_wastes_room_is_told_of(settings: CoreConfig, says: str) -> None:
    (sentence,) = wasted(settings)
    assert says in sentence


@pytest.mark.parametrize(
    "settings",
    [
        core_settings(), core_settings(states=1), core_settings(host=500, states=5),
        core_settings(host=0, write_back_watermark=1.0), core_settings(swa=(50, 4)), core_settings(swa=(50, 3), host=3),
        *(core_settings(host=host, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE) for host in (10, 100, 200)),
    ],
)  # fmt: skip
def test_others_are_not(settings: CoreConfig) -> None:
    assert wasted(settings) == ()


async def test_it_is_said_when_the_cache_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccache"):
        async with opened(settings(device=16, host=8, write_back_watermark=1.0)):
            pass
    assert [record.message for record in caplog.records if "write_back_watermark" in record.message]


REAL = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
SPACE = b"\x07" * 32
ERROR = 0.0081
"""One standard error of 2**14 registers: 1.04 / 128."""


def tokens(seed: int, pages: int, page: int = 16) -> bytes:
    return np.random.default_rng(seed).integers(0, 1 << 17, pages * page, dtype=np.int32).tobytes()


@pytest.mark.parametrize("pages", [0, 1, 7, 100, 3_000, 20_000, 41_000, 60_000, 250_000])
def test_the_count_is_within_four_standard_errors_at_any_size(pages: int) -> None:
    found, one = DistinctPages(16), 250
    for seed in range(-(-pages // one)):
        count = min(one, pages - seed * one)
        found.add(SPACE, tokens(seed, count), 0, count)
    assert abs(found.count() - pages) <= max(0.5 * (pages < 10), 4 * ERROR * pages)


def test_the_error_has_no_bias_and_the_spread_that_is_promised() -> None:
    errors = []
    for seed in range(40):
        found = DistinctPages(16)
        for part in range(20):
            found.add(SPACE, tokens(1000 * seed + part, 500), 0, 500)
        errors.append(found.count() / 10_000 - 1)
    assert abs(np.mean(errors)) < 3 * ERROR / 40**0.5
    assert np.std(errors) < 1.5 * ERROR


def test_a_page_is_its_tokens_and_all_before_them_and_its_namespace() -> None:
    found, one, other = DistinctPages(16), tokens(1, 3), tokens(2, 3)
    found.add(SPACE, one, 0, 3)
    found.add(SPACE, one + other, 0, 3)
    found.add(SPACE, one, 1, 3)
    assert round(found.count()) == 3
    found.add(SPACE, other + one, 0, 6)  # the same pages behind others
    assert round(found.count()) == 9
    found.add(b"\xff" * 32, one, 0, 3)
    assert round(found.count()) == 12
    page = np.frombuffer(one, np.int32, 16)
    found.add(SPACE, page[::-1].tobytes(), 0, 1)
    found.add(SPACE, np.concatenate([page[1:], page[:1]]).tobytes(), 0, 1)
    found.add(SPACE, np.zeros(32, np.int32).tobytes(), 0, 2)
    assert round(found.count()) == 16


def counted(trace: Trace) -> tuple[DistinctPages, int]:
    """The sketch after all full blocks of the trace, and how many different ones there are."""
    found, size = DistinctPages(trace.block_size), trace.block_size
    for request in trace.requests:
        if full := len(trace.path(request)):
            found.add(SPACE, block_tokens(request.blocks, full * size, size).tobytes(), 0, full)
    return found, len({key for path in paths_of(trace) for key in path})


def test_the_count_of_the_example_trace_is_exact_to_the_sketch() -> None:
    found, exact = counted(read_trace(str(Path(__file__).parents[2] / "examples" / "trace.jsonl")))
    assert abs(found.count() / exact - 1) < 4 * ERROR
    rows = [TraceRequest(0, 32 * len(blocks), 1, blocks) for blocks in ((1, 2, 3), (1, 2, 4), (2, 3))]
    found, exact = counted(Trace(rows, 32))
    assert (round(found.count()), exact) == (6, 6)


@pytest.mark.slow(2)
@pytest.mark.skipif(not REAL.is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_count_of_the_recorded_trace_is_exact_to_the_sketch() -> None:
    found, exact = counted(read_trace(str(REAL)))
    assert exact == 276_491 - 105_592
    assert abs(found.count() / exact - 1) < 3 * ERROR


async def test_the_ceiling_is_what_an_endless_cache_would_have_had() -> None:
    """Three conversations in turns, in a cache with room for one: nothing hits, and two thirds could."""
    async with opened(settings(device=6)) as cache:
        assert cache.statistics().lookups.ceiling == 0
        for _ in range(3):
            for seed in range(3):
                await serve(cache, text(4, seed=seed, extra=1))
        found = cache.statistics().lookups
        assert (found.hit_ratio, found.tokens, found.new_tokens) == (0, 36 * PAGE, 12 * PAGE)
        assert found.ceiling == pytest.approx(2 / 3)
        assert "more than about 66.7%" in str(cache.statistics())
        for _ in range(9):
            await serve(cache, text(4, seed=2, extra=1))
        found = cache.statistics().lookups
        assert found.new_tokens == 12 * PAGE
        assert found.hit_ratio < found.ceiling == pytest.approx(1 - 12 / 72)
