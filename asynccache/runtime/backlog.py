"""How much of the host waits for storage, against how much may.

Law: what waits for storage is pinned on the host, so there is a bound to it, by component: back-pressure slows backups
and never requests. Who is over it drops what waits longest, the last one excepted: it would never get anywhere. Half of
it may be in flight, or a single operation: the other half is for those that may still be dropped.
Mutable state: the slots that are held, those in flight among them, and how much was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from asynccache.core.plan import BackupStorage
from asynccache.core.slots import SLOT_BYTES


class Backlog:
    """``limits``: slots by component that effects may hold, from when they are queued to their outcome."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        self.dropped = 0
        self._held = dict.fromkeys(limits, 0)
        self._flying = dict.fromkeys(limits, 0)

    def __repr__(self) -> str:
        held = ", ".join(f"{self._held[c]}/{limit}" for c, limit in self.limits.items())
        return f"Backlog({held} slots, {self.dropped} dropped)"

    @property
    def over(self) -> bool:
        """Whether more is held than may be."""
        return any(self._held[c] > limit for c, limit in self.limits.items())

    def add(self, effect: BackupStorage) -> None:
        """The slots of ``effect`` are held from now on."""
        for pages in effect.pages:
            self._held[pages.component] += len(pages.slots) // SLOT_BYTES

    def fly(self, effect: BackupStorage) -> bool:
        """Whether it may be in flight now; then it is, until ``land``."""
        flying = self._flying
        sizes = {pages.component: len(pages.slots) // SLOT_BYTES for pages in effect.pages}
        if any(flying.values()) and any(2 * (flying[c] + n) > self.limits[c] for c, n in sizes.items()):
            return False
        for component, size in sizes.items():
            flying[component] += size
        return True

    def land(self, effect: BackupStorage) -> None:
        """Its I/O has let go: it is neither in flight nor held any more."""
        for pages in effect.pages:
            self._flying[pages.component] -= len(pages.slots) // SLOT_BYTES
        self.remove(effect)

    def remove(self, effect: BackupStorage) -> None:
        """They are not, any more, and never were in flight."""
        for pages in effect.pages:
            self._held[pages.component] -= len(pages.slots) // SLOT_BYTES

    def drop(self, effect: BackupStorage) -> None:
        """They are not, and nothing came of it."""
        self.remove(effect)
        self.dropped += 1


def pages_of(effect: BackupStorage) -> int:
    """The slots of ``effect``, over all components."""
    return sum(len(pages.slots) for pages in effect.pages) // SLOT_BYTES
