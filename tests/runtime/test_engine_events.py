"""Pages that an engine still writes or reads, and the events and batches that say so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from asynccache import AsyncCache, ConfigError, Lease, LoadFailed
from asynccache.core import audit
from asynccache.core.plan import Medium, Publish
from asynccache.events import Notice, StorageReport
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.signals import HostGate
from asynccache.runtime import engine_batches
from asynccache.runtime.core_calls import holding
from asynccache.runtime.engine_batches import SWEEP, Fences
from tests.runtime.runtime_kit import (
    LAYERS,
    PAGE,
    assert_cached_bytes,
    compute,
    enter,
    entering,
    fence_all,
    free,
    gate,
    holds,
    on_the_host,
    opened,
    page_hashes,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
    write,
)

# Pages that the engine still writes or reads are neither copied, nor free, nor overwritten before its events have
# fired.


async def test_a_backup_that_was_deferred_waits_for_ready_too() -> None:
    async with opened(settings(host=32, max_backup_ops=1)) as cache:
        earlier, ready = gate(cache), gate(cache)
        first, second = text(2, seed=1), text(2, seed=2)
        async with cache.lease(first) as lease:
            compute(cache, lease, first)
            await lease.commit(first, after=earlier)
            await turns()
        async with cache.lease(second) as lease:
            await lease.commit(second, after=ready)
            assert cache.statistics().core.deferred_backups == 1
            earlier.open()
            await until(lambda: cache.statistics().stages["backup_host"].ops == 1)
            await until(lambda: not cache.statistics().core.deferred_backups)
            await turns()
            compute(cache, lease, second)
            ready.open()
        await settled(cache)
        await push_out(cache, 16)
        assert await serve(cache, [*second, 1]) == 2 * PAGE


async def test_a_private_copy_waits_for_ready() -> None:
    async with opened(settings(mamba=8)) as cache:
        tokens, ready = text(2), gate(cache)
        state = page_hashes(tokens)[-1]
        async with cache.lease(tokens) as lease:
            await lease.commit(tokens, after=ready, checkpoint=(2 * PAGE, int(lease.states[1])))
            slot = int(lease.states[1]) if lease.states.size > 2 else 1
            async with cache.lease([*tokens, 1]) as other:
                loaded = asyncio.create_task(other.loaded())
                await turns()
                assert not loaded.done()
                write(cache, "mamba", slot, state)
                ready.open()
                await loaded
                assert other.cached == 2 * PAGE
                assert holds(cache, "mamba", int(other.states[0]), state)


@pytest.mark.parametrize("how", ["release", "commit"])
async def test_released_pages_retire_until_the_engine_has_let_go(how: str) -> None:
    async with opened(settings(device=8)) as cache:
        work = gate(cache)
        lease = await enter(cache, 2, new_tokens=6 * PAGE)
        if how == "commit":
            await lease.commit(text(2), after=work)
        lease.release(after=work if how == "release" else None)
        await turns()
        assert free(cache) == 0
        if how == "release":  # of what was published one could be evicted
            waits = entering(cache, 1, 2)
            await turns()
            assert not waits.done()
        work.open()
        if how == "release":
            (await waits).release()
        await until(lambda: free(cache) == (6 if how == "commit" else 8))


@asynccontextmanager
async def loaded_after(
    cache: AsyncCache, event: HostGate, pages: int, pools: Sequence[str] = ("full",)
) -> AsyncIterator[Lease]:
    """A lease of so many pages that are loaded when the event fires, at the end of the block, and not before."""
    async with cache.lease(text(pages, seed=1, extra=1), wait=False) as lease:
        loaded = asyncio.create_task(lease.loaded())
        await turns(20_000)  # without the fence it is there long before
        assert lease.cached == pages * PAGE
        assert not loaded.done()
        yield lease
        event.open()
        await loaded
        assert_cached_bytes(cache, lease, text(pages, seed=1), pools)


@pytest.mark.parametrize("how", ["release", "adopt"])
async def test_a_load_into_pages_that_the_engine_may_still_read_waits_on_the_device(how: str) -> None:
    async with opened(settings(device=8, host=32)) as cache:
        for seed in (1, 2):
            await serve(cache, text(6, seed=seed))
            await settled(cache)
        reads, hashes = gate(cache), page_hashes(text(6, seed=2))
        async with cache.lease(text(6, seed=2, extra=1)) as lease:
            read = lease.pages[:6].tolist()
            if how == "adopt":
                await lease.commit(text(6, seed=2))
                lease.adopt(after=reads)
            else:
                lease.release(after=reads)
        async with loaded_after(cache, reads, 6):
            assert all(holds(cache, "full", slot, page) for slot, page in zip(read, hashes, strict=True))


@pytest.mark.parametrize("how", ["adopt", "adopt later", "adopt what is computed later", "commit", "release"])
async def test_duplicates_are_free_once_the_engine_uses_the_new_table(how: str) -> None:
    async with opened(settings(device=12)) as cache:
        tokens, work = text(4), gate(cache)
        async with cache.lease(tokens) as one, cache.lease(tokens) as two:
            compute(cache, one, tokens)
            compute(cache, two, tokens)
            first = await one.commit(tokens)
            computed = work if how == "adopt what is computed later" else None
            assert (await two.commit(tokens, after=computed)).tolist() == first.tolist()
            await turns()
            assert free(cache) == 4
            if how == "commit":
                await two.commit(tokens)
            elif how == "release":
                two.release()
            else:
                two.adopt(after=work if how == "adopt later" else None)
            if how.endswith("later"):
                await turns()
                assert free(cache) == 4
                work.open()
            await until(lambda: free(cache) == 8)


@pytest.mark.parametrize("how", ["truncate", "advance"])
async def test_a_load_into_pages_given_back_early_waits_for_the_engine(how: str) -> None:
    async with opened(settings(device=8, host=32, swa=8)) as cache:
        pools = ("full", "swa")
        await on_the_host(cache, text(2, seed=1), pools=pools)
        reads = gate(cache)
        async with cache.lease(text(1), new_tokens=4 * PAGE) as lease:
            if how == "truncate":
                lease.truncate(PAGE, after=reads)
            else:
                lease.advance(5 * PAGE, after=reads)
            async with loaded_after(cache, reads, 2, pools):
                pass


async def test_a_commit_must_continue_what_the_lease_holds() -> None:
    async with opened(settings()) as cache:
        async with cache.lease(text(2), new_tokens=PAGE) as lease:
            with pytest.raises(ConfigError, match="prompt"):
                await lease.commit(text(2, seed=1))
            with pytest.raises(ConfigError, match="12 reserved"):
                await lease.commit(text(4))
            await lease.commit(text(2))
            with pytest.raises(ConfigError, match="8 committed"):
                await lease.commit(text(1))
            await lease.commit(text(3))
        assert (await cache.match(text(3))).device == 3 * PAGE


@pytest.mark.parametrize("how", ["commit", "release", "advance"])
async def test_a_load_runs_beside_the_engines_work_on_other_pages(how: str) -> None:
    async with opened(settings(device=12, host=32, swa=12)) as cache:
        pools = ("full", "swa")
        await on_the_host(cache, text(3, seed=1), pools=pools)
        work = gate(cache)
        async with cache.lease(text(3, seed=2), new_tokens=PAGE) as lease:
            if how == "commit":
                await lease.commit(text(3, seed=2), after=work)
            elif how == "advance":
                lease.advance(2 * PAGE, after=work)
            else:
                lease.release(after=work)
            async with cache.lease(text(3, seed=1, extra=1)) as other:
                assert other.hits.host == 3 * PAGE
                await other.loaded()
                assert not work.done()
                assert_cached_bytes(cache, other, text(3, seed=1), pools)
            work.open()


async def test_a_load_into_pages_that_a_commit_left_behind_its_window_waits_for_ready() -> None:
    """They are the tree's, and nobody's, while the engine may still write them: no call has named them since."""
    config = settings(device=16, host=64, swa=8, write_policy="write_through_selective")
    async with opened(config) as cache:
        for _ in range(2):  # seen twice, it is worth a place on the host
            await serve(cache, text(2, seed=1), ("full", "swa"))
        await settled(cache)
        await push_out(cache, 8)
        ready = gate(cache)
        async with cache.lease(text(6, seed=2)) as lease:
            written = [slot for slot in lease.page_table("swa").tolist() if slot >= 0]
            await lease.commit(text(6, seed=2), after=ready)
            lease.advance(6 * PAGE)
            async with loaded_after(cache, ready, 2, ("swa",)) as other:
                brought = [slot for slot in other.page_table("swa").tolist() if slot >= 0]
                assert set(brought) & set(written)


@pytest.mark.parametrize("what", ["load", "clone"])
async def test_what_was_asked_for_before_an_event_was_named_does_not_wait_for_it(what: str) -> None:
    """An engine on the host may compute its layers as they come, and fire ``ready`` after that."""
    async with opened(settings(device=16, host=32, mamba=8 if what == "clone" else 0)) as cache:
        async with cache.lease(text(2, seed=1)) as lease:
            compute(cache, lease, text(2, seed=1))
            checkpoint = (2 * PAGE, int(lease.states[1])) if what == "clone" else None
            await lease.commit(text(2, seed=1), checkpoint=checkpoint)
        await settled(cache)
        if what == "load":
            await push_out(cache, 16)
        ready, tokens = gate(cache), text(2, seed=1, extra=1) + text(3, seed=2)

        async def engine(lease: Lease) -> None:
            await asyncio.gather(*(lease.layer(layer) for layer in range(LAYERS)))
            ready.open()

        async with cache.lease(tokens) as lease:
            assert lease.loading
            computing = asyncio.create_task(engine(lease))
            await turns(2)
            async with asyncio.timeout(60):
                await lease.commit(tokens, after=ready)
            await computing


async def test_a_load_in_line_behind_another_does_not_wait_for_its_own_lease() -> None:
    async with opened(settings(device=12, host=64)) as cache:
        await on_the_host(cache, text(3, seed=1), text(3, seed=2))
        first, ready = gate(cache), gate(cache)
        fences = parts(cache).batches.fences
        fence_all(cache, first)
        async with cache.lease(text(3, seed=1, extra=1)) as one:
            await turns(100)
            fences._sets.clear()
            tokens = text(3, seed=2, extra=1)
            async with cache.lease(tokens) as two:
                loaded = asyncio.create_task(two.loaded())
                await turns(100)
                committing = asyncio.create_task(two.commit(tokens, after=ready))
                await turns(100)
                first.open()
                async with asyncio.timeout(60):
                    await loaded  # the engine would compute now, and fire
                ready.open()
                await committing
            await one.loaded()


@pytest.mark.parametrize("last", range(3))
async def test_released_pages_retire_until_every_batch_is_over_whichever_ends_last(last: int) -> None:
    async with opened(settings(device=8)) as cache:
        batches = [gate(cache) for _ in range(3)]
        async with cache.lease(text(2), new_tokens=6 * PAGE) as lease:
            await lease.commit(text(1), after=batches[0])
            await lease.commit(text(2), after=batches[1])
            lease.release(after=batches[2])
        for batch in batches[:last] + batches[last + 1 :]:
            batch.open()
        await turns(50)
        assert cache.statistics().device["full"].free == 0
        batches[last].open()
        await until(lambda: cache.statistics().device["full"].free == 6)


# Fences: which batches stand before which slots, against a model that keeps every batch of every slot.


FULL, SWA = 0, 1
SLOTS = {FULL: 24, SWA: 8}


class Told:
    """A batch that is over when it is told so."""

    number = 0
    fired = False
    failed = False

    def done(self) -> bool:
        return self.fired

    async def wait(self) -> None:
        """Nobody waits here."""
        await asyncio.Event().wait()

    settled = wait


def table(slots: Sequence[int]) -> bytes:
    return np.array(slots, np.int32).tobytes()


def test_behind_one_that_lasts_the_others_are_forgotten() -> None:
    """An event that fires late keeps the sets that it is in, and no others."""
    fences, first = Fences(SLOTS), Told()
    fences.add(first, {FULL: table([0])})
    for _ in range(10 * SWEEP):
        event = Told()
        fences.add(event, {FULL: table([1]), SWA: table([2])})
        event.fired = True
    assert len(fences) <= 2 * SWEEP
    assert fences.before([(FULL, table([0, 1])), (SWA, table([2]))]) == [first]
    first.fired = True
    assert fences.before([(FULL, table([0]))]) == []
    assert len(fences) == 0


def test_behind_one_that_never_ends_a_fence_costs_as_much_after_many_batches_as_after_few() -> None:
    """What a fence costs grows with the numbers from the first set to the last."""
    fences, stuck = Fences(SLOTS), Told()
    fences.add(stuck, {FULL: table([0])})
    spans = []
    for number in range(200 * SWEEP):
        event = Told()
        fences.add(event, {FULL: table([1 + number % 8]), SWA: table([2])})
        event.fired = True
        spans.append(fences._number - next(iter(fences._sets)))
    assert max(spans[len(spans) // 2 :]) <= max(spans[: 20 * SWEEP])
    assert fences.before([(FULL, table(range(9)))]) == [stuck]


@pytest.mark.parametrize("renumbers", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_against_a_model(seed: int, renumbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if renumbers:
        monkeypatch.setattr(engine_batches, "SWEEP", 2)
        monkeypatch.setattr(engine_batches, "SPARSE", 0)
    rng, fences = Random(seed), Fences(SLOTS)
    model: dict[tuple[int, int], set[Told]] = {(c, s): set() for c, count in SLOTS.items() for s in range(count)}
    events: list[Told] = []

    def drawn(component: int) -> list[int]:
        return [s if rng.random() < 0.8 else -1 for s in rng.sample(range(SLOTS[component]), rng.randrange(6))]

    for _ in range(400):
        if rng.random() < 0.4 and events:
            rng.choice(events).fired = True
        elif rng.random() < 0.7:
            event = rng.choice(events) if events and rng.random() < 0.3 else Told()
            events.append(event)
            slots = {c: drawn(c) for c in rng.sample(list(SLOTS), rng.randrange(1, 3))}
            fences.add(event, {c: table(found) for c, found in slots.items()})
            for c, found in slots.items():
                for slot in found:
                    if slot >= 0:
                        model[c, slot].add(event)
        wanted = {c: drawn(c) for c in SLOTS}
        expected = {e for c, found in wanted.items() for s in found if s >= 0 for e in model[c, s] if not e.fired}
        got = fences.before([(c, table(found)) for c, found in wanted.items()])
        assert len(got) == len(expected)
        assert set(got) == expected


# Events that the device's streams cannot wait for are refused by name, and the lease stays as it was.


class QueriedEvent:
    """As an event of torch's, without its handle: it can be queried, and has no ``done``."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host would wait")


