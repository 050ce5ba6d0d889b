"""What is stored under which key: every rank's part under its own, what all ranks hold once, and nothing of it is
found by a group of another shape, whose bytes are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from asynccache.config import CacheConfig, Full, Replicated, Sidecar, SlidingWindow
from asynccache.core.settings import PrefetchPolicy
from asynccache.ranks import Topology
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from tests.ranks.cache_world import Member
from tests.ranks.still_world import Pages, Served, StillWorld, publish, serve, text_of

PAGE, PAGES = 4, 6
ROOM = 40 * PAGE
TEXT = text_of(PAGES)
LAYERS = 4  # of the model, whatever the shape


def full_and_more(layers: int) -> CacheConfig:
    """What a stage of so many layers holds."""
    size = 8 * layers
    return CacheConfig(
        model="keys", page_size=PAGE, prefetch_threshold=1, prefetch_quota=1.0,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        components=(
            Full(bytes_per_token=size, device_tokens=ROOM, host_tokens=ROOM, layers=layers),
            SlidingWindow(window=2 * PAGE, bytes_per_token=size, device_tokens=ROOM, host_tokens=ROOM, layers=layers),
        ),
        sidecars=(
            Sidecar(
                name="shared", indices_from="full", bytes_per_page=size, layers=layers, replicated=Replicated.TP_CP
            ),
            Sidecar(name="own", indices_from="full", bytes_per_page=size, layers=layers),
        ),
    )  # fmt: skip


def latent(layers: int) -> CacheConfig:
    """All that there is, is replicated."""
    config = full_and_more(layers)
    full = Full(bytes_per_token=0, device_tokens=ROOM, host_tokens=ROOM, layers=1)
    return replace(config, components=(full,), sidecars=config.sidecars[:1])


Model = Callable[[int], CacheConfig]


def filled(topology: Topology, model: Model = full_and_more, covers: bool = True) -> tuple[Pages, list[Counter[str]]]:
    """A store to which a group of this shape wrote TEXT, and how many pages each rank wrote, by pool."""

    async def main(loop: SimulatedLoop) -> tuple[Pages, list[Counter[str]]]:
        world = shaped(loop, topology, model, {}, covers)
        written = [watch(member) for member in world.members]
        await world.group(lambda member: publish(member, TEXT))
        await world.close()
        return world.pages, written

    return simulate(main, 2)


def watch(member: Member) -> Counter[str]:
    """Counts what this rank's store is given, from now on."""
    assert member.backend is not None
    written: Counter[str] = Counter()
    put = member.backend.put

    async def counted(keys, records):  # type: ignore[no-untyped-def]
        written.update(key.pool for key in keys)
        return await put(keys, records)

    member.backend.put = counted  # type: ignore[method-assign]
    return written


def shaped(loop: SimulatedLoop, topology: Topology, model: Model, pages: Pages, covers: bool) -> StillWorld:
    config = model(LAYERS // topology.pp)
    world = StillWorld(loop, topology, config, pages)
    if not covers:
        for member in world.members:
            member.config = config
    return world


def asked(topology: Topology, pages: Pages, model: Model = full_and_more, covers: bool = True) -> Served:
    """What a new group of this shape finds, the same on all of its ranks; bytes are verified."""

    async def main(loop: SimulatedLoop) -> Served:
        world = shaped(loop, topology, model, dict(pages), covers)
        found = await world.group(lambda member: serve(member, TEXT))
        await world.close()
        assert len(set(found)) == 1
        return found[0]

    return simulate(main, 3)


def storage_pages(found: Served) -> int:
    assert (found.hits.device, found.hits.host) == (0, 0)
    return found.hits.storage // PAGE


SHAPES = [
    Topology(), Topology(tp=2), Topology(tp=4), Topology(cp=2), Topology(pp=2), Topology(tp=2, cp=2),
    Topology(tp=2, pp=2),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_shape_finds_what_a_group_of_the_same_shape_stored_and_no_other_does(shape: Topology) -> None:
    """A miss, never wrong bytes: sharded by tp and by cp give different parts, also where there are equally many."""
    pages, _ = filled(shape)
    for other in SHAPES:
        assert storage_pages(asked(other, pages)) == (PAGES if other == shape else 0), f"{other} on what {shape} stored"


@pytest.mark.parametrize("shape", [Topology(pp=2), Topology(tp=2, pp=2)], ids=str)
def test_stages_that_do_not_say_which_layers_are_theirs_have_keys_of_their_own(shape: Topology) -> None:
    pages, _ = filled(shape, covers=False)
    assert storage_pages(asked(shape, pages, covers=False)) == PAGES
    assert storage_pages(asked(Topology(tp=shape.tp), pages, covers=False)) == 0


@pytest.mark.parametrize("shape", [Topology(tp=2), Topology(tp=2, cp=2), Topology(tp=2, pp=2)], ids=str)
def test_what_is_replicated_is_written_once_and_read_by_all(shape: Topology) -> None:
    pages, written = filled(shape)
    columns = shape.tp * shape.cp
    stored = Counter(key.pool for key in pages)
    assert stored == {
        "full": PAGES * shape.ranks, "swa": PAGES * shape.ranks, "own": PAGES * shape.ranks, "shared": PAGES * shape.pp
    }
    assert sum(written, Counter()) == stored, "nothing is written twice"
    for rank, counts in enumerate(written):
        first = rank % columns == 0
        assert counts["shared"] == (PAGES if first else 0), f"the first rank of each stage writes it; rank {rank} did"
        assert counts["full"] == PAGES


def test_where_everything_is_replicated_shapes_of_one_stage_share_a_store() -> None:
    pages, written = filled(Topology(tp=2), latent)
    assert [counts["shared"] for counts in written] == [PAGES, 0]
    for shape in (Topology(), Topology(tp=2), Topology(tp=4), Topology(cp=2)):
        assert storage_pages(asked(shape, pages, latent)) == PAGES
    assert storage_pages(asked(Topology(pp=2), pages, latent)) == 0
