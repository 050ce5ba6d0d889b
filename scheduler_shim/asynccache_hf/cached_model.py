"""The part that ``PrefixCache`` and ``ContinuousBatching`` share: a model of transformers with its cache and the
scheduler that serves requests on it, in an event loop in a thread of its own, for callers that are not asynchronous.

``BatchRequest`` is a request to it. Unlike the scheduler's own requests it may be read and aborted by any thread,
and in any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from asynccache_shim import Finish, Limits, Sampling, Scheduler, SchedulerConfig
from asynccache_shim.request import Request, Tokens, end_request

from asynccache import AsyncCache, CacheClosed, CacheConfig, ConfigError, Hits
from asynccache_hf.identity import ModelIdentity
from asynccache_hf.layout import Layout
from asynccache_hf.paged import PagedModel

R = TypeVar("R")

USUAL_LENGTH = 20
"""The number of new tokens that transformers generates where no setting limits them."""


class Counts(NamedTuple):
    """Tokens of all prompts so far: how many there were, and how many of them came from each tier."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0

    def plus(self, prompt: int, hits: Hits) -> Counts:
        """Return these counts with one more prompt of ``prompt`` tokens, of which ``hits`` were found."""
        return Counts(self.prompt + prompt, self.device + hits.device, self.host + hits.host,
                      self.storage + hits.storage)  # fmt: skip


def most_new_tokens(settings: Any, length: int) -> Any:
    """The number of new tokens that a generation configuration allows for a prompt of ``length`` tokens."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    return int(settings.max_length) - length if settings.max_length else USUAL_LENGTH


def config_of(layout: Layout, settings: Mapping[str, Any]) -> CacheConfig:
    """Return the configuration of a cache for a model with this ``layout``. A prefix of one page is fetched from
    storage, too, unless ``settings`` (those of ``Layout.cache_config``) say otherwise.

    Raises:
        ConfigError: a setting is unusable.
    """
    return layout.cache_config(**{"prefetch_threshold": layout.page_size, **settings})


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


class LoopThread:
    """An event loop in a thread, which runs until ``close``. The thread is a daemon: a program that forgets to close it
    ends all the same."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._door = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the loop takes calls."""
        return not self._ending

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Return what ``work`` returns, or raise what it raises. Blocks the calling thread. If that is interrupted,
        ``work`` is cancelled, and its end is not awaited.

        Raises:
            CacheClosed: the loop has ended.
        """
        with self._door:
            if self._ending:
                work.close()
                raise CacheClosed("the cache is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CacheClosed("the cache is closed") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback`` in the loop's thread, soon. Does not wait.

        Raises:
            CacheClosed: the loop has ended.
        """
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            raise CacheClosed("the cache is closed") from None

    def close(self) -> None:
        """End the loop, cancel the tasks that still run in it, and return when the thread has ended. A second call does
        nothing."""
        with self._door:
            first, self._ending = not self._ending, True
            if first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with self._runner:  # whose end cancels what is left
            self._loop.run_forever()


