"""Parts of the tier without vLLM: its options, namespace, lookups and the names of blocks; the versions of vLLM that it
takes, and its message where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import asynccache_vllm
import pytest
from asynccache_vllm.lookups import HIT_KEPT, MISS_KEPT, ChunkQuestion, KeyAnswer, KeyTable
from asynccache_vllm.namespace import (
    block_named,
    engine_facts,
    environment_facts,
    layout_facts,
    namespace_of,
    order_is_known,
    short,
    version_facts,
    weights_fact,
)
from asynccache_vllm.options import LOOKUP_TIMEOUT, TierOptions

from asynccache.errors import ConfigError
from asynccache.storage import Result

# The tier's entry in ``secondary_tiers``: what it may have, and how all else is refused. Without vLLM.


def test_one_url_is_enough() -> None:
    assert TierOptions.parse({"storage": "memory:"}) == TierOptions(storage=("memory:",))
    assert TierOptions(storage=("memory:",)).lookup_timeout == LOOKUP_TIMEOUT == 0.5


def test_all_that_can_be_said() -> None:
    options = TierOptions.parse({
        "storage": ["memory:?capacity=1GiB", "redis://cache:6379"], "namespace": "tiny 3", "lookup_timeout": 2,
        "store_options": {"timeout": 2.5, "slow": 1, "write": "no"}, "enable_kv_events": True, "locality": "REMOTE",
        "compatible_with": "0.32.0+cu130",
    })  # fmt: skip
    assert options == TierOptions(
        storage=("memory:?capacity=1GiB", "redis://cache:6379"), namespace="tiny 3", lookup_timeout=2.0,
        store_options={"timeout": "2.5", "slow": "1", "write": "no"}, enable_kv_events=True, locality="REMOTE",
        compatible_with="0.32.0+cu130",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "storage: no store is named"),
        ({"storage": []}, "storage: no store is named"),
        ({"storage": ""}, "storage='' must not be empty"),
        ({"storage": 7}, "storage=7 must be text"),
        ({"storage": ["memory:", None]}, "storage=None must be text"),
        ({"storage": "memory:", "namespace": ""}, "namespace='' must not be empty"),
        ({"storage": "memory:", "namespace": 3}, "namespace=3 must be text"),
        ({"storage": "memory:", "lookup_timeout": 0}, "lookup_timeout=0 must be above 0"),
        ({"storage": "memory:", "lookup_timeout": "1"}, "lookup_timeout='1' must be a number"),
        ({"storage": "memory:", "lookup_timeout": float("inf")}, "lookup_timeout=inf must be a finite number"),
        ({"storage": "memory:", "store_options": ["timeout"]}, "store_options must map names"),
        ({"storage": "memory:", "store_options": {"timeout": True}}, "store_options: 'timeout' must be text or a"),
        ({"storage": "memory:", "enable_kv_events": 1}, "enable_kv_events=1 must be True or False"),
        ({"storage": "memory:", "compatible_with": 0.32}, "compatible_with=0.32 must be text"),
        ({"storage": "memory:", "compatible_with": ["0.32.0"]}, "compatible_with=['0.32.0'] must be text"),
        ({"storage": "memory:", "compatible_with": ""}, "compatible_with='' must be a version, as in '0.32.0'"),
        ({"storage": "memory:", "compatible_with": "vllm 0.32"}, "compatible_with='vllm 0.32' must be a version"),
        ({"storage": "memory:", "compatible_with": "0" * 65}, "must be a version"),
        ({"storage": "memory:", "locality": "near"}, "locality='near' must be one of LOCAL, REMOTE"),
        ({"storage": "memory:", "root_dir": "/kv"}, "unknown key 'root_dir'; there are compatible_with, "),
    ],
)
def test_what_is_unusable_is_refused_by_name_and_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TierOptions.parse(given)
    assert said in str(refused.value)


# The namespace: chunks of an engine that differs in it are never found, those of an equal one always. On plain
# objects, without vLLM.


Change = Callable[[Any], None]


class Backend(Enum):
    FLASH = "flash"
    FLASH_ATTN = "flash attention"
    B12X = "b12x"


def layout(**parallel: Any) -> SimpleNamespace:
    """As vLLM's ``OffloadingConfig``."""
    ranks = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "is_parallelism_agnostic": True}
    return SimpleNamespace(
        groups=[SimpleNamespace(group_id=i, tokens_per_block=16, layer_names=(f"l{i}",)) for i in range(2)],
        worker_kv_bytes_per_block=8192,
        model=SimpleNamespace(dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(**{**ranks, **parallel}),
        replicated_layout=False,
        kv_cache_layout="LBNHC",
    )


def engine(folder: Path | str = "tiny", **model: Any) -> SimpleNamespace:
    """As vLLM's ``VllmConfig``."""
    hf = {"_name_or_path": str(folder), "hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0}}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{
            "model": str(folder), "revision": None, "dtype": "torch.bfloat16", "quantization": None,
            "max_model_len": 4096, "hf_config": SimpleNamespace(to_dict=lambda: hf),
            "get_num_kv_heads": lambda parallel: 2, "get_head_size": lambda: 64,
            **dict.fromkeys(("use_mla", "is_hybrid", "has_inner_state", "is_attention_free", "is_encoder_decoder"),
                            False), **model,
        }),
        parallel_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        attention_config=SimpleNamespace(backend=Backend.FLASH),
        lora_config=None,
        speculative_config=None,
    )  # fmt: skip


