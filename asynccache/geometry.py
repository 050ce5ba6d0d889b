"""The components of a model's cache, from the configuration that transformers has of the model. The model is not run,
and neither torch nor transformers is imported."""

from __future__ import annotations

from typing import Any

from asynccache import checks
from asynccache.config import MOST_LAYERS, ROUND, Full, SlidingWindow, kv_bytes, room_in
from asynccache.errors import ConfigError

FULL, WINDOW = "full_attention", "sliding_attention"
ODD = ("kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads", "compress_ratios")
"""Settings of models whose layers do not all keep keys and values of their own, in one size."""

RUN_IT = "asynccache_hf.describe(model) runs the model, and finds what it keeps"


def components_from(
    config: Any, *, device: int | str, host: int | str = 0, dtype: object = None, tp: int = 1
) -> tuple[Full | SlidingWindow, ...]:
    """Return the components of a model whose layers are full attention or sliding windows.

    Args:
        config: transformers' configuration of the model (``AutoConfig.from_pretrained(...)``), or any object with
            ``num_hidden_layers``, ``num_attention_heads`` and ``hidden_size``, and, where they differ from the usual,
            ``num_key_value_heads``, ``head_dim``, ``layer_types`` and ``sliding_window``.
        device: room on the device: tokens, or bytes as text with a unit (``"8GiB"``), which all layers share. A window
            gets room for as many tokens as full attention does.
        host: room in host memory in the same units; 0: there is no host tier.
        dtype: of keys and values, as torch or text name it; None: the configuration's own.
        tp: the tensor parallel ranks, each of which holds its share of the heads.

    Raises:
        ConfigError: the model has layers of another kind (recurrent states, latent or compressed attention), for which
            ``asynccache_hf.describe`` runs the model; or an argument is unusable.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if odd := [name for name in ODD if getattr(text, name, None)]:
        raise ConfigError(f"config: {odd[0]}={getattr(text, odd[0])!r}: {RUN_IT}")
    layers = _count(text, "num_hidden_layers")
    heads = _count(text, "num_attention_heads")
    kv_heads = _count(text, "num_key_value_heads", heads)
    head_dim = _count(text, "head_dim", 0) or _count(text, "hidden_size") // heads
    tp = checks.integer("tp", tp, 1)
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(f"tp={tp}: {kv_heads} heads of keys and values cannot be divided among so many ranks")
    window = getattr(text, "sliding_window", None) or 0
    alike = WINDOW if window and getattr(text, "use_sliding_window", True) else FULL
    kinds = list(getattr(text, "layer_types", None) or [alike] * layers)
    if other := sorted({*kinds} - {FULL, WINDOW}):
        raise ConfigError(f"config: layers of type {', '.join(map(repr, other))}: {RUN_IT}")
    if dtype is None:
        dtype = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None)
    if dtype is None:
        raise ConfigError("dtype: the configuration has none; give the dtype of keys and values")
    shape: dict[str, Any] = {"kv_heads": max(1, kv_heads // tp), "head_dim": head_dim, "dtype": dtype}
    token = kv_bytes(len(kinds), **shape)
    rooms = [room_in(name, room, token, ROUND, "tokens") if isinstance(room, str) else checks.integer(name, room, 0)
             for name, room in (("device", device), ("host", host))]
    full, swa = (tuple(i for i, kind in enumerate(kinds) if kind == one) for one in (FULL, WINDOW))
    if not swa:
        return (Full.attention(layers=len(full), device=rooms[0], host=rooms[1], **shape),)
    window = checks.integer("config: sliding_window", window, 1)
    windows = SlidingWindow.attention(layers=len(swa), covers=swa, window=window, device=rooms[0], host=rooms[1],
                                      **shape)
    if not full:  # slots without bytes: every cache has full attention
        return Full(bytes_per_token=0, device_tokens=rooms[0], host_tokens=rooms[1]), windows
    return Full.attention(layers=len(full), covers=full, device=rooms[0], host=rooms[1], **shape), windows


def _count(config: Any, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None and default is not None:
        return default
    return checks.integer(f"config: {name}", value, 1, MOST_LAYERS)
