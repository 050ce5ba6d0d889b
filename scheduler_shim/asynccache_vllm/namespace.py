"""The namespace of chunks: everything that must be equal for a stored chunk to be usable, and that is not in its key.

vLLM's key of a chunk has a hash of the tokens up to its end (with an adapter's name and path, the hashes of images, and
a cache salt) and the number of its KV group. All other facts are collected here: which weights computed the chunk, how
they computed it, and how it lies in memory. Objects of vLLM are only read, by their attributes, so these functions work
on any object that has the same attributes.

A fact that is here without need costs misses. A fact that is missing here would let an engine read the chunk of another
model, and generate wrong tokens. So facts that may matter are included.

The engine's version is such a fact, and an expensive one: with it every upgrade begins with an empty store. It is left
out where the other facts decide the bytes (``order_is_known``). Weights, configuration, dtypes and the implementation
decide the values, but for rounding, which differs between two GPUs as it does between two versions. What a version
could change without a trace in those facts is the order of the bytes in a block. vLLM lays its blocks out as ``[layers,
blocks, heads, tokens, content]`` in an order that has a name (``kv_cache_layout``). For plain attention the content is
K of the head, then V, in each of the attention backends that ``SAME_CONTENT`` names; that was read in vLLM 0.32 and
0.33. On a CPU there is one backend, which orders a block by the CPU's instructions, and these are facts, too. Elsewhere
the version stays: states of Mamba, latent KV, codes of four bits, drafts, and wherever the version chooses the backend,
since ``B12X`` has K of all heads, then V of all heads, under the same name of a layout.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from asynccache.errors import ConfigError
from asynccache.storage import weights_digest

FORMATS = frozenset(
    {"auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "mistral", "gguf",
     "bitsandbytes", "sharded_state"}
)  # fmt: skip
"""The ``load_format``s that read the model's own files, whole."""

GROUP_BYTES = 4
"""The last bytes of a chunk's key, which say the number of its KV cache group."""

IGNORED = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Fields of a model's configuration that only say where it came from, and change nothing that is computed."""

_CHOOSES = re.compile(r"VLLM_(ROCM_|.*(ATTENTION|ATTN|MLA|LAYOUT))")

