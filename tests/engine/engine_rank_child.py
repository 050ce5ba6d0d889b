"""One rank of a served model as a process of its own: rank 0 has the cache and the scheduler, and each its shard.

Reads jobs from stdin, a line of JSON each; answers each with a line. Rank 0 submits the job's ``rounds`` of prompts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from asynccache_shim import Limits, Request, Scheduler, SchedulerConfig, follow
from msgspec import structs

from asynccache import AsyncCache, CacheConfig, Full, Hits, PrefetchPolicy, RankFailure
from asynccache.core.audit import check
from asynccache.worker import RankWorker, Topology, connect, listen
from tests.engine.sharded_qwen3 import Shape, ShardedQwen3

PAGE = 8
SECRET = b"what only the ranks of this test know"


@dataclass
class Job:
    """``rounds``: prompts that are asked at the same time, and how many tokens each is to get; ``logits``: a file for
    them. ``endless``: rank 0 asks the last round again until the group fails. ``address``: where rank 0 listens;
    ``meeting``: of the model's own groups."""

    address: str
    meeting: str
    topology: tuple[int, int, int]
    rank: int
    weights: str
    rounds: list[list[tuple[list[int], int]]]
    device: int
    host: int
    storage: str | None = None
    logits: str | None = None
    timeout: float = 30.0
    endless: bool = False


@dataclass
class Answer:
    """``outputs`` and ``hits``: of rank 0's requests, in order. ``moved``: pages that this rank has copied, stored and
    read. ``computed``: tokens. ``callers``: how requests failed at rank 0. ``at``: the machine's monotonic clock when
    they were told; on the other ranks, when there were no more batches."""

    rank: int
    outputs: list[list[int]] = field(default_factory=list)
    hits: list[tuple[int, int, int]] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    computed: int = 0
    error: str = ""
    text: str = ""
    callers: list[str] = field(default_factory=list)
    at: float = 0.0


async def serve(job: Job) -> Answer:
    answer = Answer(job.rank)
    topology = Topology(*job.topology)
    group = await asyncio.to_thread(_groups, job, topology)
    try:
        if job.rank == 0:
            await _lead(job, topology, group, answer)
        else:
            await _follow(job, topology, group, answer)
    except RankFailure as error:
        answer.error, answer.text = type(error).__name__, str(error)
    return answer


async def _lead(job: Job, topology: Topology, group: Any, answer: Answer) -> None:
    """The rank of the scheduler."""
    part = partial(shard, topology, 0)
    async with listen(job.address, topology, secret=SECRET, timeout=job.timeout, arrival=120, shard=part) as workers:
        cache = AsyncCache(_config(job, topology), workers=workers)
        try:
            async with cache:
                assert cache.worker is not None
                model = _model(job, topology, cache.worker, group)
                moved = _counted(cache.worker)
                async with Scheduler(cache, model, SchedulerConfig(step_tokens=48, max_running=4)) as scheduler:
                    await _ask(job, scheduler, answer)
                await cache.flush()
                check(cache.core, idle=True)
        finally:
            check(cache.core)
    answer.computed, answer.moved = model.computed, moved()


async def _follow(job: Job, topology: Topology, group: Any, answer: Answer) -> None:
    """All other ranks."""
    part = partial(shard, topology, job.rank)
    async with connect(job.address, job.rank, secret=SECRET, shard=part, arrival=120) as worker:
        model = _model(job, topology, worker, group)
        moved = _counted(worker)
        try:
            await follow(worker, model)
        finally:
            answer.at = time.monotonic()
    answer.computed, answer.moved = model.computed, moved()
    if model.logits and job.logits is not None:
        torch.save(model.logits, job.logits)


def _model(job: Job, topology: Topology, worker: RankWorker, group: Any) -> ShardedQwen3:
    return ShardedQwen3(torch.load(job.weights), Shape(), topology, job.rank, worker.pools, PAGE, group)


def _counted(worker: RankWorker) -> Callable[[], dict[str, float]]:
    """The pages that this rank has moved, asked when its worker is closed already."""
    local = worker._server.local
    assert local is not None
    stores = [attached.store for attached in local._tiers.attached]

    def moved() -> dict[str, float]:
        copied: dict[str, float] = {name: meter.pages for name, meter in local.meters().items()}
        return copied | {name: sum(store.stats()[name] for store in stores) for name in ("put_pages", "get_pages")}

    return moved


def _config(job: Job, topology: Topology) -> CacheConfig:
    full = Full(
        bytes_per_token=Shape().token_bytes(topology), device_tokens=job.device * PAGE, host_tokens=job.host * PAGE,
        dtype="float32",
    )  # fmt: skip
    return shard(topology, 0, CacheConfig(
        model="qwen3", components=(full,), page_size=PAGE, prefetch_threshold=PAGE, storage=job.storage,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, close_timeout=60.0,
    ))  # fmt: skip


def shard(topology: Topology, rank: int, config: CacheConfig) -> CacheConfig:
    """``config`` with the layers of this rank's pipeline stage."""
    covers = tuple(Shape().stage(topology, topology.place(rank)))
    (full,) = config.components
    return structs.replace(config, components=(structs.replace(full, layers=len(covers), covers=covers),))


def _groups(job: Job, topology: Topology) -> Any:
    """Make the groups of the model itself. A new group does not take the time-out of the first one: unless it is given
    one, it is half an hour."""
    patience = timedelta(seconds=2 * job.timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting}-model", rank=job.rank, world_size=topology.ranks,
        timeout=patience,
    )  # fmt: skip
    mine = None
    for stage in range(topology.pp):
        members = [stage * topology.tp + tp for tp in range(topology.tp)]
        group = dist.new_group(members, timeout=patience)
        mine = group if job.rank in members and topology.tp > 1 else mine
    return mine


async def _ask(job: Job, scheduler: Scheduler, answer: Answer) -> None:
    rounds = list(job.rounds)
    while rounds:
        asked = rounds.pop(0)
        requests = [scheduler.submit(Request(tokens, Limits(new))) for tokens, new in asked]
        ends = await asyncio.gather(*(request.done() for request in requests), return_exceptions=True)
        failed = [end for end in ends if isinstance(end, BaseException)]
        if failed:
            answer.at = time.monotonic()
            answer.callers = [type(error).__name__ for error in failed]
            raise failed[0]
        if job.endless and not rounds:
            say({"serving": True})
            rounds.append(asked)
            continue
        answer.outputs += [request.output for request in requests]
        answer.hits += [request.hits or Hits(0, 0, 0) for request in requests]


def say(line: dict[str, Any]) -> None:
    """Answer the process that sends the jobs."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do jobs, one after the other."""
    torch.set_num_threads(1)
    say({"ready": True})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        answer = asyncio.run(serve(job))
        dist.destroy_process_group()
        say({"answer": asdict(answer)})


if __name__ == "__main__":
    main()
