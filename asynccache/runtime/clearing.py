"""What goes to storage while storage is being cleared: nothing. It is held back until the last clearing is over.

Law: what is put after the tree was forgotten is put after the store was cleared; else its nodes would pass for stored
and be gone. What was held back before the tree was forgotten is never put: it would be found under its old key. The
core starts no more of those once a namespace is dead. What is held back counts as backlog, and the oldest is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.backlog import Backlog


class Clearing:
    """Stands before the backup_storage stage. Mutable state: how many clearings run, and what they hold back."""

    def __init__(
        self, put: Callable[[BackupStorage], None], post: Callable[[Outcome], None], backlog: Backlog
    ) -> None:
        self._put = put
        self._post = post
        self._backlog = backlog
        self._running = 0
        self._held: dict[int, BackupStorage] = {}

    def __repr__(self) -> str:
        return f"Clearing({self._running} running, {len(self._held)} held back)"

    def __bool__(self) -> bool:
        return self._running > 0

    @property
    def held(self) -> frozenset[int]:
        """The operations that are held back."""
        return frozenset(self._held)

    def put(self, effect: BackupStorage) -> None:
        """Pass the effect on, now or when no clearing runs any more."""
        if not self._running:
            self._put(effect)
            return
        self._held[effect.op] = effect
        self._backlog.add(effect)
        while self._backlog.over and len(self._held) > 1:
            oldest = self._held.pop(next(iter(self._held)))
            self._backlog.drop(oldest)
            self._post(Outcome(oldest.op, Status.FAILED))

    def begin(self) -> None:
        """Hold back from now on. ``end`` must follow."""
        self._running += 1

    def outdate(self) -> None:
        """The tree is being forgotten: what is held back belongs to it, and fails."""
        for effect in self._release():
            self._post(Outcome(effect.op, Status.FAILED))

    def end(self) -> None:
        """This clearing is over; after the last one, what was held back goes."""
        self._running -= 1
        if not self._running:
            for effect in self._release():
                self._put(effect)

    def _release(self) -> list[BackupStorage]:
        held, self._held = list(self._held.values()), {}
        for effect in held:
            self._backlog.remove(effect)
        return held
