"""The queue of requests. When a request arrives, its pages are prefetched for as long as the cache's policy allows.
Then it passes both gates, and waits until load_back has brought its pages. A request that is retracted arrives again.

**Order.** Requests are admitted in their order (``board.by_rank``). A request for whose pages there is no room is
not overtaken. A request that waits for storage may be, since a prefetch holds up nobody else; if the cache has no room
for a prefetch now, the prefetch waits in the cache's own line.

**Room.** While any request holds pages, the loop does not wait for room: it tries the first request again in the next
step. When no request holds pages, the first one waits in the cache's line, for backups and for other users of the
cache, and gives up its place to a request that comes before it. A request does not give up its cached prefix because
room for load_back is missing at this moment. One that was retracted is not admitted again before another request has
given pages back.

**Shared prefixes.** A request does not begin while another one computes pages that both begin with, so those are
computed once. It waits only for requests that hold pages and have no lower priority, which get on without it, and may
be overtaken meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache import AsyncCacheError, CacheConfig, CacheFull, Lease, LoadFailed, PrefetchPolicy
from asynccache_shim.admission import LeaseOffer, cut_offers, demand, offer, passes
from asynccache_shim.board import Board, ScheduledRequest, by_rank, victim
from asynccache_shim.request import Finish, Matched, State, begin_request


def patience(config: CacheConfig, tokens: int) -> float | None:
    """Return for how many seconds a request of ``tokens`` tokens waits for its own prefetch, by the cache's prefetch
    policy; None: until the prefetch has ended."""
    if config.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
        return None
    if config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
        return 0.0
    allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * tokens / 1024
    return min(allowed, config.prefetch_timeout_max)


def arrive(board: Board, request: ScheduledRequest) -> None:
    """Put ``request`` into the queue, and begin to prefetch its pages."""
    board.waiting[request.id] = request
    request.patient = True
    request.handle = board.cache.prefetch(request.tokens, namespace=request.terms.namespace)
    if request.handle.done():
        request.submitted.state = State.WAITING
        board.call(request)
    else:
        request.submitted.state = State.PREFETCHING
        request.watch = asyncio.get_running_loop().create_task(_fetched(board, request), name=f"prefetch-{request.id}")


async def _fetched(board: Board, request: ScheduledRequest) -> None:
    handle = request.handle
    assert handle is not None
    with suppress(AsyncCacheError):  # the cache is closed; the scheduler's next call of it raises that
        try:
            async with asyncio.timeout(patience(board.cache.config, request.length)):
                await handle
        except TimeoutError:
            request.patient = False  # the next attempt to admit it stops the prefetch, which then ends soon
            board.call(request)
            await handle
    if not request.over:
        request.submitted.state = State.WAITING
    board.call(request)


async def retract(board: Board, request: ScheduledRequest) -> None:
    """Publish what ``request`` has computed, give its pages back and put it into the queue again. When it is admitted
    again it goes on from what the cache still has. Cancelling may leave it as it was."""
    await board.publish(request)
    board.release(request)
    if not request.over:
        request.submitted.retractions += 1
        request.blocked = board.freed
        arrive(board, request)


async def admit(board: Board, budget: int) -> None:
    """Admit requests that fit, as long as there is something left of ``budget``, the step's tokens. Cancelling leaves
    those that were admitted so far as they are."""
    for request in by_rank(board.waiting.values()):
        if budget < 1:
            return
        if request.over:
            continue
        if request.submitted.state is State.PREFETCHING:
            if not request.patient and request.handle is not None:
                request.handle.stop()
        elif board.held and request.blocked == board.freed:
            return
        elif _waits_for_another(board, request):
            continue
        elif not await _admit_one(board, request, budget):
            return
        else:
            budget -= min(budget, request.length - request.computed)


def _waits_for_another(board: Board, request: ScheduledRequest) -> bool:
    """Return True if a request that holds pages begins like ``request`` and is still computing what they share. Those
    pages can be hit soon, and would be computed twice otherwise."""
    if request.behind is not None:
        other, shared = request.behind
        if board.held.get(other.id) is other and not other.over and other.computed < shared:
            return True
    page = board.shape.page_size
    found = [(other, shared) for other in board.held.values()
             if other.priority >= request.priority and (shared := other.computes_for(request, page))]  # fmt: skip
    request.behind = max(found, key=lambda each: each[1], default=None)
    return bool(found)


async def _admit_one(board: Board, request: ScheduledRequest, budget: int) -> bool:
    if len(board.held) < board.settings.max_running:
        match = await _match(board, request)
        extend = max(1, request.length - match.host)
        whole = offer(board.shape, extend, budget, request.more)
        if not board.held:
            if await _admit_alone(board, request, cut_offers(board.shape, whole, match.host)):
                return True
        else:
            need = demand(board.shape, extend, budget, request.more, match)
            if passes(need, board.room(), len(board.held)) and await _try(board, request, [whole]):
                return True
    loser = victim(board.held.values())
    if board.settings.preempt and not request.over and loser is not None and loser.priority < request.priority:
        await retract(board, loser)  # only one in each step, because its pages take a moment to become free
    return False


async def _match(board: Board, request: ScheduledRequest) -> Matched:
    found = await board.cache.match(request.tokens, namespace=request.terms.namespace)
    request.submitted.match = Matched(
        found.device, found.host, found.host_hit_length, found.swa_host_hit_length, found.mamba_host_hit_length
    )
    return request.submitted.match


async def _admit_alone(board: Board, request: ScheduledRequest, offers: list[LeaseOffer]) -> bool:
    """Admit ``request`` while no request holds pages. Returns whether it was admitted.

    First each of ``offers`` is tried without waiting, the largest first. If none fits, the request waits for room for
    the largest one with all of its cached prefix, unless other users of the cache hold leases. If that can never fit,
    or if there are such users, it waits for the smallest one, with a shorter prefix if need be.
    """
    if request.over or await _try(board, request, offers):
        return not request.over
    try:
        if not board.cache.statistics().leases:
            with suppress(CacheFull):
                return await _wait_for(board, request, offers[0], shorter=False)
        return not request.over and await _wait_for(board, request, offers[-1], shorter=True)
    except CacheFull as error:
        board.drop(request, Finish.FAILED, error)
        return False


async def _wait_for(board: Board, request: ScheduledRequest, terms: LeaseOffer, *, shorter: bool) -> bool:
    """Wait in the cache's line until ``request`` is admitted with ``terms``. Returns whether it was; False if it was
    aborted or has given up its place.

    Raises:
        CacheFull: it can never be admitted with these terms.
    """
    lease = _lease(board, request, terms, wait=True, shorter=shorter)
    board.alone = request
    try:
        entered = await _wait_in_line(request, lease)
    except BaseException:
        lease.release(board.batch)
        raise
    finally:
        board.alone = None
    if entered and not request.over:
        _entered(board, request, lease)
        return True
    lease.release(board.batch)
    return False


async def _wait_in_line(request: ScheduledRequest, lease: Lease) -> bool:
    """Wait until ``lease`` is granted. Returns whether it was; False if ``give_way`` was called. The wait is a task of
    its own, so that ``give_way`` can cancel it and nothing else. Cancelling gives up the place in the line."""
    request.entering = asyncio.ensure_future(lease.__aenter__())
    try:
        await asyncio.wait([request.entering])
    except asyncio.CancelledError:
        request.entering.cancel()
        await asyncio.wait([request.entering])
        raise
    finally:
        entering, request.entering = request.entering, None
    if entering.cancelled():
        return False
    entering.result()
    return True


async def _try(board: Board, request: ScheduledRequest, offers: list[LeaseOffer]) -> bool:
    for terms in offers:
        try:
            lease = await _lease(board, request, terms, wait=False, shorter=False).__aenter__()
        except CacheFull:
            continue
        if request.over:
            lease.release(board.batch)
            return False
        _entered(board, request, lease)
        return True
    return False


def _lease(board: Board, request: ScheduledRequest, terms: LeaseOffer, *, wait: bool, shorter: bool) -> Lease:
    return board.cache.lease(
        request.tokens, new_tokens=request.more, namespace=request.terms.namespace, prefetch=request.handle, wait=wait,
        states=terms.states, chunk=terms.chunk, swa_chunk=terms.swa_chunk, shorter=shorter,
    )  # fmt: skip


def _entered(board: Board, request: ScheduledRequest, lease: Lease) -> None:
    request.entered(lease, board.shape.page_size, board.shape.has_mamba)
    board.hold(request)
    request.watch = asyncio.get_running_loop().create_task(_loaded(board, request, lease), name=f"load-{request.id}")


async def _loaded(board: Board, request: ScheduledRequest, lease: Lease) -> None:
    """Wait for the lease's pages: ``request`` is RUNNING when they are on the device. If they failed to load, the
    request arrives again, or fails after too many attempts."""
    try:
        await lease.loaded()
    except LoadFailed as error:
        request.watch = None
        request.failed_loads += 1
        if request.failed_loads >= board.settings.load_attempts:
            board.drop(request, Finish.FAILED, error)
        else:
            board.release(request)
            try:
                arrive(board, request)
            except AsyncCacheError as closed:
                board.drop(request, Finish.FAILED, closed)
    except AsyncCacheError as error:  # the cache is closed
        request.watch = None
        board.drop(request, Finish.FAILED, error)
    else:
        if not request.over:
            request.submitted.state = State.RUNNING
            begin_request(request.submitted, lease.hits)
    board.bell.set()