PLAIN = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number, by the dtypes of a KV cache that has values only, without scales or codes beside them."""

SAME_CONTENT = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})

LONG = ('"longrope"', '"su"', '"dynamic"')
"""Kinds of position encoding that depend on the longest request that the engine accepts."""


def order_is_known(config: Any, engine: Any | None, platform: str) -> bool:
    """Return True if the facts beside the engine's version decide the order of the bytes in a chunk. ``config``: vLLM's
    ``OffloadingConfig``; ``engine``: its ``VllmConfig``; ``platform``: cuda, rocm, cpu or another. What is missing
    counts as not known."""
    if engine is None or config.kv_cache_layout is None or getattr(engine, "speculative_config", True) is not None:
        return False
    model, attention = engine.model_config, getattr(engine, "attention_config", None)
    peculiar = ("use_mla", "is_hybrid", "has_inner_state", "is_attention_free", "is_encoder_decoder")
    if any(getattr(model, name, True) for name in peculiar) or getattr(attention, "backend_per_kind", None):
        return False
    sizes, number = {group.tokens_per_block for group in config.groups}, PLAIN.get(config.model.dtype)
    if len(sizes) != 1 or number is None:
        return False
    # A block that has anything beside K and V, such as an index of them, is larger than this, or smaller.
    token = 2 * model.get_num_kv_heads(engine.parallel_config) * model.get_head_size() * number
    layers = max(len(group.layer_names) for group in config.groups)
    if config.worker_kv_bytes_per_block != layers * sizes.pop() * token:
        return False
    return platform == "cpu" or (platform == "cuda" and _plain(getattr(attention, "backend", None)) in SAME_CONTENT)


def layout_facts(config: Any, canonical_format: str | None) -> dict[str, Any]:
    """The layout of a chunk in memory, according to vLLM's ``OffloadingConfig``. ``canonical_format``: the identity of
    vLLM's canonical layout, which does not depend on how the model is split; None if the layout is another one.

    vLLM also calls some other layouts "parallelism agnostic", but they are not: a chunk has the ranks one after the
    other, each with all of its layers. So with another number of ranks the same place has other bytes.
    """
    groups = [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups]
    parallel = config.parallel
    facts = {
        "cache dtype": config.model.dtype,
        "tokens of a hash": config.cache.tokens_per_hash,
        "blocks of a chunk": config.cache.blocks_per_chunk,
        "groups": groups,
        "layout": config.kv_cache_layout,
        "one copy for all ranks": bool(config.replicated_layout),
    }
    if canonical_format is not None and parallel.is_parallelism_agnostic:
        return {**facts, "canonical format": canonical_format}
    return {
        **facts,
        "canonical format": canonical_format,
        "bytes of a block": config.worker_kv_bytes_per_block,
        "ranks": parallel.world_size,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
    }


def engine_facts(engine: Any) -> dict[str, Any]:
    """The facts of vLLM's ``VllmConfig`` that change the values which the weights compute, or their order in a
    block."""
    model, cache = engine.model_config, engine.cache_config
    config, draft = _plain(_dictionary(getattr(model, "hf_config", None))), getattr(engine, "speculative_config", None)
    facts = {
        "dtype": str(model.dtype),
        "quantization": _plain(getattr(model, "quantization", None)),
        "quantization options": _plain(_dictionary(getattr(model, "quantization_config", None))),
        "implementation": _plain(getattr(model, "model_impl", None)),
        "sliding window": not getattr(model, "disable_sliding_window", False),
        "model configuration": _digest(config),
        "images": _plain(getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)),
        "kv dtype": _plain(getattr(cache, "cache_dtype", None)),
        "kv dtype skips": _plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "mamba dtype": _plain(getattr(cache, "mamba_cache_dtype", None)),
        "mamba state dtype": _plain(getattr(cache, "mamba_ssm_cache_dtype", None)),
        "mamba replay": _plain(getattr(cache, "use_replayssm", None)),
        "hash": _plain(getattr(cache, "prefix_caching_hash_algo", None)),
        "attention": _plain(getattr(getattr(engine, "attention_config", None), "backend", None)),
        "attention of kinds": _plain(getattr(getattr(engine, "attention_config", None), "backend_per_kind", None)),
        "runner": _plain(getattr(engine, "use_v2_model_runner", None)),
        "draft": None if draft is None else [_plain(getattr(draft, name, None)) for name in ("method", "model")],
    }
    if any(kind in json.dumps(config) for kind in LONG):
        facts["longest request"] = model.max_model_len
    return facts


def weights_fact(engine: Any | None, namespace: str | None) -> dict[str, Any]:
    """Return the fact that says which weights computed the chunks: the user's ``namespace`` and the model's name;
    without a namespace, a digest of the weights' files. The files are read once on each machine, which may take
    minutes.

    Raises:
        ConfigError: there is no ``namespace``, and the weights cannot be identified by their files; the message says
            why.
    """
    if namespace is not None:
        return {"namespace": namespace, "model": None if engine is None else str(engine.model_config.model)}
    if engine is None:
        raise _unknown("vLLM's configuration of the model cannot be found")
    if getattr(engine, "lora_config", None) is not None:
        raise _unknown("vLLM's keys name a LoRA adapter by its name and path only, and not by what is in its files")
    model, load = engine.model_config, engine.load_config
    load_format = _plain(load.load_format)
    if load_format not in FORMATS:
        raise _unknown(f"load_format={load_format!r} does not load the files of the model as they are")
    name = str(getattr(model, "model_weights", None) or model.model)
    revision, cache = getattr(model, "revision", None), getattr(load, "download_dir", None)
    try:
        return {"weights": weights_digest(name, revision=revision, cache=cache)}
    except ConfigError as error:
        raise _unknown(str(error)) from error


def environment_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables of the environment by which a user chooses how vLLM computes attention and lays out KV."""
    return {"environment": {name: value for name, value in environment.items() if _CHOOSES.match(name)}}


def version_facts(version: str, attention: Collection[str]) -> dict[str, Any]:
    """Return the facts that stand for all that vLLM decides by itself: its ``version``, and which ``attention``
    libraries are installed, by which it chooses a backend. Their versions follow from its own, which requires them."""
    return {"vllm": version, "attention libraries": sorted(attention)}


def namespace_of(*facts: Mapping[str, Any]) -> str:
    """A text that is equal for two engines if and only if all of their facts are equal."""
    merged: dict[str, Any] = {}
    for some in facts:
        merged.update(some)
    return json.dumps(merged, sort_keys=True, separators=(",", ":"))


def block_named(pool: str, key: bytes) -> int:
    """Return the hash by which vLLM's KV events name the block of a chunk: the lower 64 bits of its hash, of a chunk of
    several blocks the last one's. A key is a hash, and 4 bytes that number the group of layers."""
    return int.from_bytes(key[:-GROUP_BYTES][-8:], "big")


def short(namespace: str) -> str:
    """Eight hexadecimal digits that stand for a namespace in logs."""
    return _digest(namespace)[:8]


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        f"namespace: {why}, so the weights that computed a stored chunk cannot be identified by their files. Name them "
        f"yourself, as in namespace='llama-3.1-8b 2026-11-01', and change the name whenever weights or adapters change"
    )


def _dictionary(config: Any) -> Any:
    make = getattr(config, "to_dict", None)
    return make() if callable(make) else config


def _plain(value: Any) -> Any:
    """``value`` as plain values for JSON, equal in every process. An object whose text has an address in it is
    represented by the name of its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if str(key) not in IGNORED}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(one), sort_keys=True) for one in value)
    if hasattr(value, "value") and hasattr(value, "name"):  # a member of an enumeration
        return str(value.name)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name, None)) for name in value.__dataclass_fields__}
    text = str(value)
    return text if " at 0x" not in text else type(value).__qualname__


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
