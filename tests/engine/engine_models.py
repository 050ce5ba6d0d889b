"""One small model per family, with weights by a seed."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 512
WINDOW = 16

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 2}),
    "gemma3": ("Gemma3TextConfig", {
        "num_hidden_layers": 3, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "falcon_h1": ("FalconH1Config", {
        "num_hidden_layers": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16,
    }),
    "qwen3_next": ("Qwen3NextConfig", {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }),
    "deepseek_v4": ("DeepseekV4Config", {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 32,
        "o_groups": 2, "o_lora_rank": 16, "sliding_window": WINDOW, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 4,
        "num_hash_layers": 1, "hc_mult": 2, "hc_sinkhorn_iters": 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    }),
}  # fmt: skip

_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
           "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip

_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2}),
    "mistral": ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "gpt_oss": ("GptOssConfig", {"num_hidden_layers": 2, "sliding_window": WINDOW, **_LOCAL}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "mamba2": ("Mamba2Config", {
        "num_hidden_layers": 2, "num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8,
    }),
    "deepseek_v32": ("DeepseekV32Config", {
        **_LATENT, **_ROUTED, "num_hidden_layers": 2, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 6,
    }),
    "gemma3n": ("Gemma3nTextConfig", {
        "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4,
    }),
}  # fmt: skip

_SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", {**_SSM, "attn_layer_indices": [1]}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "cohere2": ("Cohere2Config", _MIXED),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, **_ROUTED}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 8}),
    "gemma2": ("Gemma2Config", _MIXED),
    "glm4_moe": ("Glm4MoeConfig", _ROUTED),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**_SSM, **_LOCAL, "layer_types": ["mamba", "attention"]}),
    "jamba": ("JambaConfig", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4,
    }),
    "llama4": ("Llama4TextConfig", {
        "num_hidden_layers": 4, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_local_experts": 4,
    }),
    "llama_dynamic": ("LlamaConfig", {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 96,
    }),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "mimo_v2": ("MiMoV2FlashConfig", {
        **_MIXED, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "v_head_dim": 8,
    }),
    "minimax": ("MiniMaxConfig", {
        "layer_types": ["full_attention", "linear_attention"], "block_size": 8, "num_local_experts": 4,
    }),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "nemotron_h": ("NemotronHConfig", {
        "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 16,
        "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 16,
    }),
    "olmo3": ("Olmo3Config", _MIXED),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA | {"pad_token_id": 0}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "phi3_longrope": ("Phi3Config", {
        "pad_token_id": 0, "original_max_position_embeddings": 96,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 96, "partial_rotary_factor": 1.0,
        },
    }),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "smollm3": ("SmolLM3Config", {"pad_token_id": 0}),
    "zamba2": ("Zamba2Config", {
        "num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4,
        "mamba_d_state": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
    }),
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)
OTHERS = tuple(_OTHERS)
MORE = tuple(_MORE)


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of ``family``: float32, on the CPU, ready to run."""
    kind, settings = (_FAMILIES | _OTHERS | _MORE)[family]
    small = _SMALL if family not in _MORE else _SMALL | {"num_hidden_layers": 2}
    config = getattr(transformers, kind)(**small | settings | changes)
    torch.manual_seed(seed)
    if family in _MORE:
        return even(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def even(model: Any) -> Any:
    """The same, with matrices that neither swell nor shrink what goes through them: with the weights that some
    families begin training with, every layer's share of the output would be lost in rounding."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "A_log" not in name and "conv" not in name:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return model
