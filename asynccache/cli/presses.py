"""Ctrl-C, from the first moment of a run to its last: counted, and acted on where a run can be.

The first press ends a run early, the second cancels what runs; both still report. Whoever presses a third time wants
out. Mutable state: how often it was pressed, and what the next press does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any, Self

PATIENT = 3


class Next(Enum):
    """What a press does beside being counted."""

    NOTHING = "nothing, until there are too many"
    SKIPS = "ends what is being done, by KeyboardInterrupt"
    WAITS = "nothing at all"


class Presses:
    """``with Presses() as presses``: Ctrl-C is ours. In another than the main thread it is not, and nothing comes."""

    def __init__(self) -> None:
        self.count = 0
        self._next = Next.NOTHING
        self._act: Callable[[int], object] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def told_to(self, act: Callable[[int], object]) -> Iterator[None]:
        """``act(count)`` at each press; at once, if there was one before. It runs between any two steps of the main
        thread, so it had better be ``call_soon_threadsafe``."""
        self._act = act
        try:
            if self.count:
                act(self.count)
            yield
        finally:
            self._act = None

    @contextmanager
    def meaning(self, what: Next) -> Iterator[None]:
        """For as long as this lasts."""
        self._next = what
        try:
            yield
        finally:
            self._next = Next.NOTHING

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._next is Next.SKIPS or (self._next is Next.NOTHING and self.count >= PATIENT):
            raise KeyboardInterrupt
        if self._act is not None:
            self._act(self.count)
