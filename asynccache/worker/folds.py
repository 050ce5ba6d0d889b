"""Folds: the answers of several workers become one. Nothing here is asynchronous.

Something was done only if all workers say so. If several workers report errors, the lowest of their ranks gives the
class of the error. The fold of a remote method gets the answers by rank, and the arguments of the call. If an answer
cannot be right, the fold raises ``RankFailure`` with its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import isfinite
from operator import or_

from asynccache.core.keys import HASH_BYTES
from asynccache.errors import BackendError, ConfigError, RankFailure, Timeout, Unavailable
from asynccache.storage.call_guard import BreakerState
from asynccache.storage.contract import Result
from asynccache.worker.messages import Failed
from asynccache.worker.work import (
    Inspected,
    PageBytes,
    PageQuestion,
    ReadOrder,
    StoredBatch,
    StoreQuestion,
    WriteOrder,
)

_ORDER = (Result.HIT, Result.MISS, Result.FAILED, Result.CORRUPT)
_RANK = bytes(_ORDER.index(Result(value)) if value < len(_ORDER) else len(_ORDER) for value in range(256))
_RESULT = bytes([*_ORDER, *[Result.FAILED] * (256 - len(_ORDER))])

_SUM_BYTES = 8
_KINDS = {kind.__name__: kind for kind in (ConfigError, BackendError, Unavailable, Timeout)}
_WORST_LAST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def found(said: Mapping[int, Sequence[bytes]], asked: Sequence[StoreQuestion]) -> list[bytes]:
    """Return, for each question, the worst result of each page."""
    return _worst_of(said, asked, int.__eq__, "answered a question of other pages")


def read(said: Mapping[int, Sequence[bytes]], reads: Sequence[ReadOrder], run: bool) -> list[bytes]:
    """Return, for each of ``reads``, the worst result of each page. Of a ``run`` there may be fewer results than
    pages."""
    return _worst_of(said, reads, int.__le__ if run else int.__eq__, "read other pages")


def _worst_of(
    said: Mapping[int, Sequence[bytes]], wanted: Sequence[StoreQuestion] | Sequence[ReadOrder],
    fits: Callable[[int, int], bool], nonsense: str,
) -> list[bytes]:  # fmt: skip
    counts = [len(pages.hashes) // HASH_BYTES for pages in wanted]
    for rank, answers in said.items():
        right = len(answers) == len(counts) and all(map(fits, map(len, answers), counts))
        if not right or any(max(answer, default=0) >= len(_ORDER) for answer in answers):
            raise RankFailure(nonsense, rank)
    return [worst(of_pool) for of_pool in zip(*said.values(), strict=True)]


def worst(answers: Sequence[bytes]) -> bytes:
    """Return the worst result of each page: CORRUPT before FAILED before MISS before HIT. ``answers``: for each worker,
    a result for each page. Pages after the end of the shortest answer are left out."""
    first = answers[0]
    if all(answer == first for answer in answers):
        return first
    return bytes(map(max, *(answer.translate(_RANK) for answer in answers))).translate(_RESULT)


def inspected(said: Mapping[int, Inspected], asked: Sequence[PageQuestion], free: bool) -> Inspected:
    """Return what the pages hold on all ranks together: a page's checksum is those of all ranks in order."""
    for rank, one in said.items():
        if len(one.pages) != len(asked) or any(len(page.sums) != 2 * len(ask.slots)
                                               for page, ask in zip(one.pages, asked, strict=True)):
            raise RankFailure("looked at other pages", rank)
    pages = [_together([one.pages[i] for one in said.values()]) for i in range(len(asked))]
    return Inspected(pages, [page for one in said.values() for page in one.damaged])


def _together(parts: Sequence[PageBytes]) -> PageBytes:
    size = _SUM_BYTES
    pages = range(0, len(parts[0].sums), size)
    sums = b"".join(part.sums[at : at + size] for at in pages for part in parts)
    seen = [part.tokens for part in parts if part.tokens]
    tokens = bytes(reduce(or_, bits) for bits in zip(*seen, strict=True))
    return PageBytes(sums, tokens, [layer for part in parts for layer in part.untouched])


def stored(said: Mapping[int, StoredBatch], batch: Sequence[WriteOrder]) -> StoredBatch:
    """Return what was stored of a batch that all workers have written. FULL's pages are counted once, because they hold
    the same tokens on each worker."""
    ops = {order.op for order in batch}
    for rank, one in said.items():
        if not ops.issuperset(one.failed) or min(one[1:]) < 0:
            raise RankFailure("wrote a batch of other operations", rank)
    return total(list(said.values()), full_pages=max)


def total(parts: Sequence[StoredBatch], *, full_pages: Callable[[Iterable[int]], int]) -> StoredBatch:
    """Return ``parts`` as one. An operation is stored if every part of it is; pages and bytes add up.

    ``full_pages`` is ``max`` where the parts are those of several workers, whose pages hold the same tokens, and
    ``sum`` where they are those of messages that follow each other."""
    failed, pages, full, size = zip(*parts, strict=True)
    return StoredBatch(frozenset().union(*failed), sum(pages), full_pages(full), sum(size))


def are_counters(parts: Iterable[Mapping[str, int | float]]) -> bool:
    """Return True if ``sums`` can add ``parts`` up: their numbers are finite, and a ``breaker`` is in a known state."""
    return all(
        isfinite(value) and (name != "breaker" or value in _WORST_LAST)
        for part in parts
        for name, value in part.items()
    )


def sums(parts: Sequence[Mapping[str, int | float]]) -> dict[str, int | float]:
    """Return the counters added up; for ``breaker`` the worst state of any worker."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    found: dict[str, int | float] = dict(total)
    states = [BreakerState(int(part["breaker"])) for part in parts if "breaker" in part]
    if states:
        found["breaker"] = int(max(states, key=_WORST_LAST.index))
    return found


def error_of(failures: Mapping[int, Failed]) -> Exception:
    """Return the error for those who wait for a call. It has the class that the lowest rank in ``failures`` names, and
    the reasons of all; a ``RankFailure`` of that rank if its error is of no class that a call may raise."""
    ranks = sorted(failures)
    first = failures[ranks[0]]
    kind = _KINDS.get(first.kind)
    if kind is None:
        return RankFailure(f"{first.kind}: {first.reason}", ranks[0])
    return kind("; ".join(f"rank {rank}: {failures[rank].reason}" for rank in ranks))
