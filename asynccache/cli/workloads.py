"""The workloads of ``stress``: conversations that share prompts, grow, branch and end, all drawn from a seed.

A conversation gives one request at a time, and the next one only when the last one has ended, as a user or an agent
would. More conversations are open than can run at once, and the source picks one of the conversations that wait. So
pages are evicted between two requests of a conversation and come back. Nothing in this module knows of a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from asynccache.cli.request import RunRequest, Tokens, stream_tokens

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


class _Conversation:
    """An open conversation. ``hinted``: its last request tells the cache that it is the last."""

    def __init__(self, turns: Iterator[Turn], extra_key: str | None, hinted: bool) -> None:
        self.turns = turns
        self.extra_key = extra_key
        self.hinted = hinted


class StressSource:
    """The requests of ``open_conversations`` conversations. Each request is of one that is drawn at random among those
    that wait; a conversation that has ended is replaced by a new one.

    ``requests``: end after so many; None: never. ``hints``: the share of conversations whose last request says that it
    is the last. ``rate``: requests arrive at random times, so many a second on average; 0: as soon as there is a place.
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
        conversation, turn = self._draw()
        number = self._given
        self._given += 1
        self._running[number] = conversation
        return RunRequest(
            number=number, length=len(turn.prompt), output_length=len(turn.output),
            prompt=lambda: turn.prompt, output=lambda: turn.output,
            at=self._arrival(), ended=turn.last and conversation.hinted, extra_key=conversation.extra_key,
        )  # fmt: skip

    def done(self, request: RunRequest) -> None:
        self._waiting.append(self._running.pop(request.number))

    def _arrival(self) -> float:
        if self._rate:
            self._at += self._rng.expovariate(self._rate)
        return self._at

    def _draw(self) -> tuple[_Conversation, Turn]:
        """A conversation that waits, and its next turn. One that has no turn left is replaced by a new one."""
        conversation = self._take()
        while (turn := next(conversation.turns, None)) is None:
            conversation = self._open()
        return conversation, turn

    def _take(self) -> _Conversation:
        if not self._waiting:
            return self._open()
        place = self._rng.randrange(len(self._waiting))
        self._waiting[place], self._waiting[-1] = self._waiting[-1], self._waiting[place]
        return self._waiting.pop()

    def _open(self) -> _Conversation:
        turns = self._rng.choice(self._kinds)(self._text)
        return _Conversation(turns, self._rng.choice(_TENANTS), self._rng.random() < self._hints)
