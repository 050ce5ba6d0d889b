"""What is known of keys in the stores, and for how long a request waits to know it. Plain decisions, without a clock.

vLLM asks for each key of a request by itself, in every step of its scheduler, until none of the answers is "later".
Keys are gathered until the step ends and asked of the stores in one call, a ``Question``.

Laws:
* A request waits ``timeout`` seconds in all for the stores' answers: from the end of the step in which it asked until
  the stores answered, however long the engine's next step takes. What is unknown to it then is a miss, in each later
  step, too, until it is preempted.
* An answer is remembered for a moment: a hit for ``HIT_KEPT`` seconds, a miss or a failure for ``MISS_KEPT``, unless
  the key is stored meanwhile.
* A key is asked of the stores once at a time, however many requests want it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from asynccache.storage import Result

HIT_KEPT = 5.0
MISS_KEPT = 1.0


class Answer(Enum):
    """``LATER``: the stores are asked."""

    HIT = "hit"
    MISS = "miss"
    LATER = "later"


class Question(NamedTuple):
    """Keys that the stores are asked for together. ``requests``: who waits. ``sent``: when, by the caller's clock."""

    keys: list[bytes]
    requests: set[str]
    sent: float


class _Known(NamedTuple):
    """``took``: seconds that the stores needed to say so."""

    hit: bool
    until: float
    took: float


class Lookups:
    """The table of one tier. Used by one thread at a time."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[bytes, _Known] = {}
        self._wanted: dict[bytes, None] = {}
        self._wanting: set[str] = set()
        self._asked: dict[bytes, Question] = {}
        self._spent: dict[str, float] = {}
        self._tidied = 0.0

    def __repr__(self) -> str:
        return f"Lookups(known={len(self._known)}, wanted={len(self._wanted)}, asked={len(self._asked)})"

    def begin(self, request: str) -> None:
        """A new request, which may wait."""
        self._spent[request] = 0.0

    def begin_again(self, requests: Collection[str]) -> None:
        """``requests`` were preempted: they may wait anew."""
        for request in requests:
            self._spend(request, -self._timeout)

    def end(self, request: str) -> None:
        """The request is over. Answers that it waited for may still come."""
        self._spent.pop(request, None)

    def ask(self, key: bytes, request: str, now: float) -> Answer:
        """What ``request`` is told about ``key``."""
        known = self._known.get(key)
        if known is not None and now < known.until:
            return Answer.HIT if known.hit else Answer.MISS
        left = self._timeout - self._spent.get(request, 0.0)
        question = self._asked.get(key)
        if left <= 0 or (question is not None and now - question.sent >= left):
            self._spend(request, self._timeout)
            return Answer.MISS
        if question is not None:
            question.requests.add(request)
        else:
            self._wanted[key] = None
            self._wanting.add(request)
        return Answer.LATER

    def take(self, now: float) -> Question | None:
        """What to ask the stores now; it counts as asked until ``answer``."""
        if not self._wanted:
            return None
        question = Question(list(self._wanted), self._wanting, now)
        self._asked.update(dict.fromkeys(question.keys, question))
        self._wanted, self._wanting = {}, set()
        return question

    def answer(self, question: Question, results: Sequence[Result], arrived: float, now: float) -> None:
        """The stores answered at ``arrived``. What they could not tell is a miss."""
        took = arrived - question.sent
        for request in question.requests:
            self._spend(request, took)
        for key, result in zip(question.keys, results, strict=True):
            self._asked.pop(key, None)
            hit = result is Result.HIT
            self._known[key] = _Known(hit, now + (HIT_KEPT if hit else MISS_KEPT), took)

    def left(self, keys: Iterable[bytes]) -> float:
        """Seconds that are left of ``timeout`` to whoever waited for the answers about ``keys``."""
        took = max((self._known[key].took for key in keys if key in self._known), default=0.0)
        return max(self._timeout - took, 0.0)

    def lost(self, keys: Iterable[bytes], request: str, now: float) -> None:
        """A load of ``keys`` failed: they are misses now, and ``request`` has waited enough."""
        for key in keys:
            self._known[key] = _Known(False, now + MISS_KEPT, 0.0)
        self._spend(request, self._timeout)

    def stored(self, keys: Iterable[bytes]) -> None:
        """``keys`` are in the stores now: a miss is true no longer."""
        for key in keys:
            known = self._known.get(key)
            if known is not None and not known.hit:
                del self._known[key]

    def tidy(self, now: float) -> None:
        """Forget what is out of date, once in a while."""
        if now - self._tidied < HIT_KEPT:
            return
        self._tidied = now
        self._known = {key: known for key, known in self._known.items() if now < known.until}

    def _spend(self, request: str, seconds: float) -> None:
        """Of a request that is over nothing is kept."""
        if request in self._spent:
            self._spent[request] = min(max(self._spent[request] + seconds, 0.0), self._timeout)
