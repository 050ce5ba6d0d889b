"""One model on one path, with its tokenizer. The server opens and closes it, and the routes ask it.

Law: a generation that has no reader any more is aborted. Until then it counts as live.
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
from openai_serving.paths import Path, TokenStream, WantedAnswer
from openai_serving.protocol import COMPLETION_TOKENS, ApiError, ParsedRequest, Prompt, tokens_of
from openai_serving.scores import Score, Scores
from openai_serving.text import StopStrings
from openai_serving.words import Words, spoken


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """The parts of a service.

    name: what requests call the model. words: its tokenizer. path: what computes.
    context: how many tokens prompt and answer may have together.
    chat_tokens: how many tokens an answer in a chat may have if the request does not say.
    max_live: how many answers there may be at a time, including those that wait; further requests get status 429.
    """

    name: str
    words: Words
    path: Path
    context: int
    chat_tokens: int
    max_live: int = 1024


class Generation:
    """An answer that is being generated. Its text can be iterated over once. ``made``: how many tokens it has so far.
    ``reason``: why it ended, in OpenAI's words; set after the iteration. ``scores``: the log-probabilities of its
    tokens so far; None: the request did not ask for them."""

    def __init__(self, service: Service, run: TokenStream, ask: ParsedRequest, tokens: Sequence[int],
                 scores: Scores | None) -> None:  # fmt: skip
        self._service = service
        self._run = run
        self.scores = scores
        self._ask = ask
        self._stops = StopStrings(ask.stops)
        self._ends = service.served.words.ends
        self._reader = service.served.words.reader(() if ask.chat else tokens)
        self.reason = ""
        self.made = 0

    async def __aiter__(self) -> AsyncIterator[str]:
        """Iterate over pieces of the text, none of them empty.

        Raises:
            ApiError: the generation failed, or the server is closing.
        """
        try:
            async for token in self._run:
                self.made += 1
                if token not in self._ends and (text := self._stops.put(self._reader.put(token))):
                    yield text
                if self._stops.hit:
                    self._run.abort()  # so that its number of tokens does not grow any more
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
    def told(self) -> list[tuple[str, Score, list[tuple[str, float]]]]:
        """The scores of the tokens that are part of the text: each token as a text, its score, and the likeliest tokens
        as texts. Empty if the request did not ask for them."""
        words, scores = self._service.served.words, [] if self.scores is None else self.scores.all[: self.made]
        return [(spoken(words, one.token), one, [(spoken(words, token), value) for token, value in one.top])
                for one in scores if one.token not in self._ends]  # fmt: skip

    @property
    def hits(self) -> Mapping[str, int]:
        """How many tokens of the prompt were cached, by the tier that they came from."""
        return self._run.hits._asdict() if self._run.hits is not None else {}

    def abort(self) -> None:
        """End the generation. One that has ended stays as it is."""
        self._run.abort()

    @property
    def end(self) -> str:
        """How the generation ended, as a name for the counters."""
        return "stop" if self._stops.hit else str((self._run.finish or Finish.ABORTED).value)


class Choices:
    """The answers to one request: as many as it asks for. ``prompt``: how many tokens its prompt has."""

    def __init__(self, service: Service, prompt: int) -> None:
        self._service = service
        self._prompt = prompt
        self.all: list[Generation] = []

    async def pieces(self) -> AsyncIterator[tuple[int, str | None]]:
        """Iterate over the text of all answers as it comes: the number of an answer with a piece of its text, or with
        None when that answer has ended.

        Raises:
            ApiError: one of the answers failed, or the server is closing.
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
        """The numbers of tokens so far, as OpenAI counts them: the prompt once and all answers. Cached tokens of the
        prompt are those of the first answer, in all and by tier."""
        made = sum(generation.made for generation in self.all)
        by_tier = self.all[0].hits
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": made,
            "total_tokens": self._prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
        }

    def abort(self) -> None:
        """End all answers, and count them as ended. A second call does nothing."""
        for generation in self.all:
            generation.abort()
            self._service.left(generation)


