"""What a group keeps of what is over has a bound: batches, those who waited for them, stores, pages."""

from __future__ import annotations

from typing import Any

from asynccache.core.plan import BackupHost
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.worker import Topology
from tests.group.group_kit import GroupWorld, play, settings, text


def test_batches_that_commits_named_are_forgotten_when_they_are_over_also_without_a_host_tier() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8), lag=0.001)
        async with world.opened() as cache:
            for seed in range(100):
                await world.serve(text(1, seed=seed))
                await cache.batch_ended(seed + 1)
            assert len(cache._opened().engine._ready) < 70
        await world.aclose()

    play(main)


def test_a_backup_waits_for_a_batch_once_however_many_commits_named_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
        async with world.opened() as cache:
            worker = cache._opened().worker
            plain, after = worker.perform, list[tuple[int, ...]]()

            def perform(work: Any) -> None:
                if isinstance(work.effect, BackupHost):
                    after.append(work.after)
                plain(work)

            worker.perform = perform  # type: ignore[method-assign]
            async with cache.lease(text(3)) as lease:
                number = world.compute(lease, text(3))
                for pages in (1, 2, 3):
                    await lease.commit(text(pages), ready=number)
                lease.release(after=number)
            await cache.flush()
            assert after == [(number,)] * len(after)
            assert len(after) == 3
        await world.aclose()

    play(main)
