"""A few threads that do blocking work for one event loop, in the order in which it is handed to them.

What ``ThreadPoolExecutor`` behind ``run_in_executor`` does, at half the price of a hand-off (30 µs of CPU instead of 60
on the machine of docs/performance.md): one future instead of two, and one wake-up of the loop for all that is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

from asynccache import checks
from asynccache.errors import Unavailable

MOST_THREADS = 1024

P = ParamSpec("P")
T = TypeVar("T")


class _Job(NamedTuple):
    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Workers:
    """``count`` threads, started when they are first needed. They are daemons: who never calls ``close`` does not keep
    the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._count = checks.integer("count", count, 1, MOST_THREADS)
        self._name = checks.text("name", name)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._waking = False
        self._threads: list[Thread] = []

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """``function`` in a thread. Cancelling the future does not stop it: who lent it buffers waits by ``settled``.

        Raises:
            ConfigError: ``function`` cannot be called.
            Unavailable: ``close`` was called.
        """
        checks.function("function", function)
        if not self._threads:
            self._start()
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(future, function, args, kwargs))
        return future

    def close(self) -> None:
        """Do what was handed in, end the threads, and wait for that. Nobody may wait for a future. Twice is fine."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._name}: closed")
        self._loop = asyncio.get_running_loop()
        self._threads = [Thread(target=self._work, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done.append(_outcome(job))
            del job  # or an idle thread would keep the last call's buffers
            if not self._waking:
                self._waking = True
                with suppress(RuntimeError):  # the loop is gone, and with it everybody who could wait
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Runs on the loop. The flag falls first: what is appended from then on has a wake-up of its own."""
        self._waking = False
        while self._done:
            future, result, error = self._done.popleft()
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _outcome(job: _Job) -> tuple[asyncio.Future[Any], Any, BaseException | None]:
    try:
        return job.future, job.function(*job.args, **job.kwargs), None
    except BaseException as error:
        return job.future, None, error
