"""vLLM's host tier with a copy that is wrong on purpose: each layer gets another layer's KV back."""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from vllm_on_cpu.offload import CpuTieringSpec, MemcpyWorker


class SwappedLayers(MemcpyWorker):
    """Loads the layers in the reverse order."""

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._host.reverse()
        try:
            return super().submit_load(job_id, src_spec, dst_spec)
        finally:
            self._host.reverse()


class WrongTieringSpec(CpuTieringSpec):
    """vLLM's tiers, with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        worker.__class__ = SwappedLayers
        return worker
