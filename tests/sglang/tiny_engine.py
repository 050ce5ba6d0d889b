"""SGLang's own ``UnifiedRadixCache`` and ``HybridCacheController`` over small pools on the CPU, and a model that writes
bytes which say what they are. The stand-ins must be installed before this is imported.

``Tiny.serve`` is a request: its prefix is looked for in L1, L2 and L3, what is found is brought to the device, the rest
is computed, and all is published. It returns how many tokens were found, after every byte of them was compared.
"""

from __future__ import annotations

import json
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, reset_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.sglang import standins

PAGE = 4
TOKENS = 64
WINDOW = 2 * PAGE
PATIENCE = 300.0
"""A machine's first prefetch compiles SGLang's hashes from C++, which takes a minute of a busy one."""
POISON = 0xAB
DTYPE = torch.bfloat16

Rows = Callable[[torch.Tensor], torch.Tensor]


class Part:
    """Buffers of one pool. ``rows``: device indices to rows. ``window``: how many of the last tokens must be right."""

    def __init__(self, name: str, buffers: Sequence[torch.Tensor], rows: Rows, window: int = TOKENS) -> None:
        self.name = name
        self.buffers = [buffer.view(torch.uint8).reshape(buffer.shape[0], -1) for buffer in buffers]
        self.rows = rows
        self.window = window

    def write(self, tokens: Sequence[int], indices: torch.Tensor, start: int) -> None:
        for number, buffer in enumerate(self.buffers):
            buffer[self.rows(indices[start:])] = self._content(tokens, number)[start:]

    def wrong(self, tokens: Sequence[int], indices: torch.Tensor) -> list[str]:
        """The buffers that do not have what was written for these tokens."""
        start = max(0, len(indices) - self.window)
        rows = self.rows(indices[start:])
        return [
            f"{self.name}.{number}" for number, buffer in enumerate(self.buffers)
            if not torch.equal(buffer[rows], self._content(tokens[: len(indices)], number)[start:])
        ]  # fmt: skip

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(POISON)

    def _content(self, tokens: Sequence[int], number: int) -> torch.Tensor:
        """A row of bytes for each token, by all tokens up to the end of its page."""
        width = self.buffers[number].shape[1]
        pages = [
            torch.randint(0, 256, (PAGE, width), dtype=torch.uint8, generator=_seeded(self.name, number, tokens[:end]))
            for end in range(PAGE, len(tokens) + 1, PAGE)
        ]
        return torch.cat(pages)


class States:
    """Recurrent states: a slot for a checkpoint."""

    def __init__(self, pool: Any) -> None:
        state = pool.mamba_cache
        self.buffers = [*state.conv, state.temporal]

    def write(self, tokens: Sequence[int], slot: int) -> None:
        for number, buffer in enumerate(self.buffers):
            buffer[:, slot] = self._content(tokens, number)

    def found(self, tokens: Sequence[int]) -> bool:
        """Whether any slot has the state after these tokens."""
        content = [self._content(tokens, number) for number in range(len(self.buffers))]
        return any(
            all(torch.equal(buffer[:, slot], made) for buffer, made in zip(self.buffers, content, strict=True))
            for slot in range(self.buffers[0].shape[1])
        )

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(-1.0)

    def _content(self, tokens: Sequence[int], number: int) -> torch.Tensor:
        shape = self.buffers[number][:, 0].shape
        made = torch.randint(-999, 999, shape, generator=_seeded("state", number, tokens))
        return made.to(self.buffers[number].dtype)