def model_folder(path: Path, weights: bytes = b"w") -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_equal_configurations_have_one_namespace() -> None:
    assert namespace_of(layout_facts(layout(), None)) == namespace_of(layout_facts(deepcopy(layout()), None))
    assert engine_facts(engine()) == engine_facts(deepcopy(engine()))


def test_what_is_not_json_is_equal_in_each_process() -> None:
    facts = engine_facts(engine(quantization_config=object(), model_impl={"b", "a"}))
    assert facts["quantization options"] == "object"
    assert json.loads(namespace_of(facts))["attention"] == "FLASH"


CHANGES: dict[str, Change] = {
    "another dtype of the cache": lambda c: setattr(c.model, "dtype", "fp8"),
    "other hashes": lambda c: setattr(c.cache, "tokens_per_hash", 32),
    "another chunk": lambda c: setattr(c.cache, "blocks_per_chunk", 2),
    "another block": lambda c: setattr(c.groups[1], "tokens_per_block", 32),
    "other layers": lambda c: setattr(c.groups[0], "layer_names", ("l0", "l2")),
    "another group": lambda c: c.groups.pop(),
    "another layout": lambda c: setattr(c, "kv_cache_layout", "LBHNC"),
    "other bytes": lambda c: setattr(c, "worker_kv_bytes_per_block", 4096),
    "one copy": lambda c: setattr(c, "replicated_layout", True),
    **{f"another {size}": lambda c, size=size: setattr(c.parallel, size, 2)  # type: ignore[misc]
       for size in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")},
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_another_layout_is_another_namespace(what: str) -> None:
    """Also where vLLM calls it agnostic of ranks, and where their product is the same."""
    changed = layout()
    CHANGES[what](changed)
    assert layout_facts(changed, None) != layout_facts(layout(), None)


def test_ranks_do_not_matter_in_the_canonical_layout_and_only_there() -> None:
    two = layout(tp_size=2, world_size=2)
    assert layout_facts(two, "v1-nhd") == layout_facts(layout(), "v1-nhd")
    assert layout_facts(layout(), "v1-nhd") != layout_facts(layout(), "v1-hnd")
    assert layout_facts(layout(), "v1-nhd") != layout_facts(layout(), None)
    two.parallel.is_parallelism_agnostic = False
    assert layout_facts(two, "v1-nhd") != layout_facts(layout(is_parallelism_agnostic=False), "v1-nhd")


def _hf(**changed: Any) -> SimpleNamespace:
    found = {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0}, **changed}
    return SimpleNamespace(to_dict=lambda: found)


ENGINES: dict[str, Change] = {
    "dtype": lambda e: setattr(e.model_config, "dtype", "torch.float16"),
    "quantization": lambda e: setattr(e.model_config, "quantization", "fp8"),
    "quantization options": lambda e: setattr(e.model_config, "quantization_config", {"bits": 4}),
    "hf_overrides": lambda e: setattr(e.model_config, "hf_config", _hf(rope_parameters={"rope_theta": 5e5})),
    "implementation": lambda e: setattr(e.model_config, "model_impl", "transformers"),
    "sliding window": lambda e: setattr(e.model_config, "disable_sliding_window", True),
    "kv-cache dtype": lambda e: setattr(e.cache_config, "cache_dtype", "fp8_e5m2"),
    "kv-cache dtype of some layers": lambda e: setattr(e.cache_config, "kv_cache_dtype_skip_layers", ["0"]),
    "mamba dtype": lambda e: setattr(e.cache_config, "mamba_cache_dtype", "float16"),
    "mamba state dtype": lambda e: setattr(e.cache_config, "mamba_ssm_cache_dtype", "float16"),
    "mamba replay": lambda e: setattr(e.cache_config, "use_replayssm", True),
    "hash algorithm": lambda e: setattr(e.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "attention": lambda e: setattr(e.attention_config, "backend", None),
    "attention of windows": lambda e: setattr(e.attention_config, "backend_per_kind", {"mla_attention": Backend.FLASH}),
    "images": lambda e: setattr(
        e.model_config, "multimodal_config", SimpleNamespace(mm_processor_kwargs={"size": 2})
    ),
    "draft": lambda e: setattr(e, "speculative_config", SimpleNamespace(method="eagle", model="draft")),
}  # fmt: skip


@pytest.mark.parametrize("what", ENGINES)
def test_whatever_changes_values_is_in_the_namespace(what: str) -> None:
    changed = engine()
    ENGINES[what](changed)
    assert engine_facts(changed) != engine_facts(engine())


def test_where_a_model_lies_does_not_matter() -> None:
    assert engine_facts(engine("/models/tiny")) == engine_facts(engine("/mnt/tiny"))


def test_the_longest_request_matters_where_positions_depend_on_it() -> None:
    scaled = _hf(rope_parameters={"rope_type": "longrope"})
    assert engine_facts(engine(max_model_len=8192)) == engine_facts(engine())
    assert engine_facts(engine(hf_config=scaled, max_model_len=8192)) != engine_facts(engine(hf_config=scaled))


def test_other_weights_are_another_namespace_and_equal_ones_are_one(tmp_path: Path) -> None:
    one, same, other = (model_folder(tmp_path / name, name[:1].encode()) for name in ("a", "a2", "b"))
    facts = [weights_fact(engine(folder), None) for folder in (one, same, other)]
    assert facts[0] == facts[1] != facts[2]


def test_the_users_namespace_stands_for_the_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    fact = weights_fact(engine(folder), "v1")
    assert fact != weights_fact(engine(folder), "v2")
    assert fact != weights_fact(engine("other"), "v1")
    (folder / "model.safetensors").write_bytes(b"x")
    assert fact == weights_fact(engine(folder), "v1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: setattr(e.load_config, "load_format", "dummy"), "load_format='dummy' does not load the files"),
        (lambda e: setattr(e.load_config, "load_format", "runai_streamer"), "load_format='runai_streamer'"),
        (lambda e: setattr(e, "lora_config", object()), "LoRA adapter by its name and path only"),
        (lambda e: setattr(e.model_config, "model", "s3://models/tiny"), "'s3://models/tiny'"),
        (lambda e: setattr(e.model_config, "model", "nobody/nothing"), "'nobody/nothing' is no path, and is not in"),
    ],
)
def test_weights_that_cannot_be_known_are_refused_with_what_to_do(tmp_path: Path, change: Change, why: str) -> None:
    unknown = engine(model_folder(tmp_path / "m"))
    change(unknown)
    with pytest.raises(ConfigError) as refused:
        weights_fact(unknown, None)
    assert str(refused.value).startswith("namespace: ")
    assert why in str(refused.value)
    assert "Name them yourself, as in namespace='llama-3.1-8b 2026-11-01'" in str(refused.value)
    assert weights_fact(unknown, "mine")["namespace"] == "mine"


def test_without_the_engines_configuration_a_namespace_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="configuration of the model cannot be found"):
        weights_fact(None, None)
    assert weights_fact(None, "mine") == {"namespace": "mine", "model": None}


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    model_folder(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    hub = engine("org/tiny")
    hub.load_config.download_dir = str(tmp_path)
    assert weights_fact(hub, None) == weights_fact(engine(snapshot), None)


@pytest.mark.parametrize(
    "name", ["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT"]
)
def test_what_chooses_another_attention_backend_is_another_namespace(name: str) -> None:
    without, chosen = (namespace_of(environment_facts(e)) for e in ({}, {name: "1"}))
    assert without != chosen != namespace_of(environment_facts({name: "0"}))


def test_other_variables_do_not_matter() -> None:
    others = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_PORT": "1", "HOME": "/"}
    assert environment_facts({}) == environment_facts(others)


def test_a_version_stands_with_the_libraries_by_which_it_chooses() -> None:
    facts = version_facts("0.32.0", ["flashinfer-python", "flash-attn"])
    assert facts == version_facts("0.32.0", ("flash-attn", "flashinfer-python"))
    assert facts != version_facts("0.32.0", ["flash-attn"])
    assert facts != version_facts("0.33.0", ["flash-attn", "flashinfer-python"])


def named(backend: Backend | None = Backend.FLASH_ATTN, **model: Any) -> SimpleNamespace:
    """An engine whose attention backend the user named."""
    made = engine(**model)
    made.attention_config.backend = backend
    return made


def test_the_order_of_plain_attention_is_known() -> None:
    assert order_is_known(layout(), named(), "cuda")
    assert order_is_known(layout(), named(None), "cpu")  # which has one backend


NOT_KNOWN: dict[str, Callable[[Any, Any], Any]] = {
    "no layout": lambda c, e: setattr(c, "kv_cache_layout", None),
    "something beside K and V": lambda c, e: setattr(c, "worker_kv_bytes_per_block", 8448),
    "codes of four bits": lambda c, e: setattr(c.model, "dtype", "nvfp4"),
    "blocks of two sizes": lambda c, e: setattr(c.groups[1], "tokens_per_block", 32),
    "the version chooses the backend": lambda c, e: setattr(e.attention_config, "backend", None),
    "a backend of its own": lambda c, e: setattr(e.attention_config, "backend", Backend.B12X),
    "a backend by kind": lambda c, e: setattr(e.attention_config, "backend_per_kind", {"a": Backend.FLASH}),
    "latent KV": lambda c, e: setattr(e.model_config, "use_mla", True),
    "recurrent states": lambda c, e: setattr(e.model_config, "is_hybrid", True),
    "inner state": lambda c, e: setattr(e.model_config, "has_inner_state", True),
    "a draft": lambda c, e: setattr(e, "speculative_config", SimpleNamespace(method="eagle")),
    "a vLLM that says nothing of drafts": lambda c, e: delattr(e, "speculative_config"),
    "a vLLM that says nothing of states": lambda c, e: delattr(e.model_config, "is_hybrid"),
}


@pytest.mark.parametrize("what", NOT_KNOWN)
def test_whatever_may_be_in_another_order_is_not_known(what: str) -> None:
    config, known = layout(), named()
    NOT_KNOWN[what](config, known)
    assert not order_is_known(config, known, "cuda")


@pytest.mark.parametrize("platform", ["rocm", "xpu", "another"])
def test_platforms_with_orders_of_their_own_are_not_known(platform: str) -> None:
    assert not order_is_known(layout(), named(), platform)
    assert not order_is_known(layout(), None, "cuda")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no weights"):
        weights_fact(engine(tmp_path), None)


def test_namespaces_are_told_apart_in_logs() -> None:
    assert short(namespace_of({"a": 1})) != short(namespace_of({"a": 2}))


# Lookups: gathered by the step, answered within the deadline, remembered for a moment. Without vLLM, without time.


THERE, ABSENT, LATER = KeyAnswer.HIT, KeyAnswer.MISS, KeyAnswer.LATER
TIMEOUT = 0.5


def living(*requests: str) -> KeyTable:
    """A table that knows these requests."""
    lookups = KeyTable(TIMEOUT)
    for request in requests:
        lookups.begin(request)
    return lookups


def asked(lookups: KeyTable, now: float) -> ChunkQuestion:
    question = lookups.take(now)
    assert question is not None
    return question


def test_answers_are_told_and_remembered_for_a_moment() -> None:
    lookups = living("r", "s", "t")
    for key in (b"a", b"b", b"c"):
        lookups.ask(key, "r", 0.0)
    lookups.answer(asked(lookups, 0.0), [Result.HIT, Result.MISS, Result.FAILED], 0.01, 0.01)
    assert [lookups.ask(key, "s", 0.02) for key in (b"a", b"b", b"c")] == [THERE, ABSENT, ABSENT]
    assert lookups.take(0.02) is None
    assert lookups.ask(b"b", "s", 0.01 + MISS_KEPT) is LATER
    assert lookups.ask(b"a", "s", HIT_KEPT) is THERE
    assert lookups.ask(b"a", "s", 0.01 + HIT_KEPT) is LATER


def test_no_answer_is_a_miss_at_the_deadline_and_stays_one_for_that_request() -> None:
    lookups = living("r", "s", "t")
    assert lookups.ask(b"a", "r", 0.0) is LATER
    question = asked(lookups, 0.1)
    assert lookups.ask(b"a", "r", 0.59) is LATER
    assert lookups.ask(b"a", "r", 0.6) is ABSENT
    assert lookups.ask(b"b", "r", 0.6) is ABSENT, "it has waited enough"
    assert lookups.take(0.6) is None
    lookups.answer(question, [Result.FAILED], 0.6, 0.6)
    assert lookups.ask(b"a", "r", 5.0) is ABSENT
    assert lookups.ask(b"a", "s", 5.0) is LATER, "another request may wait"


def test_a_slow_step_of_the_engine_is_no_wait_for_the_stores() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    question = asked(lookups, 0.0)
    lookups.answer(question, [Result.HIT], 0.01, 2.0)  # the step took two seconds
    assert lookups.ask(b"a", "r", 2.0) is THERE
    assert lookups.ask(b"b", "r", 2.0) is LATER, "of another group, say"
    lookups.answer(asked(lookups, 2.0), [Result.HIT], 2.01, 4.0)
    assert lookups.ask(b"b", "r", 4.0) is THERE


def test_waits_add_up() -> None:
    lookups = living("r", "s", "t")
    now = 0.0
    waited = 0.0
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        if lookups.ask(key, "r", now) is ABSENT:
            break
        lookups.answer(asked(lookups, now), [Result.MISS], now + 0.2, now + 0.2)
        now += 0.2
        waited += 0.2
    assert TIMEOUT <= waited < TIMEOUT + 0.2


def test_who_joins_a_question_waits_no_longer_than_who_asked() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    question = asked(lookups, 0.0)
    assert lookups.ask(b"a", "s", 0.4) is LATER
    lookups.answer(question, [Result.FAILED], 0.5, 0.5)
    assert lookups.ask(b"a", "s", 0.51) is ABSENT
    assert lookups.ask(b"z", "s", 0.51) is ABSENT


def test_what_could_not_be_loaded_is_a_miss_at_once() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    lookups.answer(asked(lookups, 0.0), [Result.HIT], 0.1, 0.1)
    assert abs(lookups.left([b"a"]) - 0.4) < 1e-9
    lookups.lost([b"a"], "r", 0.2)
    assert lookups.ask(b"a", "r", 0.2) is ABSENT
    assert lookups.ask(b"a", "r", 9.0) is ABSENT, "the request does not try again"
    assert lookups.ask(b"a", "s", 0.2 + MISS_KEPT) is LATER


def test_nothing_is_kept_for_ever() -> None:
    lookups = living(*(f"r{i}" for i in range(100)))
    for i in range(100):
        lookups.ask(b"%d" % i, f"r{i}", 10.0)
    question = asked(lookups, 10.0)
    lookups.answer(question, [Result.HIT] * 100, 10.0, 10.0)
    for i in range(50):
        lookups.end(f"r{i}")
    lookups.lost([b"0"], "r0", 10.0)
    for i in range(50, 100):
        lookups.end(f"r{i}")
    lookups.begin_again(["r0", "r1"])
    lookups.tidy(10.0 + HIT_KEPT)
    assert (lookups._known, lookups._wanted, lookups._asked) == ({}, {}, {})
    assert not lookups._spent


# What vLLM's events call a block is in our storage keys.


@pytest.mark.parametrize("length", [32, 16])
@pytest.mark.parametrize("group", [0, 7])
def test_a_block_is_named_by_the_lower_64_bits_of_its_hash(length: int, group: int) -> None:
    digest = sha256(b"block").digest()[:length]
    assert block_named("pages", digest + group.to_bytes(4, "big")) == int.from_bytes(digest, "big") % (1 << 64)


def test_vllm_says_the_same() -> None:
    keys = pytest.importorskip("vllm.v1.kv_offload.base")
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    digest = utils.BlockHash(sha256(b"block").digest())
    assert block_named("pages", keys.make_offload_key(digest, 3)) == utils.maybe_convert_block_hash(digest)


# The versions of vLLM that the tier takes, and its message where there is none. vLLM's classes are written out here,
# so vLLM is not needed.


# ruff: noqa: B027


class Base(ABC):
    """As vLLM 0.32 and 0.33 have it, where we use it."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, backpressure_detector: Any = None
    ) -> None: ...
    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> Any: ...
    @abstractmethod
    def submit_store(self, job_metadata: Any) -> None: ...
    @abstractmethod
    def submit_load(self, job_metadata: Any) -> None: ...
    @abstractmethod
    def get_finished_jobs(self) -> Any: ...
    @abstractmethod
    def on_new_request(self, req_context: Any) -> Any: ...
    @abstractmethod
    def drain_jobs(self) -> None: ...
    def on_request_finished(self, req_context: Any) -> None: ...
    def on_schedule_end(self, context: Any) -> None: ...
    def take_events(self) -> Any: ...
    def get_stats(self) -> Any: ...
    def shutdown(self) -> None: ...
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> Any: ...


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


TYPES: dict[str, type] = {
    one.__name__: one for one in (TransferJob, JobResult, ScheduleEndContext, LookupResult)
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some vLLM."""
    monkeypatch.setattr(asynccache_vllm.interface, "version", lambda name: "0.34.1")


def test_the_interface_of_the_tested_versions_is_taken() -> None:
    asynccache_vllm.interface.check_interface(Base, TYPES)


def another(**methods: Callable[..., None]) -> type:
    """vLLM's class with these methods of another kind."""
    return type("New", (Base,), methods)


def test_more_with_a_default_is_taken() -> None:
    more = another(submit_load=abstractmethod(lambda self, job_metadata, expedited=False: None))
    asynccache_vllm.interface.check_interface(more, TYPES)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("methods", "said"), [
    ({"submit_copy": abstractmethod(lambda self, job: None)}, "its secondary tiers must have the method submit_copy()"),
    ({"drain_jobs": lambda self: None}, "its secondary tiers need not have the method drain_jobs()"),
    ({"lookup": abstractmethod(lambda self, key, req_context, step: None)},
     "lookup() of its secondary tiers has an additional parameter step"),
    ({"submit_store": abstractmethod(lambda self, job: None)},
     "submit_store() of its secondary tiers has no parameter job_metadata"),
])  # fmt: skip
def test_another_interface_is_refused_in_a_sentence(methods: dict[str, Callable[..., None]], said: str) -> None:
    with pytest.raises(ImportError) as refused:
        asynccache_vllm.interface.check_interface(another(**methods), TYPES)
    assert str(refused.value) == (
        f"asynccache_vllm does not work with vLLM 0.34.1: {said}. It was tested with 0.32.0, and without an engine "
        f"with 0.33.0"
    )


