"""The requests of a step: pages for what each one computes, retraction where there are none, and the step's results.

Laws:
* A request computes its first chunk in the pages that it was admitted with. Later chunks and decoding extend its lease.
* If there is no page to extend a lease, the last request in the order is retracted, even if that is the request which
  needs the page. So the first request in the order always goes on.
* What a request has computed is published before its pages are given back, unless it failed or was aborted between two
  steps.
"""

from __future__ import annotations

import asyncio

from asynccache import CacheFull
from asynccache_shim.admission import by_rank, chunk_stop, shorter, victim
from asynccache_shim.admitting import retract
from asynccache_shim.board import Board
from asynccache_shim.model import NO_TOKEN, Checkpoint, Chunk
from asynccache_shim.request import Finish
from asynccache_shim.scheduled_request import ScheduledRequest


async def grow_all(board: Board) -> tuple[dict[int, int], int]:
    """Extend the leases of the running requests for this step. Returns the position at which each of them stops, by the
    request's number, and how many tokens of the step's budget are left.

    Requests that decode come first, because they take one token each and their readers wait for it. Cancelling leaves
    the leases as they are by then.
    """
    budget = board.settings.step_tokens
    stops: dict[int, int] = {}
    ranked = by_rank(board.running())
    for request in [*(r for r in ranked if r.decodes), *(r for r in ranked if not r.decodes)]:
        if budget and request.runs and not request.over:
            stop = await _grow(board, request, _wanted(board, request, budget))
            if stop > request.computed and request.runs:
                stops[request.id] = stop
                budget -= stop - request.computed
    return {number: stop for number, stop in stops.items() if number in board.held}, budget


def plan_admitted(board: Board, stops: dict[int, int], budget: int) -> None:
    """Add the requests that were admitted during this step and whose pages are on the device already to ``stops``."""
    for request in by_rank(board.running()):
        if request.id not in stops and budget and request.computed < request.reserved:
            stop = min(request.reserved, _wanted(board, request, budget))
            if stop > request.computed:
                stops[request.id] = stop
                budget -= stop - request.computed


def _wanted(board: Board, request: ScheduledRequest, budget: int) -> int:
    end = request.length
    if not request.decodes and request.reserved > request.computed:
        end = min(end, request.reserved)
    return chunk_stop(request.computed, end, budget, board.shape.page_size, request.marks)


async def _grow(board: Board, request: ScheduledRequest, stop: int) -> int:
    """Extend the lease of ``request`` up to ``stop``, or as far as there is room. Returns how far it reaches now;
    ``request.computed`` if the request was retracted."""
    page = board.shape.page_size
    while request.lease is not None and stop > request.reserved:
        try:
            request.pages = await request.lease.extend(stop - request.reserved, wait=True)
            request.reserved = len(request.pages) * page
        except CacheFull:
            less = shorter(request.computed, stop, page)
            if less < stop:
                stop = less
                continue
            loser = victim(list(board.held.values()))
            assert loser is not None
            await retract(board, loser)
    return stop if request.lease is not None else request.computed


async def chunks_of(board: Board, stops: dict[int, int]) -> list[tuple[ScheduledRequest, Chunk]]:
    """The requests of the step's batch, each with its chunk."""
    chunks = []
    for number, stop in stops.items():
        request = board.held.get(number)
        if request is not None and request.runs and not request.over:
            checkpoint = await _checkpoint(board, request, stop)
            chunks.append((request, request.chunk(stop, checkpoint, board.shape.has_swa)))
    return chunks


async def _checkpoint(board: Board, request: ScheduledRequest, stop: int) -> Checkpoint | None:
    """The checkpoint that is due at ``stop``; None if none is due, or if there is no slot for it."""
    if not board.shape.has_mamba or stop % board.shape.page_size:
        return None
    if stop > request.entry and stop - request.checkpointed < board.settings.checkpoint_every:
        return None
    assert request.lease is not None
    if len(request.lease.states) < 2:
        try:
            await request.lease.extend(0, states=1)
        except CacheFull:
            return None
    return Checkpoint(stop, int(request.lease.states[1]))


async def finish_step(board: Board, chunks: list[tuple[ScheduledRequest, Chunk]], tokens: list[int]) -> None:
    """Publish what a step has computed, and hand out its tokens. Cancelling leaves the other results unused; the
    requests of the step can only be released then."""
    for (request, chunk), token in zip(chunks, tokens, strict=True):
        request.computed = chunk.stop
        if request.over:
            await board.publish(request)
            board.release(request)
        else:
            await _publish_part(board, request, chunk)
            if token != NO_TOKEN and not request.over:  # it may have ended while its pages were published
                await _generated(board, request, token)


async def _publish_part(board: Board, request: ScheduledRequest, chunk: Chunk) -> None:
    """Commit a chunk of prefill or a checkpoint, and give back the SWA pages that the window has left."""
    lease = request.lease
    assert lease is not None
    if (chunk.stop <= request.entry or chunk.checkpoint is not None) and request.publishes():
        request.pages = await lease.commit(chunk.tokens[: chunk.stop], board.batch, chunk.checkpoint)
        lease.adopt(board.batch)
        if chunk.checkpoint is not None:
            request.checkpointed = chunk.stop
    lease.advance(chunk.stop, board.batch)


async def _generated(board: Board, request: ScheduledRequest, token: int) -> None:
    request.append(token)
    limits, late = request.terms.limits, request.deadline
    too_late = late is not None and asyncio.get_running_loop().time() >= late
    if token in limits.stop_tokens or request.generated >= limits.max_new_tokens or too_late:
        await board.publish(request)
        board.drop(request, Finish.STOP if token in limits.stop_tokens else Finish.LENGTH)
