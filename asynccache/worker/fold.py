"""What several workers say, as one: plain functions. Whatever is true of all of them is true; of failures the most
telling one is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite

from asynccache.errors import BackendError, ConfigError, RankFailure, Timeout, Unavailable
from asynccache.storage.breaker import BreakerState
from asynccache.storage.contract import Result
from asynccache.worker.contract import Stored
from asynccache.worker.messages import Failed, Written

_ORDER = (Result.HIT, Result.MISS, Result.FAILED, Result.CORRUPT)
_RANK = bytes(_ORDER.index(Result(value)) if value < len(_ORDER) else len(_ORDER) for value in range(256))
_RESULT = bytes([*_ORDER, *[Result.FAILED] * (256 - len(_ORDER))])

_KINDS = {kind.__name__: kind for kind in (ConfigError, BackendError, Unavailable, Timeout)}


def worst(answers: Sequence[bytes]) -> bytes:
    """For each page the worst of its results: CORRUPT before FAILED before MISS before HIT. As many as the shortest of
    ``answers`` has."""
    first = answers[0]
    if all(answer == first for answer in answers):
        return first
    return bytes(map(max, *(answer.translate(_RANK) for answer in answers))).translate(_RESULT)


def all_worst(answers: Sequence[Sequence[bytes]]) -> list[bytes]:
    """``worst`` for each pool; ``answers``: of each worker those of all pools."""
    return [worst(of_pool) for of_pool in zip(*answers, strict=True)]


def are_results(answers: Sequence[bytes]) -> bool:
    """Whether nothing but results is in them."""
    return all(max(answer, default=0) < len(_ORDER) for answer in answers)


def stored(parts: Sequence[Written] | Sequence[Stored], *, full_pages: Callable[[Iterable[int]], int]) -> Stored:
    """What ``parts`` come to. An operation is stored when every part of it is; pages and bytes add up.

    ``full_pages`` is ``max`` where the parts are those of several workers, whose pages hold the same tokens, and
    ``sum`` where they are those of messages that follow each other."""
    failed = frozenset(op for part in parts for op in part.failed)
    return Stored(
        failed, sum(part.pages for part in parts), full_pages(part.full_pages for part in parts),
        sum(part.bytes for part in parts),
    )  # fmt: skip


def are_counters(parts: Iterable[Mapping[str, int | float]]) -> bool:
    """Whether ``sums`` can add them up: finite numbers, and states of a breaker that there are."""
    return all(
        isfinite(value) and (name != "breaker" or value in _WORST_LAST)
        for part in parts for name, value in part.items()
    )


def sums(parts: Sequence[Mapping[str, int | float]]) -> dict[str, int | float]:
    """Counters added up; ``breaker``: as that of the worker that is worst off."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    found: dict[str, int | float] = dict(total)
    states = [BreakerState(int(part["breaker"])) for part in parts if "breaker" in part]
    if states:
        found["breaker"] = int(max(states, key=_WORST_LAST.index))
    return found


_WORST_LAST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def error_of(failures: Mapping[int, Failed]) -> Exception:
    """What those who wait are told: an error of the class that the first rank names, with what each of them says."""
    ranks = sorted(failures)
    kind = _KINDS.get(failures[ranks[0]].kind)
    if kind is None:
        first = failures[ranks[0]]
        return RankFailure(f"{first.kind}: {first.reason}", ranks[0])
    return kind("; ".join(f"rank {rank}: {failures[rank].reason}" for rank in ranks))
