"""The namespace: chunks of an engine that differs in it are never found, those of an equal one always. On plain
objects, without vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asynccache_vllm.namespace import (
    engine_facts,
    environment_facts,
    layout_facts,
    namespace_of,
    order_is_known,
    short,
    version_facts,
    weights_fact,
)

from asynccache.errors import ConfigError

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
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_layout_is_another_namespace(what: str) -> None:
    changed = layout()
    CHANGES[what](changed)
    assert layout_facts(changed, None) != layout_facts(layout(), None)


@pytest.mark.parametrize("size", ["world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"])
def test_another_number_of_ranks_is_another_namespace_though_vllm_calls_it_agnostic(size: str) -> None:
    """Also where their product is the same."""
    assert layout_facts(layout(**{size: 2}), None) != layout_facts(layout(), None)


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


def without(name: str) -> Change:
    return lambda one: delattr(one, name)


NOT_KNOWN: dict[str, tuple[str, Change, Change]] = {
    what: ("cuda", of_layout or (lambda _: None), of_engine or (lambda _: None))
    for what, of_layout, of_engine in (
        ("no layout", lambda c: setattr(c, "kv_cache_layout", None), None),
        ("something beside K and V", lambda c: setattr(c, "worker_kv_bytes_per_block", 8448), None),
        ("codes of four bits", lambda c: setattr(c.model, "dtype", "nvfp4"), None),
        ("blocks of two sizes", lambda c: setattr(c.groups[1], "tokens_per_block", 32), None),
        ("the version chooses the backend", None, lambda e: setattr(e.attention_config, "backend", None)),
        ("a backend of its own", None, lambda e: setattr(e.attention_config, "backend", Backend.B12X)),
        ("a backend by kind", None, lambda e: setattr(e.attention_config, "backend_per_kind", {"a": Backend.FLASH})),
        ("latent KV", None, lambda e: setattr(e.model_config, "use_mla", True)),
        ("recurrent states", None, lambda e: setattr(e.model_config, "is_hybrid", True)),
        ("inner state", None, lambda e: setattr(e.model_config, "has_inner_state", True)),
        ("a draft", None, lambda e: setattr(e, "speculative_config", SimpleNamespace(method="eagle"))),
        ("a vLLM that says nothing of drafts", None, without("speculative_config")),
        ("a vLLM that says nothing of states", None, lambda e: delattr(e.model_config, "is_hybrid")),
    )
}


@pytest.mark.parametrize("what", NOT_KNOWN)
def test_whatever_may_be_in_another_order_is_not_known(what: str) -> None:
    platform, of_layout, of_engine = NOT_KNOWN[what]
    config, known = layout(), named()
    of_layout(config)
    of_engine(known)
    assert not order_is_known(config, known, platform)


@pytest.mark.parametrize("platform", ["rocm", "xpu", "another"])
def test_platforms_with_orders_of_their_own_are_not_known(platform: str) -> None:
    assert not order_is_known(layout(), named(), platform)
    assert not order_is_known(layout(), None, "cuda")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no weights"):
        weights_fact(engine(tmp_path), None)


def test_namespaces_are_told_apart_in_logs() -> None:
    assert short(namespace_of({"a": 1})) != short(namespace_of({"a": 2}))
