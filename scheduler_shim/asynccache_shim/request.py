"""A request as its caller sees it. The caller makes it from tokens, limits, priority and namespace, and reads a stream
of tokens from it.

What always holds:
* A request knows nothing of the cache, and the cache never sees it. The scheduler writes the request's state, output
  and end; the caller reads them, iterates over the output, and may abort at any moment.
* The scheduler acts on the ``terms`` as they were when the request was submitted. Setting an attribute afterwards
  changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache import ConfigError, Hits
from asynccache.checks import flag, instance, integer, number, shown
from asynccache.checks import namespace as checked_namespace
from asynccache.settings import Count, Seconds, Settings
from asynccache_shim.model import Sampling

Tokens = npt.NDArray[np.int32]
Namespace = str | bytes | None

MAX_TOKEN = int(np.iinfo(np.int32).max)
MAX_SEED = 2**64 - 1


class State(Enum):
    """The state of a request."""

    NEW = "not submitted"
    PREFETCHING = "its pages are being fetched from storage"
    WAITING = "in the queue"
    LOADING = "admitted; its pages are being loaded to the device"
    RUNNING = "part of every step"
    FINISHED = "finished"


class Finish(Enum):
    """The reason why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"
    FAILED = "failed"


class Limits(Settings, frozen=True):
    """The limits of a generation: it ends after ``max_new_tokens`` tokens, with one of ``stop_tokens``, which is then
    the last token of the output, or with the first token that is made ``max_time`` seconds or more after the request
    was submitted."""

    max_new_tokens: Count = 16
    stop_tokens: frozenset[int] = frozenset()
    max_time: Seconds | None = None

    def __post_init__(self) -> None:
        self._set("stop_tokens", as_stop_tokens(self.stop_tokens))
        super().__post_init__()


class Matched(NamedTuple):
    """The part of a request's tokens that the cache had at its latest look-up, in tokens; ``mamba_host_hit_length`` in
    states. The fields are those that ``AsyncCache.match`` returns."""

    device: int = 0
    host: int = 0
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0


class RequestTerms(NamedTuple):
    """The attributes of a ``Request`` that say what is asked for, checked; see there."""

    tokens: Tokens
    limits: Limits
    priority: int
    namespace: Namespace
    sampling: Sampling
    ended: bool
    publishes: Callable[[], bool] | None


class Request:
    """One prompt to be continued. A request is submitted once; ``async for token in request`` streams its output.

    Args:
        tokens: the prompt, at least one token; a list or an int32 array of one dimension.
        limits: when generation ends (default: after 16 tokens).
        priority: requests of higher priority are admitted first and retracted last.
        namespace: the cache's namespace for the prompt; prompts of different namespaces share nothing.
        sampling: how tokens are drawn (default: the most likely one).
        ended: the conversation will not go on, so what the request computes is the first to be evicted.
        publishes: called in the loop before anything that the request has computed is published. If it returns False or
            raises an error, that is not published, and neither is what the request computes after it, until it is
            retracted and begins anew. None: everything is published.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        tokens: list[int] | Tokens,
        limits: Limits | None = None,
        *,
        priority: int = 0,
        namespace: Namespace = None,
        sampling: Sampling | None = None,
        ended: bool = False,
        publishes: Callable[[], bool] | None = None,
    ) -> None:
        limits, sampling = Limits() if limits is None else limits, Sampling() if sampling is None else sampling
        terms = as_terms(tokens, limits, priority, namespace, sampling, ended, publishes)
        self.tokens, self.limits, self.priority, self.namespace, self.sampling, self.ended, self.publishes = terms
        self.number: int | None = None
        """The request's ``request_id`` in chunks of the model's steps; None: it was not submitted. This and what
        follows is set by the scheduler."""
        self.state = State.NEW
        self.match = Matched()
        """The latest look-up."""
        self.hits: Hits | None = None
        """What the first lease found whose pages were loaded."""
        self.retractions = 0
        """How often the request was retracted."""
        self.output: list[int] = []
        self.finish: Finish | None = None
        """How the request ended; None: it has not."""
        self.error: BaseException | None = None
        """Why the request failed."""
        self._terms: RequestTerms | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._aborted: Callable[[], None] | None = None

    def __repr__(self) -> str:
        end = self.finish or self.state
        return f"Request({len(self.tokens)} tokens, {len(self.output)} generated, {end.value})"

    def abort(self) -> None:
        """End the request. Its stream of tokens ends at once; its pages are given back when no step uses them any more.
        A request that has ended stays as it is."""
        if self.finish is not None:
            return
        if self._aborted is None:
            end_request(self, Finish.ABORTED)
        else:
            self._aborted()

    def __aiter__(self) -> AsyncIterator[int]:
        """Iterate over the output, from its first token on. There may be any number of readers; cancelling one does not
        abort the request. If the request failed, its error is raised after the last token."""
        return _OutputReader(self)

    async def done(self) -> list[int]:
        """Wait until the request has ended; returns the whole output. Cancelling does not abort the request.

        Raises:
            BaseException: the error that the request failed with.
        """
        while self.finish is None:
            await self._news(len(self.output))
        if self.error is not None:
            raise self.error
        return self.output

    async def next_token(self, index: int) -> int | None:
        """Output token ``index``, counted from 0, as soon as it is there; None if the output ends before it. Cancelling
        does not abort the request.

        Raises:
            BaseException: the error that the request failed with, if the output ends before token ``index``.
            ConfigError: ``index`` is no integer of 0 or more.
        """
        index = integer("index", index, 0)
        while True:
            over = self.finish is not None
            if len(self.output) > index:
                return self.output[index]
            if over and self.error is not None:
                raise self.error
            if over:
                return None
            await self._news(index)

    @property
    def terms(self) -> RequestTerms:
        """The terms that were submitted; before the request is submitted, those of its present attributes.

        Raises:
            ConfigError: an attribute was set to something that cannot be used.
        """
        if self._terms is not None:
            return self._terms
        return as_terms(
            self.tokens, self.limits, self.priority, self.namespace, self.sampling, self.ended, self.publishes
        )

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _begin(self, hits: Hits) -> None:
        self.hits = hits

    async def _news(self, seen: int) -> None:
        """Wait until there are more than ``seen`` tokens, or the request has ended. It may return earlier."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