class Tiny:
    """``kind``: full, mla, swa, mamba. ``layout``: of the host pools. ``extra``: the storage backend's options. ``tp``:
    the rank and size of a tensor parallel group of which the others are not there."""

    def __init__(
        self, kind: str, layout: str, extra: dict[str, Any], backend: str = "dynamic", tp: tuple[int, int] = (0, 1)
    ) -> None:
        standins.install_kernels()
        reset_context()
        self.place = get_parallel().override(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_dcp_size=1,
            attn_dcp_rank=0, dcp_enabled=False, attn_tp_rank=tp[0], attn_tp_size=tp[1], attn_dp_rank=0,
        )  # fmt: skip
        self.place.__enter__()
        named = {"backend_name": "asynccache", "module_path": "asynccache_sglang.storage",
                 "class_name": "AsyncCacheStorage", "interface_v1": 1}  # fmt: skip
        config = {"prefetch_threshold": PAGE} | (named if backend == "dynamic" else {}) | extra
        self.args = ServerArgs(
            model_path=extra.get("model", "dummy"), device="cpu", page_size=PAGE, hicache_ratio=2.0,
            hicache_io_backend="direct", hicache_mem_layout=layout, hicache_write_policy="write_through",
            hicache_storage_backend=backend, hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(config),
        )  # fmt: skip
        self.args._mamba_cache_chunk_size = PAGE
        set_global_server_args_for_scheduler(self.args)
        self.states: States | None = None
        self.parts: list[Part] = []
        components, allocator, requests = getattr(self, f"_{kind}")()
        self.allocator = allocator
        self.requests = requests
        params = CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=PAGE,
            tree_components=components, sliding_window_size=WINDOW if ComponentType.SWA in components else None,
            enable_mamba_extra_buffer=ComponentType.MAMBA in components,
        )  # fmt: skip
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(self.args, params)
        self.cache.load_back_threshold = 0
        self.controller = self.cache.cache_controller
        self.served = 0

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    # kinds of models

    def _full(self) -> tuple[Any, Any, Any]:
        pool = MHATokenToKVPool(
            size=TOKENS, page_size=PAGE, dtype=DTYPE, head_num=2, head_dim=8, layer_num=3, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.parts = [Part("kv", [*pool.k_buffer, *pool.v_buffer], lambda indices: indices)]
        return (ComponentType.FULL,), _allocator(pool), _requests()

    def _mla(self) -> tuple[Any, Any, Any]:
        pool = MLATokenToKVPool(
            size=TOKENS, page_size=PAGE, dtype=DTYPE, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=3, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.parts = [Part("kv", pool.kv_buffer, lambda indices: indices)]
        return (ComponentType.FULL,), _allocator(pool), _requests()

    def _swa(self) -> tuple[Any, Any, Any]:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = SWAKVPool(
            size=TOKENS, size_swa=TOKENS, page_size=PAGE, dtype=DTYPE, head_num=2, head_dim=8,
            swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1], device="cpu", swa_head_num=1,
        )  # fmt: skip
        allocator = SWATokenToKVPoolAllocator(
            size=TOKENS, size_swa=TOKENS, page_size=PAGE, dtype=DTYPE, device="cpu", kvcache=pool, need_sort=False
        )
        full, swa = pool.full_kv_pool, pool.swa_kv_pool
        self.parts = [
            Part("kv", [*full.k_buffer, *full.v_buffer], lambda indices: indices),
            Part("swa", [*swa.k_buffer, *swa.v_buffer], allocator.translate_loc_from_full_to_swa, WINDOW),
        ]
        return (ComponentType.FULL, ComponentType.SWA), allocator, _requests()

    def _mamba(self) -> tuple[Any, Any, Any]:
        shape = SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 8), disable_conv_window_dedup=False)
        dtype = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
        cache_params = SimpleNamespace(shape=shape, dtype=dtype, layers=[0, 2])
        requests = HybridReqToTokenPool(
            size=4, mamba_size=8, mamba_spec_state_size=4, max_context_len=TOKENS, device="cpu",
            enable_memory_saver=False, cache_params=cache_params, mamba_layer_ids=[0, 2],
            enable_mamba_extra_buffer=True, enable_overlap_schedule=False,
        )  # fmt: skip
        pool = HybridLinearKVPool(
            size=TOKENS, dtype=DTYPE, page_size=PAGE, head_num=2, head_dim=8, full_attention_layer_ids=[1, 3],
            device="cpu", mamba_pool=requests.mamba_pool,
        )  # fmt: skip
        full = pool.full_kv_pool
        self.parts = [Part("kv", [*full.k_buffer, *full.v_buffer], lambda indices: indices)]
        self.states = States(requests.mamba_pool)
        return (ComponentType.FULL, ComponentType.MAMBA), _allocator(pool), requests

    # requests

    def serve(self, tokens: Sequence[int]) -> int:
        """Serve a request of whole pages; how many of its tokens were found, and were right."""
        self.served += 1
        before = self._match(tokens)
        have = before.device_prefix_len + before.host_hit_length
        if have < len(tokens):
            self._prefetch(tokens, have, before.last_host_node)
        found = self._load(tokens)
        indices = self._indices(tokens)[:found]
        wrong = [name for part in self.parts for name in part.wrong(tokens, indices)] if found else []
        assert not wrong, f"{found} of {len(tokens)} tokens were found, with wrong bytes in {wrong}"
        if found and self.states is not None:
            assert self.states.found(tokens[:found]), f"no slot has the state after {found} tokens"
        if found < len(tokens):
            self._compute(tokens, indices)
        return found

    def forget(self) -> None:
        """Empty L1 and L2, and poison the device's memory."""
        self.drain()
        self.cache.reset()
        self.allocator.clear()
        self.requests.clear()
        self.poison()

    def to_host(self) -> None:
        """Empty L1, to which L2 has copies of everything, and poison the device's memory."""
        self.drain()
        self.cache.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20, mamba_num=1 << 20))
        self.poison()

    def poison(self) -> None:
        for part in self.parts:
            part.poison()
        if self.states is not None:
            self.states.poison()

    def drain(self) -> None:
        """Return when everything that was published has gone to L2 and, as far as it can, to L3."""
        self._until(lambda: not (self.cache.ongoing_write_through or self.cache.ongoing_backup))

    def _until(self, ended: Callable[[], bool]) -> None:
        """Handle the controller's events until ``ended()``."""
        end = time.monotonic() + PATIENCE
        self.cache.check_hicache_events()
        while not ended():
            assert time.monotonic() < end, "a backup or a prefetch does not end"
            time.sleep(0.002)
            self.cache.check_hicache_events()

    def close(self) -> None:
        self.cache.shutdown()

    def _prefetch(self, tokens: Sequence[int], have: int, node: Any) -> None:
        handle = CacheRequestHandle(f"request {self.served}", 0)
        last_hash = None if self.cache.is_root(node) else self.cache.get_last_hash_value(node)
        self.cache.prefetch_from_storage(
            handle, node, array("q", tokens[have:]), last_hash, matched_prefix_tokens=array("q", tokens[:have])
        )
        self._until(lambda: self.cache.check_prefetch_progress(handle))

    def _load(self, tokens: Sequence[int]) -> int:
        match = self._match(tokens)
        if match.host_hit_length or match.swa_host_hit_length or match.mamba_host_hit_length:
            assert self.cache.load_back(match.best_match_node), "no room on the device"
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()
            match = self._match(tokens)
            assert not match.host_hit_length
        return int(match.device_prefix_len)

    def _compute(self, tokens: Sequence[int], found: torch.Tensor) -> None:
        own = self._allocated(len(tokens) - len(found))
        indices = torch.cat([found, own])
        for part in self.parts:
            part.write(tokens, indices, len(found))
        state = None
        if self.states is not None:
            state = self.requests.mamba_allocator.alloc(1)
            self.states.write(tokens, int(state[0]))
        self.cache.insert(InsertParams(key=_key(tokens), value=indices, mamba_value=state, prev_prefix_len=len(found)))

    def _allocated(self, count: int) -> torch.Tensor:
        allocator = self.allocator
        if not hasattr(allocator, "swa_attn_allocator"):
            full: torch.Tensor | None = allocator.alloc(count)
        else:  # as its own alloc_extend does it, by a kernel
            full, swa = allocator.full_attn_allocator.alloc(count), allocator.swa_attn_allocator.alloc(count)
            allocator.set_full_to_swa_mapping(full, swa)
        assert full is not None, "the device is full"
        return full

    def _match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))

    def _indices(self, tokens: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.cache.path_device_indices(self._match(tokens).last_device_node)
        return found


def _key(tokens: Sequence[int]) -> Any:
    return RadixKey(array("q", tokens))


def _seeded(name: str, number: int, tokens: Sequence[int]) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {number} {list(tokens)}".encode()))


def _allocator(pool: Any) -> Any:
    return PagedTokenToKVPoolAllocator(
        size=TOKENS, page_size=PAGE, dtype=DTYPE, device="cpu", kvcache=pool, need_sort=False
    )


def _requests() -> Any:
    return ReqToTokenPool(size=4, max_context_len=TOKENS, device="cpu", enable_memory_saver=False)
