"""``BatchRequest``: a request to ``ContinuousBatching``. Unlike the scheduler's own requests it may be read and aborted
by any thread, and in any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from asynccache_shim.request import Limits, Request, Tokens

from asynccache import CacheClosed, Hits


class BatchRequest(Request):
    """One prompt that is being continued. ``output``: its new tokens so far. ``finish``: how the request ended; None:
    it has not. ``error``: the error with which it failed; None: it has not failed. ``hits``: the prompt's cached tokens
    by tier; None while the request waits for room. Iterating yields the tokens as they are made."""

    def __init__(
        self, tokens: list[int] | Tokens, limits: Limits, soon: Callable[..., None],
        begun: Callable[[int, Hits], None], **terms: Any,
    ) -> None:  # fmt: skip
        """``soon`` calls a function in the thread that serves the request; ``begun`` is told the length of the prompt
        and its hits."""
        super().__init__(tokens, limits, **terms)
        self._soon = soon
        self._begun = begun
        self._changed = threading.Condition()

    def abort(self) -> None:
        """End the request soon, as ``Finish.ABORTED``, with the tokens that it has. A request that is over stays as it
        is. The call does not wait."""
        if self.finish is None:
            with suppress(CacheClosed):  # closing ends all requests
                self._soon(super().abort)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the request is over, however it ended. Blocks the thread.

        Raises:
            TimeoutError: it is not over after ``timeout`` seconds; it goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish is not None, timeout):
                raise TimeoutError(f"the request is not over after {timeout} s")

    def result(self, timeout: float | None = None) -> list[int]:
        """Return the whole output. Blocks the thread until the request is over.

        Raises:
            TimeoutError: it is not over after ``timeout`` seconds; it goes on.
            BaseException: what the request failed of.
        """
        self.wait(timeout)
        if self.error is not None:
            raise self.error
        return self.output

    def __iter__(self) -> Iterator[int]:
        """Yield the output from its first token on; blocks the thread until each token is there. There may be any
        number of readers. A request that failed raises its error after the last token."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: self.finish is not None or len(self.output) > at)  # type: ignore[misc]
            if at == len(self.output):
                self.result()
                return
            yield self.output[at]
            at += 1

    def _begin(self, hits: Hits) -> None:
        super()._begin(hits)
        self._begun(len(self.tokens), hits)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # the reader's loop is closed: nobody reads there any more
                waiter.get_loop().call_soon_threadsafe(_done, waiter)

    async def _news(self, seen: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self.finish is not None or len(self.output) > seen:
                return
            self._waiters.append(waiter)
        await waiter


def _done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
