"""Pages that the engine still writes or reads are neither copied, nor free, nor overwritten before its events have
fired."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import ConfigError, Lease
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import (
    LAYERS,
    PAGE,
    assert_cached_bytes,
    compute,
    fence_all,
    holds,
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


async def test_a_backup_waits_for_ready() -> None:
    device = CpuDevice()
    async with opened(settings(host=16), device=device) as cache:
        tokens, ready = text(4), device.gate()
        async with cache.lease(tokens) as lease:
            await lease.commit(tokens, after=ready)
            await turns()
            assert (await cache.match(tokens)).device == 4 * PAGE
            assert cache.statistics().stages["backup_host"].ops == 0
            compute(cache, lease, tokens)  # the engine's kernel runs only now
            ready.open()
        await settled(cache)
        await push_out(cache, 16)
        assert await serve(cache, [*tokens, 1]) == 4 * PAGE
    await device.aclose()


async def test_a_backup_that_was_deferred_waits_for_ready_too() -> None:
    device = CpuDevice()
    async with opened(settings(host=32, max_backup_ops=1), device=device) as cache:
        earlier, ready = device.gate(), device.gate()
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
    await device.aclose()


async def test_a_private_copy_waits_for_ready() -> None:
    device = CpuDevice()
    async with opened(settings(mamba=8), device=device) as cache:
        tokens, ready = text(2), device.gate()
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
    await device.aclose()


async def test_released_pages_retire_until_the_engine_has_let_go() -> None:
    device = CpuDevice()
    async with opened(settings(device=8), device=device) as cache:
        work = device.gate()
        lease = await cache.lease(text(8)).__aenter__()
        lease.release(after=work)
        await turns()
        assert cache.statistics().device["full"].free == 0
        waits = asyncio.create_task(cache.lease(text(1, seed=2)).__aenter__())
        await turns()
        assert not waits.done()
        work.open()
        (await waits).release()
        assert cache.statistics().device["full"].free == 8
    await device.aclose()


async def test_released_pages_retire_until_a_commits_ready_has_fired() -> None:
    device = CpuDevice()
    async with opened(settings(device=8), device=device) as cache:
        ready = device.gate()
        async with cache.lease(text(2), new_tokens=6 * PAGE) as lease:
            await lease.commit(text(2), after=ready)
        await turns()
        assert cache.statistics().device["full"].free == 0
        ready.open()
        await until(lambda: cache.statistics().device["full"].free == 6)
    await device.aclose()


async def test_a_load_into_pages_that_the_engine_may_still_read_waits_on_the_device() -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=32), device=device) as cache:
        await serve(cache, text(6, seed=1))
        await settled(cache)
        await serve(cache, text(6, seed=2))
        await settled(cache)
        reads = device.gate()
        lease = await cache.lease(text(6, seed=2, extra=1)).__aenter__()
        read = [int(slot) for slot in lease.pages[:6]]
        hashes = page_hashes(text(6, seed=2))
        lease.release(after=reads)
        async with cache.lease(text(6, seed=1, extra=1)) as other:
            loaded = asyncio.create_task(other.loaded())
            await turns(50)
            assert not loaded.done()
            assert all(holds(cache, "full", slot, page) for slot, page in zip(read, hashes, strict=True))
            reads.open()
            await loaded
            assert_cached_bytes(cache, other, text(6, seed=1))
    await device.aclose()


@pytest.mark.parametrize("how", ["truncate", "advance"])
async def test_a_load_into_pages_given_back_early_waits_for_the_engine(how: str) -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=32, swa=8), device=device) as cache:
        pools = ("full", "swa")
        await serve(cache, text(2, seed=1), pools)
        await settled(cache)
        await push_out(cache, 8)
        reads = device.gate()
        async with cache.lease(text(1), new_tokens=4 * PAGE) as lease:
            if how == "truncate":
                lease.truncate(PAGE, after=reads)
            else:
                lease.advance(5 * PAGE, after=reads)
            async with cache.lease(text(2, seed=1, extra=1), wait=False) as other:
                loaded = asyncio.create_task(other.loaded())
                await turns(20_000)  # without the fence it is there long before
                assert other.cached == 2 * PAGE
                assert not loaded.done()
                reads.open()
                await loaded
                assert_cached_bytes(cache, other, text(2, seed=1), pools)
    await device.aclose()


@pytest.mark.parametrize("how", ["adopt", "commit", "release"])
async def test_duplicates_are_free_once_the_engine_uses_the_new_table(how: str) -> None:
    async with opened(settings(device=12)) as cache:
        tokens = text(4)
        async with cache.lease(tokens) as one, cache.lease(tokens) as two:
            compute(cache, one, tokens)
            compute(cache, two, tokens)
            first = await one.commit(tokens)
            second = await two.commit(tokens)
            assert second.tolist() == first.tolist()
            await turns()
            assert cache.statistics().device["full"].free == 4
            if how == "adopt":
                two.adopt()
            elif how == "commit":
                await two.commit(tokens)
            else:
                two.release()
            await until(lambda: cache.statistics().device["full"].free == 8)


async def test_adopted_duplicates_wait_for_the_engines_last_use() -> None:
    device = CpuDevice()
    async with opened(settings(device=12), device=device) as cache:
        tokens, work = text(4), device.gate()
        async with cache.lease(tokens) as one, cache.lease(tokens) as two:
            await one.commit(tokens)
            await two.commit(tokens)
            two.adopt(after=work)
            await turns()
            assert cache.statistics().device["full"].free == 4
            work.open()
            await until(lambda: cache.statistics().device["full"].free == 8)
    await device.aclose()


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
    device = CpuDevice()
    async with opened(settings(device=12, host=32, swa=12), device=device) as cache:
        pools = ("full", "swa")
        await serve(cache, text(3, seed=1), pools)
        await settled(cache)
        await push_out(cache, 12)
        work = device.gate()
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
    await device.aclose()


async def test_a_load_into_pages_that_a_commit_left_behind_its_window_waits_for_ready() -> None:
    """They are the tree's, and nobody's, while the engine may still write them: no call has named them since."""
    device = CpuDevice()
    config = settings(device=16, host=64, swa=8, write_policy="write_through_selective")
    async with opened(config, device=device) as cache:
        for _ in range(2):  # seen twice, it is worth a place on the host
            await serve(cache, text(2, seed=1), ("full", "swa"))
        await settled(cache)
        await push_out(cache, 8)
        ready = device.gate()
        async with cache.lease(text(6, seed=2)) as lease:
            written = [slot for slot in lease.page_table("swa").tolist() if slot >= 0]
            await lease.commit(text(6, seed=2), after=ready)
            lease.advance(6 * PAGE)
            async with cache.lease(text(2, seed=1, extra=1), wait=False) as other:
                brought = [slot for slot in other.page_table("swa").tolist() if slot >= 0]
                assert set(brought) & set(written)
                loaded = asyncio.create_task(other.loaded())
                await turns(20_000)  # without the fence it is there long before
                assert not loaded.done()
                ready.open()
                await loaded
                assert_cached_bytes(cache, other, text(2, seed=1), ("swa",))
    await device.aclose()


@pytest.mark.parametrize("what", ["load", "clone"])
async def test_what_was_asked_for_before_an_event_was_named_does_not_wait_for_it(what: str) -> None:
    """An engine on the host may compute its layers as they come, and fire ``ready`` after that."""
    device = CpuDevice()
    async with opened(settings(device=16, host=32, mamba=8 if what == "clone" else 0), device=device) as cache:
        async with cache.lease(text(2, seed=1)) as lease:
            compute(cache, lease, text(2, seed=1))
            checkpoint = (2 * PAGE, int(lease.states[1])) if what == "clone" else None
            await lease.commit(text(2, seed=1), checkpoint=checkpoint)
        await settled(cache)
        if what == "load":
            await push_out(cache, 16)
        ready, tokens = device.gate(), text(2, seed=1, extra=1) + text(3, seed=2)

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
    await device.aclose()


async def test_a_load_in_line_behind_another_does_not_wait_for_its_own_lease() -> None:
    device = CpuDevice()
    async with opened(settings(device=12, host=64), device=device) as cache:
        for seed in (1, 2):
            await serve(cache, text(3, seed=seed))
            await settled(cache)
        await push_out(cache, 12)
        first, ready = device.gate(), device.gate()
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
    await device.aclose()


async def test_what_adopt_names_stands_before_loads_too() -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=32), device=device) as cache:
        for seed in (1, 2):
            await serve(cache, text(6, seed=seed))
            await settled(cache)
        work = device.gate()
        async with cache.lease(text(6, seed=2, extra=1)) as lease:
            read, hashes = lease.pages[:6].tolist(), page_hashes(text(6, seed=2))
            await lease.commit(text(6, seed=2))
            lease.adopt(after=work)
        async with cache.lease(text(6, seed=1, extra=1)) as other:
            loaded = asyncio.create_task(other.loaded())
            await turns(20_000)  # without the fence it is there long before
            assert not loaded.done()
            assert all(holds(cache, "full", slot, page) for slot, page in zip(read, hashes, strict=True))
            work.open()
            await loaded
    await device.aclose()
