"""A process of its own with a model: one that serves what another one stored, or one rank of a served model.

    engine_child.py serve FOLDER [FAMILY ...]     each family (or all of ``FAMILIES``) from its store there

prints a line for each: its name, cached tokens by tier, the largest difference of a logit.

    engine_child.py share FAMILY URL

serves prompts by ``ContinuousBatching``, beside others on the same store: each line of input has the prompts of a turn.
When all that was computed is stored, it says what it made: the tokens and hits of each.

    engine_child.py rank

does the jobs of a rank. Rank 0 has the cache and the scheduler and submits the job's ``rounds`` of prompts, and each
rank has its shard: heads and the MLP's width over tp, layers over pp; KV in the pages of each rank's worker.

Turns and jobs are lines of JSON, and so are the answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import torch.distributed as dist
import transformers
from asynccache_hf import ContinuousBatching, describe
from asynccache_shim import Batch, Limits, Request, Scheduler, SchedulerConfig, follow
from msgspec import structs

from asynccache import AsyncCache, CacheConfig, Full, Hits, PrefetchPolicy, RankFailure
from asynccache.core.audit import check
from asynccache.worker import RankPlace, RankWorker, Topology, connect, listen
from tests.engine.engine_kit import PAGE, Heard, model_of, prompt, served
from tests.engine.engine_models import FAMILIES, make

LENGTH = 61
LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 4, 2, 8, 64
"""Of the whole model."""
SECRET = b"what only the ranks of this test know"


async def serve(folder: str, *families: str) -> None:
    for family in families or FAMILIES:
        async with served(family, storage_url=f"file:{Path(folder, family)}?capacity=64MiB&segment=8MiB") as engine:
            made = await engine.check(prompt(LENGTH))
            sys.stdout.write(f"{family} {tuple(made.hits)} {engine.worst:.3g}\n")


def share(family: str, url: str) -> None:
    with ContinuousBatching(model_of(family), page_size=8, name=family, storage=url) as batching:
        say({"ready": True})
        for line in sys.stdin:
            done = batching.generate_batch(json.loads(line), max_new_tokens=6, eos_token_id=-1)
            batching.ask(lambda cache: cache.flush(timeout=20))
            say({"answer": [(each.result(), each.hits) for each in done]})


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


def stage(topology: Topology, place: RankPlace) -> range:
    """The layers of a pipeline stage."""
    count = LAYERS // topology.pp
    return range(place.pp * count, (place.pp + 1) * count)


class ShardedQwen3(Heard):
    """The part of one rank: a smaller Qwen3 with its share of the weights. Sums over tp and activations between stages
    go through groups of the model's own (``tp_group``: None for one rank). Every rank returns the tokens that the last
    stage has chosen; what counts is what rank 0 returns."""

    def __init__(self, job: Job, topology: Topology, worker: RankWorker, tp_group: Any) -> None:
        place = topology.place(job.rank)
        model = part_of(torch.load(job.weights), topology, place)
        super().__init__(model, describe(model, PAGE, name="qwen3"), worker.pools)
        self.computed = 0
        self._teller = topology.rank(RankPlace(0, 0, topology.pp - 1))
        if tp_group is not None:
            for layer in model.model.layers:
                for summed in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    summed.register_forward_hook(lambda *call: dist.all_reduce(call[2], group=tp_group))
        if place.pp:
            above = topology.rank(place._replace(pp=place.pp - 1))
            model.model.embed_tokens.register_forward_hook(lambda *call: received(call[2], above))
        if place.pp < topology.pp - 1:
            below = topology.rank(place._replace(pp=place.pp + 1))
            model.model.norm.register_forward_pre_hook(lambda _, given: dist.send(given[0].contiguous(), below))

    def forward(self, batch: Batch) -> list[int]:
        self.computed += sum(chunk.stop - chunk.start for chunk in batch.chunks)
        chosen = torch.tensor(super().forward(batch))
        dist.broadcast(chosen, self._teller)
        return [int(token) for token in chosen]


def received(x: torch.Tensor, above: int) -> torch.Tensor:
    dist.recv(x, above)
    return x


def part_of(weights: dict[str, torch.Tensor], topology: Topology, place: RankPlace) -> Any:
    """A model of this rank's layers, cut up."""
    covers, of = stage(topology, place), topology.tp
    part = make("qwen3", num_hidden_layers=len(covers), num_attention_heads=HEADS // of,
                num_key_value_heads=KV_HEADS // of, intermediate_size=MLP // of)  # fmt: skip
    for name, own in part.state_dict().items():
        at = name.split(".")
        if "layers" in at:
            at[2] = str(covers[int(at[2])])
        whole = weights[".".join(at)]
        along = int(whole.shape[0] == own.shape[0])
        own.copy_(whole if whole.shape == own.shape else whole.chunk(of, along)[place.tp])
    return part


async def do(job: Job) -> Answer:
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
                model = ShardedQwen3(job, topology, cache.worker, group)
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
        model = ShardedQwen3(job, topology, worker, group)
        moved = _counted(worker)
        try:
            await follow(worker, model)
        finally:
            answer.at = time.monotonic()
    answer.computed, answer.moved = model.computed, moved()
    if job.logits is not None:
        torch.save(model.heard, job.logits)


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
    size = LAYERS // topology.pp * 2 * (KV_HEADS // topology.tp) * HEAD_DIM * 4
    full = Full(bytes_per_token=size, device_tokens=job.device * PAGE, host_tokens=job.host * PAGE, dtype="float32")
    return shard(topology, 0, CacheConfig(
        model="qwen3", components=(full,), page_size=PAGE, prefetch_threshold=PAGE, storage=job.storage,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, close_timeout=60.0,
    ))  # fmt: skip


def shard(topology: Topology, rank: int, config: CacheConfig) -> CacheConfig:
    """``config`` with the layers of this rank's pipeline stage."""
    covers = tuple(stage(topology, topology.place(rank)))
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
    """Answer the process that sends turns or jobs."""
    print(json.dumps(line), flush=True)  # noqa: T201


def rank() -> None:
    """Do jobs, one after the other."""
    say({"ready": True})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        answer = asyncio.run(do(job))
        dist.destroy_process_group()
        say({"answer": asdict(answer)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    what, *given = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(*given))
    elif what == "share":
        share(*given)
    else:
        rank()
