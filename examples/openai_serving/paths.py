"""The ways to compute answers. The server uses them by two protocols: a ``Path`` has a model and a cache, and a
``TokenStream`` is one answer that is being computed.

To add a way, write a class with the members of ``Path``, made from ``PathParts``, and give it a name in ``PATHS``. A
``Request`` of ``asynccache_shim`` can be used as a ``TokenStream``, and so can a ``BatchRequest`` of ``asynccache_hf``,
whose tokens come from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import torch
from asynccache_hf import BatchRequest, Layout, PrefixCache, describe
from asynccache_shim import Finish, Limits, Request, Sampling, Scheduler, SchedulerConfig
from asynccache_shim.model import returned
from asynccache_shim.request import add_token, begin_request, end_request

from asynccache import AsyncCache, CacheClosed, ConfigError, Hits
from openai_serving.scores import ScoredModel, Scores

R = TypeVar("R")
OnEvent = Callable[[Any], None]

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0, because transformers divides by the temperature."""

LEAST_P = 1e-6
"""The smallest ``top_p`` that is handed to transformers, which refuses 0. It also leaves only the most likely token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedAnswer:
    """The answer that is to be computed: at most ``most`` tokens that follow ``tokens``. Generation ends earlier with
    one of the tokens ``ends``, which is then the last one. ``salt``: the namespace of the cache. ``scores``: where the
    log-probabilities of the tokens go, before the tokens themselves; None: nobody asked for them."""

    tokens: list[int] = field(repr=False)
    most: int
    ends: frozenset[int]
    sampling: Sampling
    priority: int = 0
    salt: str | None = None
    scores: Scores | None = None


class TokenStream(Protocol):
    """One answer that is being computed (a *run*); iterating yields its tokens, from the first one on. ``output``: the
    tokens so far. ``hits``: the tiers that the cached tokens of the prompt came from; None until that is known.
    ``finish``: how the answer ended; None until it has."""

    output: list[int]
    hits: Hits | None
    finish: Finish | None

    def __aiter__(self) -> AsyncIterator[int]:
        """Iterate over the tokens. An error that the run failed with is raised after the last token. Cancelling a
        reader aborts nothing."""
        ...

    def abort(self) -> None:
        """End the run. A run that has ended stays as it is."""
        ...


class Path(Protocol):
    """A way to compute answers. ``async with path`` opens the cache; its end aborts the runs that are left and closes
    the cache. To be used in the server's loop only. ``limit``: how many tokens of prompt and answer together one
    request may have; None: any number."""

    @property
    def limit(self) -> int | None: ...

    async def __aenter__(self) -> object:
        """Cancelling it leaves nothing open."""
        ...

    async def __aexit__(self, *raised: Any) -> None: ...

    def start(self, wanted: WantedAnswer) -> TokenStream:
        """Begin to compute ``wanted``.

        Raises:
            CacheFull: the request could never run.
            CacheClosed: this path takes no requests any more.
            ConfigError: this path cannot do what is wanted; the message says what.
        """
        ...

    async def ask(self, question: Callable[[AsyncCache], Awaitable[R]]) -> R:
        """Await ``question(cache)`` in the cache's own event loop; returns its result."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason why this path takes no requests; None if it takes them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PathParts:
    """The parts that paths are made from: a model, the settings of its cache (those of ``Layout.cache_config``), the
    callback for KV events, and the settings of our scheduler."""

    model: Any
    page_size: int
    cache: Mapping[str, Any]
    on_event: OnEvent | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


class SchedulerPath:
    """Our own scheduler: many requests in each step, on the cache's pages."""

    def __init__(self, means: PathParts) -> None:
        """Describe the model, which calls it a few times.

        Raises:
            ConfigError: the model cannot be cached, or a setting cannot be used.
        """
        self.model = means.model
        self._layout: Layout = describe(means.model, means.page_size)
        self._config = self._layout.cache_config(**means.cache)
        self._means = means
        self._stack = AsyncExitStack()
        self._cache: AsyncCache
        self._scheduler: Scheduler
        self._paged: ScoredModel

    @property
    def limit(self) -> int | None:
        return self._layout.limit

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._cache = await stack.enter_async_context(AsyncCache(self._config, on_event=self._means.on_event))
            self._paged = ScoredModel(self.model, self._layout, self._cache.pools)
            scheduler = Scheduler(self._cache, self._paged, self._means.scheduler)
            self._scheduler = await stack.enter_async_context(scheduler)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._stack.__aexit__(*raised)

    def start(self, wanted: WantedAnswer) -> Request:
        limits = Limits(wanted.most, wanted.ends)
        request = Request(wanted.tokens, limits, priority=wanted.priority, namespace=wanted.salt,
                          sampling=wanted.sampling)  # fmt: skip
        self._scheduler.submit(request)
        if wanted.scores is not None and request.number is not None:
            self._paged.scored[request.number] = wanted.scores
        return request

    async def ask(self, question: Callable[[AsyncCache], Awaitable[R]]) -> R:
        return await question(self._cache)

    @property
    def failure(self) -> str | None:
        return self._cache.closed or (repr(self._scheduler.failure) if self._scheduler.failure else None)


