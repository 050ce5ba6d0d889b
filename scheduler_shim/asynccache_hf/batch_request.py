"""``BatchRequest``: a request to ``ContinuousBatching`` as its caller sees it. It may be read and aborted by any
thread, and in any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from asynccache_shim.request import Finish

from asynccache import Hits


class BatchPrompt(NamedTuple):
    """The input of a request. ``tokens``: the prompt. ``most``: how many new tokens it gets at most. ``ends``: the
    tokens that end the answer. ``streaming``: True if transformers is to report each new token, and not only the whole
    answer. ``options``: those of sampling. ``now``: the model's identity when it was asked."""

    tokens: list[int]
    most: int
    ends: frozenset[int]
    extra_key: str | bytes | None
    streaming: bool
    options: dict[str, object]
    now: str = ""


class BatchRequest:
    """One prompt that is being continued. ``output``: its new tokens so far. ``finish``: how the request ended; None:
    it has not. ``error``: the error with which it failed; None: it has not failed. ``hits``: the prompt's cached tokens
    by tier; None while the request waits for room. Iterating yields the tokens as they are made."""

    def __init__(self, request_id: str, asked: BatchPrompt, abort: Callable[[BatchRequest], None]) -> None:
        self.id = request_id
        self.asked = asked
        self.output: list[int] = []
        self.hits: Hits | None = None
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self._abort = abort
        self._news = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        how = self.finish.value if self.finish else "not over"
        return f"<BatchRequest {self.id}: {len(self.asked.tokens)} tokens, {len(self.output)} generated, {how}>"

    def abort(self) -> None:
        """End the request soon, as ``Finish.ABORTED``, with the tokens that it has. A request that is over stays as it
        is. The call does not wait."""
        if self.finish is None:
            self._abort(self)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the request is over, however it ended. Blocks the thread.

        Raises:
            TimeoutError: it is not over after ``timeout`` seconds; it goes on.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.finish is not None, timeout):
                raise TimeoutError(f"request {self.id} is not over after {timeout} s")

    def result(self, timeout: float | None = None) -> list[int]:
        """Return the whole output. Blocks the thread until the request is over.

        Raises:
            TimeoutError: it is not over after ``timeout`` seconds; it goes on.
            BaseException: what the request failed of.
        """
        self.wait(timeout)
        return self._ended()

    async def done(self) -> list[int]:
        """Return the whole output when the request is over. Cancelling the wait aborts nothing.

        Raises:
            BaseException: what the request failed of.
        """
        with self._heard() as news:
            while self.finish is None:
                await news()
        return self._ended()

    def __iter__(self) -> Iterator[int]:
        """Yield the output from its first token on; blocks the thread until each token is there. There may be any
        number of readers. A request that failed raises its error after the last token."""
        at = 0
        while True:
            with self._news:
                while self.finish is None and len(self.output) <= at:
                    self._news.wait()
            if at == len(self.output):
                self._ended()
                return
            yield self.output[at]
            at += 1

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the output in an event loop, as ``__iter__`` does in a thread. Cancelling a reader aborts nothing."""
        at = 0
        with self._heard() as news:
            while True:
                over = self.finish is not None
                for token in self.output[at:]:
                    at += 1
                    yield token
                if over:
                    break
                if at == len(self.output):
                    await news()
        self._ended()

    def _ended(self) -> list[int]:
        if self.error is not None:
            raise self.error
        return self.output

    @contextmanager
    def _heard(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield an async function. Each call of it returns when the request has had news since the call before."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop is closed: nobody reads there any more
                loop.call_soon_threadsafe(event.set)

        async def news() -> None:
            await event.wait()
            event.clear()

        with self._news:
            self._listeners.append(wake)
            event.set()
        try:
            yield news
        finally:
            with self._news:
                self._listeners.remove(wake)

    # for ContinuousBatching, which serves the request

    def tell(self, tokens: list[int]) -> None:
        """Note that the output has these tokens now, and wake those who wait for more."""
        if len(tokens) > len(self.output):
            with self._news:
                self.output.extend(tokens[len(self.output) :])
                self._wake()

    def end(self, finish: Finish, error: BaseException | None = None) -> None:
        """Note that the output is complete. Of several calls the first one counts."""
        with self._news:
            if self.finish is None:
                self.error, self.finish = error, finish
                self._wake()

    def _wake(self) -> None:
        self._news.notify_all()
        for listener in self._listeners:
            listener()
