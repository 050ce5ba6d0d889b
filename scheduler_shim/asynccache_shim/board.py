"""What the parts of a scheduler share: who waits, who holds pages, and the bell that wakes its loop.

Law: this is where the scheduler's mutable state lives. A job is in ``waiting`` or in ``held``, and in ``held`` exactly
as long as it has a lease.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from asynccache import AsyncCache, ConfigError
from asynccache.checks import check_fields, within
from asynccache_shim.admission import Shape, Slots, shape_of
from asynccache_shim.job import Job
from asynccache_shim.planning import by_rank
from asynccache_shim.request import Finish, State, end_request
from asynccache_shim.shards import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``step_tokens``: computed in one step at most, all requests together. ``max_running``: requests with pages.
    ``checkpoint_every``: tokens of decoding between two checkpoints of a recurrent state. ``preempt``: whether a
    request of higher priority may have one of lower priority retracted to come in. ``load_attempts``: how often
    pages may fail to arrive before the request fails."""

    step_tokens: int = field(default=512, metadata=within(1))
    max_running: int = field(default=32, metadata=within(1))
    checkpoint_every: int = field(default=512, metadata=within(1))
    preempt: bool = True
    load_attempts: int = field(default=8, metadata=within(1))

    def __post_init__(self) -> None:
        check_fields(self)


class Board:
    """``freed`` counts how often a request gave its pages back; ``ended``: what the model has not been told yet;
    ``alone``: who waits in the cache's line, while nobody holds pages. ``shards``: of the model, on other ranks; None
    if there are none."""

    def __init__(self, cache: AsyncCache, settings: Settings) -> None:
        self.cache = cache
        self.settings = settings
        self.shape: Shape = shape_of(cache.config)
        if settings.step_tokens < settings.max_running + self.shape.page_size:
            raise ConfigError(
                f"step_tokens={settings.step_tokens} must hold a token for each of max_running={settings.max_running} "
                f"requests and a page of {self.shape.page_size} beside them"
            )
        self.waiting: dict[int, Job] = {}
        self.held: dict[int, Job] = {}
        self.alone: Job | None = None
        self.shards: Shards | None = None
        self.ended: list[int] = []
        self.freed = 0
        self.bell = asyncio.Event()

    def __repr__(self) -> str:
        return f"Board({len(self.waiting)} waiting, {len(self.held)} hold pages)"

    @property
    def batch(self) -> int | None:
        """What commits and releases name: the last batch that several ranks compute; None where there is one rank,
        whose model has returned by then."""
        return None if self.shards is None else self.shards.sent

    def room(self) -> Slots:
        """Free and evictable slots of the device."""
        tiers = self.cache.statistics().device
        room = {name: shelf.free + shelf.evictable for name, shelf in tiers.items()}
        return Slots(room["full"], room.get("swa", 0), room.get("mamba", 0))

    def jobs(self) -> list[Job]:
        """Everybody."""
        return [*self.waiting.values(), *self.held.values()]

    def running(self) -> list[Job]:
        """Who can be part of a step."""
        return [job for job in self.held.values() if job.runs and not job.over]

    def hold(self, job: Job) -> None:
        """It has a lease now."""
        self.waiting.pop(job.id, None)
        self.held[job.id] = job

    def call(self, job: Job) -> None:
        """It may be admitted from now on: the loop looks, also if it waits for somebody who comes after this one."""
        if self.alone is not None and by_rank([job, self.alone])[0] is job:
            self.alone.give_way()
        self.bell.set()

    def release(self, job: Job) -> None:
        """Its lease goes back, now. Idempotent."""
        if job.watch is not None:
            job.watch.cancel()
            job.watch = None
        self.held.pop(job.id, None)
        lease = job.left()
        if lease is not None:
            lease.release(self.batch, ended=job.terms.ended)
            self.ended.append(job.id)
            self.freed += 1

    async def publish(self, job: Job) -> None:
        """What it has computed may be hit by others, and by itself when it is back. Cancelling it publishes all of it
        or nothing."""
        lease, computed = job.lease, job.computed
        if lease is None or job.request.state is State.LOADING or computed <= lease.cached:
            return
        keeps = self.shape.has_mamba and computed > job.checkpointed and not computed % self.shape.page_size
        checkpoint = (computed, int(lease.states[0])) if keeps else None
        await lease.commit(job.tokens[:computed], self.batch, checkpoint)

    def drop(self, job: Job, finish: Finish, error: BaseException | None = None) -> None:
        """It is over: nothing of it stays."""
        end_request(job.request, finish, error)
        if job.handle is not None:
            job.handle.cancel()
        job.give_way()
        self.waiting.pop(job.id, None)
        self.release(job)
