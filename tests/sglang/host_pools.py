"""Host pools of SGLang's own classes without a device, and configurations of the storage backend. The stand-ins must be
installed before this is imported."""

from __future__ import annotations

from typing import Any

import torch
from asynccache_sglang.storage import AsyncCacheStorage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 4
PAGES = 12
LAYERS = 3


def mha(layout: str = "page_first", seed: int = 1) -> Any:
    """K and V of 12 pages of 4 tokens."""
    made = object.__new__(MHATokenToKVPoolHost)
    made.head_num, made.head_dim, made.v_head_dim = 2, 8, 8
    shapes = {
        "layer_first": (2, LAYERS, PAGES * PAGE, 2, 8), "page_first": (2, PAGES * PAGE, LAYERS, 2, 8),
        "page_first_direct": (2, PAGES, LAYERS, PAGE, 2, 8), "page_head": (2, PAGES, 2, PAGE, LAYERS, 8),
    }  # fmt: skip
    return _filled(made, layout, shapes[layout], seed, 2 * 2 * 8)


def mla(layout: str = "page_first", seed: int = 2) -> Any:
    """Latent rows of 12 pages of 4 tokens."""
    made = object.__new__(MLATokenToKVPoolHost)
    made.kv_cache_dim = 16
    shapes = {
        "layer_first": (LAYERS, PAGES * PAGE, 1, 16), "page_first": (PAGES * PAGE, LAYERS, 1, 16),
        "page_first_direct": (PAGES, LAYERS, PAGE, 1, 16),
    }  # fmt: skip
    return _filled(made, layout, shapes[layout], seed, 16)


def compressed(layout: str = "page_first", seed: int = 3) -> Any:
    """DeepSeek-V4's compressed KV: 12 pages of 4 tokens, 40 bytes a layer."""
    rows = [torch.zeros(PAGES, 40, dtype=torch.uint8) for _ in range(LAYERS)]
    made = DeepSeekV4PagedHostPool("c4", rows, 40, PAGES, PAGE, layout=layout, pin_memory=False)
    return _random(made, seed)


def states(layout: str = "page_first", seed: int = 4) -> Any:
    """DeepSeek-V4's states of the compressor: 12 pages of 4 tokens."""
    made = object.__new__(DeepSeekV4StateHostPool)
    made.layout, made.dtype, made.layer_num = layout, torch.uint8, LAYERS
    made.page_size = made.swa_page_size = PAGE
    made.size, made.state_page_bytes, made.size_per_token, made.device = PAGES * PAGE, 24, 24, "cpu"
    made.pin_memory = False
    made.kv_buffer = {
        "layer_first": [torch.zeros(PAGES, 24, dtype=torch.uint8) for _ in range(LAYERS)],
        "page_first": torch.zeros(PAGES, LAYERS, 24, dtype=torch.uint8),
        "page_first_direct": torch.zeros(PAGES, LAYERS, 1, 24, dtype=torch.uint8),
    }[layout]
    return _random(made, seed)


def _random(made: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for tensor in made.kv_buffer if isinstance(made.kv_buffer, list) else [made.kv_buffer]:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
    return made


def anchor() -> Any:
    """The pool without bytes that stands for FULL in DeepSeek-V4's stack."""
    return LogicalHostPool(PAGES * PAGE, PAGE)


def _filled(made: Any, layout: str, shape: tuple[int, ...], seed: int, width: int) -> Any:
    made.layout, made.dtype, made.layer_num, made.page_size = layout, torch.bfloat16, LAYERS, PAGE
    made.device, made.pin_memory, made.dcp_size = "cpu", False, 1
    made.page_num, made.size, made.size_per_token = PAGES, PAGES * PAGE, width * LAYERS * 2
    generator = torch.Generator().manual_seed(seed)
    made.kv_buffer = torch.randint(0, 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
    return made


def flat(pool: Any, page: int) -> torch.Tensor:
    """The bytes of a page, as SGLang itself copies it."""
    copied: torch.Tensor = pool.get_data_page(page * PAGE, flat=True).view(torch.uint8).clone()
    return copied


def scramble(pool: Any) -> None:
    for tensor in pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]:
        tensor.view(torch.uint8).fill_(0xAA)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def config(extra: dict[str, Any], **changed: Any) -> HiCacheStorageConfig:
    given: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "model",
        "extra_config": {"interface_v1": 1, "namespace": "w1"} | extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**(given | changed))


def opened(pools: dict[str, Any], extra: dict[str, Any], **changed: Any) -> AsyncCacheStorage:
    """A backend that knows these pools; ``kv`` is the first."""
    made = AsyncCacheStorage(config(extra, **changed), {})
    made.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made
