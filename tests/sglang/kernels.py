"""SGLang's copy kernels on the CPU: rows of device pools to host pools and back. Nothing else is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Indices = torch.Tensor


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: Indices, dst_indices: Indices, page_size: int
) -> None:
    """Rows of each layer to rows of the same layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Indices, dst_indices: Indices, page_size: int
) -> None:
    """Rows of each layer to pages that have all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for at in range(0, len(src_indices), page_size):
        rows, page = src_indices[at : at + page_size], int(dst_indices[at]) // page_size
        for number, src in enumerate(src_ptrs):
            where = dst_ptrs[number // layers][page, number % layers]
            where.copy_(src[rows].reshape(where.shape))


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Indices, dst_indices: Indices, layer_id: int, page_size: int
) -> None:
    """One layer of pages to rows of that layer."""
    for at in range(0, len(src_indices), page_size):
        rows, page = dst_indices[at : at + page_size], int(src_indices[at]) // page_size
        for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
            dst[rows] = src[page, layer_id].reshape(dst[rows].shape)


def install() -> None:
    """Put them where SGLang's host pools look for the kernels; host memory is not pinned."""
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla

    if common._cuda_host_register is _nothing:
        return
    for module in (memory_pool_host, mamba, mha, mla):
        for function in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
            setattr(module, function.__name__, function)
    common._cuda_host_register = _nothing
    torch.zeros = partial(_unpinned, torch.zeros)


def _nothing(*_: Any) -> None: ...


def _unpinned(zeros: Callable[..., torch.Tensor], *shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    return zeros(*shape, **more)
