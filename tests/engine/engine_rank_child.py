"""One rank of a served model as a process of its own: cache, scheduler and its part of the model.

Reads jobs from stdin, a line of JSON each; answers each with a line. Rank 0 asks what the job's ``rounds`` say.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from asynccache_shim import Limits, Request, Scheduler, Settings, connect_orders
from asynccache_shim.orders import Order

from asynccache import AsyncCache, CacheConfig, Full, Hits, PrefetchPolicy, RankDivergence, RankFailure
from asynccache.core.audit import check
from asynccache.ranks import Topology
from asynccache.ranks.gloo import GlooRanks, connect
from tests.engine.sharded_qwen3 import Shape, ShardedQwen3

PAGE = 8


@dataclass
class Job:
    """``rounds``: prompts that are asked at the same time, and how many tokens each is to get; ``logits``: a file for
    them. ``endless``: rank 0 asks the last round again until the group fails."""

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
    """``outputs`` and ``hits``: by request, in order. ``stages``: pages that each transfer stage has moved here.
    ``callers``: how requests failed at rank 0. ``at``: the machine's monotonic clock when they were told; on the other
    ranks, when the scheduler had ended."""

    rank: int
    outputs: list[list[int]] = field(default_factory=list)
    hits: list[tuple[int, int, int]] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    digest: int = 0
    error: str = ""
    text: str = ""
    callers: list[str] = field(default_factory=list)
    at: float = 0.0


class Recorded(Scheduler):
    """Knows its requests on every rank."""

    requests: dict[int, Request]

    def _obey(self, order: Order) -> None:
        self.requests |= dict(order.arrivals)
        super()._obey(order)


async def serve(job: Job) -> Answer:
    answer = Answer(job.rank)
    topology = Topology(*job.topology)
    group = await asyncio.to_thread(_groups, job, topology)
    ranks = await connect(topology, job.rank, f"file://{job.meeting}-cache", timeout=job.timeout, arrival=60)
    try:
        async with AsyncCache(_config(job, topology), ranks=ranks) as cache:
            await _scheduled(job, ranks, cache, group, answer)
            await cache.step()
            await cache.flush()
            check(cache.core, idle=True)
            answer.digest = cache._opened().lockstep.chain.digest  # type: ignore[union-attr]
            answer.stages = {name: stage.pages for name, stage in cache.statistics().stages.items()}
    except (RankFailure, RankDivergence) as error:
        answer.error, answer.text = type(error).__name__, str(error)
        check(cache.core)
    await ranks.aclose()
    return answer


def _config(job: Job, topology: Topology) -> CacheConfig:
    shape = Shape()
    covers = tuple(shape.stage(topology, topology.place(job.rank)))
    full = Full(
        bytes_per_token=shape.token_bytes(topology), device_tokens=job.device * PAGE, host_tokens=job.host * PAGE,
        layers=len(covers), covers=covers, dtype="float32",
    )  # fmt: skip
    return CacheConfig(
        model="qwen3", components=(full,), page_size=PAGE, prefetch_threshold=PAGE, storage=job.storage,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, close_deadline=60.0,
    )  # fmt: skip


def _groups(job: Job, topology: Topology) -> Any:
    """The model's own. A new group does not have the time-out of the first: half an hour, if nobody says."""
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


async def _scheduled(job: Job, ranks: GlooRanks, cache: AsyncCache, group: Any, answer: Answer) -> None:
    weights = torch.load(job.weights)
    model = ShardedQwen3(weights, Shape(), ranks.topology, job.rank, cache.pools, PAGE, group)
    orders = await connect_orders(ranks, timeout=job.timeout)
    scheduler = Recorded(cache, model, Settings(step_tokens=48, max_running=4), orders=orders)
    scheduler.requests = {}
    try:
        async with scheduler:
            if job.rank == 0:
                await _ask(job, scheduler, answer)
            else:
                await scheduler.finished()
    finally:
        answer.at = answer.at or time.monotonic()
    ended = scheduler.requests.values()
    answer.outputs = [request.output for request in ended]
    answer.hits = [request.hits or Hits(0, 0, 0) for request in ended]
    answer.computed = model.computed
    if model.logits and job.logits is not None:
        torch.save(model.logits, job.logits)


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


def say(line: dict[str, Any]) -> None:
    """To whom the jobs come from."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Jobs, one after the other."""
    torch.set_num_threads(1)
    say({"ready": True})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        answer = asyncio.run(serve(job))
        dist.destroy_process_group()
        say({"answer": asdict(answer)})


if __name__ == "__main__":
    main()
