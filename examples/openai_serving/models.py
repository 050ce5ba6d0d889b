"""The models that can be served: a checkpoint with its tokenizer, or a small random one.

A random model has the architecture of one of a few families of transformers, and weights drawn from a seed. Nothing is
downloaded, and its answers make no sense.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asynccache import ConfigError
from openai_serving.text import VOCABULARY, ByteWords
from openai_serving.words import CheckpointWords, Words

transformers.logging.set_verbosity_error()  # or it would warn of optional kernels that are not installed
transformers.logging.disable_progress_bar()

CONTEXT = 32768
WINDOW = 256

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.1,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 4}),
    "gemma3": ("Gemma3TextConfig", {
        "num_hidden_layers": 4, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }),
    "falcon_h1": ("FalconH1Config", {
        "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16,
    }),
    "qwen3_next": ("Qwen3NextConfig", {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    "deepseek_v4": ("DeepseekV4Config", {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2,
        "o_lora_rank": 16, "sliding_window": WINDOW, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
        "num_hash_layers": 1, "hc_mult": 2, "hc_sinkhorn_iters": 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    }),
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)


def make(family: str, seed: int = 0) -> Any:
    """A model of ``family``: float32, on the CPU, ready to run. The same seed makes the same weights."""
    kind, settings = _FAMILIES[family]
    config = getattr(transformers, kind)(**_SHARED | settings)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


class ServedModel(NamedTuple):
    """A model, its tokenizer, and the number of positions that the model has."""

    model: Any
    words: Words
    context: int


def random(family: str, seed: int = 0) -> ServedModel:
    """A random model of ``family``, whose tokens are bytes."""
    return ServedModel(make(family, seed), ByteWords(), CONTEXT)


def checkpoint(place: str, *, dtype: str = "auto", device: str = "cpu", revision: str | None = None) -> ServedModel:
    """The checkpoint in the folder ``place``, or on the hub under that name: weights, tokenizer and chat template. Its
    settings of sampling are not used, because each request has its own.

    Raises:
        ConfigError: the checkpoint cannot be read, or is no causal language model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision)
        model = AutoModelForCausalLM.from_pretrained(place, revision=revision, dtype=dtype).to(device).eval()
    except Exception as error:  # damaged files make the libraries raise errors of many kinds
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"--model={place}: {type(error).__name__}: {line}") from error
    ends = _ends(model.generation_config.eos_token_id) or _ends(tokenizer.eos_token_id)
    pad = next((token for token in (tokenizer.pad_token_id, *sorted(ends)) if token is not None), None)
    model.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=pad)
    text = model.config.get_text_config(decoder=True)
    words = CheckpointWords(tokenizer, int(text.vocab_size), ends)
    words.encode("The first call changes the tokenizer's settings, so it is made here.")
    return ServedModel(model, words, int(getattr(text, "max_position_embeddings", 0) or CONTEXT))


def _ends(given: Any) -> frozenset[int]:
    """The end tokens in ``given``, which is one token, several tokens or None."""
    if given is None:
        return frozenset()
    return frozenset(given) if isinstance(given, (list, tuple)) else frozenset((int(given),))
