"""The state that the parts of a scheduler share: which requests wait, which hold pages, and the event that wakes its
loop. And each request as the scheduler keeps it: its tokens so far, its lease, and how far it is computed.

A request is either in ``waiting`` or in ``held``; it is in ``held`` as long as it has a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from asynccache import AsyncCache, ConfigError, Lease, PrefetchHandle
from asynccache.settings import Count, Settings
from asynccache_shim.admission import CacheShape, SlotCounts, shape_of
from asynccache_shim.model import Checkpoint, Chunk, Pages
from asynccache_shim.request import Finish, Request, State, Tokens, add_token, end_request
from asynccache_shim.shards import Shards


class SchedulerConfig(Settings, frozen=True, kw_only=True):
    """The settings of a scheduler.

    Raises:
        ConfigError: a value is of the wrong type or out of its bounds.
    """

    step_tokens: Count = 512
    """How many tokens one step computes at most, of all requests together."""
    max_running: Count = 32
    """How many requests hold pages at the same time at most."""
    checkpoint_every: Count = 512
    """How many tokens are decoded between two checkpoints of a recurrent state."""
    preempt: bool = True
    """Whether a request of lower priority is retracted when one of higher priority finds no room."""
    load_attempts: Count = 8
    """With how many failed loads of its pages a request fails."""


class ScheduledRequest:
    """One request of one scheduler. All positions and lengths are in tokens."""

    def __init__(self, submitted: Request, number: int) -> None:
        self.submitted = submitted
        """The ``Request`` that the caller holds, to which the scheduler tells its state and its output."""
        self.terms = terms = submitted.terms
        self.id = number
        """The request's number."""
        self.priority = terms.priority
        self.length = len(terms.tokens)
        """Tokens so far, of prompt and output."""
        self._buffer = np.empty(self.length + terms.limits.max_new_tokens, np.int32)
        self._buffer[: self.length] = terms.tokens
        self.lease: Lease | None = None
        self.handle: PrefetchHandle | None = None
        self.watch: asyncio.Task[None] | None = None
        """The task that waits for the prefetch or for the load."""
        self.entering: asyncio.Task[Lease] | None = None
        """The task that waits in the cache's line."""
        self.patient = False
        """Whether the prefetch may still go on."""
        self.blocked = -1
        """``Board.freed`` when the request was retracted; -1: it was not. While other requests hold pages it is not
        admitted again before ``freed`` has grown."""
        self.failed_loads = 0
        """How often the request's pages failed to load."""
        self.behind: tuple[ScheduledRequest, int] | None = None
        """The request that this one waited for when that was last looked up, and how many tokens they share."""
        most = terms.limits.max_time
        self.deadline = None if most is None else asyncio.get_running_loop().time() + most
        """The time of the loop after which a token is the last one; None: there is none."""
        self._forget()

    def _forget(self) -> None:
        self.computed = self.reserved = self.entry = self.checkpointed = 0
        """KV is written up to ``computed``, and the lease's pages reach up to ``reserved``. ``entry``: the length when
        the request was admitted; up to there it prefills. ``checkpointed``: where the latest state was kept."""
        self.private = False
        """True if what the request has computed in its present pages may not be published."""
        self.marks: tuple[int, ...] = ()
        """Where states are to be kept."""
        self.pages: Pages = np.empty(0, np.int32)

    @property
    def tokens(self) -> Tokens:
        """Prompt and output so far."""
        return self._buffer[: self.length]

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return self.length - len(self.terms.tokens)

    @property
    def more(self) -> int:
        """The number of tokens that may still be generated and need KV. The last token of the output needs none."""
        return len(self._buffer) - self.length - 1

    @property
    def over(self) -> bool:
        """True if the request has ended, in whatever way."""
        return self.submitted.finish is not None

    @property
    def runs(self) -> bool:
        """True if the request can be part of a step."""
        return self.lease is not None and self.submitted.state is State.RUNNING

    def publishes(self) -> bool:
        """Return True if what the request has computed may be published. Once it may not, all that it computes in the
        same pages is kept back: it is computed from what may not be published."""
        if self.private:
            return False
        try:
            self.private = not (self.terms.publishes is None or self.terms.publishes())
        except Exception:  # the caller's own; it must not end the loop
            self.private = True
        return not self.private

    def computes_for(self, other: ScheduledRequest, page_size: int) -> int:
        """Return how many tokens, in whole pages, both requests begin with, if this one has not computed all of these
        yet; else 0. Every request computes the last token of its prompt itself."""
        most = min(self.length, other.length - 1) // page_size * page_size
        if self.over or self.computed >= most or self.terms.namespace != other.terms.namespace:
            return 0
        differs = np.flatnonzero(self._buffer[:most] != other._buffer[:most])
        shared = int(differs[0]) // page_size * page_size if len(differs) else most
        return shared if shared > self.computed else 0

    @property
    def decodes(self) -> bool:
        """True if all tokens but the last are computed, so that the next step generates one."""
        return self.length - self.computed == 1

    def entered(self, lease: Lease, page_size: int, has_states: bool) -> None:
        """Note that the request was admitted with ``lease``, whose pages may still be on their way to the device."""
        self.lease = lease
        self.computed = self.checkpointed = lease.cached
        self.entry = self.length
        self.pages = lease.pages
        self.reserved = len(self.pages) * page_size
        self.marks = (lease.checkpoint_at, (self.entry - 1) // page_size * page_size) if has_states else ()
        self.submitted.state = State.LOADING

    def give_way(self) -> None:
        """Give up the request's place in the cache's line, if it has one."""
        if self.entering is not None:
            self.entering.cancel()

    def left(self) -> Lease | None:
        """Take the lease away from the request, and return it to be released; None if there was none."""
        lease, self.lease = self.lease, None
        self._forget()
        return lease

    def append(self, token: int) -> None:
        """Add a token to the output."""
        self._buffer[self.length] = token
        self.length += 1
        add_token(self.submitted, token)

    def chunk(self, stop: int, checkpoint: Checkpoint | None, has_swa: bool) -> Chunk:
        """The request's part of a step that computes it up to ``stop``."""
        assert self.lease is not None
        none = np.empty(0, np.int32)
        return Chunk(
            request_id=self.id,
            tokens=self.tokens,
            start=self.computed,
            stop=stop,
            pages=self.pages,
            swa_pages=self.lease.page_table("swa") if has_swa else none,
            states=self.lease.states,
            checkpoint=checkpoint,
            sample=stop == self.length,
            sampling=self.terms.sampling,
        )


def by_rank(requests: Iterable[ScheduledRequest]) -> list[ScheduledRequest]:
    """The requests in their order: those of higher priority go first, and among equals the one that came first."""
    return sorted(requests, key=lambda request: (-request.priority, request.id))


def victim(requests: Iterable[ScheduledRequest]) -> ScheduledRequest | None:
    """The request to be retracted, the last in the order; None if there are no requests."""
    return max(requests, key=lambda request: (-request.priority, request.id), default=None)


class Board:
    """The shared state of one scheduler.

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
        """The requests that hold pages, by number; ``waiting`` has the others."""
        self.alone: ScheduledRequest | None = None
        """The request that waits in the cache's line for pages, while none holds any."""
        self.shards: Shards | None = None
        """The model's shards on other ranks; None: there are none."""
        self.ended: list[int] = []
        """The numbers of requests that gave their pages back and that the model has not been told of yet."""
        self.freed = 0
        """How often a request gave its pages back, so far."""
        self.bell = asyncio.Event()
        """Set when the loop has something to do."""

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
