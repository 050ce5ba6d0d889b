"""Counters of the tokens that requests found, and of the reasons why they did not find the rest. Plain integers,
counted once for every lease that is granted.

A request *wants* the whole pages of its prompt, without the last token. Wanted tokens that are cached count for the
tier that had them when the request arrived. Each of the others counts for one reason:

* If FULL goes on but the match does not, what cut the match short.
* Behind the end of the tree, what became of the first page there.
* If a prefetch might have brought that page, and it is known why it did not, that reason instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from asynccache.core.keys import TOKEN_BYTES
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import Gone, walk
from asynccache.runtime.distinct import DistinctPages
from asynccache.runtime.prefetch import Cut, Prefetch, PrefetchStatus, Wish

if TYPE_CHECKING:
    from asynccache.core.cache import CacheCore, LeaseRequest
    from asynccache.core.ledger import CoreLease


class Miss(IntEnum):
    """The reason why tokens had to be computed."""

    NEVER_STORED = 0
    EVICTED_DEVICE = 1
    EVICTED_HOST = 2
    EVICTED_STORAGE = 3
    PREFETCH_TOO_LATE = 4
    PREFETCH_TOO_SHORT = 5
    BACKEND_DOWN = 6
    CHECKSUM = 7
    NO_HOST_ROOM = 8
    NO_DEVICE_ROOM = 9
    WINDOW_GONE = 10
    NO_STATE = 11


_CUT = {Cut.BACKEND: Miss.BACKEND_DOWN, Cut.CHECKSUM: Miss.CHECKSUM, Cut.ROOM: Miss.NO_HOST_ROOM}
_GONE = {
    Gone.NEVER: Miss.NEVER_STORED, Gone.DEVICE: Miss.EVICTED_DEVICE, Gone.HOST: Miss.EVICTED_HOST,
    Gone.STORED: Miss.EVICTED_STORAGE,
}  # fmt: skip
_SHORT = {
    None: Miss.NO_DEVICE_ROOM, ComponentKind.FULL: Miss.NO_DEVICE_ROOM, ComponentKind.SWA: Miss.WINDOW_GONE,
    ComponentKind.MAMBA: Miss.NO_STATE,
}  # fmt: skip


class LookupStats(NamedTuple):
    """Counters of leases that were granted."""

    requests: int
    """How many leases were granted."""
    tokens: int
    """How many tokens the leases wanted."""
    hits: Mapping[str, int]
    """Tokens that were found, by tier."""
    misses: Mapping[str, int]
    """Tokens that were not found, by reason."""
    missed_requests: Mapping[str, int]
    """How many leases missed any tokens, by reason."""
    new_tokens: int
    """Tokens of different pages that were nowhere on the way to the device when they were asked for, an estimate (see
    ``DistinctPages``). Every cache, however large, misses those the first time."""

    @property
    def hit_ratio(self) -> float:
        """The share of the wanted tokens that was found, 0 to 1; 0 before the first request."""
        return sum(self.hits.values()) / self.tokens if self.tokens else 0.0

    @property
    def ceiling(self) -> float:
        """The highest hit ratio that a cache of any size could have had, if requests had come one after another; at
        least ``hit_ratio``."""
        return max(self.hit_ratio, 1 - self.new_tokens / self.tokens) if self.tokens else 0.0


class Lookups:
    """The counters of one cache."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._size = core.config.page_size
        self.requests = self.tokens = self.device = self.host = self.storage = 0
        self._missed = [0] * len(Miss)
        self._missed_requests = [0] * len(Miss)
        self._new = DistinctPages(self._size)

    def __repr__(self) -> str:
        return f"Lookups({self.requests} requests, {self.tokens} tokens, {sum(self._missed)} missed)"

    def read(self) -> LookupStats:
        """Return the counters as they are now."""
        names = [reason.name.lower() for reason in Miss]
        return LookupStats(
            self.requests, self.tokens, {"device": self.device, "host": self.host, "storage": self.storage},
            dict(zip(names, self._missed, strict=True)), dict(zip(names, self._missed_requests, strict=True)),
            round(self._new.count() * self._size),
        )  # fmt: skip

    def count(self, lease: CoreLease, ask: LeaseRequest, found: tuple[int, int, int], handle: Prefetch | None) -> None:
        """Count a lease that was granted. ``found``: cached tokens by the tier that had them, as ``Lease.hits``."""
        wanted = ask.limit // self._size * self._size
        device, host, storage = found
        self.requests += 1
        self.tokens += wanted
        self.device += device
        self.host += host
        self.storage += storage
        cached = lease.cached
        if cached < wanted:
            known = min(lease.full, wanted)
            if known > cached:
                self._miss(self._cut_short(ask, lease.full), known - cached)
            if known < wanted:
                self._miss(self._absent(lease, ask, handle), wanted - max(known, cached))
                self._new.add(ask.space, ask.key, known // self._size, wanted // self._size)

    def _miss(self, reason: Miss, tokens: int) -> None:
        self._missed[reason] += tokens
        self._missed_requests[reason] += 1

    def _cut_short(self, ask: LeaseRequest, full: int) -> Miss:
        """Return why the match ended though FULL goes on: a component ended it, or there was no room to load more."""
        core = self._core
        path, _ = walk(core.world.roots[ask.space], ask.key, 0, core.world.page_bytes, full * TOKEN_BYTES)
        return _SHORT[core.explanations.limit(path, full // self._size)]

    def _absent(self, lease: CoreLease, ask: LeaseRequest, handle: Prefetch | None) -> Miss:
        """Return why the pages behind the end of the tree were not found."""
        core, end = self._core, lease.hold.end
        page = core.world.page_bytes
        path, reached = walk(end, ask.key, end.end * page, page, ask.limit * TOKEN_BYTES)
        gone = core.explanations.gone(path[-1] if path else end, ask.key, reached // page)
        return _GONE[gone] if handle is None else self._not_fetched(handle, gone)

    def _not_fetched(self, handle: Prefetch, gone: Gone) -> Miss:
        if handle.cut is not Cut.NOTHING:
            return _CUT[handle.cut]
        if handle.wish is not Wish.RUN:
            return Miss.PREFETCH_TOO_LATE
        status = handle.result.status if handle.result is not None else PrefetchStatus.CANCELLED
        if status is PrefetchStatus.COMPLETE:
            return Miss.NO_HOST_ROOM  # it has brought all that its share of the host allowed
        if status is PrefetchStatus.SKIPPED and gone is Gone.STORED:
            return Miss.PREFETCH_TOO_SHORT
        return _GONE[gone]
