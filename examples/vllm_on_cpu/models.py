"""Small models with random weights in a folder that vLLM can load: no download, no tokenizer.

Their answers mean nothing, but they depend on every token of the prompt, as those of a real model do. For that the
weights are scaled so that every layer has a similar influence. With weights as they are usually initialized the next
token hardly depends on the prompt, and wrong KV would go unnoticed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

GAINS = {"q_proj": 3.0, "o_proj": 3.0, "lm_head": 2.0}
"""Weights that are stronger than unit gain: attention's scores, so that tokens differ in influence; attention's output;
and the logits."""

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 16384, "tie_word_embeddings": False,
}  # fmt: skip


def llama(folder: str | os.PathLike[str], *, seed: int = 0, **sizes: int) -> Path:
    """Write a small Llama to ``folder``, and return the folder. ``sizes``: fields of ``LlamaConfig``; ``seed``: that of
    the weights."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 4} | sizes)
    return _write(LlamaForCausalLM(config), Path(folder), seed)


def gemma3(folder: str | os.PathLike[str], *, seed: int = 0, window: int = 64, **sizes: int) -> Path:
    """Write a small Gemma 3 to ``folder``, and return the folder. Four layers see ``window`` tokens and two see all, so
    vLLM keeps three groups of KV."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    fixed = {"sliding_window": window, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    config = Gemma3TextConfig(**SIZES | sizes | fixed)
    return _write(Gemma3ForCausalLM(config), Path(folder), seed)


def _write(model: PreTrainedModel, folder: Path, seed: int) -> Path:
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            gain = GAINS.get(name.split(".")[-2], 1.0)
            scale = 1.0 if "embed_tokens" in name else gain / weight.shape[1] ** 0.5
            weight.data.normal_(std=scale, generator=rng)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = model.config.bos_token_id = model.config.pad_token_id = None
    model.save_pretrained(folder)
    return folder
