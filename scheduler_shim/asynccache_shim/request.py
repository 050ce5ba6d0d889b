"""What a caller holds: tokens, limits, priority and namespace on the way in; a stream of tokens and ``abort`` after.

Laws:
* A request knows nothing of the cache, and the cache never sees it. The scheduler writes ``state``, ``match``, ``hits``
  and ``output``; the caller reads them, iterates, and may abort at any moment.
* What the scheduler acts on are the ``terms`` as they were submitted, whatever becomes of the request's attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache import ConfigError, Hits
from asynccache.checks import check_fields, flag, instance, integer, namespace, number, shown, within
from asynccache_shim.model import Sampling

Tokens = npt.NDArray[np.int32]
ExtraKey = str | bytes | None

MAX_TOKEN = int(np.iinfo(np.int32).max)
MAX_SEED = 2**64 - 1


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

    max_new_tokens: int = field(default=16, metadata=within(1))
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "stop_tokens", as_stop_tokens(self.stop_tokens))


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
        self.limits = Limits() if limits is None else instance("request: limits", limits, Limits)
        self.tokens = as_tokens(tokens)
        self.priority = as_priority(priority)
        self.extra_key = as_extra_key(extra_key)
        self.sampling = Sampling() if sampling is None else as_sampling(sampling)
        self.ended = flag("request: ended", ended)
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
        """The caller wants no more of it. Its stream ends at once; what it holds goes back once no step uses it."""
        if self.finish is not None:
            return
        if self._aborted is None:
            end_request(self, Finish.ABORTED)
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
        index = integer("index", index, 0)
        while len(self.output) <= index:
            if self.finish is not None:
                if self.error is not None:
                    raise self.error
                return None
            await self._news()
        return self.output[index]

    @property
    def terms(self) -> Terms:
        """As they were submitted; before, as they are.

        Raises:
            ConfigError: an attribute was set to what is unusable.
        """
        if self._terms is not None:
            return self._terms
        return Terms(
            as_tokens(self.tokens), instance("request: limits", self.limits, Limits), as_priority(self.priority),
            as_extra_key(self.extra_key), as_sampling(self.sampling), flag("request: ended", self.ended),
        )  # fmt: skip

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


# what becomes of a request: for the scheduler alone, and no part of what a caller holds


def enlist(request: Request, aborted: Callable[[], None]) -> None:
    """It is a scheduler's from now on, which is told if it is to be aborted, and ends it.

    Raises:
        ConfigError: it was submitted before, or an attribute was set to what is unusable.
    """
    if request.state is not State.NEW:
        raise ConfigError("request: it is submitted once")
    request._terms = request.terms
    request.state = State.WAITING
    request._aborted = aborted


def add_token(request: Request, token: int) -> None:
    """One more token for the readers."""
    request.output.append(token)
    request._wake()


def end_request(request: Request, finish: Finish, error: BaseException | None = None) -> None:
    """There will be no more tokens. The first end counts."""
    if request.finish is None:
        request.finish, request.error, request.state = finish, error, State.FINISHED
        request._wake()


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
    """A private int32 copy, of at least one token.

    Raises:
        ConfigError: they are not one row of integers, or one is negative or beyond int32, or there are none.
    """
    try:
        given = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and len(given)):
            raise TypeError(f"{given.ndim} dimensions of {given.dtype}")
    except Exception as error:  # whatever it is, it becomes no array
        raise ConfigError(f"request: tokens={shown(tokens)} are no row of integers: {error}") from error
    if not len(given):
        raise ConfigError("request: tokens: it needs at least one")
    if given.min() < 0 or given.max() > MAX_TOKEN:
        raise ConfigError("request: tokens are one row of integers from 0 to 2**31 - 1")
    return given.astype(np.int32)


def as_stop_tokens(tokens: object) -> frozenset[int]:
    """
    Raises:
        ConfigError: it is no collection of tokens.
    """
    if not isinstance(tokens, (frozenset, set, list, tuple)):
        raise ConfigError(f"stop_tokens={shown(tokens)} must be a set of tokens")
    return frozenset(integer("stop_tokens", token, 0, MAX_TOKEN) for token in tokens)


def as_priority(priority: object) -> int:
    """
    Raises:
        ConfigError: it is no integer.
    """
    return integer("request: priority", priority)


def as_extra_key(extra_key: object) -> ExtraKey:
    """
    Raises:
        ConfigError: it is nothing that can be digested.
    """
    return namespace("request: extra_key", extra_key)


def as_sampling(sampling: object) -> Sampling:
    """
    Raises:
        ConfigError: a value in it is unusable.
    """
    temperature, top_p, seed = instance("request: sampling", sampling, Sampling)
    return Sampling(
        number("request: sampling: temperature", temperature, 0), number("request: sampling: top_p", top_p, 0, 1),
        None if seed is None else integer("request: sampling: seed", seed, -MAX_SEED, MAX_SEED),
    )  # fmt: skip
