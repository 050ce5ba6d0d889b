"""The workloads of ``stress``: conversations that share, grow, branch and end, out of a seed.

A *session* is one conversation: it gives one request at a time and the next only when that one has ended, like a user
or an agent would. Many sessions are open at once, more than can run, and the source picks among those that wait, so
that pages are evicted and come back. Nothing here knows a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from asynccache.cli.request import Request, Tokens
from asynccache.cli.tokens import stream_tokens

_SYSTEM, _USER = 1 << 40, 1 << 44
_TENANTS = (None, None, None, "tenant-a", "tenant-b")


class Turn(NamedTuple):
    """One request of a session: the whole prompt, and how many tokens come out."""

    prompt: Tokens
    output: Tokens
    last: bool


class _Text:
    """Draws fresh tokens: every stream is drawn once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._next = _USER

    def fresh(self, low: int, high: int) -> Tokens:
        self._next += 1
        return stream_tokens(self._next, 0, self.rng.randint(low, high))

    def system(self, kinds: int, low: int, high: int) -> Tokens:
        """One of ``kinds`` prompts that many sessions share; few of them are popular."""
        kind = min(int(self.rng.expovariate(3.0 / kinds)), kinds - 1)
        return stream_tokens(_SYSTEM + kind, 0, low + (high - low) * kind // kinds)


def chat(text: _Text) -> Iterator[Turn]:
    """A shared system prompt, then turns that each repeat all before them."""
    context = text.system(8, 64, 512)
    turns = text.rng.randint(2, 10)
    for turn in range(turns):
        context = np.concatenate([context, text.fresh(16, 240)])
        output = text.fresh(8, 160)
        yield Turn(context, output, turn == turns - 1)
        context = np.concatenate([context, output])


def shared(text: _Text) -> Iterator[Turn]:
    """A long shared system prompt and one question."""
    prompt = np.concatenate([text.system(16, 512, 2560), text.fresh(16, 320)])
    yield Turn(prompt, text.fresh(4, 64), last=True)


def agent(text: _Text) -> Iterator[Turn]:
    """A loop of tool calls: short outputs, long results, sometimes a retry from an earlier point, sometimes the
    context is cut down to a summary."""
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


def lonely(text: _Text) -> Iterator[Turn]:
    """Nothing in common with anything; now and then the same prompt twice."""
    prompt, repeat = text.fresh(1, 3072), text.rng.random() < 0.1
    yield Turn(prompt, text.fresh(1, 96), last=not repeat)
    if repeat:
        yield Turn(prompt, text.fresh(1, 96), last=True)


_KINDS: dict[str, Callable[[_Text], Iterator[Turn]]] = {
    "chat": chat, "shared": shared, "agent": agent, "random": lonely,
}


class _Session:
    """One open conversation."""

    def __init__(self, turns: Iterator[Turn], extra_key: str | None, hinted: bool) -> None:
        self.turns = turns
        self.extra_key = extra_key
        self.hinted = hinted


class StressSource:
    """Requests of ``open_sessions`` conversations, one drawn at random each time; an ended one is replaced. They arrive
    ``rate`` a second on average, independent of one another; 0: whenever there is room."""

    def __init__(
        self, workload: str, *, seed: int, requests: int | None, open_sessions: int, hints: float, rate: float = 0.0
    ) -> None:
        self.total = requests
        self._rate = rate
        self._at = 0.0
        self._rng = random.Random(seed)
        self._text = _Text(self._rng)
        self._kinds = list(_KINDS.values()) if workload == "mixed" else [_KINDS[workload]]
        self._hints = hints
        self._waiting = [self._open() for _ in range(open_sessions)]
        self._running: dict[int, _Session] = {}
        self._given = 0

    def next(self) -> Request | None:
        if self._given == self.total:
            return None
        session, turn = self._draw()
        number = self._given
        self._given += 1
        self._running[number] = session
        return Request(
            number=number, length=len(turn.prompt), output_length=len(turn.output),
            prompt=lambda: turn.prompt, output=lambda: turn.output,
            at=self._arrival(), ended=turn.last and session.hinted, extra_key=session.extra_key,
        )

    def done(self, request: Request) -> None:
        self._waiting.append(self._running.pop(request.number))

    def _arrival(self) -> float:
        if self._rate:
            self._at += self._rng.expovariate(self._rate)
        return self._at

    def _draw(self) -> tuple[_Session, Turn]:
        session = self._take()
        while (turn := next(session.turns, None)) is None:
            session = self._open()
        return session, turn

    def _take(self) -> _Session:
        if not self._waiting:
            return self._open()
        place = self._rng.randrange(len(self._waiting))
        self._waiting[place], self._waiting[-1] = self._waiting[-1], self._waiting[place]
        return self._waiting.pop()

    def _open(self) -> _Session:
        turns = self._rng.choice(self._kinds)(self._text)
        return _Session(turns, self._rng.choice(_TENANTS), self._rng.random() < self._hints)
