"""Takes a request into the queue, and prefetches its pages from storage for as long as the cache's policy allows.

Laws: a prefetch never holds up the admission of another request. If the cache has no room for the prefetch now, it
waits in the cache's own line. A request that was retracted, or whose pages failed to load, arrives here again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache import AsyncCacheError, CacheConfig, PrefetchPolicy
from asynccache_shim.board import Board
from asynccache_shim.request import State
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
