"""Ctrl-C during a run: every press is counted, and the run is told of it.

The first press ends the run early and the second cancels the requests that run; both still give a report. The third
press ends the command by KeyboardInterrupt; errors of the tasks that this leaves unfinished are not shown. Mutable
state: how often Ctrl-C was pressed, and what the next press does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import asyncio

PATIENT = 3


class Presses:
    """Counts Ctrl-C while its ``with`` block lasts. Outside of the main thread signals cannot be caught, and the count
    stays 0."""

    def __init__(self) -> None:
        self.count = 0
        self._ends = True
        self._act: Callable[[int], object] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler for event loops. The third press ends the loop within any step of any task, so errors
        after it are of no use to anybody."""
        if self.count < PATIENT:
            loop.default_exception_handler(context)

    @contextmanager
    def told_to(self, act: Callable[[int], object]) -> Iterator[None]:
        """Call ``act(count)`` at each press while this lasts, and at once if there was a press before. ``act`` runs as
        a signal handler, between any two steps of the main thread, so it should only use ``call_soon_threadsafe``."""
        self._act = act
        try:
            if self.count:
                act(self.count)
            yield
        finally:
            self._act = None

    @contextmanager
    def counted_only(self) -> Iterator[None]:
        """While this lasts, presses end nothing, however many there are."""
        self._ends = False
        try:
            yield
        finally:
            self._ends = True

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._ends and self.count >= PATIENT:
            raise KeyboardInterrupt
        if self._act is not None:
            self._act(self.count)
