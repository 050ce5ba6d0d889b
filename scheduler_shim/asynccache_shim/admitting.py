"""Admits jobs: takes them through both gates, and waits until load_back has brought their pages.

Laws:
* Jobs are admitted in their order (``admission.by_rank``). A job that waits for pages is not overtaken; one that waits
  for storage is.
* While any job holds pages, no job waits for pages; it is tried again in the next step. When no job holds pages, the
  first one waits in the cache's line, for backups and for other users of the cache. It gives up its place to a job that
  comes before it in the order.
* A job does not give up its cached prefix because room for load_back is missing at this moment.
* A job that was retracted is not admitted again before some job has given pages back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache import AsyncCacheError, CacheFull, Lease, LoadFailed
from asynccache_shim.admission import LeaseOffer, by_rank, cut_offers, demand, offer, passes, victim
from asynccache_shim.arrivals import arrive
from asynccache_shim.board import Board
from asynccache_shim.request import Finish, Matched, State
from asynccache_shim.running import retract
from asynccache_shim.scheduled_request import ScheduledRequest


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