class Service:
    """Serves what ``served`` says: ``async with Service(served) as service`` opens its path, and closes it at the
    end."""

    def __init__(self, served: ServiceParts) -> None:
        self.served = served
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
            await stack.enter_async_context(self.served.path)
            lag = LoopLag()
            lag.start()
            stack.callback(lag.stop)

            async def register(cache: AsyncCache) -> None:
                self._registry.register(CacheCollector(cache, lag=lag))

            await self.served.path.ask(register)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort the generations that are left, and close the path, which saves pages that are not in storage yet."""
        await self._stack.__aexit__(kind, error, trace)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. They are made in a thread, so that a long prompt does not block the loop.

        Raises:
            ApiError: the model has no tokens for the prompt.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, tokens_of, prompt, self.served.words)

    def generate(self, ask: ParsedRequest, tokens: list[int]) -> Choices:
        """Start the answers to ``ask``, whose prompt has these ``tokens``. The caller must call ``abort`` of the result
        in the end.

        Raises:
            ApiError: there is no room in the context or in the pools, the path cannot do what is asked, there are too
                many requests, or the server is closing.
        """
        if self._closing:
            raise ApiError(503, "the server is closing", kind="server_error")
        if ask.choices > self.served.max_live:
            raise ApiError(400, f"n={ask.choices}: this server has at most {self.served.max_live} answers at a time",
                           param="n", code="invalid_value")  # fmt: skip
        if len(self._live) + ask.choices > self.served.max_live:
            raise ApiError(429, "too many requests; come again later", kind="requests", code="rate_limit_exceeded")
        most = self._room(ask, len(tokens))
        choices = Choices(self, len(tokens))
        try:
            for index in range(ask.choices):
                scores = None if ask.top is None else Scores(ask.top)
                run = self._start(ask, tokens, most, index, scores)
                generation = Generation(self, run, ask, tokens, scores)
                choices.all.append(generation)
                self._live.add(generation)
        except BaseException:
            choices.abort()
            raise
        return choices

    def _start(self, ask: ParsedRequest, tokens: list[int], most: int, index: int,
               scores: Scores | None) -> TokenStream:  # fmt: skip
        """Start answer number ``index``. If the request has a seed, each answer gets a different one."""
        sampling = ask.sampling
        if sampling.seed is not None:
            sampling = sampling._replace(seed=sampling.seed + index)
        try:
            return self.served.path.start(WantedAnswer(
                tokens=tokens, most=most, ends=self.served.words.ends, sampling=sampling, priority=ask.priority,
                salt=ask.cache_salt, scores=scores,
            ))  # fmt: skip
        except CacheFull as error:
            raise _too_long(str(error), ask) from error
        except CacheClosed as error:
            raise ApiError(503, f"not serving: {error}", kind="server_error") from error
        except ConfigError as error:
            name, given, _ = str(error).partition("=")
            param = name if given and name.isidentifier() else None
            raise ApiError(400, str(error), param=param, code="unsupported_value") from error

    def _room(self, ask: ParsedRequest, prompt: int) -> int:
        """How many tokens may be generated after a prompt of ``prompt`` tokens.

        Raises:
            ApiError: there is no room in the context for what is asked.
        """
        left = self.served.context - prompt
        usual = self.served.chat_tokens if ask.chat else COMPLETION_TOKENS
        wanted = min(usual, left) if ask.max_tokens is None else ask.max_tokens
        if left < 1 or wanted > left:
            raise _too_long(f"this server's context is {self.served.context} tokens: the prompt has {prompt}, "
                            f"and max_tokens={ask.max_tokens or 1} come on top", ask)  # fmt: skip
        return wanted

    def check_model(self, name: str) -> None:
        """Refuse a request for another model than the one that is served.

        Raises:
            ApiError: ``name`` is not the name of the model that is served.
        """
        if name != self.served.name:
            raise ApiError(404, f"the model {name!r} does not exist; this server has {self.served.name!r}",
                           param="model", code="model_not_found")  # fmt: skip

    def left(self, generation: Generation) -> None:
        """Count ``generation`` as ended, because it has no reader any more."""
        if generation in self._live:
            self._live.remove(generation)
            self._ended[generation.end] += 1

    def cut(self) -> None:
        """End every generation, and start no new one. The server calls this when its time for closing is over."""
        self._closing = True
        for generation in self._live:
            generation.abort()

    @property
    def failure(self) -> str | None:
        """The reason why the service takes no requests; None if it takes them."""
        return self.served.path.failure

    async def metrics(self) -> bytes:
        """The cache's metrics in Prometheus' text format.

        Raises:
            CacheClosed: the cache is closed.
        """

        async def scrape(cache: AsyncCache) -> bytes:
            return generate_latest(self._registry)

        return await self.served.path.ask(scrape)

    async def explain(self, tokens: list[int], namespace: str | None) -> Mapping[str, Any]:
        """Return where a prompt's pages are in the cache, and what ends its match.

        Raises:
            CacheClosed: the cache is closed.
            ConfigError: the tokens cannot be used.
        """
        return (await self.served.path.ask(lambda cache: cache.explain(tokens, namespace))).plain()

    async def block_names(self) -> Mapping[str, Any]:
        """What a router needs to name blocks as the cache's KV events do: arguments of
        ``asynccache.events.prompt_blocks``.

        Raises:
            CacheClosed: the cache is closed.
        """

        async def named(cache: AsyncCache) -> Mapping[str, Any]:
            return {"model": cache.config.model, "page_size": cache.config.page_size}

        return await self.served.path.ask(named)

    async def statistics(self) -> Mapping[str, Any]:
        """The numbers of requests and all counters of the cache, as plain values.

        Raises:
            CacheClosed: the cache is closed.
        """

        async def count(cache: AsyncCache) -> Any:
            return plain(cache.statistics())

        return {
            "model": self.served.name,
            "context": self.served.context,
            "requests": {"live": len(self._live), "ended": dict(self._ended)},
            "tasks": len(asyncio.all_tasks()),
            "cache": await self.served.path.ask(count),
        }


def _too_long(message: str, ask: ParsedRequest) -> ApiError:
    return ApiError(400, message, param="messages" if ask.chat else "prompt", code="context_length_exceeded")


def plain(value: Any) -> Any:
    """``value`` with named tuples and mappings turned into dicts, at every level."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
