"""One model on one cache behind one scheduler: opened and closed by the server, asked by its routes.

Law: a generation that nobody reads any more is aborted; until then it is counted in ``live``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from asynccache_hf import Layout, PagedModel
from asynccache_shim import Finish, Limits, Request, Scheduler, Settings
from prometheus_client import CollectorRegistry, generate_latest

from asynccache import AsyncCache, CacheClosed, CacheConfig, CacheFull
from asynccache.metrics import CacheCollector, LoopLag
from openai_serving.protocol import ApiError, Ask
from openai_serving.text import BEGIN, END, Reader, StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is served. ``context``: tokens of prompt and answer together. ``max_live``: requests at a time, waiting
    ones too; who comes then is told to come again later."""

    name: str
    model: Any
    layout: Layout
    cache: CacheConfig
    context: int
    settings: Settings
    max_live: int = 1024


class Generation:
    """An answer in the making: iterate over its text, once; afterwards ``reason`` says why it ended."""

    def __init__(self, service: Service, request: Request, stops: tuple[str, ...]) -> None:
        self._service = service
        self._request = request
        self._stops = StopStrings(stops)
        self.reason = ""

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text, none of them empty.

        Raises:
            ApiError: it failed, or the server is closing.
        """
        reader = Reader()
        try:
            async for token in self._request:
                if text := self._stops.put(reader.put(token)):
                    yield text
                if self._stops.hit:
                    self._request.abort()  # its usage does not grow any more
                    break
        except Exception as error:
            raise ApiError(500, f"the engine failed: {error!r}", kind="server_error") from error
        self._ended()
        if text := self._stops.put(reader.rest()) + self._stops.rest():
            yield text

    def _ended(self) -> None:
        if self._stops.hit or self._request.finish is Finish.STOP:
            self.reason = "stop"
        elif self._request.finish is Finish.LENGTH:
            self.reason = "length"
        else:
            raise ApiError(503, "the request was aborted: the server is closing", kind="server_error")

    @property
    def usage(self) -> Mapping[str, Any]:
        """Tokens so far, as OpenAI counts them, and the tiers that the cached ones came from."""
        hits = self._request.hits
        prompt, made = len(self._request.tokens), len(self._request.output)
        by_tier = hits._asdict() if hits is not None else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
        }

    def cut(self) -> None:
        """Whoever reads it is told that the server is closing."""
        self._request.abort()

    def abort(self) -> None:
        """Nobody reads it any more. Idempotent; nothing is lost if it has ended."""
        self._request.abort()
        self._service.left(self)

    @property
    def end(self) -> str:
        """How its request ended, for the counters."""
        return "stop" if self._stops.hit else str((self._request.finish or Finish.ABORTED).value)


class Service:
    """``async with Service(plan) as service``: the cache, then the scheduler; closed the other way round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._live: set[Generation] = set()
        self._ended: Counter[str] = Counter()
        self._closing = False
        self._registry = CollectorRegistry()
        self._cache: AsyncCache
        self._scheduler: Scheduler

    async def __aenter__(self) -> Service:
        """Open everything. Cancelling it leaves nothing open."""
        async with AsyncExitStack() as stack:
            self._cache = await stack.enter_async_context(AsyncCache(self.plan.cache))
            model = PagedModel(self.plan.model, self.plan.layout, self._cache.pools)
            self._scheduler = await stack.enter_async_context(Scheduler(self._cache, model, self.plan.settings))
            lag = LoopLag()
            lag.start()
            stack.callback(lag.stop)
            self._registry.register(CacheCollector(self._cache, lag=lag))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is left, save what is not in storage yet."""
        await self._stack.__aexit__(kind, error, trace)

    def generate(self, ask: Ask) -> Generation:
        """Start; whoever calls this calls ``abort`` in the end.

        Raises:
            ApiError: another model, no room in the context or in the pools, too many requests, or closing.
        """
        if ask.model != self.plan.name:
            raise ApiError(404, f"the model {ask.model!r} does not exist; this server has {self.plan.name!r}",
                           param="model", code="model_not_found")  # fmt: skip
        if len(self._live) >= self.plan.max_live:
            raise ApiError(429, "too many requests; come again later", kind="requests", code="rate_limit_exceeded")
        limits = Limits(self._room(ask), frozenset((BEGIN, END)))
        request = Request(ask.tokens, limits, priority=ask.priority, extra_key=ask.cache_salt, sampling=ask.sampling)
        self._submit(request)
        generation = Generation(self, request, ask.stops)
        self._live.add(generation)
        return generation

    def _submit(self, request: Request) -> None:
        if self._closing:
            raise ApiError(503, "the server is closing", kind="server_error")
        try:
            self._scheduler.submit(request)
        except CacheFull as error:
            raise _too_long(str(error)) from error
        except CacheClosed as error:
            raise ApiError(503, f"not serving: {error}", kind="server_error") from error

    def _room(self, ask: Ask) -> int:
        """Tokens that may be generated."""
        left = self.plan.context - len(ask.tokens)
        wanted = min(ask.default_tokens, left) if ask.max_tokens is None else ask.max_tokens
        if left < 1 or wanted > left:
            raise _too_long(f"this server's context is {self.plan.context} tokens: the prompt has {len(ask.tokens)}, "
                            f"and max_tokens={ask.max_tokens or 1} come on top")  # fmt: skip
        return wanted

    def left(self, generation: Generation) -> None:
        """It is no longer read."""
        if generation in self._live:
            self._live.remove(generation)
            self._ended[generation.end] += 1

    def cut(self) -> None:
        """End every generation, and start no other one: there is no more time."""
        self._closing = True
        for generation in self._live:
            generation.cut()

    def healthy(self) -> bool:
        """Whether a request would be taken."""
        return self._cache.closed is None and self._scheduler.failure is None

    def metrics(self) -> bytes:
        """What the cache counts, in Prometheus' text format."""
        return generate_latest(self._registry)

    def statistics(self) -> Mapping[str, Any]:
        """Requests, and all that the cache counts, as plain values."""
        return {
            "model": self.plan.name,
            "context": self.plan.context,
            "requests": {"live": len(self._live), "ended": dict(self._ended)},
            "steps": self._scheduler.steps,
            "tasks": len(asyncio.all_tasks()),
            "cache": plain(self._cache.statistics()),
        }


def _too_long(message: str) -> ApiError:
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def plain(value: Any) -> Any:
    """Named tuples and mappings as dicts, all the way down."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