class PrefixPath:
    """``PrefixCache``: transformers' own ``generate``, which computes one request after the other, in the order in
    which they came. A request that is too long to be cached (see ``Layout.limit``) is generated without the cache.
    Everything runs in one thread."""

    limit: int | None = None

    def __init__(self, means: PathParts) -> None:
        self._means = means
        self._thread: ThreadPoolExecutor
        self._opened: PrefixCache | None = None
        self._runs: set[BatchRequest] = set()

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "generate")
        opening = asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        cancelled = await returned(opening)
        try:
            self._opened = opening.result()
        except BaseException:
            self._thread.shutdown()
            raise
        if cancelled is not None:
            await self.__aexit__()
            raise cancelled
        return self

    def _open(self) -> PrefixCache:
        means = self._means
        return PrefixCache(means.model, page_size=means.page_size, on_event=means.on_event, **means.cache)

    async def __aexit__(self, *raised: Any) -> None:
        for run in list(self._runs):
            run.abort()
        opened, self._opened = self._opened, None
        if opened is None:
            return
        closing = asyncio.get_running_loop().run_in_executor(self._thread, opened.close)
        cancelled = await returned(closing)
        self._thread.shutdown()
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def ask(self, question: Callable[[AsyncCache], Awaitable[R]]) -> R:
        if self._opened is None:
            raise CacheClosed("the cache is closed")
        return await asyncio.to_thread(self._opened.ask, question)

    @property
    def failure(self) -> str | None:
        return "the cache is closed" if self._opened is None else self._opened.closed

    def start(self, wanted: WantedAnswer) -> BatchRequest:
        if self._opened is None:
            raise CacheClosed("the cache is closed")
        if wanted.priority:
            raise ConfigError(f"priority={wanted.priority}: --path prefix serves in the order of arrival")
        run = BatchRequest(wanted.tokens, Limits(wanted.most, wanted.ends), lambda call: call(), lambda *_: None)
        self._runs.add(run)
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._generate, self._opened, wanted, run)
        future.add_done_callback(lambda _: self._runs.discard(run))
        return run

    # runs in the thread

    def _generate(self, cached: PrefixCache, wanted: WantedAnswer, run: BatchRequest) -> None:
        if run.finish is not None:
            return
        before = cached.counts
        try:
            made = self._made(cached, wanted, run)
        except Exception as error:  # a model may raise anything; it fails this request only
            end_request(run, Finish.FAILED, error)
            return
        begin_request(run, Hits(*(now - then for now, then in zip(cached.counts[1:], before[1:], strict=True))))
        end_request(run, Finish.STOP if made and made[-1] in wanted.ends else Finish.LENGTH)

    def _made(self, cached: PrefixCache, wanted: WantedAnswer, run: BatchRequest) -> list[int]:
        ids = torch.tensor([wanted.tokens], device=self._means.model.device)
        with torch.random.fork_rng(enabled=wanted.sampling.seed is not None):
            if wanted.sampling.seed is not None:
                torch.manual_seed(wanted.sampling.seed)
            last = _LastLogits()
            out = cached.generate(ids, namespace=wanted.salt, streamer=_Streamer(run, last, wanted.scores),
                                  max_new_tokens=wanted.most, stopping_criteria=[_Aborted(run)],
                                  logits_processor=[last], eos_token_id=sorted(wanted.ends) or None,
                                  **_sampled(wanted.sampling))  # fmt: skip
        made: list[int] = out[0, len(wanted.tokens) :].tolist()
        return made


def _sampled(sampling: Sampling) -> dict[str, Any]:
    """The sampling as arguments of transformers' ``generate``."""
    if sampling.temperature < GREEDY_BELOW:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": max(sampling.top_p, LEAST_P), "top_k": 0}


class _LastLogits:
    """A logits processor that changes nothing, and keeps the logits that the next token is drawn from."""

    row: torch.Tensor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.row = scores[0]
        return scores


class _Streamer:
    """Hands tokens on to a run. transformers calls ``put`` with the prompt first, and then with each token."""

    def __init__(self, run: BatchRequest, last: _LastLogits, scores: Scores | None) -> None:
        self._run = run
        self._last = last
        self._scores = scores
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        for token in value.reshape(-1).tolist() if self._begun and self._run.finish is None else ():
            if self._scores is not None:
                self._scores.add(token, self._last.row)
            add_token(self._run, token)
        self._begun = True

    def end(self) -> None:
        """Do nothing: the caller of ``generate`` ends the run."""


class _Aborted:
    """A stopping criterion: an aborted run ends after the token that is being computed."""

    def __init__(self, run: BatchRequest) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._run.finish is not None, dtype=torch.bool, device=input_ids.device)


PATHS: Mapping[str, Callable[[PathParts], Path]] = {"scheduler": SchedulerPath, "prefix": PrefixPath}
"""The ways to compute, by the value of ``--path``."""
