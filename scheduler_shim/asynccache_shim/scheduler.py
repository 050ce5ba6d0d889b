"""The scheduler: continuous batching over one cache and one model.

Laws:
* One loop, one step at a time: room, admission, model, results. The model runs in a worker thread; nothing here blocks
  the event loop.
* Pages are given back only when no step uses them: a cancellation that arrives while the model runs waits for it.
* When the loop dies, every request is told what of.
* Several ranks: before each step all apply one order of rank 0's, and nothing else that comes from outside. While
  anything waits or is in flight there is a step every ``PACE`` seconds at least, whether there is work or not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import NoReturn

from asynccache import AsyncCache, CacheClosed, ConfigError, RankDivergence, RankFailure, checks
from asynccache.ranks.handshake import shake_hands
from asynccache_shim.admission import check_fits
from asynccache_shim.admitting import admit, note_loaded
from asynccache_shim.arrivals import arrive, note_fetched
from asynccache_shim.board import Board, Settings
from asynccache_shim.job import Job
from asynccache_shim.model import NO_TOKEN, Batch, Model, Sampling, Work
from asynccache_shim.orders import Desk, Order, Orders, decode, encode
from asynccache_shim.request import MAX_TOKEN, Finish, Request, end_request, enlist
from asynccache_shim.running import finish_step, grow_all, plan_admitted, works_of
from asynccache_shim.thread import ModelThread, returned

PACE = 0.001


class Scheduler:
    """``async with Scheduler(cache, model) as scheduler: scheduler.submit(request)``.

    The cache stays the caller's, who closes it afterwards; of several ranks, one that fails closes it, saving nothing.
    Belongs to the cache's loop.

    ``orders``: one rank among several, each with a scheduler, a cache and a model of its own; the scheduler closes
    them. Callers come to rank 0; the others wait for its end in ``finished``. Until then nobody else calls the cache.
    The model's answer must be the same on all ranks.
    """

    def __init__(
        self, cache: AsyncCache, model: Model, settings: Settings | None = None, *, orders: Orders | None = None
    ) -> None:
        checks.instance("cache", cache, AsyncCache)
        checks.provider("model", model, Model)  # type: ignore[type-abstract]
        settings = Settings() if settings is None else checks.instance("settings", settings, Settings)
        if orders is not None:
            checks.provider("orders", orders, Orders)  # type: ignore[type-abstract]
        self._board = Board(cache, settings, orders is not None)
        self._orders = orders
        self._desk = Desk()
        self._model = model
        self._thread = ModelThread()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False
        self._closed_by_order = False
        self._failure: BaseException | None = None
        self._count = 0
        self.steps = 0

    def __repr__(self) -> str:
        return f"Scheduler({self._board!r}, {self.steps} steps)"

    @property
    def failure(self) -> BaseException | None:
        """What its loop died of, if it did."""
        return self._failure

    async def __aenter__(self) -> Scheduler:
        """Start the loop. Several ranks: compare settings first.

        Raises:
            ConfigError: ranks differ in a setting.
            RankFailure: a rank is gone or silent.
        """
        if self._orders is not None:
            try:
                await shake_hands(self._orders.gather, {"scheduler": asdict(self._board.settings)})
            except BaseException:
                await self._orders.aclose(well=False)
                raise
            self._orders.watch(self._lost)
        self._loop = asyncio.get_running_loop().create_task(self._run(), name="asynccache-scheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``aclose()``. Raises what the loop died of, if nothing else is being raised."""
        await self.aclose()
        if self._failure is not None and error is None:
            raise self._failure

    async def aclose(self) -> None:
        """Abort what is left, give all pages back, stop. Several ranks: rank 0's ends all of them; another one that is
        closed before is lost to them. Cancelling it stops the waiting; closing goes on."""
        self._closing = True
        if self._orders is None:
            for job in self._board.jobs():
                job.request.abort()
        elif self._orders.leads:
            self._desk.closing = True
        elif self._loop is not None:
            self._loop.cancel()
        self._board.bell.set()
        if self._loop is not None:
            await asyncio.wait([self._loop])
        self._end_all()
        self._thread.close(wait=False)
        if self._orders is not None and (self._loop is None or self._loop.cancelled()):
            await self._orders.aclose(well=False)  # a loop that was cancelled before it began has not

    async def finished(self) -> None:
        """Return when the loop has ended: several ranks, when rank 0's scheduler was closed. Cancelling it stops the
        waiting.

        Raises:
            BaseException: what the loop died of.
        """
        assert self._loop is not None
        await asyncio.wait([self._loop])
        if self._failure is not None:
            raise self._failure

    # callers

    def submit(self, request: Request) -> Request:
        """Into the queue; returns it, to iterate over. From the loop's thread.

        Raises:
            CacheFull: it could not run in empty pools.
            CacheClosed: the scheduler is closed, or died.
            RankFailure, RankDivergence: so it died.
            ConfigError: it is no request, or was submitted before, or one of its attributes was set to what is
                unusable; or this is not rank 0.
        """
        checks.instance("request", request, Request)
        if self._closing:
            self._refuse()
        if self._orders is not None and not self._orders.leads:
            raise ConfigError("submit: rank 0 takes the requests")
        terms = request.terms
        check_fits(self._board.shape, len(terms.tokens) + terms.limits.max_new_tokens - 1)
        self._count += 1
        number = self._count
        if self._orders is not None:
            request.sampling = _seeded(request.sampling)
            enlist(request, lambda: self._abort_everywhere(number))
            self._submit_everywhere(number, request)
            return request
        job = Job(request, number)
        enlist(request, lambda: self._aborted(job))
        try:
            arrive(self._board, job)
        except Exception as error:
            self._board.drop(job, Finish.FAILED, error)
            raise
        return request

    def _submit_everywhere(self, number: int, request: Request) -> None:
        try:
            self._desk.submit(number, request)
        except Exception as error:
            end_request(request, Finish.FAILED, error)
            raise
        self._board.bell.set()

    def _refuse(self) -> NoReturn:
        if isinstance(self._failure, (RankFailure, RankDivergence)):
            raise type(self._failure)(*self._failure.args)
        raise CacheClosed("the scheduler is closed") from self._failure

    def _aborted(self, job: Job) -> None:
        """Who waits leaves at once; who holds pages, when no step uses them."""
        end_request(job.request, Finish.ABORTED)
        if job.id in self._board.waiting:
            self._board.drop(job, Finish.ABORTED)
        self._board.bell.set()

    def _abort_everywhere(self, number: int) -> None:
        request = self._desk.abort(number)
        if request is not None:
            end_request(request, Finish.ABORTED)
        self._board.bell.set()

    # the loop

    async def _run(self) -> None:
        try:
            await (self._alone() if self._orders is None else self._together(self._orders))
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._end_all()
            if self._orders is not None:
                await self._orders.aclose(well=self._closed_by_order)
                if self._failure is not None:  # nothing can be agreed on any more; who saved alone would only diverge
                    await self._board.cache.aclose(0.0)

    async def _alone(self) -> None:
        while not self._closing:
            self._board.bell.clear()
            if not await self.step():
                await self._board.bell.wait()

    def _end_all(self) -> None:
        self._closing = True
        finish = Finish.ABORTED if self._failure is None else Finish.FAILED
        for job in self._board.jobs():
            self._board.drop(job, finish, self._failure)
        for request in self._desk.left():
            end_request(request, finish, self._failure)

    # several ranks

    async def _together(self, orders: Orders) -> None:
        while self._failure is None:
            order = self._desk.order() if orders.leads else decode(await orders.receive())
            if orders.leads:
                orders.send(encode(order))
            self._obey(order)
            if order.closing:
                self._closed_by_order = True
                return
            if not await self.step() and orders.leads:
                await self._pause()

    def _obey(self, order: Order) -> None:
        """The same on every rank."""
        board = self._board
        for number, request in order.arrivals:
            job = Job(request, number)
            try:
                arrive(board, job)
            except ConfigError as error:
                board.drop(job, Finish.FAILED, error)
        for number in order.aborted:
            aborted = board.waiting.get(number) or board.held.get(number)
            if aborted is not None:
                board.drop(aborted, Finish.ABORTED)

    async def _pause(self) -> None:
        """Rank 0, which has computed nothing: until somebody comes, or for a moment while anything is under way."""
        board = self._board
        board.bell.clear()
        if self._desk or self._failure is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PACE if board.waiting or board.cache.in_flight else None):
                await board.bell.wait()

    def _lost(self, failure: RankFailure) -> None:
        """A rank is gone: whoever waits is told now. What is held goes back when no step uses it any more."""
        self._failure = self._failure or failure
        self._closing = True
        for request in [*(job.request for job in self._board.jobs()), *self._desk.left()]:
            end_request(request, Finish.FAILED, self._failure)
        self._board.bell.set()

    # one step

    async def step(self) -> bool:
        """One step; whether anything was computed. The loop calls it: by hand only where no loop was started.

        Cancelling it while the model runs takes effect when the model has returned and its results are applied.
        """
        board = self._board
        await board.cache.step()
        if board.lockstep:
            note_fetched(board)
            await note_loaded(board)
        self._reap()
        stops, budget = await grow_all(board)
        await admit(board, budget)
        await note_loaded(board)
        plan_admitted(board, stops, budget)
        works = await works_of(board, stops)
        if works:
            await self._compute(works)
        return bool(works)

    def _reap(self) -> None:
        """Aborted requests leave."""
        for job in self._board.jobs():
            if job.over:
                self._board.drop(job, Finish.ABORTED)

    async def _compute(self, works: list[tuple[Job, Work]]) -> None:
        board = self._board
        batch = Batch(tuple(work for _, work in works), tuple(board.ended))
        board.ended.clear()
        future = self._thread.start(self._model.forward, batch)
        cancelled = await returned(future)
        try:
            tokens = _checked(batch, future.result())
        except Exception as error:
            if board.lockstep:  # nobody here knows what the other ranks' models did
                raise RankFailure(f"the model failed on this rank: {error!r}") from error
            for job, _ in works:
                board.drop(job, Finish.FAILED, error)
        else:
            self.steps += 1
            await finish_step(board, works, tokens)
        if cancelled is not None:
            raise cancelled


def _seeded(sampling: Sampling) -> Sampling:
    """What is drawn is the same on every rank."""
    if sampling.temperature <= 0 or sampling.seed is not None:
        return sampling
    return sampling._replace(seed=random.getrandbits(32))


def _checked(batch: Batch, answer: Sequence[int]) -> list[int]:
    """What the model returned, if it is what was asked for."""
    tokens = [int(token) for token in answer]
    if len(tokens) != len(batch.works):
        raise ConfigError(f"model: {len(tokens)} tokens came back for {len(batch.works)} works")
    for work, token in zip(batch.works, tokens, strict=True):
        if not (0 <= token <= MAX_TOKEN if work.sample else token == NO_TOKEN):
            raise ConfigError(f"model: token {token} came back for request {work.request_id}, sample={work.sample}")
    return tokens
