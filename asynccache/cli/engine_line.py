"""``asynccache config vllm|sglang``: prints what an engine's command line needs, so that nobody writes it by hand.

    vllm serve MODEL --kv-transfer-config "$(asynccache config vllm --storage file:/var/kv --host 32GiB)"
    python -m sglang.launch_server --model-path MODEL $(asynccache config sglang --storage redis://kv --host 32GiB)

What can be known here is checked: the stores' URLs, sizes, the length of a block. What cannot is assumed, and each
assumption is a line on standard error. Imports neither an engine nor torch, so it can be run elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.redaction import redacted

HOST = 16 << 30
BLOCK = 16
"""vLLM's default block, in tokens. It stores whole multiples of its block."""
PAGE = 64
RANKS = {"vllm": ("dp_rank",), "sglang": ("tp_rank", "pp_rank", "dp_rank", "cp_rank")}
"""What may stand in braces in a store's URL, for a store that each rank has for itself."""
PAGE_BYTES = 1 << 20
_BRACES = re.compile(r"\{(\w*)\}")
_PATTERNS = re.compile(r"[^\x21-\x7e]|[*?\[\]]")


class EngineLine(NamedTuple):
    """The line to print, and the assumptions that it rests on, as sentences without a full stop."""

    text: str
    assumed: list[str]


def engine_line(engine: str, storage: Sequence[str], host: int | None, namespace: str | None, block: int | None,
                compatible_with: str | None = None) -> EngineLine:  # fmt: skip
    """Return the line for ``engine``, vllm or sglang. ``storage``: the stores' URLs, the nearest first; ``host``: bytes
    of host memory, None: a default; ``namespace``: what stands for the weights; ``block``: tokens in a page of the
    stores, None: a default; ``compatible_with``: the engine's version in keys, None: its own.

    Raises:
        ConfigError: there is no store, a URL cannot be used, or a size or a version cannot be.
    """
    assumed = _check_storage(engine, storage)
    if host is not None and host < 1 << 30:
        raise ConfigError(f"--host={host}: host memory of less than 1GiB holds too little; write for example 32GiB")
    entry: dict[str, Any] = {"storage": storage[0] if len(storage) == 1 else list(storage)}
    if namespace == "":
        raise ConfigError("--namespace= is empty: it must stand for the weights")
    if namespace is not None:
        entry["namespace"] = namespace
        assumed.append(f"whenever weights or adapters change, the namespace {namespace!r} will change, too")
    else:
        assumed.append("weights are files on the server's machine, and their digest is the namespace; with LoRA, dummy "
                       "or streamed weights give --namespace")  # fmt: skip
    if compatible_with is not None:
        entry["compatible_with"] = checks.version("--compatible-with", compatible_with)
        assumed.append(f"this {engine} stores the same bytes as {engine} {compatible_with}; asynccache verify-engine "
                       f"finds out")  # fmt: skip
    elif engine == "vllm":
        assumed.append("an upgrade of vLLM begins with an empty store, unless vLLM is given --attention-backend, or "
                       "this --compatible-with")  # fmt: skip
    return _vllm(entry, host, block, assumed) if engine == "vllm" else _sglang(entry, host, block, assumed)


def placed_storage(engine: str, storage: Sequence[str]) -> list[str]:
    """The URLs as the engine's first rank has them, checked.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for url in storage:
        if unknown := next((name for name in _BRACES.findall(url) if name not in RANKS[engine]), None):
            known = ", ".join(f"{{{name}}}" for name in RANKS[engine])
            raise ConfigError(f"--storage={redacted(url)}: {{{unknown}}} means nothing under {engine}, which knows "
                              f"{known}")  # fmt: skip
        if url.partition(":")[0] == "none":
            raise ConfigError("--storage=none is no store")
    placed = [_BRACES.sub("0", url) for url in storage]
    from asynccache.storage import RECORD_SCHEMA, StoreLayout, check_stores  # here: the rest of config needs no store

    for error in check_stores(placed, StoreLayout({"kv": PAGE_BYTES}, RECORD_SCHEMA)):
        raise error
    return placed


def _check_storage(engine: str, storage: Sequence[str]) -> list[str]:
    """Check the URLs; returns what is assumed about them."""
    if not storage:
        raise ConfigError(f"config {engine} needs --storage URL, as in file:/var/kv?capacity=500GiB")
    placed_storage(engine, storage)
    assumed = []
    for url in storage:
        scheme = url.partition(":")[0]
        if scheme == "file" and not _BRACES.search(url):
            assumed.append(f"one {'engine' if engine == 'vllm' else 'rank'} uses {redacted(url)}, which belongs to one "
                           f"process; for several, put {{{RANKS[engine][0]}}} into the path")  # fmt: skip
        if "{tp_rank}" in url:
            assumed.append("each rank has K and V of its own; the pages of MLA are the same on all, and need a store "
                           "that all ranks share")  # fmt: skip
        if scheme == "file" and "capacity=" not in url:
            assumed.append(f"{redacted(url)} may take the file store's default, 10GiB; ?capacity=500GiB says otherwise")
        if scheme == "memory":
            assumed.append(f"{url} may end with the engine's process: it is for trying things out")
        if redacted(url) != url:
            assumed.append(f"who may see the server's arguments may see the secret in {redacted(url)}")
    return assumed


def _vllm(entry: dict[str, Any], host: int | None, block: int | None, assumed: list[str]) -> EngineLine:
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": HOST if host is None else host}
    if block is not None:
        if block % BLOCK:
            raise ConfigError(f"--block-size={block}: vLLM stores whole multiples of its block, which has {BLOCK} "
                              f"tokens or a multiple of them")  # fmt: skip
        extra["block_size"] = block
        assumed.append(f"vLLM's own --block-size divides {block}")
    if host is None:
        assumed.append(f"{HOST >> 30}GiB of host memory for all ranks of a replica; --host says otherwise")
    extra["secondary_tiers"] = [{"type": "asynccache", **entry}]
    made = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return EngineLine(json.dumps(made), assumed)


def _sglang(entry: dict[str, Any], host: int | None, block: int | None, assumed: list[str]) -> EngineLine:
    """The flags of SGLang's server, to be put on its command line without quotes: no text in them has a blank, or what
    a shell would take for a pattern of file names."""
    plugin = {"backend_name": "asynccache", "module_path": "asynccache_sglang.storage",
              "class_name": "AsyncCacheStorage", "interface_v1": 1}  # fmt: skip
    flags = ["--page-size", str(block or PAGE), "--enable-hierarchical-cache", "--hicache-mem-layout", "page_first",
             "--hicache-write-policy", "write_through"]  # fmt: skip
    if block is None:
        assumed.append(f"pages of {PAGE} tokens; --block-size says otherwise")
    if host is None:
        assumed.append("SGLang's own size of host memory, twice the device's; --host says otherwise")
    else:
        flags += ["--hicache-size", str(host // 10**9)]
        assumed.append(f"{host // 10**9} gigabytes (of 10^9 bytes, as SGLang counts) of host memory for each rank")
    flags += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", _quoted(plugin | entry)]
    return EngineLine(" ".join(flags), assumed)


def _quoted(value: Any) -> str:
    """``value`` as JSON, with a ``\\u`` for each character in a text that a shell would not leave alone."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(name)}:{_quoted(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_quoted, value)) + "]"
    text = json.dumps(value)
    return _PATTERNS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) if isinstance(value, str) else text
