"""The part that ``PrefixCache`` and ``ContinuousBatching`` share: a model of transformers with its cache, which is open
in an event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from asynccache import AsyncCache, CacheClosed, CacheConfig, Hits
from asynccache_hf.identity import ModelIdentity
from asynccache_hf.layout import Layout

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


class LoopThread:
    """An event loop in a thread, which runs until ``close``. The thread is a daemon: a program that forgets to close it
    ends all the same."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._door = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name!r}, {'alive' if self.alive else 'closed'}>"

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
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class CachedModel:
    """A model of transformers with a cache of prefixes. ``closed``: the reason why no requests are taken any more; None
    while they are."""

    def __init__(
        self, identity: ModelIdentity, layout: Layout, thread: str, config: CacheConfig,
        on_event: Callable[[Any], None] | None,
    ) -> None:  # fmt: skip
        """Opens the cache and binds the model to it.

        Raises:
            Exception: the cache could not be opened, or the model could not be bound to it. Nothing is left open then.
        """
        self._identity = identity
        self._model = identity.model
        self._layout = layout
        self._counts = Counts()
        self._closer = threading.Lock()
        self._loop = LoopThread(thread)
        try:
            self._cache = self._loop.call(_open(config, on_event))
        except BaseException:
            self._loop.close()
            raise
        try:
            self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        """Bind the model to the pools of the open cache. If this raises an error, the cache is closed."""
        raise NotImplementedError

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
        return self._cache.closed if self._loop.alive else "the cache is closed"

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
        """Save the pages that are not saved yet, for at most the cache's ``close_deadline`` seconds, and close the
        cache. May be called again, and by several threads at once: each call returns when the cache is closed."""
        with self._closer:
            if self._loop.alive:
                self._close()

    def _close(self) -> None:
        try:
            self._loop.call(self._cache.aclose())
        finally:
            self._loop.close()


async def _open(config: CacheConfig, on_event: Callable[[Any], None] | None) -> AsyncCache:
    return await AsyncCache(config, on_event=on_event).__aenter__()
