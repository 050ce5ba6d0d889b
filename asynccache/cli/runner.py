"""Lets requests arrive, runs them side by side, cancels some, and ends when all have ended.

A request waits for its time, then for one of ``concurrency`` places. In a replay by the clock (``--speed``) it arrives
whether there is a place or not, prefetches at once, and waits then.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from contextlib import suppress

from asynccache.cli.interrupt import CancelledAt
from asynccache.cli.options import Settings
from asynccache.cli.request import Request, Source
from asynccache.cli.serving import Server
from asynccache.cli.tally import Tally
from asynccache.cli.trace import TraceClock
from asynccache.errors import CacheClosed, CacheFull, RankFailure


class Driver:
    """Runs one workload to its end. ``stop`` lets what runs finish, ``abort`` cancels it."""

    def __init__(
        self, server: Server, source: Source, settings: Settings, tally: Tally, time_of_trace: TraceClock | None = None
    ) -> None:
        self.tally = tally
        self._time_of_trace = time_of_trace
        self.running = 0
        self.stopping = False
        self.trace: str | None = None
        self._server = server
        self._source = source
        self._clock = bool(settings.speed)
        self._cancel_rate = settings.cancel_rate
        self._places = asyncio.Semaphore(settings.concurrency)
        self._rng = random.Random(settings.seed + 1)
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaits = 16.0

    @property
    def total(self) -> int | None:
        """How many requests there will be, where that is known."""
        return self._source.total

    async def run(self) -> None:
        """Return when the source has no more requests, or after ``stop``, and all have ended. Cancelling cancels
        the requests that run and waits for them."""
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
        """No new requests."""
        self.stopping = True
        self._stopped.set()

    def abort(self) -> None:
        """Cancel what runs."""
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
        if not self._clock:
            await self._places.acquire()

    async def _one(self, request: Request) -> None:
        self.running += 1
        self.tally.requests += 1
        if self._time_of_trace is not None:
            self._time_of_trace.begin(request)
        work = CancelledAt(self._served(request), self._cancel_at())
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
            self.stop()  # whoever closes the cache learns why it had closed itself
        except Exception as error:
            self._broken(request, error)
        finally:
            self.running -= 1
            self._source.done(request)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the place back, also of a request that was cancelled before its first step."""
        self._tasks.discard(task)
        if not self._clock:
            self._places.release()

    async def _served(self, request: Request) -> None:
        if self._clock:
            await self._server.serve(request, self._places)
        else:
            await self._server.serve(request)

    def _broken(self, request: Request, error: Exception) -> None:
        """An error that no request may meet: the run is over. The first one's trace is kept."""
        self.tally.failed += 1
        self.tally.problem(f"request {request.number} met {type(error).__name__}: {error}")
        if self.trace is None:
            self.trace = "".join(traceback.format_exception(error))
        self.stop()

    def _cancel_at(self) -> int | None:
        if self._rng.random() >= self._cancel_rate:
            return None
        return 1 + int(self._rng.random() * self._awaits)