@pytest.mark.usefixtures("installed")
def test_another_result_is_refused() -> None:
    class Other(NamedTuple):
        job_id: int
        success: bool

    with pytest.raises(ImportError, match="its JobResult has no successful_keys"):
        asynccache_vllm.interface.check_interface(Base, {**TYPES, "JobResult": Other})


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(asynccache_vllm.interface, "version", nothing)
    with pytest.raises(ImportError, match=r"needs vLLM, which is not installed here: pip install vllm==0\.32\.0"):
        asynccache_vllm.register()


def test_importing_it_imports_nothing_of_vllm_and_nothing_heavy() -> None:
    program = ("import sys, asynccache_vllm; "
               "print(sorted({'vllm', 'torch', 'numpy', 'asyncio', 'asynccache'} & set(sys.modules)))")
    path = [entry for entry in sys.path if entry]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"],
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_no_question_for_vllm() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tier'"):
        asynccache_vllm.Tier  # noqa: B018


def test_vllm_finds_it_by_an_entry_point() -> None:
    found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "asynccache"]
    if not found:
        pytest.skip("asynccache is not installed here since it has the entry point: pip install -e .")
    assert found[0].value == "asynccache_vllm:register"


def test_a_vllm_without_tiers_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    def no_module(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(asynccache_vllm.interface, "version", lambda name: "0.20.0")
    monkeypatch.setattr(asynccache_vllm, "import_module", no_module)
    asynccache_vllm.register()
    assert "the tier type 'asynccache' was not registered: asynccache_vllm does not work with vLLM 0.20.0" in told.text
