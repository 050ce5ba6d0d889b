"""Folds what several workers say into one answer. All functions are plain. Something was done if all workers say so. If
several workers report errors, the lowest of their ranks gives the class of the error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite

from asynccache.errors import BackendError, ConfigError, RankFailure, Timeout, Unavailable
from asynccache.storage.call_guard import BreakerState
from asynccache.storage.contract import Result
from asynccache.worker.contract import StoredBatch
from asynccache.worker.messages import CallFailed, PagesWritten

_ORDER = (Result.HIT, Result.MISS, Result.FAILED, Result.CORRUPT)
_RANK = bytes(_ORDER.index(Result(value)) if value < len(_ORDER) else len(_ORDER) for value in range(256))
_RESULT = bytes([*_ORDER, *[Result.FAILED] * (256 - len(_ORDER))])

_KINDS = {kind.__name__: kind for kind in (ConfigError, BackendError, Unavailable, Timeout)}


def worst(answers: Sequence[bytes]) -> bytes:
    """Return the worst result of each page. The results from the worst to the best: CORRUPT, FAILED, MISS, HIT.
    ``answers``: for each worker, a result for each page. If they differ in length, the pages after the end of the
    shortest one are left out."""
    first = answers[0]
    if all(answer == first for answer in answers):
        return first
    return bytes(map(max, *(answer.translate(_RANK) for answer in answers))).translate(_RESULT)


def all_worst(answers: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return ``worst`` for each pool. ``answers``: for each worker its answers, one for each pool."""
    return [worst(of_pool) for of_pool in zip(*answers, strict=True)]


def are_results(answers: Sequence[bytes]) -> bool:
    """Return True if every byte of ``answers`` is a ``Result``."""
    return all(max(answer, default=0) < len(_ORDER) for answer in answers)


def stored(
    parts: Sequence[PagesWritten] | Sequence[StoredBatch], *, full_pages: Callable[[Iterable[int]], int]
) -> StoredBatch:
    """Return ``parts`` as one. An operation is stored if every part of it is; pages and bytes add up.

    ``full_pages`` is ``max`` where the parts are those of several workers, whose pages hold the same tokens, and
    ``sum`` where they are those of messages that follow each other."""
    failed = frozenset(op for part in parts for op in part.failed)
    return StoredBatch(
        failed, sum(part.pages for part in parts), full_pages(part.full_pages for part in parts),
        sum(part.bytes for part in parts),
    )  # fmt: skip


def are_counters(parts: Iterable[Mapping[str, int | float]]) -> bool:
    """Return True if ``sums`` can add ``parts`` up: their numbers are finite, and a ``breaker`` is in a known state."""
    return all(
        isfinite(value) and (name != "breaker" or value in _WORST_LAST)
        for part in parts for name, value in part.items()
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


_WORST_LAST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def error_of(failures: Mapping[int, CallFailed]) -> Exception:
    """Return the error for those who wait for a call. It has the class that the lowest rank in ``failures`` names, and
    the reasons of all; a ``RankFailure`` of that rank if its error is of no class that a call may raise."""
    ranks = sorted(failures)
    kind = _KINDS.get(failures[ranks[0]].kind)
    if kind is None:
        first = failures[ranks[0]]
        return RankFailure(f"{first.kind}: {first.reason}", ranks[0])
    return kind("; ".join(f"rank {rank}: {failures[rank].reason}" for rank in ranks))