class CachedModel:
    """A model of transformers with a cache of prefixes. ``closed``: the reason why no requests are taken any more; None
    while they are."""

    def __init__(
        self, identity: ModelIdentity, layout: Layout, thread: str, config: CacheConfig, steps: SchedulerConfig,
        on_event: Callable[[Any], None] | None,
    ) -> None:  # fmt: skip
        """Opens the cache, and starts the scheduler.

        Raises:
            Exception: the cache could not be opened, or the model could not be bound to it. Nothing is left open then.
        """
        self._identity = identity
        self._model = identity.model
        self._layout = layout
        self._vocabulary = int(identity.model.get_input_embeddings().num_embeddings)
        text = identity.model.config.get_text_config(decoder=True)
        self._positions = int(getattr(text, "max_position_embeddings", 0) or 0)
        self._counts, self._counting = Counts(), threading.Lock()
        self._seen = (-1, "")
        self._door, self._closer = threading.Lock(), threading.Lock()
        self._closing = False
        self._loop = LoopThread(thread)
        try:
            self._loop.call(self._open(config, steps, on_event))
        except BaseException:
            self._loop.close()
            raise

    async def _open(self, config: CacheConfig, steps: SchedulerConfig, on_event: Callable[[Any], None] | None) -> None:
        self._cache = await AsyncCache(config, on_event=on_event).__aenter__()
        try:
            self._paged = PagedModel(self._model, self._layout, self._cache.pools)
            self._scheduler = await Scheduler(self._cache, self._paged, steps).__aenter__()
        except BaseException:
            await self._cache.aclose()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._layout.model!r}: {self._counts}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def counts(self) -> Counts:
        """The tokens of the prompts that were begun so far, and where they were found. A prompt whose request waits for
        room or for its pages, or failed while it waited, does not count."""
        return self._counts

    @property
    def closed(self) -> str | None:
        if self._closing or not self._loop.alive:
            return "the cache is closed"
        failed = self._scheduler.failure
        return self._cache.closed or (f"the scheduler has ended: {failed!r}" if failed is not None else None)

    def ask(self, question: Callable[[AsyncCache], Awaitable[R]]) -> R:
        """Return what ``question(cache)`` returns: ``cached.ask(lambda cache: cache.explain(tokens))``. ``question`` is
        called in the cache's thread. Blocks the calling thread.

        Raises:
            CacheClosed: the cache is closed.
        """

        async def asked() -> R:
            return await question(self._cache)

        return self._loop.call(asked())

    def statistics(self) -> Any:
        """Return what ``AsyncCache.statistics`` returns: all that the cache counts, as of now.

        Raises:
            CacheClosed: this is closed.
        """

        async def statistics(cache: AsyncCache) -> Any:
            return cache.statistics()

        return self.ask(statistics)

    def close(self) -> None:
        """End all requests that are not over (their error is ``CacheClosed``), save the pages that are not saved yet,
        for at most the cache's ``close_timeout`` seconds, and end the threads. May be called again, and by several
        threads at once: each call returns when the cache is closed."""
        with self._door:
            self._closing = True
        with self._closer:
            if self._loop.alive:
                try:
                    self._loop.call(self._end())
                finally:
                    self._loop.close()

    async def _end(self) -> None:
        try:
            await self._scheduler.aclose(CacheClosed("the cache was closed before the request was over"))
        finally:
            await self._cache.aclose()

    # requests to the scheduler

    def _request(
        self, tokens: Tokens, limits: Limits, namespace: str | bytes | None, now: str, sampling: Sampling
    ) -> BatchRequest:
        """A request in ``namespace`` of the model's identity ``now``. What it computes is published as
        long as the model is the same: else it is not known what computed it."""
        return BatchRequest(
            tokens, limits, self._loop.soon, self._count, namespace=self._identity.within(now, namespace),
            sampling=sampling, publishes=lambda: self._is_still(now),
        )  # fmt: skip

    def _begin(self, requests: Sequence[BatchRequest]) -> None:
        """Have ``requests`` served.

        Raises:
            CacheClosed: this is closed.
        """
        with self._door:  # what comes in before the end is ended with the rest
            if self._closing:
                raise CacheClosed("the cache is closed")
            self._loop.soon(self._submit, requests)

    def _submit(self, requests: Sequence[BatchRequest]) -> None:
        for request in requests:
            try:
                self._scheduler.submit(request)
            except Exception as error:  # it never fits, or the scheduler has ended
                end_request(request, Finish.FAILED, error)

    def _is_still(self, now: str) -> bool:
        """Return True if the model is still what it was when ``now`` was its identity. The model is looked at once a
        step."""
        if self._seen[0] != self._scheduler.steps:
            try:
                self._seen = self._scheduler.steps, self._identity.now()
            except ConfigError:  # in train() mode, or moved
                return False
        return self._seen[1] == now

    def _count(self, prompt: int, hits: Hits) -> None:
        with self._counting:
            self._counts = self._counts.plus(prompt, hits)
