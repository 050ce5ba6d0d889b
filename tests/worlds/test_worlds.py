"""Seeded worlds: all right, seen, and without anybody who polls."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest

from asynccache import CacheConfig, Full
from asynccache.core.plan import Wait
from asynccache.errors import CopyFailed
from asynccache.runtime import lease
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.core_calls import drive
from asynccache.runtime.driver import Driver
from asynccache.runtime.engine_batches import EngineBatches, Fences, not_over
from asynccache.runtime.lease import Publishing
from asynccache.runtime.save import Lateness, StoreCall
from asynccache.worker.local import LocalBatch
from asynccache.worker.work import BatchInFlight
from tests.events.test_events_mirror import Reader, on_tier
from tests.simulated import world
from tests.simulated.backend import HONEST, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import Deadlock, SimulatedLoop, simulate
from tests.simulated.patience import Overdue
from tests.simulated.world import WrongBytes, play
from tests.worlds import hanging

# Seeded worlds over the real runtime. One that fails prints its seed; ``ASYNCCACHE_SEED=<seed>`` plays it again.
#
# ``ASYNCCACHE_WORLDS`` says how many worlds to play from seed 0 on, instead of the usual number. The usual number was
# measured: see ``CONTRIBUTING.md``. ``make soak`` plays worlds by new seeds.


CHUNK = 25
WORLDS = int(os.environ.get("ASYNCCACHE_WORLDS", 200))


def chunks(ends: dict[int, Sequence[pytest.MarkDecorator]]) -> list[object]:
    """Ranges of seeds. ``ends``: up to which seeds the ranges have which marks."""
    if seed := os.environ.get("ASYNCCACHE_SEED"):
        return [range(int(seed), int(seed) + 1)]
    return [
        pytest.param(range(start, start + CHUNK), id=f"{start}-", marks=ends[min(end for end in ends if start < end)])
        for start in range(0, max(ends), CHUNK)
    ]


@pytest.mark.parametrize("seeds", chunks({CHUNK: (), WORLDS: (pytest.mark.slow(3),)}))
def test_worlds(seeds: Sequence[int]) -> None:
    met: Counter[str] = Counter()
    verified = 0
    for seed in seeds:
        report = play(seed)
        met += report.met
        verified += report.verified
    if len(seeds) == CHUNK:
        assert met["served"] > 3 * CHUNK, f"a world that serves nobody shows nothing: {met}"
        assert all(met[name] for name in ("cancelled", "device hit", "host hit", "storage hit", "attached")), met
        assert verified > 50 * CHUNK
        assert met["p2c led"] > met["p2c choices"] / 4 > CHUNK / 4, f"p2c hardly ever leads: {met}"


def test_one_seed_is_one_world() -> None:
    assert repr(play(7)) == repr(play(7))


# The worlds must be able to fail: each of these breaks one rule, and some world must notice.


def is_noticed(worlds: int) -> bool:
    """Play worlds until one fails: whether that was for wrong bytes."""
    for seed in range(worlds):
        try:
            play(seed)
        except (Deadlock, AssertionError, CopyFailed) as error:
            return isinstance(error, WrongBytes)
    return False


def test_a_backup_that_does_not_wait_for_ready_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineBatches, "pending", lambda self: [])
    assert is_noticed(300)


def test_a_failed_batch_that_counts_as_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBatch, "failed", property(lambda self: False))
    assert is_noticed(300)


def test_pages_that_are_free_before_the_engine_let_go_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    retire = EngineBatches.retire
    monkeypatch.setattr(EngineBatches, "retire", lambda self, ops, batches: retire(self, ops, []))
    assert is_noticed(600)


def test_a_load_that_does_not_wait_for_the_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fences, "add", lambda self, batch, slots: None)
    assert is_noticed(600)


def test_a_load_that_does_not_wait_for_what_a_commit_named_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def expect(self: Publishing, ready: BatchInFlight) -> None:
        self._ready = [*not_over(*self._ready), ready]

    monkeypatch.setattr(Publishing, "expect", expect)
    assert is_noticed(600)


# Random worlds as a subscriber and a scraper see them: blocks equal the tree, and every wanted token counts once.


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_a_world_is_seen_as_it_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: dict[int, Reader] = {}
    begin, look = AsyncCache.__init__, world.World.check_idle

    def watched(self: AsyncCache, *args: Any, **options: Any) -> None:
        reader = readers[id(self)] = Reader()
        begin(self, *args, **options, on_event=reader.notices.append)

    def compared(seen: world.World) -> None:
        look(seen)
        blocks = readers[id(seen.cache)].read(seen.cache)
        assert blocks["GPU"] == on_tier(seen.cache, 0)
        assert blocks["CPU"] == on_tier(seen.cache, 1)
        found = seen.cache.statistics().lookups
        assert sum(found.hits.values()) + sum(found.misses.values()) == found.tokens

    monkeypatch.setattr(AsyncCache, "__init__", watched)
    monkeypatch.setattr(world.World, "check_idle", compared)
    world.play(seed)
    assert readers


# Nobody polls: a world in which all wait for something that will not come has no timer left, and is a deadlock.


CONFIG = CacheConfig(
    model="m", components=(Full(bytes_per_token=8, device_tokens=32, host_tokens=64),), page_size=4,
    prefetch_policy="wait_complete",  # type: ignore[arg-type]
    prefetch_threshold=4,
)  # fmt: skip


@pytest.mark.parametrize("stored", [False, True])
def test_a_request_that_waits_for_pages_costs_nothing(stored: bool) -> None:
    async def world(loop: SimulatedLoop) -> None:
        storage = SimulatedBackend(Random(1), HONEST) if stored else None
        cache = AsyncCache(CONFIG, device=SimulatedDevice(seed=1, latency=(0.0, 0.001)), storage=storage)
        await cache.__aenter__()
        async with cache.lease(list(range(16))) as lease:
            await lease.commit(list(range(16)))
        await cache.flush()
        for_ever = await cache.lease(list(range(100, 132))).__aenter__()
        waiting = asyncio.create_task(cache.lease(list(range(200, 216))).__aenter__(), name="waits for pages")
        await asyncio.sleep(1000)
        assert not waiting.done()
        assert for_ever.pages.size == 8
        await waiting

    with pytest.raises(Deadlock, match="waits for pages"):
        simulate(world, 1)


@pytest.mark.parametrize("seeds", chunks({CHUNK: (), 125: (pytest.mark.slow(3),), 600: (pytest.mark.soak,)}))
def test_no_request_waits_longer_than_its_deadline_and_the_patience_of_the_store(seeds: Sequence[int]) -> None:
    met: dict[str, Counter[str]] = {"alone": Counter(), "scheduler": Counter(), "ranks": Counter()}
    hung = Counter[str]()
    for seed in seeds:
        report = hanging.play(seed)
        met[report.kind] += report.met
        hung += report.hung
    if len(seeds) == CHUNK:
        assert hung.total() > CHUNK, f"hardly any call has hung: {hung}"
        assert met["alone"]["served"] > 2 * CHUNK, f"a world that serves nobody shows nothing: {met}"
        assert met["ranks"]["served"] > CHUNK / 2
        assert met["scheduler"]["length"] > 2 * CHUNK
        assert met["alone"]["storage hit"] + met["scheduler"]["storage"] + met["ranks"]["storage hit"] > 0


# The worlds must be able to fail: each of these breaks one rule, and some world must notice.


def survivors(worlds: int) -> str:
    """Play worlds until somebody waits for too long in one; empty if nobody does."""
    for seed in range(worlds):
        try:
            hanging.play(seed)
        except Overdue as error:
            return str(error)
    return ""


def test_growth_that_only_the_end_of_a_copy_or_backup_wakes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(driver: Driver, call: Any, done: Any, check: Callable[[], object] | None = None) -> Any:
        answer = await drive(driver, call, done, check)
        if isinstance(answer, Wait) and (ended := driver.ops.watch(answer.ops)) is not None:
            for waiter in driver.growing:
                ended.add_done_callback(partial(_wake, waiter))
            driver.growing = set()
        return answer

    monkeypatch.setattr(lease, "drive", deaf)
    assert "extend" in survivors(60)


def _wake(waiter: asyncio.Future[None], ended: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def test_reads_that_do_not_make_storage_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Lateness.call

    @contextmanager
    def only_writes(self: Lateness, kind: StoreCall) -> Iterator[None]:
        if kind is StoreCall.READ:
            yield
        else:
            with call(self, kind):
                yield

    monkeypatch.setattr(Lateness, "call", only_writes)
    assert survivors(60)
