"""Free slots of one component on one tier: integers only, handed out and taken back in bulk.

Slot lists are ``bytes`` of int32: a list of any length is taken, given back, divided and joined by memcpy.
"""

from __future__ import annotations

from array import array

from asynccache.errors import InvariantViolation

SLOT_BYTES = 4
NO_SLOT = b"\xff\xff\xff\xff"


class SlotPool:
    """The slots ``0 .. capacity-1``, free until taken. A stack, so recently used pages are used again first."""

    __slots__ = ("_free", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self, count: int) -> bytes:
        """``count`` free slots.

        Raises:
            InvariantViolation: fewer are free; callers make room first.
        """
        if count == 0:
            return b""
        free = self._free
        if count > len(free):
            raise InvariantViolation(f"took {count} slots, {len(free)} are free")
        taken = free[:-count - 1:-1]
        del free[-count:]
        return taken.tobytes()

    def give(self, slots: bytes) -> None:
        """Take ``slots`` back, the first of them to be handed out first again."""
        returned = array("i", slots)
        returned.reverse()
        self._free.extend(returned)

    def free(self) -> array[int]:
        """A copy of the free list, for the audit."""
        return self._free[:]
