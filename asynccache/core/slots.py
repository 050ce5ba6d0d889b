"""Free slots of one component on one tier: integers only, handed out and taken back in bulk.

Slot lists are ``bytes`` of int32, and the free ones are a stack of such runs: a run that was given back is handed out
again as it is, so most takes and gives move one reference.
"""

from __future__ import annotations

from array import array
from typing import Final

from asynccache.errors import InvariantViolation

SLOT_BYTES: Final = 4
NO_SLOT: Final = b"\xff\xff\xff\xff"

# Runs of a new pool, and the size up to which neighbours on the stack are joined: long enough that a stack of single
# slots costs little memory, short enough that dividing a run is a small copy.
_RUN = 256 * SLOT_BYTES
_SHORT = 16 * SLOT_BYTES


class SlotPool:
    """The slots ``0 .. capacity-1``, free until taken. A stack, so recently used pages are used again first. ``left``:
    how many are free."""

    __slots__ = ("_runs", "capacity", "left")

    def __init__(self, capacity: int) -> None:
        self.capacity = self.left = capacity
        slots = array("i", range(capacity)).tobytes()
        self._runs = [slots[at : at + _RUN] for at in range(0, len(slots), _RUN)][::-1]

    def take(self, count: int) -> bytes:
        """``count`` free slots.

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
        """``run`` and those below it on the stack, until they are at least ``wanted`` bytes."""
        runs, size = [run], len(run)
        while size < wanted:
            runs.append(self._runs.pop())
            size += len(runs[-1])
        return b"".join(runs)

    def give(self, slots: bytes) -> None:
        """Take ``slots`` back, the first of them to be handed out first again."""
        if not slots:
            return
        self.left += len(slots) // SLOT_BYTES
        runs = self._runs
        if runs and len(slots) + len(runs[-1]) <= _SHORT:
            runs[-1] = slots + runs[-1]
        else:
            runs.append(slots)

    def free(self) -> array[int]:
        """Every free slot, for the audit."""
        return array("i", b"".join(self._runs))
