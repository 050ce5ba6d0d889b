"""Every worker's part of every page comes back as it was written, from each tier, whatever the topology."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from asynccache import CacheConfig, Full, Replicated, Sidecar
from asynccache.worker import Topology
from asynccache.worker.ranks import Shard
from tests.group import group_kit
from tests.group.group_kit import GroupWorld, play, settings, stage_of, text
from tests.simulated.loop import SimulatedLoop

SHAPES = [Topology(), Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2), Topology(tp=2, cp=2)]
KINDS = {
    "full": settings(16, 40),
    "window": settings(16, 40, swa=16),
    "state": settings(16, 40, mamba=12),
    "all": settings(16, 40, swa=16, mamba=12, sidecars=(
        Sidecar(name="index", indices_from="full", bytes_per_page=8, layers=2),
        Sidecar(name="latent", indices_from="swa", bytes_per_page=8, layers=2, replicated=Replicated.TP_CP),
    )),
}  # fmt: skip


def chosen(*others: object) -> list[object]:
    """Every shape, kind and one of ``others``: in the gate what has all kinds, by every shape; the rest is soak."""
    return [
        pytest.param(
            shape, kind, other, id=f"{shape}-{kind}-{other}",
            marks=[] if kind == "all" and other is others[at % len(others)] else [pytest.mark.soak],
        )
        for at, shape in enumerate(SHAPES) for kind in KINDS for other in others
    ]  # fmt: skip


@pytest.mark.parametrize(("shape", "kind", "own"), chosen(None, 0))
def test_what_was_written_comes_back_from_device_and_host(shape: Topology, kind: str, own: int | None) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, shape, KINDS[kind], own=own)
        async with world.opened() as cache:
            assert await world.serve(text(6)) == 0
            assert await world.serve(text(6, extra=1)) == 24
            await cache.flush()
            await world.push_out(16)
            assert await world.serve(text(6, extra=1)) == 24
            statistics = cache.statistics()
            assert statistics.stages["load_back"].ops > 0
            assert statistics.stages["backup_host"].full_pages >= 6
            world.idle()
        assert world.verified > 0
        assert all(process.failure is None for process in world.group.processes.values())
        await world.aclose()

    play(main)


def test_load_back_of_a_group_counts_what_came_from_the_host_and_no_private_copy() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), KINDS["state"])
        async with world.opened() as cache:

            def counted() -> tuple[int, int, int]:
                load_back = cache.statistics().stages["load_back"]
                return load_back.ops, load_back.errors, load_back.latency_ms.samples

            await world.serve(text(6))
            assert await world.serve(text(6, extra=1)) == 24, "with a private copy of the state"
            assert counted() == (0, 0, 0)
            await cache.flush()
            await world.push_out(16)
            assert await world.serve(text(6, extra=1)) == 24
            assert counted() == (1, 0, 1)
        await world.aclose()

    play(main)


@pytest.mark.parametrize(("shape", "kind", "shared"), chosen(True, False))
def test_a_new_group_finds_what_the_last_one_stored(shape: Topology, kind: str, shared: bool) -> None:
    async def main(loop: SimulatedLoop) -> None:
        config: CacheConfig = replace(KINDS[kind], storage=settings(stored=True, host=1).storage)
        world = GroupWorld(loop, shape, config, shared=shared)
        async with world.opened():
            await world.serve(text(6))
        verified = world.verified
        async with world.opened() as cache:
            handle = cache.prefetch(text(6, extra=1))
            await handle
            assert await world.serve(text(6, extra=1), prefetch=handle) == 24
            assert cache.statistics().stages["prefetch"].pages > 0
        assert world.verified > verified
        await world.aclose()

    play(main)


def stage_of_windows(topology: Topology, rank: int) -> Shard:
    """The second stage has layers of the window and none of full attention."""
    stage = stage_of(topology, rank)

    def shard(config: CacheConfig) -> CacheConfig:
        whole = stage(config)
        if topology.place(rank).pp == 0:
            return whole
        full, *others = whole.components
        assert isinstance(full, Full)
        return replace(whole, components=(replace(full, bytes_per_token=0, layers=1, covers=()), *others))

    return shard


@pytest.mark.parametrize("shared", [False, True])
def test_a_page_that_has_no_bytes_on_one_worker_is_found_where_the_others_have_it(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_kit, "stage_of", stage_of_windows)

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(pp=2), settings(16, 40, swa=16, stored=True), shared=shared)
        async with world.opened():
            await world.serve(text(6))
        verified = world.verified
        async with world.opened() as cache:
            handle = cache.prefetch(text(6, extra=1))
            assert await world.serve(text(6, extra=1), prefetch=handle) == 24, "found"
        assert world.verified > verified
        await world.aclose()

    play(main)
