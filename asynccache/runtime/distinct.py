"""How many different pages requests ever missed, in 16 KiB, whatever their number: HyperLogLog (Flajolet, Fusy,
Gandouet and Meunier, 2007) with the estimator of Ertl ("New cardinality estimation algorithms for HyperLogLog
sketches", 2017), which has no bias at small counts. One standard error is 0.8 %.

It is our own, because the libraries for it take one value a call, and a prompt has a hundred pages; here numpy takes
them at once. A page is its tokens, all tokens before it, and its namespace. The cost is that of hashing the prompt: 10
to 20 µs, and 3 ns a token. A prompt that is cached has no missing pages and costs nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from asynccache.runtime.tokens import INT32

Words = npt.NDArray[np.uint64]

_BITS = 14
_REGISTERS = 1 << _BITS
_RANKS = 64 - _BITS
_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(words: Words) -> Words:
    """The finalizer of splitmix64: each bit of the result depends on every bit of its word."""
    words = (words ^ (words >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _U64(27))) * _U64(0x94D049BB133111EB)
    return words ^ (words >> _U64(31))


class DistinctPages:
    """Counts different pages. ``page``: tokens of a page."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._registers = np.zeros(_REGISTERS, np.uint8)
        self._odd = _mixed(np.arange(1, page + 1, dtype=_U64) * _U64(_GOLDEN)) | _U64(1)

    def __repr__(self) -> str:
        return f"DistinctPages({self.count():.0f})"

    def add(self, space: bytes, key: bytes, first: int, last: int) -> None:
        """Add the pages ``[first, last)`` of the tokens ``key`` in the namespace whose digest is ``space``."""
        tokens = np.frombuffer(key, INT32, last * self._page).astype(_U64).reshape(last, self._page)
        start = int.from_bytes(space[:7], "little")
        places = np.arange(start, start + last, dtype=_U64)
        pages = _mixed(tokens @ self._odd + places * _U64(_GOLDEN))
        words = _mixed(np.cumsum(pages, dtype=_U64)[first:])  # of a page and all before it
        _, log2 = np.frexp((words >> _U64(_BITS)).astype(np.float64))
        np.maximum.at(self._registers, (words & _U64(_REGISTERS - 1)).astype(np.intp),
                      (_RANKS + 1 - log2).astype(np.uint8))

    def count(self) -> float:
        """The number of different pages that were added, about."""
        counts = np.bincount(self._registers, minlength=_RANKS + 2).tolist()
        total = _REGISTERS * _tau(1 - counts[_RANKS + 1] / _REGISTERS)
        for rank in range(_RANKS, 0, -1):
            total = 0.5 * (total + counts[rank])
        total += _REGISTERS * _sigma(counts[0] / _REGISTERS)
        return _REGISTERS**2 / (2 * math.log(2) * total)


def _sigma(x: float) -> float:
    """x + the sum of x**2**k * 2**(k - 1) over k from 1 on."""
    if x == 1:
        return math.inf
    found, weight, before = x, 1.0, -1.0
    while found != before:
        x, before = x * x, found
        found += x * weight
        weight *= 2
    return found


def _tau(x: float) -> float:
    """(1 - x - the sum of (1 - x**2**-k)**2 * 2**-k over k from 1 on) / 3."""
    if x in (0, 1):
        return 0.0
    found, weight, before = 1 - x, 1.0, -1.0
    while found != before:
        x, before, weight = math.sqrt(x), found, weight / 2
        found -= (1 - x) ** 2 * weight
    return found / 3
