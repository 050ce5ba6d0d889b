"""The identity of pages: everything that must be equal for a stored page to be usable, and that is not in SGLang's
keys.

SGLang's keys are hashes of tokens (and of what it calls ``extra_key`` and ``cache_salt``). They say nothing of the
model, its weights, the dtype, the layout or the ranks. The namespace has those facts that all pools of a process share.
A suffix of every key has the facts of its pool.

SGLang's version is among a pool's facts only where the others do not decide the order of its bytes. A version changes
values by rounding, as another GPU does; but it could change the order of a page unseen. For K and V in rows of heads
(``MHATokenToKVPoolHost``), and for latent rows (``MLATokenToKVPoolHost``), the host pool's layout has a name, and its
parts have their sizes in the key. Recurrent states, indexers, compressed KV, packed formats and pools of drafts are the
business of the version that wrote them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from asynccache.errors import ConfigError
from asynccache.storage import weights_digest
from asynccache_sglang.options import SglangOptions

SUFFIX_BYTES = 16
NAMED_POOL = "kv"
"""The pool whose pages routers are told of; SGLang's ``PoolName.KV``."""

FORMATS = frozenset(
    {"auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "presharded", "gguf", "bitsandbytes",
     "mistral", "layered", "fastsafetensors"}
)  # fmt: skip
"""The ``--load-format``s that read the model's own files."""


class ServerOptions(NamedTuple):
    """The server's options that its pages depend on. ``sglang``: its version. ``lora``: whether it may have adapters.
    ``device``: the device's kind and capability, which decide the format of fp8. All other fields have the names of
    SGLang's ``ServerArgs``; None: not known."""

    sglang: str
    lora: bool = False
    device: str | None = None
    model_path: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    quantization_param_path: str | None = None
    kv_cache_dtype: str | None = None
    model_impl: str | None = None
    json_model_override_args: str | None = None


PLAIN = frozenset({None, "auto", "float16", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2"})
"""The ``kv_cache_dtype``s that are plain numbers, without codes or scales beside them."""

COMPUTED_WITH = ("device", "dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "model_impl",
                 "json_model_override_args")  # fmt: skip
"""The fields of ``ServerOptions`` that change the values which the same weights compute."""


class PageMake(NamedTuple):
    """The make of a pool's pages. ``dtypes``: the names of all dtypes in it. ``parts``: the bytes of each of its parts,
    in their order. ``sharded``: each rank of a tensor parallel group has pages of its own. ``sglang``: the version, if
    the order of the bytes depends on it; else None."""

    layout: str
    dtypes: tuple[str, ...]
    page_size: int
    parts: tuple[int, ...]
    sharded: bool
    sglang: str | None = None


def weights(options: SglangOptions, server: ServerOptions) -> str:
    """A text that stands for the weights: the user's namespace, or a digest of the weights' files. Blocks while it
    reads the files.

    Raises:
        ConfigError: there is no namespace, and the weights cannot be identified by their files.
    """
    if options.namespace is not None:
        return f"namespace {options.namespace}"
    model = options.model or server.model_path
    why = ""
    if model is None:
        why = "the server's model path is not known"
    elif server.load_format not in {None, *FORMATS} and options.model is None:
        why = f"the server runs with --load-format {server.load_format}, which does not load the model's own files"
    elif server.lora:
        why = "SGLang's keys name a LoRA adapter by its name and path only, and not by what is in its files"
    else:
        try:
            hub = (server.revision, server.download_dir) if options.model is None else (None, server.download_dir)
            return f"digest {weights_digest(model, revision=hub[0], cache=hub[1])}"
        except ConfigError as error:
            why = str(error)
    raise ConfigError(
        f'the weights that computed a stored page cannot be identified: {why}. Set "model" in the extra config to the '
        f'folder of the weights, or "namespace" to a text that you change whenever the weights change'
    )


def order_is_known(host_pool: Any, kv_cache_dtype: str | None) -> bool:
    """Return True if its layout, sizes and dtypes decide the order of bytes in the pages of one of SGLang's host pools.
    What a pool does not say about itself counts as not known."""
    if kv_cache_dtype not in PLAIN or getattr(host_pool, "storage_format_tag", "") is not None:
        return False
    kind = type(host_pool).__name__
    if kind == "MHATokenToKVPoolHost":
        infos: Sequence[Any] = getattr(host_pool, "_buffer_infos", ())
        return len(infos) == 1 and infos[0].scales is None and getattr(host_pool, "head_group_num", 0) == 1 and (
            rows_of(host_pool) == "nhd")  # fmt: skip
    if kind == "MLATokenToKVPoolHost":
        width = getattr(host_pool, "kv_lora_rank", 0) + getattr(host_pool, "qk_rope_head_dim", 0)
        return (
            getattr(host_pool, "dsa_kv_cache_store_fp8", True) is False
            and getattr(host_pool, "kv_cache_dim", None) == width
            and getattr(host_pool, "layer_num", 0) == getattr(host_pool, "target_layer_num", None)
        )
    return False


def rows_of(host_pool: Any) -> str | None:
    """The order of K and V on the device, which a pool's pages keep; None if the pool does not say."""
    infos = getattr(host_pool, "_buffer_infos", None)
    return str(infos[0].buffers.layout.value) if infos else None


def namespace(weights: str, model_name: str | None, server: ServerOptions, shard: Any) -> str:
    """The namespace of all pages of this process, as readable text. ``shard``: SGLang's ``HiCacheStorageConfig``, which
    says what part of the model's KV the process has."""
    return json.dumps({
        "engine": "sglang", "weights": weights, "model": model_name,
        "computed with": {name: getattr(server, name) for name in COMPUTED_WITH},
        "pp": [shard.pp_rank, shard.pp_size], "cp": [shard.attn_cp_rank, shard.attn_cp_size],
        "dcp": [shard.dcp_rank, shard.dcp_size], "replicated": shard.is_mla_model,
    }, sort_keys=True)  # fmt: skip


def suffix(kind: PageMake, shard: Any) -> bytes:
    """The suffix of every key of a pool: ``SUFFIX_BYTES`` bytes. ``shard`` as for ``namespace``."""
    tp = [shard.tp_rank, shard.tp_size] if kind.sharded else None
    facts = json.dumps([kind.layout, kind.dtypes, kind.page_size, kind.parts, tp, kind.sglang])
    return hashlib.sha256(facts.encode()).digest()[:SUFFIX_BYTES]


def page_keys(keys: Sequence[str], behind: bytes) -> list[bytes]:
    """The stores' keys for SGLang's ``keys``, each with the suffix ``behind``."""
    return [key.encode() + behind for key in keys]


def block_named(pool: str, key: bytes) -> int | None:
    """Return the hash by which SGLang's KV events name the block of a page of KV: the first 64 bits of its hash, as a
    signed number. None: a page of another pool, or a key that is no hash."""
    if pool != NAMED_POOL:
        return None
    try:
        return int.from_bytes(bytes.fromhex(key[:16].decode()), "big", signed=True)
    except ValueError:
        return None
