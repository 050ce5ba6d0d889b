"""The jobs of a step: pages for what each one computes, retraction where there are none, and the step's results.

Laws:
* A job computes its first chunk in the pages that it was admitted with. Later chunks and decoding extend its lease.
* If there is no page to extend a lease, the last job in the order is retracted, even if that is the job which needs the
  page. So the first job in the order always goes on.
* What a job has computed is published before its pages are given back.
"""

from __future__ import annotations

from asynccache import CacheFull
from asynccache_shim.admission import by_rank, chunk_stop, shorter, victim
from asynccache_shim.admitting import retract
from asynccache_shim.board import Board
from asynccache_shim.model import NO_TOKEN, Checkpoint, Chunk
from asynccache_shim.request import Finish
from asynccache_shim.scheduled_request import ScheduledRequest


async def grow_all(board: Board) -> tuple[dict[int, int], int]:
    """Extend the leases of the running jobs for this step. Returns the position at which each job stops, by the job's
    number, and how many tokens of the step's budget are left.

    Jobs that decode come first, because they take one token each and their readers wait for it. Cancelling leaves the
    leases as they are by then.
    """
    budget = board.settings.step_tokens
    stops: dict[int, int] = {}
    ranked = by_rank(board.running())
    for job in [*(j for j in ranked if j.decodes), *(j for j in ranked if not j.decodes)]:
        if budget and job.runs and not job.over:
            stop = await _grow(board, job, _wanted(board, job, budget))
            if stop > job.computed and job.runs:
                stops[job.id] = stop
                budget -= stop - job.computed
    return {number: stop for number, stop in stops.items() if number in board.held}, budget


def plan_admitted(board: Board, stops: dict[int, int], budget: int) -> None:
    """Add the jobs that were admitted during this step and whose pages are on the device already to ``stops``."""
    for job in by_rank(board.running()):
        if job.id not in stops and budget and job.computed < job.reserved:
            stop = min(job.reserved, _wanted(board, job, budget))
            if stop > job.computed:
                stops[job.id] = stop
                budget -= stop - job.computed


def _wanted(board: Board, job: ScheduledRequest, budget: int) -> int:
    end = job.length if job.decodes or job.reserved <= job.computed else min(job.length, job.reserved)
    return chunk_stop(job.computed, end, budget, board.shape.page_size, job.marks)


async def _grow(board: Board, job: ScheduledRequest, stop: int) -> int:
    """Extend the lease of ``job`` up to ``stop``, or as far as there is room. Returns how far it reaches now;
    ``job.computed`` if the job was retracted."""
    page = board.shape.page_size
    while job.lease is not None and stop > job.reserved:
        try:
            job.pages = await job.lease.extend(stop - job.reserved, wait=True)
            job.reserved = len(job.pages) * page
        except CacheFull:
            less = shorter(job.computed, stop, page)
            if less < stop:
                stop = less
                continue
            loser = victim(list(board.held.values()))
            assert loser is not None
            await retract(board, loser)
    return stop if job.lease is not None else job.computed


async def chunks_of(board: Board, stops: dict[int, int]) -> list[tuple[ScheduledRequest, Chunk]]:
    """The jobs of the step's batch, each with its chunk."""
    chunks = []
    for number, stop in stops.items():
        job = board.held.get(number)
        if job is not None and job.runs and not job.over:
            checkpoint = await _checkpoint(board, job, stop)
            chunks.append((job, job.chunk(stop, checkpoint, board.shape.has_swa)))
    return chunks


async def _checkpoint(board: Board, job: ScheduledRequest, stop: int) -> Checkpoint | None:
    """The checkpoint that is due at ``stop``; None if none is due, or if there is no slot for it."""
    if not board.shape.has_mamba or stop % board.shape.page_size:
        return None
    if stop > job.entry and stop - job.checkpointed < board.settings.checkpoint_every:
        return None
    assert job.lease is not None
    if len(job.lease.states) < 2:
        try:
            await job.lease.extend(0, states=1)
        except CacheFull:
            return None
    return Checkpoint(stop, int(job.lease.states[1]))


async def finish_step(board: Board, chunks: list[tuple[ScheduledRequest, Chunk]], tokens: list[int]) -> None:
    """Publish what a step has computed, and hand out its tokens. Cancelling leaves the other results unused; the
    requests of the step can only be released then."""
    for (job, chunk), token in zip(chunks, tokens, strict=True):
        job.computed = chunk.stop
        if job.over:
            await board.publish(job)
            board.release(job)
        else:
            await _publish_part(board, job, chunk)
            if token != NO_TOKEN:
                await _generated(board, job, token)


async def _publish_part(board: Board, job: ScheduledRequest, chunk: Chunk) -> None:
    """Commit a chunk of prefill or a checkpoint, and give back the SWA pages that the window has left."""
    lease = job.lease
    assert lease is not None
    if chunk.stop <= job.entry or chunk.checkpoint is not None:
        job.pages = await lease.commit(chunk.tokens[: chunk.stop], board.batch, chunk.checkpoint)
        lease.adopt(board.batch)
        if chunk.checkpoint is not None:
            job.checkpointed = chunk.stop
    lease.advance(chunk.stop, board.batch)


async def _generated(board: Board, job: ScheduledRequest, token: int) -> None:
    job.append(token)
    limits = job.terms.limits
    if token in limits.stop_tokens or job.generated >= limits.max_new_tokens:
        await board.publish(job)
        board.drop(job, Finish.STOP if token in limits.stop_tokens else Finish.LENGTH)
