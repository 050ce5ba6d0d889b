"""A backend with faults at random, which a seed repeats.

At a fault rate of P, a share of P/2 of all calls with keys is delayed by 1 to 50 ms, P/4 fail, and P/4 return corrupt
bytes. Only a ``get`` can return bytes, so other calls of that last quarter have no fault. Calls without keys and probes
have none either.

A failing call does nothing: half of them raise ``Unavailable``, and half answer FAILED for every key. A corrupt ``get``
flips one bit of one record, in its header or in its payload.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from random import Random

from asynccache.errors import Unavailable
from asynccache.storage import PageKey, Record, Result, StorageBackend
from asynccache.testing.wrapped_backend import WrappedBackend

DELAY = (0.001, 0.05)


class Fault(Enum):
    """The fault of one call."""

    NONE = "none"
    DELAYED = "delayed"
    FAILED = "failed"
    CORRUPTED = "corrupted"


def draw_fault(rng: Random, rate: float) -> Fault:
    """Return the fault of one call at the fault rate ``rate``, which lies between 0 and 1."""
    drawn = rng.random()
    if drawn >= rate:
        return Fault.NONE
    share = drawn / rate
    return Fault.DELAYED if share < 0.5 else Fault.FAILED if share < 0.75 else Fault.CORRUPTED


class FaultyBackend(WrappedBackend):
    """A backend around ``inner`` with faults at the given rate. ``faults`` counts the faults so far by their names. The
    attribute ``rate`` may be changed at any time; 0 ends the faults."""

    def __init__(self, inner: StorageBackend, rate: float, seed: int = 0) -> None:
        super().__init__(inner)
        self.rate = rate
        self.faults: Counter[str] = Counter()
        self._rng = Random(f"faulty backend {seed}")

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``, or a fault."""
        return await self._call(len(keys), self._draw(), lambda: self.inner.exists(keys))

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``, or a fault."""
        fault = self._draw()
        results = await self._call(len(keys), fault, lambda: self.inner.get(keys, records))
        if fault is Fault.CORRUPTED:
            self._corrupt([record for record, result in zip(records, results, strict=True) if result is Result.HIT])
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``, or a fault."""
        return await self._call(len(keys), self._draw(), lambda: self.inner.put(keys, records))

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``, or a fault."""
        return await self._call(len(keys), self._draw(), lambda: self.inner.delete(keys))

    def _draw(self) -> Fault:
        return draw_fault(self._rng, self.rate)

    async def _call(self, count: int, fault: Fault, call: Callable[[], Awaitable[list[Result]]]) -> list[Result]:
        if fault is Fault.DELAYED:
            self.faults["delayed"] += 1
            await asyncio.sleep(self._rng.uniform(*DELAY))
        if fault is Fault.FAILED:
            self.faults["failed"] += 1
            if self._rng.random() < 0.5:
                raise Unavailable("injected fault")
            return [Result.FAILED] * count
        return await call()

    def _corrupt(self, records: Sequence[Record]) -> None:
        if not records:
            return
        self.faults["corrupted"] += 1
        record = self._rng.choice(records)
        buffer = record.payload if self._rng.random() < 0.8 else record.header
        buffer[self._rng.randrange(buffer.nbytes)] ^= 1 << self._rng.randrange(8)
