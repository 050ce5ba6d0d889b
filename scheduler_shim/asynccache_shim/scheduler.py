"""The scheduler: continuous batching over one cache and one model. ``Scheduler.step`` is one step, from
pages to results.

What always holds:
* One loop computes one step after the other: pages for running requests, admission, model, results. The model runs in a
  thread of its own; nothing here blocks the event loop.
* A request computes its first chunk in the pages that it was admitted with. Later chunks and decoding extend its lease.
* If there is no page to extend a lease, the last request in the order is retracted, even if that is the request which
  needs the page. So the first request in the order always goes on.
* What a request has computed is published before its pages are given back, unless it failed or was aborted between two
  steps.
* Pages are given back only when no step uses them: a cancellation that comes while the model runs takes effect when the
  model has returned.
* When the loop ends with an error, every request fails with that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError, RankFailure, checks
from asynccache_shim.admission import check_fits, chunk_stop, shorter
from asynccache_shim.board import Board, ScheduledRequest, SchedulerConfig, by_rank, victim
from asynccache_shim.model import NO_TOKEN, Batch, Checkpoint, Chunk, Model, ModelThread, returned
from asynccache_shim.queue import admit, arrive, retract
from asynccache_shim.request import MAX_TOKEN, Finish, Request, end_request, enlist
from asynccache_shim.shards import Shards


class Scheduler:
    """Continuous batching: ``async with Scheduler(cache, model) as scheduler: scheduler.submit(request)``.

    The cache must be open, and stays the caller's, who closes it after the scheduler. All calls must be made in the
    thread of the cache's event loop.

    If the cache has workers on other ranks, ``model`` is this rank's shard, and the other ranks compute each step with
    ``follow``. The tokens are those that ``model`` returns on this rank.

    Raises:
        ConfigError: an argument cannot be used, or ``settings`` do not fit the cache's page size.
    """

    def __init__(self, cache: AsyncCache, model: Model, settings: SchedulerConfig | None = None) -> None:
        checks.instance("cache", cache, AsyncCache)
        checks.provider("model", model, Model)  # type: ignore[type-abstract]
        settings = SchedulerConfig() if settings is None else checks.instance("settings", settings, SchedulerConfig)
        self._board = Board(cache, settings)
        self._model = model
        self._thread = ModelThread()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False
        self._failure: BaseException | None = None
        self._count = 0
        self.steps = 0

    def __repr__(self) -> str:
        board = self._board
        return f"Scheduler({len(board.waiting)} waiting, {len(board.held)} hold pages, {self.steps} steps)"

    @property
    def failure(self) -> BaseException | None:
        """The error that the loop has ended with; None if there was none."""
        return self._failure

    async def __aenter__(self) -> Scheduler:
        """Start the loop.

        Raises:
            ConfigError: the cache has workers on other ranks but none in this process, where a shard of the model is to
                run.
        """
        cache, own = self._board.cache, self._board.cache.worker
        if own is not None:
            self._board.shards = Shards(cache, own, self._lost)
        elif not cache.pools:
            raise ConfigError("scheduler: it must run in the process of a rank, and this cache has no worker here")
        self._loop = asyncio.get_running_loop().create_task(self._run(), name="asynccache-scheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call ``aclose()``. Raises the error that the loop has ended with, unless another error is being raised."""
        await self.aclose()
        if self._failure is not None and error is None:
            raise self._failure

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all requests, give all pages back and end the loop. The requests are aborted; with an ``error`` they fail
        with that. Cancelling ends the waiting; closing goes on.

        Raises:
            ConfigError: ``error`` is no exception; nothing has ended.
        """
        if error is not None:
            checks.instance("error", error, BaseException)
        self._closing = True
        for request in self._board.requests():
            self._end(request, Finish.ABORTED if error is None else Finish.FAILED, error)
        self._board.bell.set()
        if self._loop is not None:
            await asyncio.wait([self._loop])
        self._end_all()  # for a loop that never ran

    # callers

    def submit(self, request: Request) -> Request:
        """Put ``request`` into the queue, and return it. To be called in the thread of the loop.

        Raises:
            CacheFull: the request could not run even if all pools were empty.
            CacheClosed: the scheduler is closed, or its loop has ended with an error.
            RankFailure: another rank has failed.
            ConfigError: it is no request, or it was submitted before, or one of its attributes was set to something
                that cannot be used.
        """
        checks.instance("request", request, Request)
        if self._closing:
            if isinstance(self._failure, RankFailure):
                raise RankFailure(*self._failure.args)
            raise CacheClosed("the scheduler is closed") from self._failure
        terms = request.terms
        check_fits(self._board.shape, len(terms.tokens) + terms.limits.max_new_tokens - 1)
        self._count += 1
        scheduled = ScheduledRequest(request, self._count)
        enlist(request, self._count, lambda: self._end(scheduled, Finish.ABORTED))
        try:
            arrive(self._board, scheduled)
        except Exception as error:
            self._board.drop(scheduled, Finish.FAILED, error)
            raise
        return request

    def _end(self, request: ScheduledRequest, finish: Finish, error: BaseException | None = None) -> None:
        """End ``request``. If it waits, it is removed at once; if it holds pages, when no step uses them."""
        end_request(request.submitted, finish, error)
        if request.id in self._board.waiting:
            self._board.drop(request, finish, error)
        self._board.bell.set()

    # the loop

    async def _run(self) -> None:
        try:
            while not self._closing:
                self._board.bell.clear()
                if not await self.step():
                    await self._board.bell.wait()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all requests, the model's thread and the watching of the group. A second call does nothing."""
        self._closing = True
        finish = Finish.ABORTED if self._failure is None else Finish.FAILED
        for request in self._board.requests():
            self._board.drop(request, finish, self._failure)
        self._thread.close(wait=False)
        if self._board.shards is not None:
            self._board.shards.close()

    def _lost(self, failure: RankFailure) -> None:
        """Another rank has failed: fail all requests at once. Their pages are given back when the model has
        returned."""
        self._failure = self._failure or failure
        self._closing = True
        for request in self._board.requests():
            self._end(request, Finish.FAILED, self._failure)
        self._board.bell.set()

    # one step

    async def step(self) -> bool:
        """Compute one step. Returns whether anything was computed. The loop calls this; a caller may only do so if the
        loop was not started.

        A cancellation that comes while the model runs takes effect when the model has returned and its results are
        applied.
        """
        board = self._board
        for request in board.requests():
            if request.over:
                board.drop(request, Finish.ABORTED)
        stops, budget = await _grow_all(board)
        await admit(board, budget)
        await asyncio.sleep(0)  # after this, requests that need no load_back are RUNNING
        for request in by_rank(board.running()):  # those that were admitted, and whose pages are on the device already
            if request.id not in stops and budget and request.computed < request.reserved:
                stop = min(request.reserved, _wanted(board, request, budget))
                if stop > request.computed:
                    stops[request.id] = stop
                    budget -= stop - request.computed
        chunks = []
        for number, stop in stops.items():
            held = board.held.get(number)
            if held is not None and held.runs and not held.over:
                checkpoint = await _checkpoint(board, held, stop)
                chunks.append((held, held.chunk(stop, checkpoint, board.shape.has_swa)))
        if chunks:
            await self._compute(chunks)
        return bool(chunks)

    async def _compute(self, chunks: list[tuple[ScheduledRequest, Chunk]]) -> None:
        board = self._board
        batch = Batch(tuple(chunk for _, chunk in chunks), tuple(board.ended))
        cancelled: asyncio.CancelledError | None = None
        future: asyncio.Future[Sequence[int]]
        try:
            if board.shards is None:
                future = self._thread.start(self._model.forward, batch)
            else:  # done when all ranks have computed the batch
                board.shards.send(batch)
                own = self._thread.start(self._model.forward, batch)
                future = asyncio.get_running_loop().create_task(board.shards.everywhere(own), name="scheduler-batch")
            board.ended.clear()
            cancelled = await returned(future)
            tokens = _checked(batch, future.result())
        except RankFailure:
            raise
        except Exception as error:
            for request, _ in chunks:
                board.drop(request, Finish.FAILED, error)
        else:
            self.steps += 1
            await _finish_step(board, chunks, tokens)
        if cancelled is not None:
            raise cancelled


