"""The keys that each place of a host process holds, told to whoever makes KV events of that.

A *place* is the memory, or one of the stores behind it. What changes in one turn of the loop is told together, and what
comes and goes before it was told is not told at all. So what waits is never more than the places hold and have told,
however slow the listener is; nothing is lost, and nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

AT_ONCE = 1024
AGAIN = 0.01

TellHeld = Callable[[str, bool, Sequence[bytes]], bool]
"""``tell(medium, there, keys)``: a place on this medium (``CPU`` or ``STORAGE``) holds these keys from now on, or holds
them no more. It returns False if it has no room for them now; then it is called again with them later."""


class HeldKeys:
    """One place. ``keys``: those that it holds. Mutable state beside them: what is to be told, by key; True: it has
    come."""

    def __init__(self, medium: str, changes: HeldChanges) -> None:
        self.medium = medium
        self.keys: set[bytes] = set()
        self._changes = changes
        self._untold: dict[bytes, bool] = {}

    def __repr__(self) -> str:
        return f"HeldKeys({self.medium}, {len(self.keys)} keys, {len(self._untold)} untold)"

    def note(self, there: bool, keys: Iterable[bytes]) -> None:
        """The place holds these keys from now on, or holds them no more. What is known is no change."""
        held, untold = self.keys, self._untold
        for key in keys:
            if (key in held) is there:
                continue
            (held.add if there else held.discard)(key)
            if key in untold:
                del untold[key]  # it is as it was told last
            else:
                untold[key] = there
        self._changes.soon()

    def hand_over(self, tell: TellHeld) -> bool:
        """Tell what is to be told. Returns False if ``tell`` had no room for all."""
        untold = self._untold
        while untold:
            there, keys = next(iter(untold.values())), []
            for key, now in islice(untold.items(), AT_ONCE):
                if now is not there:
                    break
                keys.append(key)
            if not tell(self.medium, there, keys):
                return False
            for key in keys:
                del untold[key]
        return True


class HeldChanges:
    """The places of one host process, for one event loop."""

    def __init__(self, tell: TellHeld) -> None:
        self.places: list[HeldKeys] = []
        self._tell = tell
        self._timer: asyncio.Handle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"HeldChanges({self.places})"

    def place(self, medium: str) -> HeldKeys:
        """Return a new place, which holds nothing."""
        made = HeldKeys(medium, self)
        self.places.append(made)
        return made

    async def list(self, place: HeldKeys, parts: Iterable[Sequence[bytes]]) -> None:
        """Note what a place has held before it was watched, a part in each turn of the loop."""
        for part in parts:
            place.note(True, part)
            await asyncio.sleep(0)

    def soon(self) -> None:
        """Tell what there is, in the next turn of the loop."""
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_soon(self._hand_over)

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _hand_over(self) -> None:
        self._timer = None
        if not all(place.hand_over(self._tell) for place in self.places):
            self._timer = asyncio.get_running_loop().call_later(AGAIN, self._hand_over)
