"""From arrival to the queue: fetch from storage what device and host lack, for as long as the policy allows.

Law: a fetch never holds up anybody else's admission, and one that the cache refuses for now waits in the cache's own
line. When a request comes back (retracted, or its pages failed to arrive) it arrives anew.
"""

from __future__ import annotations

import asyncio

from asynccache import AsyncCacheError, CacheConfig, PrefetchPolicy
from asynccache_shim.board import Board
from asynccache_shim.job import Job
from asynccache_shim.request import State


def patience(config: CacheConfig, tokens: int) -> float | None:
    """Seconds that a request waits for its own fetch, as the cache would have a waiting lease do; None: to its end."""
    if config.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
        return None
    if config.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
        return 0.0
    allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * tokens / 1024
    return min(allowed, config.prefetch_timeout_max)


def arrive(board: Board, job: Job) -> None:
    """Into the queue, while what storage has of it is being fetched."""
    board.waiting[job.id] = job
    job.patient = True
    job.handle = board.cache.prefetch(job.tokens, extra_key=job.terms.extra_key)
    if job.handle.done():
        job.request.state = State.WAITING
        board.call(job)
    else:
        job.request.state = State.PREFETCHING
        job.watch = asyncio.get_running_loop().create_task(_fetched(board, job), name=f"prefetch-{job.id}")


async def _fetched(board: Board, job: Job) -> None:
    handle = job.handle
    assert handle is not None
    try:
        async with asyncio.timeout(patience(board.cache.config, job.length)):
            await handle
    except TimeoutError:
        job.patient = False  # the next attempt to admit it has the fetch stopped; what it has is kept
        board.call(job)
        await _stopped(job)
    except AsyncCacheError:
        pass  # the cache is closed, and the scheduler's next call says so
    if not job.over:
        job.request.state = State.WAITING
    board.call(job)


async def _stopped(job: Job) -> None:
    try:
        if job.handle is not None:
            await job.handle
    except AsyncCacheError:
        pass