# functions by which the scheduler changes a request; they are not for callers


def enlist(request: Request, number: int, aborted: Callable[[], None]) -> None:
    """Hand ``request`` over to a scheduler, as its request ``number``. From now on ``abort`` calls ``aborted``, which
    must end the request.

    Raises:
        ConfigError: the request was submitted before, or an attribute was set to something that cannot be used.
    """
    if request.state is not State.NEW:
        raise ConfigError("request: it was submitted before; make a new one")
    request._terms = request.terms
    request.number = number
    request.state = State.WAITING
    request._aborted = aborted


def add_token(request: Request, token: int) -> None:
    """Add a token to the output, and wake the readers."""
    request.output.append(token)
    request._wake()


def begin_request(request: Request, hits: Hits) -> None:
    """Note that the pages of the request's lease are loaded, and what the lease had found."""
    if request.hits is None:
        request._begin(hits)


def end_request(request: Request, finish: Finish, error: BaseException | None = None) -> None:
    """End the output, and wake the readers. Only the first call for a request has an effect."""
    if request.finish is None:
        request.error, request.state = error, State.FINISHED
        request.finish = finish  # the last, for readers in other threads
        request._wake()


class _OutputReader:
    """An iterator over the output of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._index = 0

    def __aiter__(self) -> _OutputReader:
        return self

    async def __anext__(self) -> int:
        token = await self._request.next_token(self._index)
        if token is None:
            raise StopAsyncIteration
        self._index += 1
        return token


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """The tokens as a private int32 array.

    Raises:
        ConfigError: they are no integers in one dimension, or one is negative or beyond int32, or there are none.
    """
    try:
        given = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and len(given)):
            raise TypeError(f"{given.ndim} dimensions of {given.dtype}")
    except Exception as error:  # numpy calls code of the caller's object, which may raise anything
        raise ConfigError(f"request: tokens={shown(tokens)} are no row of integers: {error}") from error
    if not len(given):
        raise ConfigError("request: tokens: a request needs at least one")
    if given.min() < 0 or given.max() > MAX_TOKEN:
        raise ConfigError("request: tokens must be integers from 0 to 2**31 - 1")
    return given.astype(np.int32)


def as_stop_tokens(tokens: object) -> frozenset[int]:
    """Stop tokens, checked.

    Raises:
        ConfigError: ``tokens`` is no set, list or tuple of tokens.
    """
    if not isinstance(tokens, (frozenset, set, list, tuple)):
        raise ConfigError(f"stop_tokens={shown(tokens)} must be a set of tokens")
    return frozenset(integer("stop_tokens", token, 0, MAX_TOKEN) for token in tokens)


def as_terms(
    tokens: list[int] | Tokens, limits: object, priority: object, namespace: object, sampling: object, ended: object,
    publishes: object,
) -> RequestTerms:  # fmt: skip
    """The terms of a request, each of them checked.

    Raises:
        ConfigError: one of them cannot be used.
    """
    temperature, top_p, seed, top_k = instance("request: sampling", sampling, Sampling)
    if publishes is not None and not callable(publishes):
        raise ConfigError(f"request: publishes={shown(publishes)} must be a function or None")
    return RequestTerms(
        as_tokens(tokens), instance("request: limits", limits, Limits), integer("request: priority", priority),
        checked_namespace("request: namespace", namespace),
        Sampling(
            number("request: sampling: temperature", temperature, 0), number("request: sampling: top_p", top_p, 0, 1),
            None if seed is None else integer("request: sampling: seed", seed, -MAX_SEED, MAX_SEED),
            integer("request: sampling: top_k", top_k, 0, MAX_TOKEN),
        ),
        flag("request: ended", ended), publishes,
    )  # fmt: skip
