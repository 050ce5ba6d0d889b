"""What a caller holds: tokens, limits, priority and namespace on the way in; a stream of tokens and ``abort`` after.

Laws:
* A request knows nothing of the cache, and the cache never sees it. The scheduler writes ``state``, ``match``, ``hits``
  and ``output``; the caller reads them, iterates, and may abort at any moment.
* What the scheduler acts on are the ``terms`` as they were submitted, whatever becomes of the request's attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache import ConfigError, Hits
from asynccache_shim.model import Sampling

Tokens = npt.NDArray[np.int32]
ExtraKey = str | bytes | None

MAX_TOKEN = int(np.iinfo(np.int32).max)


class State(Enum):
    """Where a request stands."""

    NEW = "not submitted"
    PREFETCHING = "what storage has of it is being fetched"
    WAITING = "in the queue"
    LOADING = "admitted; its pages are on their way to the device"
    RUNNING = "part of every step"
    FINISHED = "over"


class Finish(Enum):
    """How a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """When generation ends: after so many tokens, or with one of these (which is the last of the output)."""

    max_new_tokens: int = 16
    stop_tokens: frozenset[int] = frozenset()


class Matched(NamedTuple):
    """What the cache had of a request when it was last looked at, in tokens (``mamba_host_hit_length``: states)."""

    device: int = 0
    host: int = 0
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0

    @property
    def needs_load_back(self) -> bool:
        """Whether admitting it takes device pages for what only the host has."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)


class Terms(NamedTuple):
    """What is asked for; see ``Request``."""

    tokens: Tokens
    limits: Limits
    priority: int
    extra_key: ExtraKey
    sampling: Sampling
    ended: bool


class Request:
    """One prompt to be continued. Submitted once; ``async for token in request`` streams its output.

    ``priority``: higher goes first, and is retracted last. ``extra_key``: a namespace of the cache. ``ended``: what
    it computes will not be asked for again, so it leaves the cache first.
    """

    def __init__(
        self,
        tokens: list[int] | Tokens,
        limits: Limits | None = None,
        *,
        priority: int = 0,
        extra_key: ExtraKey = None,
        sampling: Sampling | None = None,
        ended: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.tokens = as_tokens(tokens)
        if not len(self.tokens) or self.limits.max_new_tokens < 1:
            raise ConfigError("request: it needs at least one token, and at least one more to generate")
        self.priority = as_priority(priority)
        self.extra_key = as_extra_key(extra_key)
        self.sampling = sampling or Sampling()
        self.ended = ended
        self.state = State.NEW
        self.match = Matched()
        self.hits: Hits | None = None
        self.retractions = 0
        self.output: list[int] = []
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self._terms: Terms | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._aborted: Callable[[], None] | None = None

    def __repr__(self) -> str:
        end = self.finish or self.state
        return f"Request({len(self.tokens)} tokens, {len(self.output)} generated, {end.value})"

    def abort(self) -> None:
        """The caller wants no more of it. Its stream ends at once (several ranks: before their next step); what it
        holds goes back once no step uses it."""
        if self.finish is not None:
            return
        if self._aborted is None:
            self.end(Finish.ABORTED)
        else:
            self._aborted()

    def __aiter__(self) -> AsyncIterator[int]:
        """The output from its first token on, for any number of readers. Cancelling a reader aborts nothing."""
        return _Reader(self)

    async def done(self) -> list[int]:
        """The whole output. Cancelling it aborts nothing.

        Raises:
            BaseException: what the request failed of.
        """
        while self.finish is None:
            await self._news()
        if self.error is not None:
            raise self.error
        return self.output

    async def next_token(self, index: int) -> int | None:
        """Output token ``index``, as soon as there is one; None: there will be none."""
        while len(self.output) <= index:
            if self.finish is not None:
                if self.error is not None:
                    raise self.error
                return None
            await self._news()
        return self.output[index]

    # for the scheduler

    @property
    def terms(self) -> Terms:
        """As they were submitted; before, as they are."""
        if self._terms is not None:
            return self._terms
        limits = Limits(self.limits.max_new_tokens, frozenset(self.limits.stop_tokens))
        return Terms(as_tokens(self.tokens), limits, self.priority, self.extra_key, self.sampling, self.ended)

    def submitted(self, aborted: Callable[[], None]) -> None:
        """It is a scheduler's from now on, which is told if it is to be aborted, and ends it."""
        if self.state is not State.NEW:
            raise ConfigError("request: it is submitted once")
        self._terms = self.terms
        self.state = State.WAITING
        self._aborted = aborted

    def sent(self, terms: Terms) -> None:
        """This is what other ranks are told, and act on; so does this one."""
        self._terms = terms

    def put(self, token: int) -> None:
        """One more token for the readers."""
        self.output.append(token)
        self._wake()

    def end(self, finish: Finish, error: BaseException | None = None) -> None:
        """There will be no more tokens. The first end counts."""
        if self.finish is None:
            self.finish, self.error, self.state = finish, error, State.FINISHED
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class _Reader:
    """One pass over a request's output."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._index = 0

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> int:
        token = await self._request.next_token(self._index)
        if token is None:
            raise StopAsyncIteration
        self._index += 1
        return token


def as_tokens(tokens: list[int] | Tokens) -> Tokens:
    """A private int32 copy.

    Raises:
        ConfigError: a token is negative or beyond int32.
    """
    wide = np.asarray(tokens, np.int64)
    if wide.ndim != 1 or (len(wide) and (wide.min() < 0 or wide.max() > MAX_TOKEN)):
        raise ConfigError("request: tokens are one row of integers from 0 to 2**31 - 1")
    return wide.astype(np.int32)


def as_priority(priority: object) -> int:
    """
    Raises:
        ConfigError: it does not compare with others.
    """
    if not isinstance(priority, int):
        raise ConfigError(f"request: priority={priority!r} is no integer")
    return priority


def as_extra_key(extra_key: object) -> ExtraKey:
    """
    Raises:
        ConfigError: it is nothing that can be digested.
    """
    try:
        if isinstance(extra_key, str):
            extra_key.encode()
        elif not isinstance(extra_key, bytes | None):
            raise ConfigError(f"request: extra_key={extra_key!r} is neither text nor bytes")
    except UnicodeEncodeError as error:
        raise ConfigError(f"request: extra_key: {error}") from error
    return extra_key
