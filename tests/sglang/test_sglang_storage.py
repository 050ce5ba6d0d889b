"""SGLang's calls of a storage backend, on host pools of its own classes: v1, v2, ranks, failures, hints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-sglang", allow_module_level=True)

from tests.sglang import standins

standins.install()

import torch
from asynccache_sglang import identity
from asynccache_sglang.storage import AsyncCacheStorage
from asynccache_sglang.storage import _server as server_of_this_process
from sglang.srt.arg_groups.overrides import field_names
from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from asynccache import ConfigError
from asynccache.errors import Unavailable
from asynccache.host.server import HostServer
from asynccache.storage import Result
from tests.host.host_kit import beside
from tests.sglang.host_pools import (
    PAGES,
    anchor,
    compressed,
    config,
    flat,
    indices,
    mha,
    mla,
    opened,
    scramble,
    states,
)
from tests.storage.pages_kit import Misbehaving, until

KEYS = [f"{page:064x}" for page in range(PAGES)]


class Odd(Misbehaving):
    """A store of which every call misbehaves in one way, as soon as it is told which."""

    async def clear(self) -> None:
        await self._suffer("clear", (), self._cleared)

    async def _cleared(self) -> list[Result]:
        await super().clear()
        return []

    def begin(self, how: str) -> None:
        self.how = dict.fromkeys(("exists", "get", "put", "clear"), how)

    def let_go(self) -> None:
        self.how = {}
        self.gate.set()


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Odd:
    """A store that behaves as it is told, in place of every URL's."""
    made = Odd()
    monkeypatch.setattr("asynccache_sglang.storage.placed", lambda urls, ranks, replicated: (made,))
    return made


def file_store(folder: Path) -> dict[str, Any]:
    return {"storage": f"file:{folder / 'kv'}?capacity=16MiB"}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("make", [mha, mla, compressed, states])
