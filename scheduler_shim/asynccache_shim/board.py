"""The state that the parts of a scheduler share: which requests wait, which hold pages, and the event that wakes its
loop.

Law: all mutable state of the scheduler is here. A request is either in ``waiting`` or in ``held``; it is in ``held`` as
long as it has a lease.
"""

from __future__ import annotations

import asyncio

from asynccache import AsyncCache, ConfigError
from asynccache.settings import Count, Settings
from asynccache_shim.admission import CacheShape, SlotCounts, by_rank, shape_of
from asynccache_shim.request import Finish, State, end_request
from asynccache_shim.scheduled_request import ScheduledRequest
from asynccache_shim.shards import Shards


class SchedulerConfig(Settings, frozen=True, kw_only=True):
    """The settings of a scheduler.

    step_tokens: how many tokens one step computes at most, of all requests together.
    max_running: how many requests hold pages at the same time at most.
    checkpoint_every: how many tokens are decoded between two checkpoints of a recurrent state.
    preempt: whether a request of lower priority is retracted when one of higher priority finds no room.
    load_attempts: with how many failed loads of its pages a request fails.

    Raises:
        ConfigError: a value is of the wrong type or out of its bounds.
    """

    step_tokens: Count = 512
    max_running: Count = 32
    checkpoint_every: Count = 512
    preempt: bool = True
    load_attempts: Count = 8


class Board:
    """The shared state of one scheduler.

    waiting, held: requests by number. freed: how often a request gave its pages back, so far.
    ended: the numbers of requests that gave their pages back and that the model has not been told of yet.
    alone: the request that waits in the cache's line for pages, which one does only while none holds pages; None: none.
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

    def requests(self) -> list[ScheduledRequest]:
        """All requests."""
        return [*self.waiting.values(), *self.held.values()]

    def running(self) -> list[ScheduledRequest]:
        """The requests that can be part of a step."""
        return [request for request in self.held.values() if request.runs and not request.over]

    def hold(self, request: ScheduledRequest) -> None:
        """Note that ``request`` has a lease now."""
        self.waiting.pop(request.id, None)
        self.held[request.id] = request

    def call(self, request: ScheduledRequest) -> None:
        """Wake the loop because ``request`` may be admitted now. If the loop waits in the cache's line for another
        request, which comes after ``request`` in the order, the other one gives up its place."""
        if self.alone is not None and by_rank([request, self.alone])[0] is request:
            self.alone.give_way()
        self.bell.set()

    def release(self, request: ScheduledRequest) -> None:
        """Release the lease of ``request``, if it has one."""
        if request.watch is not None:
            request.watch.cancel()
            request.watch = None
        self.held.pop(request.id, None)
        lease = request.left()
        if lease is not None:
            lease.release(self.batch, ended=request.terms.ended)
            self.ended.append(request.id)
            self.freed += 1

    async def publish(self, request: ScheduledRequest) -> None:
        """Commit the pages that ``request`` has computed, so that other requests can hit them, and so can ``request``
        itself when it is admitted again. Cancelling commits all of it or nothing."""
        lease, computed = request.lease, request.computed
        if lease is None or request.submitted.state is State.LOADING or computed <= lease.cached:
            return
        if not request.publishes():
            return
        keeps = self.shape.has_mamba and computed > request.checkpointed and not computed % self.shape.page_size
        checkpoint = (computed, int(lease.states[0])) if keeps else None
        await lease.commit(request.tokens[:computed], self.batch, checkpoint)

    def drop(self, request: ScheduledRequest, finish: Finish, error: BaseException | None = None) -> None:
        """End ``request``, and remove it with all that it holds."""
        end_request(request.submitted, finish, error)
        if request.handle is not None:
            request.handle.cancel()
        request.give_way()
        self.waiting.pop(request.id, None)
        self.release(request)
