"""Moves chunks between vLLM's host memory (the region) and the stores. A *transfer* is one of vLLM's jobs.

A transfer that loads is split into parts. At most ``WINDOW`` bytes of parts are read at a time, of all loads together,
in the order in which they came. Each part has its own deadline. So a long load from stores that deliver may take its
time, and a load from stores that do not deliver ends soon, with the chunks that have arrived. A transfer that stores is
one call.

What always holds:
* When a part of a load is late, the stores are not expected to deliver anything soon. So all parts that wait behind it
  end as well, as FAILED.
* A transfer ends when every part that began has ended. From then on no store uses any of its memory.
* While a transfer stores chunks, vLLM cannot use them for anything else. While one of them takes longer than
  ``BACKLOG`` seconds, no transfer is begun that would bring such chunks to more than half of the region.

Mutable state: all of it is behind ``_lock``; the stores' thread ends parts and begins those that wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from typing import NamedTuple

from asynccache.errors import AsyncCacheError, forget_frames
from asynccache.storage import Pages, Result

PART = 16 << 20
"""Bytes in a part of a load, at most, unless one chunk is larger."""
WINDOW = 64 << 20
STORE_TIMEOUT = 30.0
BACKLOG = 2.0
OVERDUE = 0.25
"""Seconds after its deadline at which a part that has not ended counts as stuck: a store hangs and still uses its
memory."""


@dataclass(slots=True, eq=False, repr=False)
class ChunkTransfer:
    """One of vLLM's jobs."""

    job_id: int
    request: str
    keys: Sequence[bytes]
    slots: Sequence[int]
    """The place of each chunk in the region."""
    loading: bool
    """Whether the chunks are read; otherwise they are stored."""
    patience: float
    """Seconds that the first part of a load may take."""
    results: list[Result] = field(init=False)
    """The result of each chunk; FAILED if no store answered."""
    left: int = 0
    """Parts that have not ended."""
    begun: float = field(default_factory=time.monotonic)
    """When the transfer was made."""
    seconds: float = 0.0
    """Seconds from ``begun`` to its end, once it has ended."""

    def __post_init__(self) -> None:
        self.results = [Result.FAILED] * len(self.keys)


class _TransferPart(NamedTuple):
    transfer: ChunkTransfer
    start: int
    stop: int
    timeout: float

    @property
    def pages(self) -> int:
        return self.stop - self.start


class ChunkTransfers:
    """All transfers of one tier. ``pages``: the stores; ``page_bytes``: bytes of a chunk; ``chunks``: how many the
    region has; ``timeout``: seconds that a part of a load may take, except the first."""

    def __init__(self, pages: Pages, page_bytes: int, chunks: int, timeout: float) -> None:
        self._pages = pages
        self._timeout = timeout
        self._part = max(1, PART // page_bytes)
        self._window = max(self._part, WINDOW // page_bytes)
        self._most_pinned = chunks // 2
        self._lock = Condition()
        self._waiting: deque[_TransferPart] = deque()
        self._flying: dict[_TransferPart, float] = {}
        self._loading = 0
        self._storing = 0
        self._ended: deque[ChunkTransfer] = deque()
        self._refusing = False

    def load(self, transfer: ChunkTransfer) -> None:
        """Begin to read the chunks of ``transfer``; if that is refused, the transfer ends at once, as FAILED."""
        count = len(transfer.keys)
        with self._lock:
            if self._refusing or not count or self._stuck(time.monotonic()):
                self._end(transfer)
                return
            for start in range(0, count, self._part):
                timeout = self._timeout if start else max(transfer.patience, 0.001)
                self._waiting.append(_TransferPart(transfer, start, min(start + self._part, count), timeout))
                transfer.left += 1
        self._begin_waiting()

    def store(self, transfer: ChunkTransfer) -> bool:
        """Begin to store the chunks of ``transfer``. Returns whether that was begun; otherwise the transfer has ended,
        and none of its chunks is stored."""
        count = len(transfer.keys)
        with self._lock:
            if self._refusing or not count or (self._storing + count > self._most_pinned and self._behind()):
                self._end(transfer)
                return False
            self._storing += count
            transfer.left = 1
            part = _TransferPart(transfer, 0, count, STORE_TIMEOUT)
            self._flying[part] = time.monotonic() + STORE_TIMEOUT
        self._begin(part)
        return True

    def skip(self, transfer: ChunkTransfer) -> None:
        """End ``transfer`` without storing any of its chunks."""
        with self._lock:
            self._end(transfer)

    def ended(self) -> list[ChunkTransfer]:
        """The transfers that have ended since the last call, in the order of their ends. To be called regularly,
        because this call also notices that a store hangs, and ends the parts that wait behind it."""
        with self._lock:
            if self._waiting and self._stuck(time.monotonic()):
                self._end_waiting()
            ended = list(self._ended)
            self._ended.clear()
        return ended

    @property
    def stuck(self) -> bool:
        """True if a store hangs: it still uses memory of a load whose deadline has passed."""
        with self._lock:
            return self._stuck(time.monotonic())

    def drain(self, patience: float) -> int:
        """End the parts that wait, and wait at most ``patience`` seconds for those that have begun. Returns how many
        chunks the stores still use then."""
        with self._lock:
            self._end_waiting()
            self._lock.wait_for(lambda: not self._flying, patience)
            return sum(part.pages for part in self._flying)

    def refuse(self) -> None:
        """End the parts that wait, and begin no more transfers."""
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

    def _begin(self, part: _TransferPart) -> None:
        transfer, chosen = part.transfer, slice(part.start, part.stop)
        call = self._pages.get if transfer.loading else self._pages.put
        try:
            future = call(transfer.keys[chosen], transfer.slots[chosen], timeout=part.timeout)
        except AsyncCacheError as error:  # the stores are closed, or this process is a fork of theirs
            forget_frames(error)
            self._account(part, None)
        else:
            future.add_done_callback(partial(self._over, part))

    def _over(self, part: _TransferPart, future: Future[list[Result]]) -> None:
        error = future.exception()
        if error is not None:
            forget_frames(error)
        self._account(part, future.result() if error is None else None)
        self._begin_waiting()

    def _account(self, part: _TransferPart, results: list[Result] | None) -> None:
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

    def _less(self, transfer: ChunkTransfer) -> None:
        transfer.left -= 1
        if not transfer.left:
            self._end(transfer)

    def _end(self, transfer: ChunkTransfer) -> None:
        transfer.seconds = time.monotonic() - transfer.begun
        self._ended.append(transfer)
