"""One model on one path, and its tokenizer: opened and closed by the server, asked by its routes.

Law: a generation that nobody reads any more is aborted; until then it is counted in ``live``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from asynccache_shim import Finish
from prometheus_client import CollectorRegistry, generate_latest

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError
from asynccache.metrics import CacheCollector, LoopLag
from openai_serving.paths import Path, Run, Wanted
from openai_serving.protocol import COMPLETION_TOKENS, ApiError, Ask, Prompt, tokens_of
from openai_serving.text import StopStrings
from openai_serving.words import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is served. ``context``: tokens of prompt and answer together. ``chat_tokens``: of an answer in a chat that
    does not say how many. ``max_live``: answers at a time, waiting ones too; who comes then is told to come again
    later."""

    name: str
    words: Words
    path: Path
    context: int
    chat_tokens: int
    max_live: int = 1024


class Generation:
    """An answer in the making: iterate over its text, once. ``made``: its tokens so far. Afterwards ``reason`` says why
    it ended."""

    def __init__(self, service: Service, run: Run, ask: Ask, tokens: Sequence[int]) -> None:
        self._service = service
        self._run = run
        self._ask = ask
        self._stops = StopStrings(ask.stops)
        self._ends = service.plan.words.ends
        self._reader = service.plan.words.reader(() if ask.chat else tokens)
        self.reason = ""
        self.made = 0

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text, none of them empty.

        Raises:
            ApiError: it failed, or the server is closing.
        """
        try:
            async for token in self._run:
                self.made += 1
                if token not in self._ends and (text := self._stops.put(self._reader.put(token))):
                    yield text
                if self._stops.hit:
                    self._run.abort()  # its usage does not grow any more
                    break
        except CacheFull as error:
            raise _too_long(str(error), self._ask) from error
        except Exception as error:
            raise ApiError(500, f"the engine failed: {error!r}", kind="server_error") from error
        self._ended()
        if text := self._stops.put(self._reader.rest()) + self._stops.rest():
            yield text

    def _ended(self) -> None:
        if self._stops.hit or self._run.finish is Finish.STOP:
            self.reason = "stop"
        elif self._run.finish is Finish.LENGTH:
            self.reason = "length"
        else:
            raise ApiError(503, "the request was aborted: the server is closing", kind="server_error")

    @property
    def hits(self) -> Mapping[str, int]:
        """Cached tokens of the prompt by the tier that they came from."""
        return self._run.hits._asdict() if self._run.hits is not None else {}

    def abort(self) -> None:
        """Nobody reads it any more, or nobody will be waited for. Idempotent; nothing is lost if it has ended."""
        self._run.abort()

    @property
    def end(self) -> str:
        """How it ended, for the counters."""
        return "stop" if self._stops.hit else str((self._run.finish or Finish.ABORTED).value)


class Choices:
    """The answers to one request, which are as many as it asks for."""

    def __init__(self, service: Service, prompt: int) -> None:
        self._service = service
        self._prompt = prompt
        self.all: list[Generation] = []

    async def pieces(self) -> AsyncIterator[tuple[int, str | None]]:
        """The text of all as it comes, each piece with the number of its answer; None when that one has ended.

        Raises:
            ApiError: one failed, or the server is closing.
        """
        news: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue()

        async def follow(index: int, generation: Generation) -> None:
            try:
                async for text in generation:
                    news.put_nowait((index, text))
                news.put_nowait((index, None))
            except Exception as error:
                news.put_nowait((index, error))

        following = [asyncio.create_task(follow(*each)) for each in enumerate(self.all)]
        left = len(following)
        try:
            while left:
                index, piece = await news.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece is None
                yield index, piece
        finally:
            for task in following:
                task.cancel()

    @property
    def usage(self) -> Mapping[str, Any]:
        """Tokens so far, as OpenAI counts them: the prompt once, all answers; and the tiers that the cached ones of the
        prompt came from, for the first answer."""
        made = sum(generation.made for generation in self.all)
        by_tier = self.all[0].hits
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": made,
            "total_tokens": self._prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
        }

    def abort(self) -> None:
        """Nobody reads them any more. Idempotent."""
        for generation in self.all:
            generation.abort()
            self._service.left(generation)


class Service:
    """``async with Service(plan) as service``: opens the path, and closes it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._live: set[Generation] = set()
        self._ended: Counter[str] = Counter()
        self._closing = False
        self._registry = CollectorRegistry()
        self._thread = ThreadPoolExecutor(1, "words")

    async def __aenter__(self) -> Service:
        """Open everything. Cancelling it leaves nothing open."""
        async with AsyncExitStack() as stack:
            stack.callback(self._thread.shutdown)
            await stack.enter_async_context(self.plan.path)
            lag = LoopLag()
            lag.start()
            stack.callback(lag.stop)

            async def register(cache: AsyncCache) -> None:
                self._registry.register(CacheCollector(cache, lag=lag))

            await self.plan.path.ask(register)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is left, save what is not in storage yet."""
        await self._stack.__aexit__(kind, error, trace)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Made in a thread, so that a long one stops nobody.

        Raises:
            ApiError: the model cannot say it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, tokens_of, prompt, self.plan.words)

    def generate(self, ask: Ask, tokens: list[int]) -> Choices:
        """Start; whoever calls this calls ``abort`` in the end.

        Raises:
            ApiError: no room in the context or in the pools, something that the path cannot do, too many requests, or
                closing.
        """
        if self._closing:
            raise ApiError(503, "the server is closing", kind="server_error")
        if ask.choices > self.plan.max_live:
            raise ApiError(400, f"n={ask.choices}: this server has at most {self.plan.max_live} answers at a time",
                           param="n", code="invalid_value")  # fmt: skip
        if len(self._live) + ask.choices > self.plan.max_live:
            raise ApiError(429, "too many requests; come again later", kind="requests", code="rate_limit_exceeded")
        most = self._room(ask, len(tokens))
        choices = Choices(self, len(tokens))
        try:
            for index in range(ask.choices):
                generation = Generation(self, self._start(ask, tokens, most, index), ask, tokens)
                choices.all.append(generation)
                self._live.add(generation)
        except BaseException:
            choices.abort()
            raise
        return choices

    def _start(self, ask: Ask, tokens: list[int], most: int, index: int) -> Run:
        """The run of one choice. With a seed each has another one."""
        sampling = ask.sampling
        if sampling.seed is not None:
            sampling = sampling._replace(seed=sampling.seed + index)
        try:
            return self.plan.path.start(Wanted(tokens=tokens, most=most, ends=self.plan.words.ends, sampling=sampling,
                                               priority=ask.priority, salt=ask.cache_salt))  # fmt: skip
        except CacheFull as error:
            raise _too_long(str(error), ask) from error
        except CacheClosed as error:
            raise ApiError(503, f"not serving: {error}", kind="server_error") from error
        except ConfigError as error:
            name, given, _ = str(error).partition("=")
            param = name if given and name.isidentifier() else None
            raise ApiError(400, str(error), param=param, code="unsupported_value") from error

    def _room(self, ask: Ask, prompt: int) -> int:
        """Tokens that may be generated."""
        left = self.plan.context - prompt
        usual = self.plan.chat_tokens if ask.chat else COMPLETION_TOKENS
        wanted = min(usual, left) if ask.max_tokens is None else ask.max_tokens
        if left < 1 or wanted > left:
            raise _too_long(f"this server's context is {self.plan.context} tokens: the prompt has {prompt}, "
                            f"and max_tokens={ask.max_tokens or 1} come on top", ask)  # fmt: skip
        return wanted

    def check_model(self, name: str) -> None:
        """
        Raises:
            ApiError: another model is served.
        """
        if name != self.plan.name:
            raise ApiError(404, f"the model {name!r} does not exist; this server has {self.plan.name!r}",
                           param="model", code="model_not_found")  # fmt: skip

    def left(self, generation: Generation) -> None:
        """It is no longer read."""
        if generation in self._live:
            self._live.remove(generation)
            self._ended[generation.end] += 1

    def cut(self) -> None:
        """End every generation, and start no other one: there is no more time."""
        self._closing = True
        for generation in self._live:
            generation.abort()

    @property
    def failure(self) -> str | None:
        """Why no request would be taken; None where one would."""
        return self.plan.path.failure

    async def metrics(self) -> bytes:
        """What the cache counts, in Prometheus' text format.

        Raises:
            CacheClosed: there is no cache any more.
        """

        async def scrape(cache: AsyncCache) -> bytes:
            return generate_latest(self._registry)

        return await self.plan.path.ask(scrape)

    async def explain(self, tokens: list[int], extra_key: str | None) -> Mapping[str, Any]:
        """Where a prompt is in the cache, and what ends its match.

        Raises:
            CacheClosed: there is no cache any more.
            ConfigError: the tokens are unusable.
        """
        return (await self.plan.path.ask(lambda cache: cache.explain(tokens, extra_key))).plain()

    async def statistics(self) -> Mapping[str, Any]:
        """Requests, and all that the cache counts, as plain values.

        Raises:
            CacheClosed: there is no cache any more.
        """

        async def count(cache: AsyncCache) -> Any:
            return plain(cache.statistics())

        return {
            "model": self.plan.name,
            "context": self.plan.context,
            "requests": {"live": len(self._live), "ended": dict(self._ended)},
            "tasks": len(asyncio.all_tasks()),
            "cache": await self.plan.path.ask(count),
        }


def _too_long(message: str, ask: Ask) -> ApiError:
    return ApiError(400, message, param="messages" if ask.chat else "prompt", code="context_length_exceeded")


def plain(value: Any) -> Any:
    """Named tuples and mappings as dicts, all the way down."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
