"""How far a command has come, for those who wait: nothing for two seconds, then one line on standard error that is
written again on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

QUIET_FOR = 2.0
EVERY = 0.5


class Progress:
    """``tell`` as often as you like, ``end`` once."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._again = stream.isatty()
        self._next = clock() + QUIET_FOR
        self._shown = False

    def tell(self, line: str) -> None:
        """Show it, if it is time to."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (EVERY if self._again else 10 * EVERY)
        self._shown = True
        self._stream.write(f"\r{line}\x1b[K" if self._again else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave no half line behind."""
        if self._shown and self._again:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = False
