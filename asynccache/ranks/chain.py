"""What a rank has done, as one number: a digest over every lockstep call (arguments and plan) and every decision.

Two ranks that did the same have the same number; the last entries say where two that did not parted, and whether the
call, its arguments or its result was another. 62 bits, so that a number and its negation both fit a frame's int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

KEPT = 64
_MASK = (1 << 62) - 1

_PART = (1 << 16) - 1
_REST = (1 << 30) - 1
_CALL, _ARGUMENTS = 46, 30
_BEFORE_RESULT = 1 << _ARGUMENTS
_BEFORE_ARGUMENTS = 1 << _CALL


class Entry(NamedTuple):
    """``number`` counts entries from 1; ``step``: how many steps had begun; ``word``: what others are told of it, the
    call before its arguments before all of it and whatever came before."""

    number: int
    step: int
    word: int
    what: str


class Chain:
    """Grows by one entry a call; the last ``KEPT`` can be looked at."""

    __slots__ = ("_ring", "count", "digest")

    def __init__(self) -> None:
        self.digest = 0
        self.count = 0
        self._ring: list[Entry] = []

    def __repr__(self) -> str:
        return f"Chain({self.count} entries, {self.digest:016x})"

    def add(self, step: int, what: str, arguments: bytes, result: bytes = b"") -> None:
        """``what`` names the call."""
        self.count += 1
        call = xxh3_64_intdigest(what.encode())
        asked = xxh3_64_intdigest(arguments, self.digest ^ call)
        self.digest = xxh3_64_intdigest(result, asked) & _MASK
        word = (call & _PART) << _CALL | (asked & _PART) << _ARGUMENTS | self.digest & _REST
        entry = Entry(self.count, step, word, what)
        if len(self._ring) < KEPT:
            self._ring.append(entry)
        else:
            self._ring[(self.count - 1) % KEPT] = entry

    def last(self) -> list[Entry]:
        """The entries that are kept, oldest first."""
        cut = self.count % KEPT if len(self._ring) == KEPT else 0
        return self._ring[cut:] + self._ring[:cut]

    def at(self, number: int) -> Entry | None:
        """Entry ``number``, while it is kept."""
        if not max(0, self.count - KEPT) < number <= self.count:
            return None
        return self._ring[(number - 1) % KEPT]


def ring_words(chain: Chain, room: int) -> list[int]:
    """The kept entries as frame words: number, -number, word, -word, each at the place that its number gives it."""
    words = [0] * room
    for number, _, word, _ in chain.last()[-(room // 4) :]:
        at = number % (room // 4) * 4
        words[at : at + 4] = (number, -number, word, -word)
    return words


def parting(chain: Chain, words: Sequence[int]) -> str | None:
    """In words, the first entry that is not the same on all ranks whose ``ring_words`` went into the MIN ``words``;
    None if all that are kept are."""
    places = [words[at : at + 4] for at in range(0, len(words) // 4 * 4, 4)]
    newest = max(-high for _, high, _, _ in places)
    differing = {}
    for low, high, word, negated in places:
        if (low != -high or word != -negated) and -high > newest - KEPT:  # older: not kept by all
            differing[-high] = _elsewhere(word, -negated) if low == -high else "there was none"
    if not differing:
        return None
    first = min(differing)
    entry = chain.at(first)
    if entry is None:
        return f"entry {first} is where ranks part; this rank is at entry {chain.count}"
    here = f"here it was {entry.what!r} at step {entry.step}"
    return f"entry {first} is where ranks part; {here}, elsewhere {differing[first]}"


def _elsewhere(lowest: int, highest: int) -> str:
    """What differs between two words of one entry, if all that was before is alike."""
    apart = lowest ^ highest
    if apart >= _BEFORE_ARGUMENTS:
        return "it was another call"
    return "it had other arguments" if apart >= _BEFORE_RESULT else "it had another result"
