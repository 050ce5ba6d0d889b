"""The tier under vLLM's real ``TieringOffloadingManager``: what is found again, and by whom. No engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="vLLM is not installed: make test-vllm")

import asynccache_vllm
from asynccache_vllm.counts import DESCRIPTIONS, LOADED, LOOKUPS, STORED
from asynccache_vllm.namespace import engine_facts, weights_fact
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingModelConfig
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from asynccache.errors import ConfigError
from tests.host.host_kit import socket_path
from tests.host.host_processes import server_process
from tests.stores.redis_server import RedisServer
from tests.vllm.tier_kit import CHUNK, config, keys_of, payload, scheduler


def entry(folder: Path, **more: Any) -> dict[str, Any]:
    return {"storage": f"file:{folder}/kv?capacity=1GiB", "namespace": "tiny", **more}


def stored(folder: Path, keys: Sequence[Any]) -> None:
    """An engine stores these chunks, and ends."""
    with scheduler(config(entry(folder))) as playing:
        playing.compute(keys)
        playing.settle()


def test_vllm_knows_the_tier_by_its_plugin_and_twice_is_fine() -> None:
    asynccache_vllm.register()
    asynccache_vllm.register()
    found = SecondaryTierFactory.get_tier_class({"type": "asynccache"})
    assert found is asynccache_vllm.AsyncCacheTier


def test_a_cold_store_has_nothing_and_what_is_computed_is_found_after_it_left_host_memory(tmp_path: Path) -> None:
    with scheduler(config(entry(tmp_path))) as playing:
        first, second = keys_of(10, "first"), keys_of(16, "second")
        assert playing.serve(first) == 0
        playing.compute(first)
        playing.settle()
        playing.compute(second)  # which needs all of host memory
        playing.settle()
        request = playing.begin()
        assert playing.manager.primary_tier.lookup(first[0], request) is LookupResult.MISS
        assert playing.serve(first) == 10


@pytest.mark.parametrize("store", ["file:{}/kv?capacity=1GiB", "memory:?capacity=64MiB"])
def test_it_is_found_after_vllms_own_tiers_were_reset(tmp_path: Path, store: str) -> None:
    with scheduler(config({"storage": store.format(tmp_path), "namespace": "tiny"})) as playing:
        playing.leave_stored(keys_of(8))
        assert playing.serve(keys_of(12)) == 8
        assert playing.serve(keys_of(8)) == 8


def test_the_nearest_store_of_several_is_filled_by_what_a_farther_one_has(tmp_path: Path) -> None:
    stored(tmp_path, keys_of(8))
    both = {"storage": ["memory:?capacity=64MiB", f"file:{tmp_path}/kv?capacity=1GiB"], "namespace": "tiny"}
    with scheduler(config(both)) as playing:
        assert playing.serve(keys_of(8)) == 8
        assert playing.tier._pages.store_stats()["memory"]["pages"] == 8


OTHERS: dict[str, Callable[[Any], Any]] = {
    "another namespace": lambda folder: config(entry(folder, namespace="tiny 2")),
    "two ranks": lambda folder: config(entry(folder), parallel={"world_size": 2, "tp_size": 2}),
    "two stages": lambda folder: config(entry(folder), parallel={"world_size": 2, "pp_size": 2}),
    "three groups": lambda folder: config(entry(folder), groups=3),
    "another layout": lambda folder: replace(config(entry(folder)), kv_cache_layout="LBHNC"),
    "another dtype": lambda folder: replace(config(entry(folder)), model=OffloadingModelConfig("tiny", "fp8")),
    "chunks of other blocks": lambda folder: replace(config(entry(folder)), cache=OffloadingCacheConfig(8, 1)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_who_differs_finds_nothing(tmp_path: Path, what: str) -> None:
    stored(tmp_path, keys_of(4))
    with scheduler(OTHERS[what](tmp_path)) as playing:
        assert playing.serve(keys_of(4)) == 0


def test_three_groups_with_chunks_of_their_own(tmp_path: Path) -> None:
    groups = [keys_of(4, group=group) for group in range(3)]
    with scheduler(config(entry(tmp_path), groups=3)) as playing:
        for keys in groups:
            playing.leave_stored(keys)
        assert [playing.serve(keys) for keys in groups] == [4, 4, 4]
        assert payload(groups[0][0]) != payload(groups[1][0])


def test_all_keys_of_a_step_are_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduler(config(entry(tmp_path))) as playing:
        playing.leave_stored(keys_of(12))
        asked: list[int] = []
        exists = playing.tier._pages.exists

        def counting(keys: Sequence[bytes], **more: Any) -> Any:
            asked.append(len(keys))
            return exists(keys, **more)

        monkeypatch.setattr(playing.tier._pages, "exists", counting)
        one, two = playing.begin(), playing.begin()
        for request, keys in ((one, keys_of(8)), (two, keys_of(12))):
            for key in keys:
                assert playing.manager.lookup(key, request) is LookupResult.RETRY
        playing.step()
        assert asked == [12]
        assert playing.prefix(keys_of(12), two) == 12
        assert asked == [12]


def test_a_load_goes_in_one_job_and_in_parts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asynccache_vllm import transfers

    stored(tmp_path, keys_of(13))
    monkeypatch.setattr(transfers, "PART", 3 * CHUNK)
    monkeypatch.setattr(transfers, "WINDOW", 5 * CHUNK)
    with scheduler(config(entry(tmp_path))) as playing:
        assert playing.serve(keys_of(13)) == 13
        assert playing.counted()[f"{LOADED}:('hit',)"] == 13


def test_a_request_that_is_aborted_leaves_nothing(tmp_path: Path) -> None:
    with scheduler(config(entry(tmp_path))) as playing:
        playing.leave_stored(keys_of(8))
        early, late = playing.begin(), playing.begin()
        assert playing.manager.lookup(keys_of(1)[0], early) is LookupResult.RETRY
        playing.manager.on_request_finished(early)  # before the step ends
        playing.step()
        while playing.manager.lookup(keys_of(1)[0], late) is LookupResult.RETRY:
            playing.step()
        playing.step()
        playing.manager.on_request_finished(late)  # its load is under way
        playing.settle()
        assert playing.serve(keys_of(8)) == 8
        assert not playing.tier._lookups._spent


def test_a_preempted_request_finds_its_chunks_again(tmp_path: Path) -> None:
    with scheduler(config(entry(tmp_path))) as playing:
        request = playing.begin("preempted")
        assert playing.prefix(keys_of(8), request) == 0
        playing.leave_stored(keys_of(8))
        playing.step(preempted=["preempted"])
        assert playing.prefix(keys_of(8), request) == 8


def test_methods_may_come_from_any_thread_under_one_lock(tmp_path: Path) -> None:
    """As with the lock of the manager in vLLM 0.33."""
    lock, failures = threading.Lock(), []
    with scheduler(config(entry(tmp_path), chunks=64)) as playing:
        playing.leave_stored(keys_of(16))

        def use(number: int) -> None:
            with lock:
                request = playing.begin(f"thread {number}")
            keys, hits = keys_of(16), 0
            while hits < 16:
                with lock:
                    results = [playing.manager.lookup(key, request) for key in keys]
                    playing.step()
                if LookupResult.MISS in results:
                    failures.append(number)
                    return
                hits = results.count(LookupResult.HIT)

        threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert playing.serve(keys_of(16)) == 16


def test_vllms_metrics_are_told(tmp_path: Path) -> None:
    definitions = asynccache_vllm.AsyncCacheTier.build_metric_definitions({})
    assert definitions.keys() == DESCRIPTIONS.keys() >= {LOOKUPS, LOADED, STORED}
    assert all(one.labelnames == ("result",) for one in definitions.values())
    extra = dict(config({"storage": "memory:", "namespace": "n"}).extra_config)
    assert TieringOffloadingSpec.build_metric_definitions(extra).keys() >= DESCRIPTIONS.keys(), "vLLM's spec knows them"
    with scheduler(config(entry(tmp_path))) as playing:
        playing.leave_stored(keys_of(8))
        playing.counted()
        playing.serve(keys_of(10))
        told = playing.counted()
        assert told[f"{LOOKUPS}:('hit',)"] == 8
        assert told[f"{LOOKUPS}:('miss',)"] == 2
        assert told[f"{LOADED}:('hit',)"] == 8
        assert told["vllm:kv_offload_tiering_read_bytes:('1:asynccache',)"] == 8 * CHUNK
        assert f"{LOADED}:('hit',)" not in playing.counted()


SOURCES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "disk": (["file:{folder}/kv?capacity=1GiB"], {}),
    "host": (["memory:"], {}),
    "disk, behind memory": (["memory:", "file:{folder}/kv?capacity=1GiB"], {}),
    "external_unspecified": (["redis"], {}),
    "external_unspecified, behind a disk": (["file:{folder}/kv?capacity=1GiB", "redis"], {}),
    "external_unspecified, a disk of another machine": (
        ["file:{folder}/kv?capacity=1GiB"], {"locality": "REMOTE"}),
    "host, of the host process": (["host"], {}),
}  # fmt: skip


@pytest.mark.parametrize("what", SOURCES)
def test_hits_are_counted_as_what_they_are(tmp_path: Path, what: str) -> None:
    """vLLM 0.33 counts the tokens of a prompt by where their KV was: a hit in Redis is none on disk."""
    source = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="needs vLLM 0.33: make test-vllm-next")
    urls, more = SOURCES[what]
    with ExitStack() as stack:
        if urls[-1] == "redis":
            RedisServer.installed()
            urls = [*urls[:-1], stack.enter_context(RedisServer()).url]
        if urls == ["host"]:
            server = stack.enter_context(server_process(socket_path(), "64MiB"))
            asyncio.run(server.counts())  # it listens now
            urls = [server.url]
        made = {"storage": [url.format(folder=tmp_path) for url in urls], "namespace": "n", **more}
        playing = stack.enter_context(scheduler(config(made)))
        keys = keys_of(4)
        playing.compute(keys)
        request = playing.begin()
        assert playing.manager.get_load_source(keys[0], request) is source.CacheHitSource.HOST  # vLLM's own memory
        playing.reset()
        request = playing.begin()
        assert playing.prefix(keys, request) == 4
        found = {playing.manager.get_load_source(key, request) for key in keys}
        assert found == {source.CacheHitSource(what.partition(",")[0])}


@pytest.mark.parametrize(
    ("url", "source"),
    [("s3://bucket/kv", "external_unspecified"), ("mooncake://127.0.0.1:50051", "external_unspecified"),
     ("rediss://kv.example", "external_unspecified"), ("host:/run/asynccache.sock", "host")],
)  # fmt: skip
def test_stores_that_are_not_here_are_counted_as_what_they_are(url: str, source: str) -> None:
    found = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="needs vLLM 0.33: make test-vllm-next")
    from asynccache_vllm.options import TierOptions
    from asynccache_vllm.tier import _hit_source

    assert _hit_source(TierOptions(storage=(url,))) is found.CacheHitSource(source)


def test_events_say_what_is_stored_if_they_are_wanted(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    made = config(entry(tmp_path, enable_kv_events=True, locality="LOCAL"), enable_kv_cache_events=True)
    with scheduler(made) as playing:
        playing.compute(keys_of(4))
        playing.settle()
        ours = [event for event in playing.manager.take_events() if event.medium is playing.tier.medium]
        assert [sorted(event.keys) for event in ours] == [sorted(keys_of(4))]
        assert not ours[0].removed
        assert ours[0].locality.value == "LOCAL"
        assert not list(playing.tier.take_events())
    with scheduler(config(entry(tmp_path, enable_kv_events=True))) as playing:
        playing.compute(keys_of(4, "other"))
        playing.settle()
        assert not list(playing.tier.take_events())
    assert "vLLM publishes no KV events" in told.text


def test_the_log_says_which_stores_and_which_namespace_and_sums_up_now_and_then(
    tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler(config(entry(tmp_path))) as playing:
        playing.leave_stored(keys_of(4))
        playing.serve(keys_of(4))
        assert "looked up" not in told.text
    assert f"asynccache: file for 16 chunks of {CHUNK} bytes, namespace " in told.text
    assert '"namespace":"tiny"' in told.text
    assert "looked up 4 hit; loaded 4 hit; stored 4 hit" in told.text
    monkeypatch.setattr("asynccache_vllm.counts.SUMMARY_EVERY", 0.0)
    with scheduler(config(entry(tmp_path))) as playing:
        playing.compute(keys_of(5, "new"))
        playing.settle()
        assert "stored 5 hit" in told.text


def test_vllms_version_and_device_are_in_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, keys_of(4))
    for name, value in (("get_device_capability", (9, 4)), ("fp8_dtype", "torch.float8_e4m3fnuz")):
        with monkeypatch.context() as patched, scheduler(_on(patched, name, value, tmp_path)) as playing:
            assert playing.serve(keys_of(4)) == 0
    monkeypatch.setattr("vllm.__version__", "0.32.1")
    with scheduler(config(entry(tmp_path))) as playing:
        assert playing.serve(keys_of(4)) == 0


def _on(patched: pytest.MonkeyPatch, name: str, value: Any, folder: Path) -> Any:
    """A configuration on a device of which ``name`` says ``value``."""
    patched.setattr(type(current_platform), name, lambda *_: value)
    return config(entry(folder))


def test_each_data_parallel_replica_can_have_a_folder_of_its_own(tmp_path: Path) -> None:
    """With one folder for both the second is refused: it belongs to one process."""
    given = {"storage": f"file:{tmp_path}/kv{{dp_rank}}?capacity=1GiB"}
    first, second = config(entry(tmp_path, **given)), config(entry(tmp_path, **given))
    second = replace(second, parallel=replace(second.parallel, data_parallel_index=1, data_parallel_size=2))
    with scheduler(first) as one, scheduler(second) as other:
        for playing in (one, other):
            playing.compute(keys_of(4))
            playing.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv0", "kv1"]


def test_the_facts_in_the_namespace_are_attributes_that_vllms_configuration_has() -> None:
    """One that vLLM renamed would be equal everywhere."""
    read: set[tuple[type, str]] = set()

    class Reads:
        def __init__(self, kind: type, **given: Any) -> None:
            self.kind, self.given = kind, given

        def __getattr__(self, name: str) -> Any:
            read.add((self.kind, name))
            return self.given.get(name)

    images, model = Reads(MultiModalConfig), Reads(ModelConfig)
    model.given["multimodal_config"] = images
    engine = Reads(
        VllmConfig, model_config=model, cache_config=Reads(CacheConfig), attention_config=Reads(AttentionConfig),
        load_config=Reads(LoadConfig, load_format="hf"), speculative_config=Reads(SpeculativeConfig),
    )  # fmt: skip
    engine_facts(engine)
    model.given["model"] = "/"
    with pytest.raises(ConfigError, match="there are no weights"):
        weights_fact(engine, None)
    assert len(read) > 20
    unknown = {(kind.__name__, name) for kind, name in read if name not in {*dir(kind), *inspect.get_annotations(kind)}}
    assert not unknown
