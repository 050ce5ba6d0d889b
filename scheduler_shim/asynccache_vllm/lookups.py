"""The table of the keys that the stores have, and of the time that each request has waited for the stores' answers.
Nothing here reads a clock: the caller passes the time.

In every step of its scheduler, vLLM asks for each key of a request by itself, until none of the answers is "later".
The keys are collected until the step ends; then the stores are asked for all of them in one call, a ``ChunkQuestion``.

What always holds:
* A request waits at most ``timeout`` seconds in all for the stores' answers. The time counts from the end of the step
  in which the request asked until the stores answered, however long the engine's next step takes. Keys that are unknown
  after that are misses for this request, also in later steps, until it is preempted.
* A hit is remembered for ``HIT_KEPT`` seconds. A miss or a failure is remembered for ``MISS_KEPT`` seconds, or until
  the key is stored.
* The stores are asked for a key only once at a time, however many requests want it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from asynccache.storage import Result

HIT_KEPT = 5.0
MISS_KEPT = 1.0
"""Seconds for which hits, and misses and failures, are remembered."""


class KeyAnswer(Enum):
    """The answer that a request is given about a key. ``LATER``: the stores have not answered yet; ask again in the
    next step."""

    HIT = "hit"
    MISS = "miss"
    LATER = "later"


class ChunkQuestion(NamedTuple):
    """Keys that the stores are asked for in one call. ``requests``: the ids of those that wait for the answer.
    ``sent``: when the call was made, by the caller's clock."""

    keys: list[bytes]
    requests: set[str]
    sent: float


class _Known(NamedTuple):
    """An answer that is remembered. ``until``: when it is forgotten; ``took``: seconds until the stores gave it."""

    hit: bool
    until: float
    took: float


class KeyTable:
    """The table of one tier. To be used by one thread at a time. All times are those of one clock, in seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[bytes, _Known] = {}
        self._wanted: dict[bytes, None] = {}
        self._wanting: set[str] = set()
        self._asked: dict[bytes, ChunkQuestion] = {}
        self._spent: dict[str, float] = {}
        self._tidied = 0.0

    def begin(self, request: str) -> None:
        """Note a new request, which has not waited yet."""
        self._spent[request] = 0.0

    def begin_again(self, requests: Collection[str]) -> None:
        """Note that ``requests`` were preempted: each may wait the whole ``timeout`` again."""
        for request in requests:
            self._spend(request, -self._timeout)

    def end(self, request: str) -> None:
        """Forget a request that has ended. Answers that it waited for may still come."""
        self._spent.pop(request, None)

    def ask(self, key: bytes, request: str, now: float) -> KeyAnswer:
        """Return the answer to ``request`` about ``key``. If the answer is LATER, the key is in the next
        ``ChunkQuestion``, or in one that was not answered yet."""
        known = self._known.get(key)
        if known is not None and now < known.until:
            return KeyAnswer.HIT if known.hit else KeyAnswer.MISS
        left = self._timeout - self._spent.get(request, 0.0)
        question = self._asked.get(key)
        if left <= 0 or (question is not None and now - question.sent >= left):
            self._spend(request, self._timeout)
            return KeyAnswer.MISS
        if question is not None:
            question.requests.add(request)
        else:
            self._wanted[key] = None
            self._wanting.add(request)
        return KeyAnswer.LATER

    def want(self, keys: Iterable[bytes], now: float) -> None:
        """Have the next ``ChunkQuestion`` ask for those of ``keys`` that nothing is known of, before a request does."""
        for key in keys:
            known = self._known.get(key)
            if (known is None or now >= known.until) and key not in self._asked:
                self._wanted[key] = None

    def take(self, now: float) -> ChunkQuestion | None:
        """The keys to ask the stores for now; None if there are none. Until ``answer`` they are not asked for again."""
        if not self._wanted:
            return None
        question = ChunkQuestion(list(self._wanted), self._wanting, now)
        self._asked.update(dict.fromkeys(question.keys, question))
        self._wanted, self._wanting = {}, set()
        return question

    def answer(self, question: ChunkQuestion, results: Sequence[Result], arrived: float, now: float) -> None:
        """Note the stores' answer, which came at ``arrived``. A key about which the stores could not tell becomes a
        miss."""
        took = arrived - question.sent
        for request in question.requests:
            self._spend(request, took)
        for key, result in zip(question.keys, results, strict=True):
            self._asked.pop(key, None)
            hit = result is Result.HIT
            self._known[key] = _Known(hit, now + (HIT_KEPT if hit else MISS_KEPT), took)

    def left(self, keys: Iterable[bytes]) -> float:
        """Return how many seconds of ``timeout`` are left to a request that waited for the answers about ``keys``."""
        took = max((self._known[key].took for key in keys if key in self._known), default=0.0)
        return max(self._timeout - took, 0.0)

    def lost(self, keys: Iterable[bytes], request: str, now: float) -> None:
        """Note that a load of ``keys`` failed: they are misses now, and ``request`` does not wait any more."""
        for key in keys:
            self._known[key] = _Known(False, now + MISS_KEPT, 0.0)
        self._spend(request, self._timeout)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that ``keys`` are in the stores now: misses that are remembered for them are forgotten."""
        for key in keys:
            known = self._known.get(key)
            if known is not None and not known.hit:
                del self._known[key]

    def tidy(self, now: float) -> None:
        """Forget answers that are out of date, at most once in ``HIT_KEPT`` seconds."""
        if now - self._tidied < HIT_KEPT:
            return
        self._tidied = now
        self._known = {key: known for key, known in self._known.items() if now < known.until}

    def _spend(self, request: str, seconds: float) -> None:
        """Add to the time that a request has waited, within 0 and ``timeout``; nothing if the request has ended."""
        if request in self._spent:
            self._spent[request] = min(max(self._spent[request] + seconds, 0.0), self._timeout)
