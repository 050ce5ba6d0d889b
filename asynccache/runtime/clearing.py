"""While storage is being cleared no backup goes to it: backups are held back until the last clearing is over.

Laws:
* A page that was published after the tree was forgotten is written after the store was cleared. Written before, it
  would be cleared with the rest, and its node would still say that it is stored.
* A backup that was held back before the tree was forgotten is never written, for its page would be found under the old
  key. The core starts no more of those once their namespace is dead.
* What is held back counts as backlog. Above the limit the oldest of it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.outbox import Backlog


class Clearing:
    """Stands between the core's plans and the outbox. Mutable state: how many clearings run, and what they hold
    back."""

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
        """Pass ``effect`` on to the outbox: now, or when no clearing runs any more."""
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
        """The tree is being forgotten. What is held back belongs to that tree, so its operations fail."""
        for effect in self._release():
            self._post(Outcome(effect.op, Status.FAILED))

    def end(self) -> None:
        """Note that one clearing is over. After the last one, what was held back goes to the outbox."""
        self._running -= 1
        if not self._running:
            for effect in self._release():
                self._put(effect)

    def _release(self) -> list[BackupStorage]:
        held, self._held = list(self._held.values()), {}
        for effect in held:
            self._backlog.remove(effect)
        return held
