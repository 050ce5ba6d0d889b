"""vLLM's real ``TieringOffloadingManager`` over its real shared region, without an engine: the kit plays a scheduler.

A chunk's bytes are what its key says, so that every chunk that arrives can be checked.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 8192
CHUNKS = 16
SHM = Path("/dev/shm")


def config(
    *tiers: dict[str, Any], chunks: int = CHUNKS, groups: int = 1, parallel: dict[str, int] | None = None, **given: Any
) -> OffloadingConfig:
    """The configuration that vLLM's connector would make for an engine; ``given`` replaces fields."""
    entries = [{"type": "asynccache", **one} for one in tiers]
    ranks = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, **(parallel or {})}
    made = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layers.{i}.attn",), i) for i in range(groups)),
        worker_kv_bytes_per_block=CHUNK // ranks["world_size"],
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": chunks * CHUNK, "secondary_tiers": entries},
        engine_id=f"asynccache-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=True, **ranks,
        ),
        kv_cache_layout="LBNHC",
    )  # fmt: skip
    return replace(made, **given)


def payload(key: bytes) -> bytes:
    """The bytes of the chunk of ``key``."""
    return hashlib.shake_128(key).digest(CHUNK)


def keys_of(count: int, salt: str = "", group: int = 0) -> list[Any]:
    """The keys of a prefix of ``count`` chunks."""
    return [make_offload_key(hashlib.sha256(f"{salt} {i}".encode()).digest(), group) for i in range(count)]


class Scheduler:
    """Calls the manager as vLLM's scheduler does, for one request at a time or several."""

    def __init__(self, made: OffloadingConfig) -> None:
        self.spec = TieringOffloadingSpec(made)
        self.manager = self.spec.get_manager()
        assert isinstance(self.manager, TieringOffloadingManager)
        self.tier: Any = self.manager.secondary_tiers[0]
        self.requests = 0
        self.told: Counter[str] = Counter()

    @property
    def region(self) -> memoryview:
        view: memoryview = self.manager.primary_tier.get_kv_memoryview()
        return view

    def begin(self, name: str | None = None, **hints: Any) -> ReqContext:
        """Begin a new request."""
        self.requests += 1
        request = ReqContext(req_id=name or f"r{self.requests}", **hints)
        self.manager.on_new_request(request)
        return request

    def end(self, request: ReqContext) -> None:
        """End its step, and the request."""
        self.step([request.req_id])
        self.manager.on_request_finished(request)

    def counted(self) -> dict[str, int | float]:
        """What vLLM's metrics would get."""
        stats = self.manager.get_stats()
        return {} if stats is None else stats.reduce()

    def heard(self) -> Counter[str]:
        """All that vLLM's metrics have got so far."""
        self.told.update({name: count for name, count in self.counted().items() if isinstance(count, int)})
        return self.told

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        """End a step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=preempted))

    def compute(self, keys: Sequence[Any], name: str | None = None) -> None:
        """Serve a request that computes ``keys`` and stores them, as the workers would."""
        request = self.begin(name)
        assert self.store(keys, request)
        self.end(request)

    def leave_stored(self, keys: Sequence[Any]) -> None:
        """Have ``keys`` in the store, and nothing in host memory."""
        self.compute(keys)
        self.reset()

    def store(self, keys: Sequence[Any], request: ReqContext) -> bool:
        """Store what the request has computed, if there is room."""
        output = self.manager.prepare_store(keys, request)
        if output is None:
            return False
        for key, chunk in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.region[int(chunk) : int(chunk) + 1].cast("B")[:] = payload(key)
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, request)
        return True

    def step_until(self, there: Callable[[], bool], seconds: float = 5.0) -> None:
        """Make steps until ``there()`` is true."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, f"it does not happen; {len(self.manager._jobs)} jobs are left"
            self.step()
            time.sleep(0.001)

    def settle(self, seconds: float = 5.0) -> None:
        """Make steps until vLLM's manager has no job left."""
        self.step_until(lambda: not self.manager.has_pending_work(), seconds)

    def prefix(self, keys: Sequence[Any], request: ReqContext, seconds: float = 10.0) -> int:
        """How many of ``keys``, from the first, can be loaded. Makes steps until vLLM's connector would know."""
        end = time.monotonic() + seconds
        while True:
            hits, later = 0, False
            for key in keys:
                result = self.manager.lookup(key, request)
                if result is LookupResult.MISS:
                    break
                later = later or result is not LookupResult.HIT
                hits += result is LookupResult.HIT
            if not later:
                return hits
            assert time.monotonic() < end, f"{request.req_id} still waits"
            self.step()
            time.sleep(0.001)

    def serve(self, keys: Sequence[Any], name: str | None = None) -> int:
        """Serve a request with the prefix ``keys``. Returns how many chunks were there; each must have its right
        bytes."""
        request = self.begin(name)
        hits = self.load(keys, request)
        self.end(request)
        return hits

    def load(self, keys: Sequence[Any], request: ReqContext) -> int:
        """Load what is there of the prefix ``keys``."""
        hits = self.prefix(keys, request)
        if hits:
            spec = self.manager.prepare_load(keys[:hits], request)
            for key, chunk in zip(keys, spec.block_ids, strict=False):
                assert self.region[int(chunk) : int(chunk) + 1].tobytes() == payload(key), "wrong bytes"
            self.manager.complete_load(keys[:hits], request)
        return hits

    def reset(self) -> None:
        """Forget what is in host memory, as ``reset_prefix_cache(reset_connector=True)`` does."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33: the workers have nothing under way
            self.manager.on_reset_flushed()

    def shutdown(self) -> None:
        """Shut the manager down, as at the engine's end."""
        self.manager.shutdown()


@contextmanager
def scheduler(made: OffloadingConfig) -> Iterator[Scheduler]:
    """A scheduler that is shut down afterwards."""
    playing = Scheduler(made)
    try:
        yield playing
    finally:
        playing.shutdown()


def left_in_shm() -> list[str]:
    """The regions of tests that are still there."""
    return [path.name for path in SHM.glob("vllm_offload_asynccache-test-*")]