def test_pages_of_every_layout_come_back_to_other_slots(
    tmp_path: Path, make: Callable[..., Any], layout: str
) -> None:
    if make is not mha and layout == "page_head":
        pytest.skip("SGLang has no such pool")
    pool = make(layout)
    read = _raw if layout == "page_head" else flat
    before = [read(pool, page) for page in range(PAGES)]
    with closing(opened({"kv": pool}, file_store(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS[:4], indices(3, 0, 7, 5)) == [True] * 4
        assert storage.batch_exists([*KEYS[:3], "x" * 64, KEYS[3]]) == 3
        scramble(pool)
        assert storage.batch_get_v1([*KEYS[:4], "x" * 64], indices(1, 2, 8, 9, 10)) == [True] * 4 + [False]
        for source, target in zip((3, 0, 7, 5), (1, 2, 8, 9), strict=True):
            assert torch.equal(read(pool, target), before[source])
        assert (read(pool, 0) == 0xAA).all(), "a page that nobody asked for was changed"


def _raw(pool: Any, page: int) -> torch.Tensor:
    copied: torch.Tensor = pool.kv_buffer[:, page].reshape(-1).view(torch.uint8).clone()
    return copied


def test_more_pages_than_rows_of_staging_go_in_several_calls(tmp_path: Path) -> None:
    pool = mha()
    before = [flat(pool, page) for page in range(PAGES)]
    with closing(opened({"kv": pool}, file_store(tmp_path) | {"staging": 2000})) as storage:  # two pages of 768 bytes
        assert all(storage.batch_set_v1(KEYS, indices(*range(PAGES))))
        scramble(pool)
        assert all(storage.batch_get_v1(KEYS, indices(*range(PAGES))))
        assert all(torch.equal(flat(pool, page), before[page]) for page in range(PAGES))


def test_pools_of_a_hybrid_model_in_one_call(tmp_path: Path) -> None:
    pools = {"kv": mha(), "swa": mha("page_first_direct", seed=5), "mamba": mla(seed=6)}
    before = {name: [flat(pool, page) for page in range(PAGES)] for name, pool in pools.items()}
    transfers = [
        PoolTransfer(PoolName.SWA, indices(1, 2), keys=KEYS[3:5]),
        PoolTransfer(PoolName.MAMBA, indices(7), keys=KEYS[4:5]),
    ]
    with closing(opened(pools, file_store(tmp_path))) as storage:
        assert all(storage.batch_set_v1(KEYS[:5], indices(*range(5))))
        assert storage.batch_set_v2(transfers) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
        asked = [
            PoolTransfer(PoolName.SWA, keys=KEYS[3:5], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.MAMBA, keys=KEYS[4:5], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        hits = storage.batch_exists_v2(KEYS[:6], asked)
        assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (5, [5])
        assert hits.extra_pool_hit_pages == {"kv": 5, "swa": 5, "mamba": 5}
        assert storage.batch_exists_v2(KEYS[:4], asked).kv_hit_pages == 0
        asked[0].hit_policy = PoolHitPolicy.ALL_PAGES
        assert storage.batch_exists_v2(KEYS[:6], asked).kv_hit_pages == 0
        for pool in pools.values():
            scramble(pool)
        back = [
            PoolTransfer(PoolName.SWA, indices(8, 9), keys=KEYS[3:5]),
            PoolTransfer(PoolName.MAMBA, indices(0), keys=KEYS[4:5]),
        ]
        assert storage.batch_get_v2(back) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
        assert torch.equal(flat(pools["swa"], 8), before["swa"][1])
        assert torch.equal(flat(pools["swa"], 9), before["swa"][2])
        assert torch.equal(flat(pools["mamba"], 0), before["mamba"][7])


def test_an_anchor_without_bytes_has_a_mark_for_each_page(tmp_path: Path) -> None:
    """As in DeepSeek-V4's stack: FULL is an index space, and the compressed pools have the bytes."""
    pools = {"kv": anchor(), PoolName.DEEPSEEK_V4_C4.value: compressed()}
    with closing(opened(pools, file_store(tmp_path), is_mla_model=True)) as storage:
        assert storage.batch_set_v1(KEYS[:3], indices(0, 1, 2)) == [True] * 3
        assert storage.batch_exists(KEYS[:5]) == 3
        assert storage.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True] * 3 + [False]
        asked = [PoolTransfer(PoolName.DEEPSEEK_V4_C4, keys=KEYS[:3])]
        assert storage.batch_exists_v2(KEYS[:3], asked).kv_hit_pages == 0
        moved = [PoolTransfer(PoolName.DEEPSEEK_V4_C4, indices(0, 1), keys=KEYS[:2])]
        assert storage.batch_set_v2(moved) == {PoolName.DEEPSEEK_V4_C4: [True, True]}
        assert storage.batch_exists_v2(KEYS[:3], asked).kv_hit_pages == 2


def test_an_sglang_that_would_copy_pages_itself_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='set "interface_v1": 1'):
        opened({"kv": mha()}, file_store(tmp_path) | {"interface_v1": 0})


def test_indices_that_do_not_fit_the_keys_move_nothing(tmp_path: Path) -> None:
    with closing(opened({"kv": mha()}, file_store(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS[:2], indices(0)) == [False, False]
        assert storage.batch_get_v2([PoolTransfer(PoolName.KV, None, keys=KEYS[:2])]) == {PoolName.KV: [False, False]}
        assert storage.batch_get_v2([PoolTransfer(PoolName.SWA, indices(0), keys=KEYS[:1])]) == {PoolName.SWA: [False]}
        assert (storage.batch_exists([]), storage.batch_get_v1([], indices(0)[:0])) == (0, [])


# ranks and namespaces


def test_ranks_have_pages_of_their_own(tmp_path: Path) -> None:
    for rank, there in ((0, 0), (1, 0), (0, 1)):
        with closing(opened({"kv": mha()}, file_store(tmp_path), tp_rank=rank, tp_size=2)) as storage:
            assert storage.batch_exists(KEYS[:1]) == there
            assert storage.batch_set_v1(KEYS[:1], indices(0)) == [True]


def test_one_rank_writes_for_all_where_all_have_the_same(tmp_path: Path) -> None:
    def rank(number: int) -> closing[AsyncCacheStorage]:
        pools = {"kv": mla(), "mamba": mla(seed=3)}
        return closing(opened(pools, file_store(tmp_path), tp_rank=number, tp_size=2, is_mla_model=True))

    state = [PoolTransfer(PoolName.MAMBA, indices(0), keys=KEYS[:1])]
    with rank(1) as other:
        assert other.batch_set_v1(KEYS[:1], indices(0)) == [True], "told as done, and left to the first rank"
        assert other.batch_exists(KEYS[:1]) == 0
    with rank(0) as first:
        assert first.batch_set_v1(KEYS[:1], indices(0)) == [True]
        assert first.batch_set_v2(state) == {PoolName.MAMBA: [True]}
    with rank(1) as other:
        assert other.batch_get_v1(KEYS[:1], indices(0)) == [True]
        assert other.batch_get_v2(state) == {PoolName.MAMBA: [False]}, "states are sharded all the same"
        assert other.batch_set_v2(state) == {PoolName.MAMBA: [True]}
        assert other.batch_get_v2(state) == {PoolName.MAMBA: [True]}


@pytest.mark.parametrize(
    "changed",
    [{"extra": {"namespace": "w2"}}, {"model_name": "other"}, {"tp_size": 2}, {"pp_size": 2},
     {"pp_rank": 1, "pp_size": 2}, {"layout": "layer_first"}],
)  # fmt: skip
def test_pages_of_another_kind_are_not_found(tmp_path: Path, changed: dict[str, Any]) -> None:
    with closing(opened({"kv": mha()}, file_store(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS[:1], indices(0)) == [True]
    pool = mha(changed.pop("layout", "page_first"))
    with closing(opened({"kv": pool}, file_store(tmp_path) | changed.pop("extra", {}), **changed)) as storage:
        assert storage.batch_exists(KEYS[:1]) == 0


def test_every_dtype_of_a_pool_is_in_its_keys(tmp_path: Path) -> None:
    """As SGLang's pool of Mamba states has one for convolutions and another, of the same size, for recurrences."""
    pool = mla()
    pool.conv_dtype, pool.temporal_dtype = torch.bfloat16, torch.float16
    state = [PoolTransfer(PoolName.MAMBA, indices(0), keys=KEYS[:1])]
    with closing(opened({"kv": mha(), "mamba": pool}, file_store(tmp_path))) as storage:
        assert storage.batch_set_v2(state) == {PoolName.MAMBA: [True]}
    pool.temporal_dtype = torch.bfloat16
    with closing(opened({"kv": mha(), "mamba": pool}, file_store(tmp_path))) as storage:
        assert storage.batch_get_v2(state) == {PoolName.MAMBA: [False]}


def test_what_the_server_was_started_with_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field is one of SGLang's own arguments."""
    args = dict.fromkeys(identity.ServerOptions._fields[3:])
    args |= {"model_path": "m", "json_model_override_args": '{"rope_theta": 5e5}', "lora_paths": ["adapter"]}
    assert args.keys() | {"enable_lora"} <= field_names(ServerArgs)
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: SimpleNamespace(**args))
    found = server_of_this_process()
    assert (found.model_path, found.json_model_override_args, found.lora) == ("m", '{"rope_theta": 5e5}', True)


def test_without_weights_or_namespace_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="the weights that computed a stored page cannot be identified"):
        AsyncCacheStorage(config({"storage": "memory:", "namespace": None}), {})


def test_sglangs_factory_loads_it(tmp_path: Path) -> None:
    named = {"backend_name": "ours", "module_path": "asynccache_sglang.storage", "class_name": "AsyncCacheStorage"}
    made = StorageBackendFactory.create_backend("dynamic", config(named | file_store(tmp_path)), mha())
    assert isinstance(made, AsyncCacheStorage)
    assert isinstance(made, HiCacheStorage)
    made.close()
    with pytest.raises(ConfigError, match="there is no option 'storge'; there are storage,"):
        StorageBackendFactory.create_backend("dynamic", config(named | {"storge": "memory:"}), mha())


def test_a_pool_that_is_registered_later_is_known_then(tmp_path: Path) -> None:
    with closing(opened({"kv": mha()}, file_store(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS[:1], indices(0)) == [True]
        storage.register_mem_host_pool_v2(mha(seed=8), PoolName.DRAFT)
        draft = [PoolTransfer(PoolName.DRAFT, indices(0), keys=KEYS[:1])]
        assert storage.batch_set_v2(draft) == {PoolName.DRAFT: [True]}
        assert storage.batch_exists(KEYS[:1]) == 1


# the whole


def test_clear_forgets_everything(tmp_path: Path) -> None:
    with closing(opened({"kv": mha(), "swa": mha(seed=4)}, file_store(tmp_path))) as storage:
        assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2)))
        assert storage.clear() is True
        assert storage.batch_exists(KEYS[:3]) == 0
        assert storage.batch_set_v1(KEYS[:1], indices(0)) == [True]


@pytest.mark.parametrize("how", ["is unavailable", "hangs", "is stuck"])
def test_a_clear_that_a_store_cannot_do_ends_and_says_so(odd: Odd, how: str) -> None:
    storage = opened({"kv": mha()}, {"storage": "memory:", "timeout": 0.2})
    odd.begin(how)
    began = time.monotonic()
    assert storage.clear() is False
    assert time.monotonic() - began < 2
    odd.let_go()
    storage.close()


def test_sglangs_metrics_get_pages_and_rates(tmp_path: Path) -> None:
    with closing(opened({"kv": mha()}, file_store(tmp_path), enable_storage_metrics=True)) as storage:
        storage.batch_set_v1(KEYS[:3], indices(0, 1, 2))
        storage.batch_get_v1(KEYS[:2], indices(0, 1))
        found = storage.get_stats()
        assert (found.backup_pgs, found.prefetch_pgs) == ([3], [2])
        assert len(found.backup_bandwidth) == len(found.prefetch_bandwidth) == 1
        assert min(found.backup_bandwidth + found.prefetch_bandwidth) > 0
        assert storage.get_stats().backup_pgs == []
    assert storage.batch_exists(KEYS[:1]) == 0, "closed: a miss, and no error"
    storage.close()


# what goes wrong


def test_flipped_bits_are_a_miss(tmp_path: Path) -> None:
    with closing(opened({"kv": mha()}, file_store(tmp_path))) as storage:
        assert all(storage.batch_set_v1(KEYS[:6], indices(*range(6))))
    segments = [file for file in (tmp_path / "kv").rglob("*") if file.is_file() and file.stat().st_size > 6 * 768]
    assert segments
    for file in segments:
        content = bytearray(file.read_bytes())
        for at in range(200, len(content), 97):
            content[at] ^= 0x10
        file.write_bytes(content)
    pool = mha(seed=7)
    with closing(opened({"kv": pool}, file_store(tmp_path))) as storage:
        assert storage.batch_get_v1(KEYS[:6], indices(*range(6))) == [False] * 6


@pytest.mark.parametrize("make", [mha, mla], ids=["copied", "in place"])
@pytest.mark.parametrize("how", ["is unavailable", "hangs"])
def test_a_store_that_is_dead_or_hangs_costs_its_deadline_and_is_misses(
    odd: Odd, make: Callable[..., Any], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = opened({"kv": make()}, {"storage": "memory:", "timeout": 0.3, "lookup_timeout": 0.2})
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    odd.begin(how)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert storage.batch_exists(KEYS[:2]) == 0
        assert storage.batch_get_v1(KEYS[:2], indices(2, 3)) == [False, False]
        assert storage.batch_set_v1(KEYS[2:4], indices(2, 3)) == [False, False]
        assert storage.batch_exists_v2(KEYS[:2]).kv_hit_pages == 0
    assert time.monotonic() - began < 5
    assert "asynccache: 2 of 2 pages of pool kv were not moved in" in caplog.text
    odd.let_go()
    storage.close()


def test_rows_that_a_store_does_not_let_go_of_are_not_used_again(odd: Odd) -> None:
    """Nobody waits for it, the pages are misses, and what it writes later is written to rows that nobody reads."""
    pool = mha()
    storage = opened({"kv": pool}, {"storage": "memory:", "timeout": 0.2, "staging": 2000})
    rows = storage._pools["kv"].rows
    odd.begin("is stuck")
    before = flat(pool, 2)
    began = time.monotonic()
    assert storage.batch_get_v1(KEYS[:2], indices(2, 3)) == [False, False]
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False], "no row is free"
    assert time.monotonic() - began < 5
    assert rows.take(1, 0.0) == []
    assert torch.equal(flat(pool, 2), before)
    odd.let_go()
    found = rows.take(2, time.monotonic() + 10)
    assert found
    rows.give_back(found)
    storage.close()


def test_a_store_that_cannot_be_opened_fails_the_attaching(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises((ConfigError, Unavailable)):
        opened({"kv": mha()}, file_store(tmp_path))


# Hints in the extra info of SGLang's calls. The version tested here passes none so far: the tests put them there.


def extra(*actions: tuple[str, Any], prefix: list[str] | None = None, typed: bool = True) -> HiCacheStorageExtraInfo:
    made = [{"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": said} for kind, said in actions]
    envelope: Any = {"protocol_version": "0.1", "message_id": "m", "actions": made}
    if typed:
        envelope = decode_kv_hints_envelope(envelope)
        assert isinstance(envelope, KvHintsEnvelope)
    return HiCacheStorageExtraInfo(prefix_keys=prefix, extra_info={"kv_hints": envelope})


@contextmanager
def on_a_host_process(**more: Any) -> Iterator[tuple[AsyncCacheStorage, HostServer]]:
    pools = {"kv": mha(), "swa": mha("page_first_direct", seed=5)}
    with beside(**more) as server, closing(opened(pools, {"storage": f"host:{server.path}"})) as storage:
        yield storage, server


@pytest.mark.parametrize("typed", [True, False])
def test_what_is_kept_or_has_ended_is_told_to_the_host_process(typed: bool) -> None:
    with on_a_host_process() as (storage, server):
        size = storage._pools["kv"].source.page_size
        assert all(storage.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3), extra(typed=typed)))
        told = extra(("kv.retain", {"duration": 60, "end": 5 * size}), prefix=KEYS[:4], typed=typed)
        assert all(storage.batch_set_v1(KEYS[4:6], indices(4, 5), told))
        until(lambda: server.table.counts["kept"] == 5)
        ended = extra(("kv.end", {}), prefix=KEYS[:6], typed=typed)
        done = storage.batch_set_v2([PoolTransfer(PoolName.SWA, indices(1, 2), keys=KEYS[6:8])], ended)
        assert done == {PoolName.SWA: [True, True]}
        until(lambda: server.table.counts["ended"] == 2)
        from_here = extra(("kv.deref", {"start": 3 * size}), prefix=KEYS[:6], typed=typed)
        assert all(storage.batch_set_v1(KEYS[6:7], indices(6), from_here))
        until(lambda: server.table.counts["ended"] == 6)
        assert storage.hint_counts == {"keep": 1, "ended": 2}


def test_a_prefetch_reads_into_the_memory_and_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    with on_a_host_process(stores=[f"file:{tmp_path}/kv?capacity=64MiB"]) as (storage, server):
        skip = extra(("kv.skip_store", {}))
        assert storage.batch_set_v1(KEYS[:2], indices(0, 1), skip) == [False, False]
        assert storage.batch_set_v2([PoolTransfer(PoolName.SWA, indices(1), keys=KEYS[:1])], skip) == {"swa": [False]}
        assert not server.table.index
        assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2)))
        behind = server.behind
        assert behind is not None
        until(lambda: behind.counts().get("file.written") == 3)
        server.table.clear()
        assert storage.batch_exists(KEYS[:3], extra(("kv.prefetch", {}))) == 3
        until(lambda: len(server.table.index) == 3)


@pytest.mark.parametrize("said", [
    None, "kv.end", {"kv_hints": 3}, {"kv_hints": {"actions": [{"action_type": 7}]}}, [], {"kv_hints": {"actions": {}}},
])  # fmt: skip
def test_absurd_extra_info_changes_nothing(said: Any) -> None:
    with on_a_host_process() as (storage, server):
        info = HiCacheStorageExtraInfo(prefix_keys=None, extra_info=said)
        assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2), info))
        assert storage.batch_exists(KEYS[:3], info) == 3
        assert set(storage.hint_counts) <= {"malformed"}
        assert server.table.counts["kept"] == server.table.counts["ended"] == 0


def test_stores_that_take_no_hints_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(opened({"kv": mha()}, {"storage": f"file:{tmp_path / 'kv'}?capacity=16MiB"})) as storage:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2), extra(("kv.retain", {"ttl": 5}))))
    assert storage.hint_counts == {"keep": 3, "unheard": 3}
    assert sum("take no hints" in one.getMessage() for one in caplog.records) == 1