class AwaitedEvent:
    """A coroutine can wait for it, and no stream."""

    def done(self) -> bool:
        return False

    async def wait(self) -> None:
        raise AssertionError("nobody can order a copy behind it")


FOREIGN: list[Callable[[], object]] = [
    QueriedEvent, AwaitedEvent, object, asyncio.Event, threading.Event, Future, lambda: 3, lambda: "E1", lambda: True,
    list, lambda: CpuDevice,
]  # fmt: skip


CALLS: dict[str, Callable[[Lease, Any], Awaitable[object] | None]] = {
    "release": lambda lease, event: lease.release(after=event),
    "advance": lambda lease, event: lease.advance(3 * PAGE, after=event),
    "truncate": lambda lease, event: lease.truncate(3 * PAGE, after=event),
    "adopt": lambda lease, event: lease.adopt(after=event),
    "commit": lambda lease, event: lease.commit(text(3), after=event),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_foreign_event_is_refused_before_anything_changes(name: str) -> None:
    async def call(lease: Lease, event: object) -> None:
        if (work := CALLS[name](lease, event)) is not None:
            await work

    async with opened(settings(device=8, host=16, swa=8)) as cache:
        lease = await cache.lease(text(3), new_tokens=PAGE).__aenter__()
        compute(cache, lease, text(3), ("full", "swa"))
        await lease.commit(text(2))
        before = lease.pages.tolist(), lease.page_table("swa").tolist(), repr(lease)
        for make in FOREIGN:
            event = make()
            with pytest.raises(ConfigError, match=rf"^{name}: (after|ready): ") as told:
                await call(lease, event)
            assert repr(event) in str(told.value)
            await turns()
            assert (lease.pages.tolist(), lease.page_table("swa").tolist(), repr(lease)) == before
        assert not len(parts(cache).batches.fences), "a refused event became a fence"
        event = gate(cache)
        await call(lease, event)
        event.open()
        lease.release()
        await until(lambda: not len(parts(cache).driver.ops))
        await settled(cache)
        await serve(cache, text(3, seed=1), ("full", "swa"))


# A batch that fails after a commit named it: nothing of it is served, saved or announced; who holds some of it learns
# of it. ``commit`` checks its tokens when it publishes them, not only when it is called.


ERROR = RuntimeError("out of memory")


async def published(
    cache: AsyncCache, tokens: list[int], ready: HostGate, *, after: HostGate | None = None
) -> None:
    """A request whose engine has put its work off."""
    async with cache.lease(tokens) as lease:
        await lease.commit(tokens, after=ready, checkpoint=checkpoint(lease, tokens))
        lease.release(after=ready if after is None else after)


def checkpoint(lease: Lease, tokens: list[int]) -> tuple[int, int] | None:
    return (len(tokens) // PAGE * PAGE, int(lease.states[-1])) if len(lease.states) else None


async def fail(cache: AsyncCache, ready: HostGate) -> None:
    """Fire ``ready`` with an error, as an engine's thread would, and return when nothing is in flight any more."""
    await asyncio.to_thread(ready.fire, ERROR)
    await idle(cache)


async def idle(cache: AsyncCache) -> None:
    core = parts(cache).core
    while core.world.ledger.ops:
        await settled(cache)
        await turns(1)


@pytest.mark.parametrize("more", [{}, {"swa": 8}, {"mamba": 8}, {"swa": 8, "mamba": 8}], ids=str)
async def test_nothing_of_a_failed_batch_is_on_any_tier(more: dict[str, Any]) -> None:
    config = settings(device=16, host=32, storage="memory:", **more)
    async with opened(config) as cache:
        ready, tokens = gate(cache), text(4)
        await published(cache, tokens, ready)
        assert (await cache.match([*tokens, 1])).device == 4 * PAGE
        await fail(cache, ready)
        assert (await cache.match([*tokens, 1])).host == 0
        assert await cache.flush() == (0, 0)
        assert cache.statistics().storage.get("pages", 0) == 0
        assert cache.statistics().core.nodes == 0
        async with cache.lease([*tokens, 1]) as lease:
            assert lease.cached == 0
        assert await cache.flush() == (0, 0)


def pages(heard: list[Notice]) -> list[Publish]:
    return [event for event in heard if isinstance(event, Publish)]


async def test_what_was_announced_is_withdrawn_and_nothing_more_is_announced() -> None:
    heard = list[Notice]()
    async with opened(settings(device=16, host=32, storage="memory:"), on_event=heard.append) as cache:
        ready, tokens = gate(cache), text(4)
        await published(cache, tokens, ready)
        await turns()
        assert [(event.medium, event.stored) for event in pages(heard)] == [(Medium.GPU, True)]
        await fail(cache, ready)
        await cache.flush()
        await turns()
        there, gone = pages(heard)
        assert (gone.medium, gone.stored, gone.hashes) == (Medium.GPU, False, there.hashes)
        assert not any(isinstance(event, StorageReport) and event.keys for event in heard)


async def test_who_matched_pages_of_a_failed_batch_learns_of_it_and_keeps_them() -> None:
    async with opened(settings(device=8, host=16)) as cache:
        ready, tokens = gate(cache), text(4)
        await published(cache, tokens, ready)
        longer = text(5)
        async with cache.lease(longer) as lease:
            assert lease.cached == 4 * PAGE
            held = lease.pages.tolist()
            await fail_and_wait_until_told(cache, ready)
            assert lease.pages.tolist() == held
            asked: list[Callable[[], Coroutine[Any, Any, object]]] = [
                lease.loaded, lambda: lease.layer(0), lambda: lease.commit(longer)
            ]  # fmt: skip
            for ask in asked:
                with pytest.raises(LoadFailed) as caught:
                    await ask()
                assert caught.value.valid == 0
            async with cache.lease(text(3, seed=2), wait=False) as other:
                assert not set(other.pages.tolist()) & set(held), "nothing that it holds is given to others"
        assert await serve(cache, longer) == 0
        assert await serve(cache, [*longer, 1]) == 5 * PAGE


async def fail_and_wait_until_told(cache: AsyncCache, ready: HostGate) -> None:
    ready.fire(ERROR)
    await until(lambda: not parts(cache).core.world.ledger.ops)


async def test_what_was_committed_below_a_failed_batch_leaves_with_it() -> None:
    """By a request that matched half of it, so that a node was split, and whose own batch ran well."""
    async with opened(settings(device=32, host=32, storage="memory:")) as cache:
        await serve(cache, text(1))
        ready, well = gate(cache), gate(cache)
        await published(cache, text(4), ready)
        fork = [*text(3), *text(2, seed=7)]
        async with cache.lease(fork) as lease:
            assert lease.cached == 3 * PAGE
            compute(cache, lease, fork)
            await lease.commit(fork, after=well)
        well.open()
        await fail(cache, ready)
        assert (await cache.match([*fork, 1])).host == PAGE
        assert (await cache.match(text(4, extra=1))).host == PAGE
        await cache.flush()
        assert cache.statistics().storage["pages"] == 1


async def test_a_commit_that_names_a_batch_which_has_failed_already_publishes_nothing() -> None:
    async with opened(settings(device=16, host=16)) as cache:
        await serve(cache, text(2))
        tokens, ready = text(4), gate(cache)
        ready.fire(ERROR)
        async with cache.lease(tokens) as lease:
            with pytest.raises(LoadFailed) as caught:
                await lease.commit(tokens, after=ready)
            assert caught.value.valid == 2 * PAGE
            with pytest.raises(LoadFailed):
                await lease.commit(tokens)
        assert (await cache.match([*tokens, 1])).host == 2 * PAGE


async def test_who_has_seen_a_batch_fail_finds_nothing_of_it() -> None:
    """In the same turn of the loop: no task of the cache has run since."""
    async with opened(settings(device=16)) as cache:
        ready, tokens = gate(cache), text(4)
        await published(cache, tokens, ready)
        ready.fire(ERROR)
        async with cache.lease([*tokens, 1]) as lease:
            assert lease.cached == 0
        await idle(cache)


async def test_a_batch_that_is_not_over_lets_others_have_room_and_no_room_is_expected_of_its_end() -> None:
    """Without a host its pages are evicted as ever; and a request that cannot be served is refused at once."""
    async with opened(settings(device=8)) as cache:
        ready = gate(cache)
        async with cache.lease(text(4)) as lease:
            await lease.commit(text(4), after=ready)
        assert not cache._opened().holders
        async with asyncio.timeout(5):
            async with cache.lease(text(8, seed=3)) as other:
                assert other.pages.size == 8
        ready.open()
        await idle(cache)


@pytest.mark.parametrize("deadline", [0.0, 5.0])
async def test_a_batch_that_fails_while_the_cache_closes_saves_nothing(deadline: float) -> None:
    async with opened(settings(device=16, host=32, storage="memory:"), idle=False) as cache:
        ready, tokens = gate(cache), text(4)
        await serve(cache, text(1, seed=5))
        await published(cache, tokens, ready)
        closing = asyncio.create_task(cache.aclose(deadline))
        await turns()
        ready.fire(ERROR)
        report = await closing
        assert report.error is None
        core = parts(cache).core
        audit.check(core)
        if deadline:
            assert (report.unsaved_host, report.unsaved_storage) == (0, 0)
            assert core.statistics().nodes == 1


async def test_a_batch_that_never_ends_does_not_keep_the_cache_open() -> None:
    async with opened(settings(device=16), idle=False) as cache:
        await published(cache, text(4), gate(cache))
        async with asyncio.timeout(5):
            await cache.aclose(0.0)


async def test_of_two_commits_at_once_that_go_on_differently_the_second_is_refused() -> None:
    async with opened(settings(device=16, host=16)) as cache:
        prompt = text(1)
        one, two = [*prompt, *text(1, seed=1)], [*prompt, *text(1, seed=2)]
        async with cache.lease(prompt, new_tokens=PAGE) as lease:
            compute(cache, lease, one)
            async with holding(parts(cache).driver.lock):
                both = [asyncio.create_task(lease.commit(tokens)) for tokens in (one, two)]
                await turns()
            await asyncio.wait(both)
            assert both[0].exception() is None
            assert isinstance(both[1].exception(), ConfigError)
        assert (await cache.match([*one, 1])).device == 2 * PAGE
        assert (await cache.match([*two, 1])).device == PAGE
        await settled(cache)
