"""The state that the parts of a scheduler share: which jobs wait, which hold pages, and the event that wakes its loop.

Law: all mutable state of the scheduler is here. A job is either in ``waiting`` or in ``held``; it is in ``held`` as
long as it has a lease.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from asynccache import AsyncCache, ConfigError
from asynccache.checks import check_fields, within
from asynccache_shim.admission import CacheShape, SlotCounts, by_rank, shape_of
from asynccache_shim.request import Finish, State, end_request
from asynccache_shim.scheduled_request import ScheduledRequest
from asynccache_shim.shards import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of a scheduler.

    step_tokens: how many tokens one step computes at most, of all requests together.
    max_running: how many requests hold pages at the same time at most.
    checkpoint_every: how many tokens are decoded between two checkpoints of a recurrent state.
    preempt: whether a request of lower priority is retracted when one of higher priority finds no room.
    load_attempts: how often a request's pages may fail to load before the request fails.

    Raises:
        ConfigError: a value is of the wrong type or out of its bounds.
    """

    step_tokens: int = field(default=512, metadata=within(1))
    max_running: int = field(default=32, metadata=within(1))
    checkpoint_every: int = field(default=512, metadata=within(1))
    preempt: bool = True
    load_attempts: int = field(default=8, metadata=within(1))

    def __post_init__(self) -> None:
        check_fields(self)


class Board:
    """The shared state of one scheduler.

    waiting, held: jobs by number. freed: how often a job gave its pages back, so far.
    ended: the numbers of jobs that ended or were retracted and that the model has not been told of yet.
    alone: the job that waits in the cache's line for pages, which happens only while no job holds pages; None: none.
    shards: the model's shards on other ranks; None: there are none.
    bell: set when the loop has something to do.

    Raises:
        ConfigError: a step could not hold a token for each running request and a page besides.
    """

    def __init__(self, cache: AsyncCache, settings: SchedulerConfig) -> None:
        self.cache = cache
        self.settings = settings
        self.shape: CacheShape = shape_of(cache.config)
        if settings.step_tokens < settings.max_running + self.shape.page_size:
            raise ConfigError(
                f"step_tokens={settings.step_tokens} must hold a token for each of max_running={settings.max_running} "
                f"requests and a page of {self.shape.page_size} beside them"
            )
        self.waiting: dict[int, ScheduledRequest] = {}
        self.held: dict[int, ScheduledRequest] = {}
        self.alone: ScheduledRequest | None = None
        self.shards: Shards | None = None
        self.ended: list[int] = []
        self.freed = 0
        self.bell = asyncio.Event()

    def __repr__(self) -> str:
        return f"Board({len(self.waiting)} waiting, {len(self.held)} hold pages)"

    @property
    def batch(self) -> int | None:
        """The number of the batch that commits and releases name: the last batch that was sent to several ranks. None
        with one rank, whose model has returned before anything is committed or released."""
        return None if self.shards is None else self.shards.sent

    def room(self) -> SlotCounts:
        """Return how many slots of the device are free or evictable."""
        tiers = self.cache.statistics().device
        room = {name: shelf.free + shelf.evictable for name, shelf in tiers.items()}
        return SlotCounts(room["full"], room.get("swa", 0), room.get("mamba", 0))

    def jobs(self) -> list[ScheduledRequest]:
        """All jobs."""
        return [*self.waiting.values(), *self.held.values()]

    def running(self) -> list[ScheduledRequest]:
        """The jobs that can be part of a step."""
        return [job for job in self.held.values() if job.runs and not job.over]

    def hold(self, job: ScheduledRequest) -> None:
        """Note that ``job`` has a lease now."""
        self.waiting.pop(job.id, None)
        self.held[job.id] = job

    def call(self, job: ScheduledRequest) -> None:
        """Wake the loop because ``job`` may be admitted now. If the loop waits in the cache's line for a job that comes
        after this one in the order, that job gives up its place."""
        if self.alone is not None and by_rank([job, self.alone])[0] is job:
            self.alone.give_way()
        self.bell.set()

    def release(self, job: ScheduledRequest) -> None:
        """Release the lease of ``job``, if it has one."""
        if job.watch is not None:
            job.watch.cancel()
            job.watch = None
        self.held.pop(job.id, None)
        lease = job.left()
        if lease is not None:
            lease.release(self.batch, ended=job.terms.ended)
            self.ended.append(job.id)
            self.freed += 1

    async def publish(self, job: ScheduledRequest) -> None:
        """Commit the pages that ``job`` has computed, so that other requests can hit them, and so can the job itself
        when it is admitted again. Cancelling commits all of it or nothing."""
        lease, computed = job.lease, job.computed
        if lease is None or job.request.state is State.LOADING or computed <= lease.cached:
            return
        keeps = self.shape.has_mamba and computed > job.checkpointed and not computed % self.shape.page_size
        checkpoint = (computed, int(lease.states[0])) if keeps else None
        await lease.commit(job.tokens[:computed], self.batch, checkpoint)

    def drop(self, job: ScheduledRequest, finish: Finish, error: BaseException | None = None) -> None:
        """End the request of ``job``, and remove the job with all that it holds."""
        end_request(job.request, finish, error)
        if job.handle is not None:
            job.handle.cancel()
        job.give_way()
        self.waiting.pop(job.id, None)
        self.release(job)
