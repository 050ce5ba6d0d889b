"""The scheduler: continuous batching over one cache and one model.

Laws:
* One loop computes one step after the other: pages for running requests, admission, model, results. The model runs in a
  thread of its own; nothing here blocks the event loop.
* Pages are given back only when no step uses them: a cancellation that comes while the model runs takes effect when the
  model has returned.
* When the loop ends with an error, every request fails with that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from asynccache import AsyncCache, CacheClosed, ConfigError, RankFailure, checks
from asynccache_shim.admission import check_fits
from asynccache_shim.admitting import admit, arrive
from asynccache_shim.board import Board, SchedulerConfig
from asynccache_shim.model import NO_TOKEN, Batch, Chunk, Model
from asynccache_shim.request import MAX_TOKEN, Finish, Request, end_request, enlist
from asynccache_shim.running import chunks_of, finish_step, grow_all, plan_admitted
from asynccache_shim.scheduled_request import ScheduledRequest
from asynccache_shim.shards import Shards
from asynccache_shim.thread import ModelThread, returned


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
        return f"Scheduler({self._board!r}, {self.steps} steps)"

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
            self._refuse()
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

    def _refuse(self) -> NoReturn:
        if isinstance(self._failure, RankFailure):
            raise RankFailure(*self._failure.args)
        raise CacheClosed("the scheduler is closed") from self._failure

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
        self._reap()
        stops, budget = await grow_all(board)
        await admit(board, budget)
        await asyncio.sleep(0)  # after this, requests that need no load_back are RUNNING
        plan_admitted(board, stops, budget)
        chunks = await chunks_of(board, stops)
        if chunks:
            await self._compute(chunks)
        return bool(chunks)

    def _reap(self) -> None:
        """Remove the requests that have ended."""
        for request in self._board.requests():
            if request.over:
                self._board.drop(request, Finish.ABORTED)

    async def _compute(self, chunks: list[tuple[ScheduledRequest, Chunk]]) -> None:
        board = self._board
        batch = Batch(tuple(chunk for _, chunk in chunks), tuple(board.ended))
        cancelled: asyncio.CancelledError | None = None
        try:
            future = self._forward(batch)
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
            await finish_step(board, chunks, tokens)
        if cancelled is not None:
            raise cancelled

    def _forward(self, batch: Batch) -> asyncio.Future[Sequence[int]]:
        """Have the batch computed here and by the shards on other ranks. The future has what the model returned here,
        and is done when all ranks have computed the batch."""
        shards = self._board.shards
        if shards is None:
            return self._thread.start(self._model.forward, batch)
        shards.send(batch)
        own = self._thread.start(self._model.forward, batch)
        return asyncio.get_running_loop().create_task(shards.everywhere(own), name="scheduler-batch")


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
