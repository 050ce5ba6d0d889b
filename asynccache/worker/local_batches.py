"""The engine's batches of a worker without a group: numbers that stand for events of the device."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.errors import CopyFailed
from asynccache.memory.device import Event

SWEEP = 64
"""How many batches may be known, beyond twice those that were not over after the last sweep, before the next one. A
sweep forgets the batches that are over."""


class LocalBatch:
    """One batch that ends with ``event``; see ``BatchInFlight``."""

    __slots__ = ("done", "event", "number")

    def __init__(self, number: int, event: Event) -> None:
        self.number = number
        self.event = event
        self.done = event.done

    def __repr__(self) -> str:
        return f"LocalBatch({self.number}, {'over' if self.done() else 'not over'})"

    async def wait(self) -> None:
        """Return when the batch is over, well or not. Cancelling it stops the waiting."""
        try:
            await self.event.wait()
        except CopyFailed:
            return


class LocalBatches:
    """The batches that may not be over, by number. An event that is named again is the same batch."""

    def __init__(self) -> None:
        self._batches: dict[int, LocalBatch] = {}
        self._by_event: dict[int, LocalBatch] = {}
        self._last = 0
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"LocalBatches({len(self)} may not be over)"

    def __len__(self) -> int:
        return len(self._batches)

    def of(self, event: Event) -> LocalBatch:
        """Return the batch that ends with ``event``."""
        known = self._by_event.get(id(event))  # its batch keeps the event alive, so nothing else has that id
        if known is not None:
            return known
        if len(self._batches) >= self._sweep_at:
            self._sweep()
        self._last += 1
        batch = self._batches[self._last] = self._by_event[id(event)] = LocalBatch(self._last, event)
        return batch

    def events(self, numbers: Sequence[int]) -> list[Event]:
        """Return the events of those batches that are not over."""
        batches = (self._batches.get(number) for number in numbers)
        return [batch.event for batch in batches if batch is not None and not batch.done()]

    def _sweep(self) -> None:
        self._batches = {number: batch for number, batch in self._batches.items() if not batch.done()}
        self._by_event = {id(batch.event): batch for batch in self._batches.values()}
        self._sweep_at = 2 * len(self._batches) + SWEEP
