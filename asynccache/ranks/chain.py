"""What a rank has done, as one number: a digest over every lockstep call (arguments and plan) and every decision.

Two ranks that did the same have the same number; the last entries say where two that did not parted. 62 bits, so that
the number and its negation both fit a frame's int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

KEPT = 64
_MASK = (1 << 62) - 1


class Entry(NamedTuple):
    """``number`` counts entries from 1; ``step``: how many steps had begun; ``digest``: the chain including it."""

    number: int
    step: int
    digest: int
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

    def add(self, step: int, what: str, content: bytes) -> None:
        """``what`` names the call; ``content``: its arguments and result."""
        self.count += 1
        self.digest = xxh3_64_intdigest(content, self.digest ^ xxh3_64_intdigest(what.encode())) & _MASK
        entry = Entry(self.count, step, self.digest, what)
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
    """The kept entries as frame words: number, -number, digest, -digest, each at the place that its number gives it."""
    words = [0] * room
    for number, _, digest, _ in chain.last()[-(room // 4) :]:
        at = number % (room // 4) * 4
        words[at : at + 4] = (number, -number, digest, -digest)
    return words


def parting(chain: Chain, words: Sequence[int]) -> str:
    """In words, the first entry that is not the same on all ranks whose ``ring_words`` went into the MIN ``words``."""
    places = [words[at : at + 4] for at in range(0, len(words) // 4 * 4, 4)]
    newest = max(-high for _, high, _, _ in places)
    differing = []
    for low, high, digest, negated in places:
        if (low != -high or digest != -negated) and -high > newest - KEPT:  # older: not kept by all
            differing.append(-high)
    if not differing:
        return f"the last {KEPT} entries are alike"
    first = min(differing)
    entry = chain.at(first)
    if entry is None:
        return f"entry {first} is where ranks part; this rank is at entry {chain.count}"
    return f"entry {first} is where ranks part; here it was {entry.what!r} at step {entry.step}"
