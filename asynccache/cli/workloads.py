"""Where a run's requests come from: a trace, or made-up conversations.

Tokens are made out of numbers. The same numbers give the same tokens on every machine and in every run. Each token of a
block of a trace depends on the block's id and on its position in the block, so blocks with equal ids are equal, and the
first n tokens of a partial block are those of the whole block. What has no id is tokens that no other request has.

**The workloads of ``stress``** are conversations that share prompts, grow, branch and end, all drawn from a seed. A
conversation gives one request at a time, and the next one only when the last one has ended, as a user or an agent
would. More conversations are open than can run at once, and the source picks one of the conversations that wait. So
pages are evicted between two requests of a conversation and come back. Nothing in this module knows of a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asynccache.cli.traces import BLOCK_TOKENS, Trace, TraceSurvey, arrivals

Tokens = npt.NDArray[np.int32]

_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1


class RunRequest(NamedTuple):
    """One request that ``replay`` or ``stress`` serves.

    number: counts the requests of the run from 0.
    length, output_length: tokens of the prompt and of the output.
    prompt, output: make the tokens when they are called, because the tokens of a whole trace do not fit in memory.
    at: when the request arrives, in seconds after the start of the run; used by replays with ``--speed``.
    ended: True if the release tells the cache that this conversation will not go on.
    namespace: the namespace of the prompt.
    block_size, shared_blocks: tokens of a block of the trace; full blocks of the prompt that earlier prompts of the
        trace have as well.
    shared_tokens: the lease tells the cache that other conversations share so many tokens of the prompt; None: the
        lease does not say.
    time: when the request arrived according to the trace, in seconds after the trace's start, whatever the speed of
        the replay; None: the request is not from a trace.
    """

    number: int
    length: int
    output_length: int
    prompt: Callable[[], Tokens]
    output: Callable[[], Tokens]
    at: float = 0.0
    ended: bool = False
    namespace: str | None = None
    block_size: int = BLOCK_TOKENS
    shared_blocks: int = 0
    shared_tokens: int | None = None
    time: float | None = None


class Source(Protocol):
    """A source of requests. ``total``: how many there will be; None if the source could go on for ever."""

    total: int | None

    def next(self) -> RunRequest | None:
        """The request that arrives next; None if no more will come."""
        ...

    def done(self, request: RunRequest) -> None:
        """Tell the source that ``request`` has ended, well or not, so that its conversation may go on."""
        ...


def block_tokens(blocks: Sequence[int], length: int, size: int = BLOCK_TOKENS, rest: int = 0) -> Tokens:
    """The first ``length`` tokens of these blocks of ``size`` tokens, laid end to end. What they are too short for
    comes from the stream ``rest``."""
    seeds = np.array([_seed(block) for block in blocks], dtype=_U64)
    found = _finish((seeds[:, None] + _offsets(size)).reshape(-1)[:length])
    missing = length - len(found)
    return np.concatenate([found, stream_tokens(rest, 0, missing)]) if missing else found


@cache
def _offsets(size: int) -> npt.NDArray[np.uint64]:
    return np.arange(size, dtype=_U64) * _U64(_MIX)


def stream_tokens(stream: int, start: int, length: int) -> Tokens:
    """Tokens ``[start, start + length)`` of an endless stream of tokens."""
    offsets = np.arange(start, start + length, dtype=_U64) * _U64(_MIX)
    return _finish(offsets + _U64(_seed(stream) ^ _MIX))


def _seed(number: int) -> int:
    mixed = (number + 1) * _GOLDEN & _MASK
    return (mixed ^ (mixed >> 31)) & _MASK


def _finish(x: npt.NDArray[np.uint64]) -> Tokens:
    x ^= x >> _U64(29)
    x *= _U64(_MIX)
    x >>= _U64(33)
    return x.astype(np.int32)


_OUTPUT_STREAM, _REST_STREAM = 1 << 48, 1 << 49


class TraceSource:
    """The requests of a trace, in its order. ``hints``: the share of conversations whose last request tells the cache
    that it is the last. With ``shared_hints`` these requests also tell how much of their prompts later requests
    have."""

    def __init__(
        self, trace: Trace, found: TraceSurvey, *, speed: float = 0.0, hints: float = 0.0,
        seed: int = 0, shared_hints: bool = False,
    ) -> None:  # fmt: skip
        rng, times = random.Random(seed), arrivals(trace, 1.0)
        self.total: int | None = len(trace.requests)

        def made() -> Iterator[RunRequest]:
            size = trace.block_size
            for number, (line, time, at) in enumerate(zip(trace.requests, times, arrivals(trace, speed), strict=True)):
                ended = found.last[number] and rng.random() < hints
                yield RunRequest(
                    number=number, length=line.input_length, output_length=line.output_length,
                    prompt=partial(block_tokens, line.blocks, line.input_length, size, _REST_STREAM + number),
                    output=partial(stream_tokens, _OUTPUT_STREAM + number, 0, line.output_length),
                    at=at, ended=ended, block_size=size, shared_blocks=found.shared_blocks[number],
                    shared_tokens=found.later_blocks[number] * size if ended and shared_hints else None,
                    time=time,
                )

        self._requests = made()

    def next(self) -> RunRequest | None:
        return next(self._requests, None)

    def done(self, request: RunRequest) -> None:
        """Do nothing: the requests of a trace do not wait for one another."""


_SYSTEM, _USER = 1 << 40, 1 << 44
_TENANTS = (None, None, None, "tenant-a", "tenant-b")


class Turn(NamedTuple):
    """One request of a conversation. ``prompt``: all tokens from its start on; ``last``: no turn follows."""

    prompt: Tokens
    output: Tokens
    last: bool


class _RandomTokens:
    """Draws tokens: fresh ones, which no other prompt has, and system prompts, which many conversations share."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._next = _USER

    def fresh(self, low: int, high: int) -> Tokens:
        self._next += 1
        return stream_tokens(self._next, 0, self.rng.randint(low, high))

    def system(self, kinds: int, low: int, high: int) -> Tokens:
        """One of ``kinds`` system prompts; a few of them are drawn much more often than the others."""
        kind = min(int(self.rng.expovariate(3.0 / kinds)), kinds - 1)
        return stream_tokens(_SYSTEM + kind, 0, low + (high - low) * kind // kinds)


def chat(text: _RandomTokens) -> Iterator[Turn]:
    """A shared system prompt, then turns; each turn's prompt repeats all turns before it."""
    context = text.system(8, 64, 512)
    turns = text.rng.randint(2, 10)
    for turn in range(turns):
        context = np.concatenate([context, text.fresh(16, 240)])
        output = text.fresh(8, 160)
        yield Turn(context, output, turn == turns - 1)
        context = np.concatenate([context, output])


def shared(text: _RandomTokens) -> Iterator[Turn]:
    """A long shared system prompt and one question."""
    prompt = np.concatenate([text.system(16, 512, 2560), text.fresh(16, 320)])
    yield Turn(prompt, text.fresh(4, 64), last=True)


def agent(text: _RandomTokens) -> Iterator[Turn]:
    """A loop of tool calls with short outputs and long results. Sometimes the agent retries from an earlier point, and
    a long context is replaced by a summary."""
    system = text.system(4, 768, 1536)
    context = np.concatenate([system, text.fresh(32, 256)])
    steps = text.rng.randint(5, 24)
    marks = [len(context)]
    for step in range(steps):
        output = text.fresh(8, 64)
        yield Turn(context, output, step == steps - 1)
        context = np.concatenate([context, output, text.fresh(16, 400)])
        marks.append(len(context))
        draw = text.rng.random()
        if len(context) > 4096:
            context = np.concatenate([system, text.fresh(128, 512)])
            marks = [len(context)]
        elif draw < 0.15:
            context = np.concatenate([context[: text.rng.choice(marks)], text.fresh(8, 64)])


def lonely(text: _RandomTokens) -> Iterator[Turn]:
    """A prompt that shares nothing with any other; one in ten is asked twice."""
    prompt, repeat = text.fresh(1, 3072), text.rng.random() < 0.1
    yield Turn(prompt, text.fresh(1, 96), last=not repeat)
    if repeat:
        yield Turn(prompt, text.fresh(1, 96), last=True)


_KINDS: dict[str, Callable[[_RandomTokens], Iterator[Turn]]] = {
    "chat": chat, "shared": shared, "agent": agent, "random": lonely,
}


class _Conversation(NamedTuple):
    """An open conversation. ``hinted``: its last request tells the cache that it is the last."""

    turns: Iterator[Turn]
    namespace: str | None
    hinted: bool


class StressSource:
    """The requests of ``open_conversations`` conversations. Each request is of one that is drawn at random among those
    that wait; a conversation that has ended is replaced by a new one.

    ``requests``: the number after which to end; None: never. ``hints``: the share of conversations whose last request
    says that it is the last. ``rate``: requests arrive at random times, so many a second on average; 0: as soon as
    there is a place.
    """

    def __init__(
        self, workload: str, *, seed: int, requests: int | None, open_conversations: int, hints: float,
        rate: float = 0.0,
    ) -> None:
        self.total = requests
        self._rate = rate
        self._at = 0.0
        self._rng = random.Random(seed)
        self._text = _RandomTokens(self._rng)
        self._kinds = list(_KINDS.values()) if workload == "mixed" else [_KINDS[workload]]
        self._hints = hints
        self._waiting = [self._open() for _ in range(open_conversations)]
        self._running: dict[int, _Conversation] = {}
        self._given = 0

    def next(self) -> RunRequest | None:
        if self._given == self.total:
            return None
        waiting = self._waiting
        if waiting:
            place = self._rng.randrange(len(waiting))
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
        conversation = waiting.pop() if waiting else self._open()
        while (turn := next(conversation.turns, None)) is None:  # it has ended, and a new one takes its place
            conversation = self._open()
        number, self._given = self._given, self._given + 1
        self._running[number] = conversation
        if self._rate:
            self._at += self._rng.expovariate(self._rate)
        return RunRequest(
            number=number, length=len(turn.prompt), output_length=len(turn.output),
            prompt=lambda: turn.prompt, output=lambda: turn.output,
            at=self._at, ended=turn.last and conversation.hinted, namespace=conversation.namespace,
        )  # fmt: skip

    def done(self, request: RunRequest) -> None:
        self._waiting.append(self._running.pop(request.number))

    def _open(self) -> _Conversation:
        turns = self._rng.choice(self._kinds)(self._text)
        return _Conversation(turns, self._rng.choice(_TENANTS), self._rng.random() < self._hints)
