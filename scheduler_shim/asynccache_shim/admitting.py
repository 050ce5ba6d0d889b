"""Who comes in: both gates, and the wait for pages that load_back brings.

Laws:
* In order of rank; nobody overtakes who waits for pages. Who waits for storage is overtaken.
* While anybody holds pages, nobody waits for pages: it is tried again in the next step. When nobody does, the first in
  line waits for backups and other users of the cache, with a chunk that fits; it gives way to whoever ranks before it.
* Nobody gives up what is cached of it because room for load_back is a moment away.
* Who was retracted does not come back before pages were given back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache import AsyncCacheError, CacheFull, Lease, LoadFailed
from asynccache_shim.admission import Offer, cut_offers, demand, offer, passes
from asynccache_shim.arrivals import arrive
from asynccache_shim.board import Board
from asynccache_shim.job import Job
from asynccache_shim.planning import by_rank, victim
from asynccache_shim.request import Finish, Matched, State
from asynccache_shim.running import retract


async def admit(board: Board, budget: int) -> None:
    """Admit who fits, while the step's token budget lasts. Cancelling it leaves who came in so far admitted."""
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


async def _end_patience(board: Board, job: Job) -> None:
    """Have the cache stop a fetch that has had its time; a lease that may not wait does that, and is refused."""
    if job.patient or job.handle is None or job.handle.done():
        return
    try:
        lease = await _lease(board, job, Offer(1, 1, 0), wait=False, shorter=False).__aenter__()
    except CacheFull:
        return
    lease.release(board.batch)  # it came to its end just now


async def _admit_one(board: Board, job: Job, budget: int) -> bool:
    if len(board.held) < board.settings.max_running and await _through_the_gates(board, job, budget):
        return True
    loser = victim(list(board.held.values()))
    if board.settings.preempt and not job.over and loser is not None and loser.priority < job.priority:
        await retract(board, loser)  # one a step: what it held takes a moment to be free
    return False


async def _through_the_gates(board: Board, job: Job, budget: int) -> bool:
    match = await _match(board, job)
    extend = max(1, job.length - match.host)
    need = demand(board.shape, extend, budget, job.more, match)
    whole = offer(board.shape, extend, budget, job.more)
    if not board.held:
        return await _admit_alone(board, job, cut_offers(board.shape, whole, match.host))
    return passes(need, board.room(), len(board.held)) and await _try(board, job, [whole])


async def _match(board: Board, job: Job) -> Matched:
    found = await board.cache.match(job.tokens, extra_key=job.terms.extra_key)
    job.request.match = Matched(
        found.device, found.host, found.host_hit_length, found.swa_host_hit_length, found.mamba_host_hit_length
    )
    return job.request.match


async def _admit_alone(board: Board, job: Job, offers: list[Offer]) -> bool:
    """The largest chunk that fits now; or else, as soon as it fits, the largest with all that is cached, unless other
    users of the cache are in the way; or else the smallest."""
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


async def _wait_for(board: Board, job: Job, terms: Offer, *, shorter: bool) -> bool:
    """Whether it is in; it is not if it was aborted, or gave way.

    Raises:
        CacheFull: it never would be.
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


async def _wait_in_line(job: Job, lease: Lease) -> bool:
    """Whether the lease has entered. In a task of its own, so that whoever has it give way cancels this and nothing
    else; cancelling it gives up the place in line."""
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


async def _try(board: Board, job: Job, offers: list[Offer], *, shorter: bool = False) -> bool:
    for terms in offers:
        try:
            lease = await _lease(board, job, terms, wait=False, shorter=shorter).__aenter__()
        except CacheFull:
            continue
        if job.over:
            lease.release(board.batch)
            return False
        _entered(board, job, lease)
        return True
    return False


def _lease(board: Board, job: Job, terms: Offer, *, wait: bool, shorter: bool) -> Lease:
    return board.cache.lease(
        job.tokens, new_tokens=job.more, extra_key=job.terms.extra_key, prefetch=job.handle, wait=wait,
        states=terms.states, chunk=terms.chunk, swa_chunk=terms.swa_chunk, shorter=shorter,
    )  # fmt: skip


def _entered(board: Board, job: Job, lease: Lease) -> None:
    job.entered(lease, board.shape.page_size, board.shape.has_mamba)
    board.hold(job)
    job.watch = asyncio.get_running_loop().create_task(_loaded(board, job, lease), name=f"load-{job.id}")


async def _loaded(board: Board, job: Job, lease: Lease) -> None:
    """RUNNING when the pages are there; in line again when they failed to arrive."""
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


def _enter_again(board: Board, job: Job, error: LoadFailed) -> None:
    job.failed_loads += 1
    if job.failed_loads >= board.settings.load_attempts:
        board.drop(job, Finish.FAILED, error)
        return
    board.release(job)
    try:
        arrive(board, job)
    except AsyncCacheError as closed:
        board.drop(job, Finish.FAILED, closed)
