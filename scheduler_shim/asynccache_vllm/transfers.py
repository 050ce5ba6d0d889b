"""Chunks on their way between the region and the stores: vLLM's jobs, loads in parts, stores whole.

A load goes in parts, at most ``WINDOW`` bytes at a time for all loads together, first come, first served. Each part has
a deadline of its own, so that a long load from stores that deliver may take its time, and one from stores that do not
is over soon, with what has arrived.

Laws:
* A load stalls when one of its parts is late. Then the stores are not expected to deliver anything soon: whatever waits
  behind it ends as well, as FAILED.
* A transfer ends when every part that began has ended: from then on no store has any of its memory.
* Stores pin chunks of the region, which vLLM cannot use for anything else meanwhile. While one of them takes longer
  than ``BACKLOG`` seconds, no store is begun that would pin more than half of the region.

Mutable state: everything is behind ``_lock``; the stores' thread ends parts and begins what waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition
from typing import NamedTuple

from asynccache.errors import AsyncCacheError, forget_frames
from asynccache.storage import Pages, Result

PART = 16 << 20
WINDOW = 64 << 20
STORE_TIMEOUT = 30.0
BACKLOG = 2.0
OVERDUE = 0.25
"""Seconds after its deadline when a part that has not ended shows that a store does not let go of memory."""


class Transfer:
    """One job of vLLM's. ``results`` are in the order of ``keys``; what nobody answered is FAILED. ``seconds``: from
    its beginning to its end, once it has ended."""

    __slots__ = ("begun", "job_id", "keys", "left", "loading", "patience", "request", "results", "seconds", "slots")

    def __init__(
        self, job_id: int, request: str, keys: Sequence[bytes], slots: Sequence[int], *, loading: bool, patience: float
    ) -> None:
        self.job_id = job_id
        self.request = request
        self.keys = list(keys)
        self.slots = list(slots)
        self.loading = loading
        self.patience = patience
        self.results = [Result.FAILED] * len(self.keys)
        self.left = 0
        self.begun = time.monotonic()
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"Transfer({self.job_id}, {'load' if self.loading else 'store'} of {len(self.keys)})"


class _Part(NamedTuple):
    transfer: Transfer
    start: int
    stop: int
    timeout: float

    @property
    def pages(self) -> int:
        return self.stop - self.start


class Transfers:
    """All transfers of one tier. ``timeout``: seconds for a part of a load."""

    def __init__(self, pages: Pages, page_bytes: int, chunks: int, timeout: float) -> None:
        self._pages = pages
        self._timeout = timeout
        self._part = max(1, PART // page_bytes)
        self._window = max(self._part, WINDOW // page_bytes)
        self._most_pinned = chunks // 2
        self._lock = Condition()
        self._waiting: deque[_Part] = deque()
        self._flying: dict[_Part, float] = {}
        self._loading = 0
        self._storing = 0
        self._ended: deque[Transfer] = deque()
        self._refusing = False

    def __repr__(self) -> str:
        return f"Transfers(waiting={len(self._waiting)}, flying={len(self._flying)})"

    def load(self, transfer: Transfer) -> None:
        """Begin a load. ``transfer.patience``: seconds that its first part may take."""
        count = len(transfer.keys)
        with self._lock:
            if self._refusing or not count or self._stuck(time.monotonic()):
                self._end(transfer)
                return
            for start in range(0, count, self._part):
                timeout = self._timeout if start else max(transfer.patience, 0.001)
                self._waiting.append(_Part(transfer, start, min(start + self._part, count), timeout))
                transfer.left += 1
        self._begin_waiting()

    def store(self, transfer: Transfer) -> bool:
        """Begin a store. Returns whether it was begun; otherwise it has ended, and nothing of it is stored."""
        count = len(transfer.keys)
        with self._lock:
            if self._refusing or not count or (self._storing + count > self._most_pinned and self._behind()):
                self._end(transfer)
                return False
            self._storing += count
            transfer.left = 1
            part = _Part(transfer, 0, count, STORE_TIMEOUT)
            self._flying[part] = time.monotonic() + STORE_TIMEOUT
        self._begin(part)
        return True

    def ended(self) -> list[Transfer]:
        """The transfers that ended since this was last called, in their order. To be called now and then: here it is
        seen that a store does not let go."""
        with self._lock:
            if self._waiting and self._stuck(time.monotonic()):
                self._end_waiting()
            ended = list(self._ended)
            self._ended.clear()
        return ended

    @property
    def stuck(self) -> bool:
        """Whether a store has memory of a load that it should have let go of."""
        with self._lock:
            return self._stuck(time.monotonic())

    def drain(self, patience: float) -> int:
        """End what waits, and wait ``patience`` seconds for what is under way. Returns the pages whose memory a store
        has even then."""
        with self._lock:
            self._end_waiting()
            self._lock.wait_for(lambda: not self._flying, patience)
            return sum(part.pages for part in self._flying)

    def refuse(self) -> None:
        """End what waits, and begin nothing any more."""
        with self._lock:
            self._refusing = True
            self._end_waiting()

    # parts

    def _begin_waiting(self) -> None:
        while True:
            with self._lock:
                free = self._window - self._loading
                if not self._waiting or (self._loading and self._waiting[0].pages > free):
                    return
                part = self._waiting.popleft()
                self._loading += part.pages
                self._flying[part] = time.monotonic() + part.timeout
            self._begin(part)

    def _begin(self, part: _Part) -> None:
        transfer, chosen = part.transfer, slice(part.start, part.stop)
        call = self._pages.get if transfer.loading else self._pages.put
        try:
            future = call(transfer.keys[chosen], transfer.slots[chosen], timeout=part.timeout)
        except AsyncCacheError as error:  # the stores are closed, or this is a fork
            forget_frames(error)
            self._account(part, None)
        else:
            future.add_done_callback(partial(self._over, part))

    def _over(self, part: _Part, future: Future[list[Result]]) -> None:
        error = future.exception()
        if error is not None:
            forget_frames(error)
        self._account(part, future.result() if error is None else None)
        self._begin_waiting()

    def _account(self, part: _Part, results: list[Result] | None) -> None:
        transfer = part.transfer
        with self._lock:
            until = self._flying.pop(part)
            if results is not None:
                transfer.results[part.start : part.stop] = results
            if transfer.loading:
                self._loading -= part.pages
                if time.monotonic() >= until and Result.FAILED in transfer.results[part.start : part.stop]:
                    self._end_waiting()
            else:
                self._storing -= part.pages
            self._less(transfer)
            self._lock.notify_all()

    def _behind(self) -> bool:
        late = time.monotonic() + STORE_TIMEOUT - BACKLOG
        return any(not part.transfer.loading and until < late for part, until in self._flying.items())

    def _stuck(self, now: float) -> bool:
        return any(part.transfer.loading and now > until + OVERDUE for part, until in self._flying.items())

    def _end_waiting(self) -> None:
        while self._waiting:
            self._less(self._waiting.popleft().transfer)

    def _less(self, transfer: Transfer) -> None:
        transfer.left -= 1
        if not transfer.left:
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.seconds = time.monotonic() - transfer.begun
        self._ended.append(transfer)