# the parts of a step: pages for what each request computes, retraction where there are none, and results


async def _grow_all(board: Board) -> tuple[dict[int, int], int]:
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
            loser = victim(board.held.values())
            assert loser is not None
            await retract(board, loser)
    return stop if request.lease is not None else request.computed


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


async def _finish_step(board: Board, chunks: list[tuple[ScheduledRequest, Chunk]], tokens: list[int]) -> None:
    """Publish what a step has computed, give back the SWA pages that windows have left, and hand out the step's tokens.
    Cancelling leaves the other results unused; the requests of the step can only be released then."""
    for (request, chunk), token in zip(chunks, tokens, strict=True):
        request.computed = chunk.stop
        if request.over:
            await board.publish(request)
            board.release(request)
            continue
        lease = request.lease
        assert lease is not None
        if (chunk.stop <= request.entry or chunk.checkpoint is not None) and request.publishes():
            request.pages = await lease.commit(chunk.tokens[: chunk.stop], board.batch, chunk.checkpoint)
            lease.adopt(board.batch)
            if chunk.checkpoint is not None:
                request.checkpointed = chunk.stop
        lease.advance(chunk.stop, board.batch)
        if token != NO_TOKEN and not request.over:  # it may have ended while its pages were published
            request.append(token)
            limits, late = request.terms.limits, request.deadline
            too_late = late is not None and asyncio.get_running_loop().time() >= late
            if token in limits.stop_tokens or request.generated >= limits.max_new_tokens or too_late:
                await board.publish(request)
                board.drop(request, Finish.STOP if token in limits.stop_tokens else Finish.LENGTH)


def _checked(batch: Batch, answer: Sequence[int]) -> list[int]:
    """The tokens that the model returned.

    Raises:
        ConfigError: they are not one token for each chunk that samples and ``NO_TOKEN`` for each other.
    """
    tokens = [int(token) for token in answer]
    if len(tokens) != len(batch.chunks):
        raise ConfigError(f"model: {len(tokens)} tokens came back for {len(batch.chunks)} chunks")
    for chunk, token in zip(batch.chunks, tokens, strict=True):
        if not (0 <= token <= MAX_TOKEN if chunk.sample else token == NO_TOKEN):
            raise ConfigError(f"model: token {token} came back for request {chunk.request_id}, sample={chunk.sample}")
    return tokens
