"""Runs the requests of a workload side by side: lets them arrive, cancels some, and waits until all have ended.

A request waits for its time, then for one of ``concurrency`` places. In a replay by the clock (``--speed``) a request
arrives whether or not a place is free: it prefetches at once and waits for a place after that.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asynccache.cli.options import RunSettings
from asynccache.cli.request import RunRequest, Source
from asynccache.cli.serving import Server
from asynccache.cli.tally import Tally
from asynccache.cli.trace import TraceClock
from asynccache.errors import CacheClosed, CacheFull, RankFailure

_T = TypeVar("_T")


class CancelledAt(Generic[_T]):
    """Runs ``work`` and cancels it at its n-th await, so that a seed cancels at the same place in every run.

    To be awaited in a task of its own: at await number ``at`` (None: never) that task cancels itself, as if from
    outside. ``awaits`` counts how often ``work`` has really given control to the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, _T], at: int | None) -> None:
        self._work = work
        self._at = at
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, _T]:
        steps = self._work.__await__()
        try:
            waited = next(steps)
            while True:
                self.awaits += 1
                if self.awaits == self._at:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    sent = yield waited
                except BaseException as error:
                    waited = steps.throw(error)
                else:
                    waited = steps.send(sent)
        except StopIteration as end:
            result: _T = end.value
            return result


class RequestRunner:
    """Runs one workload to its end. ``stop`` admits no more requests and lets those that run finish; ``abort``
    cancels those too.

    ``traceback``: the text of the first unexpected error of a request; None if there was none.
    """

    def __init__(
        self, server: Server, source: Source, settings: RunSettings, tally: Tally, clock: TraceClock | None = None
    ) -> None:
        self.tally = tally
        self.running = 0
        self.stopping = False
        self.traceback: str | None = None
        self._clock = clock
        self._server = server
        self._source = source
        self._timed = bool(settings.speed)
        self._cancel_rate = settings.cancel_rate
        self._places = asyncio.Semaphore(settings.concurrency)
        self._rng = random.Random(settings.seed + 1)
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaits = 16.0

    @property
    def total(self) -> int | None:
        """The number of requests that there will be; None if that is not known."""
        return self._source.total

    async def run(self) -> None:
        """Return when the source has no more requests, or after ``stop``, and all requests have ended. Cancelling
        cancels the requests that run and waits for them."""
        began = time.monotonic()
        try:
            while not self.stopping and (request := self._source.next()) is not None:
                await self._arrival(began + request.at)
                if self.stopping:
                    break
                task = asyncio.create_task(self._one(request))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            await self._drained()
        finally:
            self.abort()
            await self._drained()

    def stop(self) -> None:
        """Admit no more requests."""
        self.stopping = True
        self._stopped.set()

    def abort(self) -> None:
        """Admit no more requests, and cancel those that run."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def _drained(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _arrival(self, at: float) -> None:
        delay = at - time.monotonic()
        if delay > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
        if not self._timed:
            await self._places.acquire()

    async def _one(self, request: RunRequest) -> None:
        self.running += 1
        self.tally.requests += 1
        if self._clock is not None:
            self._clock.begin(request)
        serving = self._server.serve(request, self._places if self._timed else None)
        work = CancelledAt(serving, self._cancel_at())
        try:
            await work
            self._awaits += (work.awaits - self._awaits) * 0.05
        except asyncio.CancelledError:
            self.tally.cancelled += 1
        except CacheFull as error:
            self.tally.failed += 1
            self.tally.problem(f"request {request.number} gave up: {error}")
        except (CacheClosed, RankFailure):
            self.tally.failed += 1
            self.stop()  # the session that closes the cache reports why the cache had closed itself
        except Exception as error:
            self._broken(request, error)
        finally:
            self.running -= 1
            self._source.done(request)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the place back, also if the request was cancelled before its first step."""
        self._tasks.discard(task)
        if not self._timed:
            self._places.release()

    def _broken(self, request: RunRequest, error: Exception) -> None:
        """Note that a request failed by an unexpected error, and stop the run. Only the first traceback is kept."""
        self.tally.failed += 1
        self.tally.problem(f"request {request.number} met {type(error).__name__}: {error}")
        if self.traceback is None:
            self.traceback = "".join(traceback.format_exception(error))
        self.stop()

    def _cancel_at(self) -> int | None:
        """The number of the await at which this request is cancelled, from 1 to as many as a request usually has; None:
        it is not cancelled."""
        if self._rng.random() >= self._cancel_rate:
            return None
        return 1 + int(self._rng.random() * self._awaits)
