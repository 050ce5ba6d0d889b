"""The queue of jobs; a *job* is a request as the scheduler keeps it (``ScheduledRequest``). When a job arrives, its
pages are prefetched for as long as the cache's policy allows. Then it passes both gates, and waits until load_back has
brought its pages. A job that is retracted arrives again.

Laws:
* A prefetch never holds up the admission of another request. If the cache has no room for the prefetch now, it waits in
  the cache's own line.
* Jobs are admitted in their order (``admission.by_rank``). A job that waits for pages is not overtaken; a job that
  waits for storage may be overtaken.
* While any job holds pages, no job waits for pages; it is tried again in the next step. When no job holds pages, the
  first one waits in the cache's line, for backups and for other users of the cache. It gives up its place to a job that
  comes before it in the order.
* A job does not give up its cached prefix because room for load_back is missing at this moment.
* A job that was retracted is not admitted again before some job has given pages back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache import AsyncCacheError, CacheConfig, CacheFull, Lease, LoadFailed, PrefetchPolicy
from asynccache_shim.admission import LeaseOffer, by_rank, cut_offers, demand, offer, passes, victim
from asynccache_shim.board import Board
from asynccache_shim.request import Finish, Matched, State
from asynccache_shim.scheduled_request import ScheduledRequest


def patience(config: CacheConfig, tokens: int) -> float | None:
    """Return for how many seconds a request of ``tokens`` tokens waits for its own prefetch, by the cache's prefetch
    policy; None: until the prefetch has ended."""
    if config.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
        return None
    if config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
        return 0.0
    allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * tokens / 1024
    return min(allowed, config.prefetch_timeout_max)


def arrive(board: Board, job: ScheduledRequest) -> None:
    """Put ``job`` into the queue, and begin to prefetch its pages."""
    board.waiting[job.id] = job
    job.patient = True
    job.handle = board.cache.prefetch(job.tokens, extra_key=job.terms.extra_key)
    if job.handle.done():
        job.request.state = State.WAITING
        board.call(job)
    else:
        job.request.state = State.PREFETCHING
        job.watch = asyncio.get_running_loop().create_task(_fetched(board, job), name=f"prefetch-{job.id}")


async def _fetched(board: Board, job: ScheduledRequest) -> None:
    handle = job.handle
    assert handle is not None
    with suppress(AsyncCacheError):  # the cache is closed; the scheduler's next call of it raises that
        try:
            async with asyncio.timeout(patience(board.cache.config, job.length)):
                await handle
        except TimeoutError:
            job.patient = False  # the next attempt to admit the job stops the prefetch, which keeps what it has by then
            board.call(job)
            await handle
    if not job.over:
        job.request.state = State.WAITING
    board.call(job)


async def retract(board: Board, job: ScheduledRequest) -> None:
    """Publish what ``job`` has computed, give its pages back and put it into the queue again. When it is admitted again
    it goes on from what the cache still has. Cancelling may leave it as it was."""
    await board.publish(job)
    board.release(job)
    if not job.over:
        job.request.retractions += 1
        job.blocked = board.freed
        arrive(board, job)


async def admit(board: Board, budget: int) -> None:
    """Admit jobs that fit, as long as there is something left of ``budget``, the step's tokens. Cancelling leaves those
    that were admitted so far as they are."""
    for job in by_rank(list(board.waiting.values())):
        if budget < 1:
            return
        if job.over:
            continue
        if job.request.state is State.PREFETCHING:
            await _end_patience(board, job)
        elif (board.held and job.blocked == board.freed) or not await _admit_one(board, job, budget):
            return
        else:
            budget -= min(budget, job.length - job.computed)


async def _end_patience(board: Board, job: ScheduledRequest) -> None:
    """Have the cache stop a prefetch whose time is over. Asking for a lease that may not wait does that; the lease is
    refused while the prefetch is still stopping."""
    if job.patient or job.handle is None or job.handle.done():
        return
    try:
        lease = await _lease(board, job, LeaseOffer(1, 1, 0), wait=False, shorter=False).__aenter__()
    except CacheFull:
        return
    lease.release(board.batch)  # the prefetch had ended just now, so the lease was granted


async def _admit_one(board: Board, job: ScheduledRequest, budget: int) -> bool:
    if len(board.held) < board.settings.max_running and await _through_the_gates(board, job, budget):
        return True
    loser = victim(list(board.held.values()))
    if board.settings.preempt and not job.over and loser is not None and loser.priority < job.priority:
        await retract(board, loser)  # only one in each step, because its pages take a moment to become free
    return False


async def _through_the_gates(board: Board, job: ScheduledRequest, budget: int) -> bool:
    match = await _match(board, job)
    extend = max(1, job.length - match.host)
    need = demand(board.shape, extend, budget, job.more, match)
    whole = offer(board.shape, extend, budget, job.more)
    if not board.held:
        return await _admit_alone(board, job, cut_offers(board.shape, whole, match.host))
    return passes(need, board.room(), len(board.held)) and await _try(board, job, [whole])


async def _match(board: Board, job: ScheduledRequest) -> Matched:
    found = await board.cache.match(job.tokens, extra_key=job.terms.extra_key)
    job.request.match = Matched(
        found.device, found.host, found.host_hit_length, found.swa_host_hit_length, found.mamba_host_hit_length
    )
    return job.request.match


async def _admit_alone(board: Board, job: ScheduledRequest, offers: list[LeaseOffer]) -> bool:
    """Admit ``job`` while no job holds pages. Returns whether it was admitted.

    First each of ``offers`` is tried without waiting, the largest first. If none fits, the job waits for room for the
    largest one with all of its cached prefix, unless other users of the cache hold leases. If that can never fit, or if
    there are such users, it waits for the smallest one, with a shorter prefix if need be.
    """
    if job.over or await _try(board, job, offers):
        return not job.over
    try:
        if not board.cache.statistics().leases:
            with suppress(CacheFull):
                return await _wait_for(board, job, offers[0], shorter=False)
        return not job.over and await _wait_for(board, job, offers[-1], shorter=True)
    except CacheFull as error:
        board.drop(job, Finish.FAILED, error)
        return False


async def _wait_for(board: Board, job: ScheduledRequest, terms: LeaseOffer, *, shorter: bool) -> bool:
    """Wait in the cache's line until ``job`` is admitted with ``terms``. Returns whether it was; False if it was
    aborted or has given up its place.

    Raises:
        CacheFull: it can never be admitted with these terms.
    """
    lease = _lease(board, job, terms, wait=True, shorter=shorter)
    board.alone = job
    try:
        entered = await _wait_in_line(job, lease)
    except BaseException:
        lease.release(board.batch)
        raise
    finally:
        board.alone = None
    if entered and not job.over:
        _entered(board, job, lease)
        return True
    lease.release(board.batch)
    return False


async def _wait_in_line(job: ScheduledRequest, lease: Lease) -> bool:
    """Wait until ``lease`` is granted. Returns whether it was; False if ``give_way`` was called. The wait is a task of
    its own, so that ``give_way`` can cancel it and nothing else. Cancelling gives up the place in the line."""
    job.entering = asyncio.ensure_future(lease.__aenter__())
    try:
        await asyncio.wait([job.entering])
    except asyncio.CancelledError:
        job.entering.cancel()
        await asyncio.wait([job.entering])
        raise
    finally:
        entering, job.entering = job.entering, None
    if entering.cancelled():
        return False
    entering.result()
    return True


async def _try(board: Board, job: ScheduledRequest, offers: list[LeaseOffer]) -> bool:
    for terms in offers:
        try:
            lease = await _lease(board, job, terms, wait=False, shorter=False).__aenter__()
        except CacheFull:
            continue
        if job.over:
            lease.release(board.batch)
            return False
        _entered(board, job, lease)
        return True
    return False


def _lease(board: Board, job: ScheduledRequest, terms: LeaseOffer, *, wait: bool, shorter: bool) -> Lease:
    return board.cache.lease(
        job.tokens, new_tokens=job.more, extra_key=job.terms.extra_key, prefetch=job.handle, wait=wait,
        states=terms.states, chunk=terms.chunk, swa_chunk=terms.swa_chunk, shorter=shorter,
    )  # fmt: skip


def _entered(board: Board, job: ScheduledRequest, lease: Lease) -> None:
    job.entered(lease, board.shape.page_size, board.shape.has_mamba)
    board.hold(job)
    job.watch = asyncio.get_running_loop().create_task(_loaded(board, job, lease), name=f"load-{job.id}")


async def _loaded(board: Board, job: ScheduledRequest, lease: Lease) -> None:
    """Wait for the lease's pages: ``job`` is RUNNING when they are on the device. If they failed to load, it arrives
    again, or fails after too many attempts."""
    try:
        await lease.loaded()
    except LoadFailed as error:
        job.watch = None
        _enter_again(board, job, error)
    except AsyncCacheError as error:  # the cache is closed
        job.watch = None
        board.drop(job, Finish.FAILED, error)
    else:
        if not job.over:
            job.request.state = State.RUNNING
    board.bell.set()


def _enter_again(board: Board, job: ScheduledRequest, error: LoadFailed) -> None:
    job.failed_loads += 1
    if job.failed_loads >= board.settings.load_attempts:
        board.drop(job, Finish.FAILED, error)
        return
    board.release(job)
    try:
        arrive(board, job)
    except AsyncCacheError as closed:
        board.drop(job, Finish.FAILED, closed)
