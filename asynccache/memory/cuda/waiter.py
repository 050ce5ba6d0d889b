"""The thread that sleeps until a stream's events have happened, in order, and tells whoever waits.

Law: it sleeps in ``event_synchronize`` on the oldest event, never in a loop of queries; all that have happened by then
are fired together, so a loop gets one hop per burst. Nothing is fired before the stream has let go of the buffers of
the work before it: a failed submission too is reported only when the event behind it has happened. The thread outlives
every error, so that no event is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from asynccache.memory.cuda.events import Context, CudaEvent
from asynccache.memory.signals import Work, call_all


class Waiter:
    """The FIFO of one stream's recorded events and its thread. ``at_end``: what the thread does last."""

    def __init__(self, name: str, context: Context, at_end: Work) -> None:
        self._context = context
        self._at_end = at_end
        self._fifo: SimpleQueue[CudaEvent | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"asynccache-{name}-waiter", daemon=True)
        self._thread.start()

    def put(self, event: CudaEvent) -> None:
        """It is recorded, after all that were put before."""
        self._fifo.put(event)

    def close(self) -> None:
        """The thread ends when all that was put has been fired."""
        self._fifo.put(None)

    def join(self) -> None:
        """Block until it has ended."""
        self._thread.join()

    def _work(self) -> None:
        self._context.use_device()
        head = self._fifo.get()
        while head is not None:
            head.synchronize()
            burst, rest = self._happened([head])
            _fire(burst)
            del burst, head  # they hold waiters, and the next get may last
            head = rest[0] if rest else self._fifo.get()
        self._at_end()

    def _happened(self, burst: list[CudaEvent]) -> tuple[list[CudaEvent], Sequence[CudaEvent | None]]:
        """``burst`` and all after it that have happened too; and the first that has not, if one was taken."""
        while True:
            try:
                event = self._fifo.get_nowait()
            except Empty:
                return burst, ()
            if event is None or not event.happened():
                return burst, (event,)
            burst.append(event)


def _fire(burst: Sequence[CudaEvent]) -> None:
    call_all([callback for event in burst for callback in event.land()])
