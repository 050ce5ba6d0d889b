"""The parts of a run over ranks, without processes: shares, replicas, payloads of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asynccache.cli.engine import PageRun, StandInEngine, Verdict
from asynccache.cli.options import RunSettings
from asynccache.cli.rank import complaint, packed, shard_config, store_url, understood, unpacked
from asynccache.cli.run_cache import configure
from asynccache.config import CacheConfig, Full, Mamba, Replicated, Sidecar
from asynccache.core.settings import ComponentKind
from asynccache.worker import Topology

# shares


def model(**settings: object) -> CacheConfig:
    return configure(RunSettings.read("stress", {"components": "full,swa,mamba"} | settings, {}))


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    config, topology = model(), Topology(tp=2, cp=2, pp=2)
    parts = [shard_config(config, topology, rank) for rank in range(8)]
    for i, whole in enumerate(config.components):
        mine = [part.components[i] for part in parts]
        sizes = [p.state_bytes if isinstance(p, Mamba) else p.bytes_per_token for p in mine]
        assert sum(sizes) == (whole.state_bytes if isinstance(whole, Mamba) else whole.bytes_per_token)
        assert [p.covers for p in mine] == [(0, 1)] * 4 + [(2, 3)] * 4
    assert {part.core() for part in parts} == {config.core()}


def test_stages_that_cannot_be_equal_differ_by_a_layer() -> None:
    config = model(layers="5", bytes_per_token="40", mamba_bytes="640")
    parts = [shard_config(config, Topology(pp=2), rank).components[0] for rank in range(2)]
    assert [part.covers for part in parts] == [(0, 1), (2, 3, 4)]
    assert [part.bytes_per_token for part in parts if isinstance(part, Full)] == [16, 24]


def test_what_is_replicated_is_whole_on_every_rank_of_a_stage_and_slots_are_everywhere() -> None:
    config = CacheConfig(
        model="m", components=(Full(bytes_per_token=0, device_tokens=64, host_tokens=64),),
        sidecars=(Sidecar(name="a", indices_from="full", bytes_per_page=64, layers=2, replicated=Replicated.TP_CP),
                  Sidecar(name="b", indices_from="full", bytes_per_page=64, layers=2)),
    )  # fmt: skip
    part = shard_config(config, Topology(tp=2, pp=2), 3)
    assert [(s.bytes_per_page, s.covers) for s in part.sidecars] == [(32, (1,)), (16, (1,))]
    assert part.components[0].layers == 1


@pytest.mark.parametrize(("url", "mine"), [
    ("file:/var/kv?capacity=1GiB", "file:/var/kv/rank-{rank}?capacity=1GiB"),
    ("file:/var/kv/", "file:/var/kv/rank-{rank}"),
    ("file:/disk-{rank}/kv", "file:/disk-{rank}/kv"), ("redis://host/0", "redis://host/0"), ("memory:", "memory:"),
])  # fmt: skip
def test_a_folder_has_one_owner_and_everything_else_is_shared(url: str, mine: str) -> None:
    assert store_url(url) == mine


def test_bytes_of_another_rank_are_wrong() -> None:
    """Of another tp rank, of another cp rank, of another stage: with the same tokens in the same slots."""
    values = np.arange(4, dtype=np.uint64)
    piece = [PageRun(ComponentKind.FULL, np.arange(4, dtype=np.int32), values, 0)]
    topology = Topology(tp=2, cp=2, pp=2)
    layers = [torch.zeros(4, 64, dtype=torch.uint8) for _ in range(2)]

    class Layers:
        def layer(self, i: int) -> torch.Tensor:
            return layers[i]

    def engine(rank: int) -> StandInEngine:
        place = topology.place(rank)
        config = shard_config(model(components="full", bytes_per_token="64"), topology, rank)
        specs = [s.on_rank(place.tp, 2, (place.cp, 2), (place.pp, 2)) for s in config.pools()]
        return StandInEngine(specs, {"full": Layers()}, lambda: None)  # type: ignore[arg-type,return-value]

    engine(0).write(piece)
    assert [engine(rank).verify(piece).wrong for rank in range(8)] == [0] + [4] * 7


# replicas


def test_pools_are_marked_replicated_by_name() -> None:
    config = model(replicated="full:tp,mamba,swa:tp+cp")
    assert [part.replicated for part in config.components] == [Replicated.TP, Replicated.TP_CP, Replicated.TP_CP]
    part = shard_config(config, Topology(tp=2, cp=2), 3).components[0]
    assert isinstance(part, Full)
    assert part.bytes_per_token == 256                 # a half for cp, none for tp
    marked = model(sidecars="deepseek-v4", components="full,swa", replicated="c4")
    assert {pool.name for pool in marked.pools() if pool.replicated} == {"c4"}


# what a batch says


def test_a_batch_says_which_pages() -> None:
    pieces = [
        PageRun(kind, np.arange(kind, 9, dtype=np.int32), np.arange(kind, 9, dtype=np.uint64) << np.uint64(60), 3)
        for kind in ComponentKind
    ]
    for verifies in (False, True):
        found = unpacked(packed(pieces, verifies=verifies))
        assert found[0] is verifies
        for one, again in zip(pieces, found[1], strict=True):
            assert (one.component, one.first) == (again.component, again.first)
            assert np.array_equal(one.ids, again.ids)
            assert np.array_equal(one.values, again.values)


def test_a_complaint_is_understood_and_nothing_else_is_taken_for_one() -> None:
    said = complaint(Verdict(9, 4, ("full page 3 differs", "full page 5 differs", "and so on")))
    assert understood(2, said) == Verdict(0, 4, ("rank 2: full page 3 differs; full page 5 differs",))
    for other in ("", "verifying failed: OSError()", "4 pages", "4", "[]", "{}", "[4]"):
        assert understood(2, other) is None
