"""When outcomes take effect, and what the garbage collector is told."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asynccache.core.plan import Outcome
from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.head import FREEZE_EVERY
from tests.runtime.runtime_kit import opened, parts, serve, settings, text, until


async def test_whoever_takes_the_lock_first_applies_what_waits() -> None:
    async with opened(settings(host=16)) as cache:
        driver = parts(cache).driver
        await serve(cache, text(4))
        async with holding(driver.lock):  # the ack task cannot come by
            await until(lambda: driver.unapplied == 1)
            assert cache.statistics().core.operations["backup_host"] == 1
            driver.apply_outcomes()
            assert cache.statistics().core.operations["backup_host"] == 0


@pytest.mark.source
async def test_the_ack_task_drains_everything_at_once() -> None:
    async with opened(settings(device=64, host=64)) as cache:
        driver, calls = parts(cache).driver, []
        complete = parts(cache).core.complete

        def spy(outcomes: Sequence[Outcome]) -> object:
            calls.append(len(outcomes))
            return complete(outcomes)

        parts(cache).core.complete = spy  # type: ignore[method-assign,assignment]
        for seed in range(5):
            await serve(cache, text(2, seed))
        await acquire(driver.lock)
        waiting = driver.unapplied + len(driver.saving)
        await until(lambda: driver.unapplied == len(driver.saving))
        calls.clear()
        driver.lock.release()
        await until(lambda: not driver.saving)
        assert waiting
        assert len(calls) == 1


async def test_the_collector_is_told_every_few_thousand_commits_and_not_before() -> None:
    async with opened(settings(freeze_gc=True)) as cache:
        head = parts(cache)
        try:
            before = gc.get_freeze_count()
            for head.commits in range(0, FREEZE_EVERY, 100):
                head._freeze()
            assert gc.get_freeze_count() <= before  # less: what was frozen may be freed
            head.commits = FREEZE_EVERY
            head._freeze()
            assert gc.get_freeze_count() > before
        finally:
            gc.unfreeze()


def test_torch_comes_with_the_first_cache_and_not_before() -> None:
    code = (
        "import sys, asynccache as a; a.CacheConfig; a.CacheFull; a.AsyncCache; assert 'torch' not in sys.modules;"
        "a.AsyncCache(a.CacheConfig(model='m', components=(a.Full(bytes_per_token=4, device_tokens=16),)));"
        "assert 'torch' in sys.modules; assert set(a.__all__) == set(dir(a))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_root())


def _root() -> Path:
    return Path(__file__).parents[2]
