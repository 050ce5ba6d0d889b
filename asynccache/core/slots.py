"""Free slots of one component on one tier: integers only, handed out and taken back in bulk.

Slot lists are ``bytes`` of int32, and the free ones are a stack of such runs: a run that was given back is handed out
again as it is, so most takes and gives move one reference.
"""

from __future__ import annotations

from array import array
from typing import Final

from asynccache.errors import InvariantViolation

SLOT_BYTES: Final = 4
NO_SLOT: Final = b"\xff\xff\xff\xff"  # what a page table has where a page has no slot

# In bytes: the runs of a new pool, and the largest run that ``give`` makes by joining slots to the top of the stack.
# Joining keeps a stack of single slots small; short runs keep the copy small that divides one.
_RUN = 256 * SLOT_BYTES
_SHORT = 16 * SLOT_BYTES


class SlotPool:
    """The slots ``0 .. capacity - 1``, free until they are taken. The pool is a stack: what was given back last is
    taken first. ``left``: how many slots are free."""

    __slots__ = ("_runs", "capacity", "left")

    def __init__(self, capacity: int) -> None:
        self.capacity = self.left = capacity
        slots = array("i", range(capacity)).tobytes()
        self._runs = [slots[at : at + _RUN] for at in range(0, len(slots), _RUN)][::-1]

    def take(self, count: int) -> bytes:
        """Take ``count`` free slots and return them.

        Raises:
            InvariantViolation: fewer are free; callers make room first.
        """
        if not count:
            return b""
        if count > self.left:
            raise InvariantViolation(f"took {count} slots, {self.left} are free")
        self.left -= count
        run = self._runs.pop()
        wanted = count * SLOT_BYTES
        if len(run) < wanted:
            run = self._join(run, wanted)
        if len(run) > wanted:
            self._runs.append(run[wanted:])
            run = run[:wanted]
        return run

    def _join(self, run: bytes, wanted: int) -> bytes:
        """Return ``run`` joined with runs below it on the stack, until they are at least ``wanted`` bytes."""
        runs, size = [run], len(run)
        while size < wanted:
            runs.append(self._runs.pop())
            size += len(runs[-1])
        return b"".join(runs)

    def give(self, slots: bytes) -> None:
        """Make ``slots`` free again. They are the next to be taken, in the same order."""
        if not slots:
            return
        self.left += len(slots) // SLOT_BYTES
        runs = self._runs
        if runs and len(slots) + len(runs[-1]) <= _SHORT:
            runs[-1] = slots + runs[-1]
        else:
            runs.append(slots)

    def free(self) -> array[int]:
        """Return every free slot, for the audit."""
        return array("i", b"".join(self._runs))
