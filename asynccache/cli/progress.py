"""Shows how far a command has come. For the first two seconds it shows nothing. Then it shows one line on standard
error, which is written over again on a terminal; elsewhere, a new line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

QUIET_FOR = 2.0
EVERY = 0.5


class Progress:
    """Shows lines of progress on ``stream``. Call ``tell`` as often as there is news, and ``end`` once."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._again = stream.isatty()
        self._next = clock() + QUIET_FOR
        self._shown = False

    def tell(self, line: str) -> None:
        """Show ``line`` if the last one has been shown for long enough."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (EVERY if self._again else 10 * EVERY)
        self._shown = True
        self._stream.write(f"\r{line}\x1b[K" if self._again else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """On a terminal, erase the line that is shown."""
        if self._shown and self._again:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = False
