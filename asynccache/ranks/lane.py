"""One thread for calls that may block until a time-out, in the order in which they are handed over.

Law: nobody waits for it but with an end. It is a daemon: a call that is stuck keeps neither the loop nor the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Call(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any] | None


class Lane:
    """The thread starts with the lane."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Lane({self._thread.name}, {self._calls.qsize()} waiting)"

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """``work()`` in the thread; its result comes to the running loop. Cancelling the future does not stop it."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(work, future))
        return future

    def put(self, work: Callable[[], None]) -> None:
        """``work()`` in the thread, and nobody waits. It must not raise."""
        self._calls.put(_Call(work, None))

    def end(self) -> None:
        """After what was handed over; nothing may be handed over any more."""
        self._calls.put(None)

    def ended(self, seconds: float) -> bool:
        """Wait so long for the thread to end; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future = call.future
            result, error = _outcome(call.work)
            del call  # what the call kept goes before anybody is told: so that it never goes while the process ends
            if future is not None:
                with suppress(RuntimeError):  # the loop is gone, and with it everybody who could wait
                    future.get_loop().call_soon_threadsafe(_deliver, future, result, error)
            del future, result, error


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
