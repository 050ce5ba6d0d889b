"""The engine of one rank in a simulated world: batches in the order in which the head sent them, on one stream.

As on a GPU, the host runs ahead of the stream. It ends a batch by an event before the work is done, or, if it is slow,
some time later, or without an event when the work is over. The stream does the work in order: it waits for the batch's
loads (the host has asked for them at once, or asks now), takes its time, reads what is called cached and writes the
rest. So a copy or another request that does not wait for the event finds the page as it was, and a page that is given
away too early is found overwritten.
"""

from __future__ import annotations

import asyncio
from random import Random

from asynccache.errors import CopyFailed, RankFailure
from asynccache.worker import EngineBatch, RankWorker
from tests.group.engine_bytes import BadBytes, EngineBytes, task_of
from tests.simulated.device import SimulatedDevice, SimulatedGate

CANNOT = "the model raised"


class RankEngine:
    """The engine of one rank. ``lag``: seconds that a batch takes at most. ``failures``: what went wrong in its work,
    by batch; ``loads``: what each of these needed. ``spoilt``: batches that have read what a failed one left.
    ``verified``: as ``EngineBytes`` has it."""

    def __init__(self, face: RankWorker, device: SimulatedDevice, random: Random, lag: float) -> None:
        self.rank = face.rank
        self.failures: dict[int, BaseException] = {}
        self.loads: dict[int, tuple[int, ...]] = {}
        self.spoilt: set[int] = set()
        self._face = face
        self._device = device
        self._random = random
        self._lag = lag
        self._bytes = EngineBytes(face.pools, face.config, face.topology.place(face.rank))
        self._works: set[asyncio.Task[None]] = set()
        self._last: SimulatedGate | None = None

    @property
    def verified(self) -> int:
        return self._bytes.verified

    async def run(self) -> None:
        """Run until the cache is closed or the group has failed, and until the stream is empty."""
        try:
            async for batch in self._face:
                await self._take(batch)
        except RankFailure:
            pass
        while self._works:
            await asyncio.wait(self._works)

    async def _take(self, batch: EngineBatch) -> None:
        if self.rank in task_of(batch.payload).unable:
            await self._fail(batch)
            return
        gate = self._device.gate()
        loop = asyncio.get_running_loop()
        early = bool(batch.loads) and self._random.random() < 0.5
        loads = loop.create_task(self._arrived(batch), name="loads") if early else None
        work = loop.create_task(self._work(batch, loads, self._last, gate), name="stream")
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        self._last = gate
        style = self._random.random()
        if style < 0.5:
            batch.end(gate)
        elif style < 0.8:
            await asyncio.sleep(self._pause())
            batch.end(gate)
        else:
            await asyncio.wait([work])
            batch.end()

    async def _fail(self, batch: EngineBatch) -> None:
        """Leave garbage in the batch's pages, when the stream comes to it, and say that it failed: by an event or
        not."""
        gate = self._device.gate() if self._random.random() < 0.4 else None
        if gate is not None:
            batch.end(gate)
        if self._last is not None:
            await self._last.wait()
        await asyncio.sleep(self._pause())
        self._bytes.spoil(task_of(batch.payload))
        if gate is None:
            batch.fail(CANNOT)
        else:
            gate.fire(RuntimeError(CANNOT))

    async def _work(
        self, batch: EngineBatch, loads: asyncio.Task[bool] | None, before: SimulatedGate | None, gate: SimulatedGate
    ) -> None:
        if before is not None:
            await before.wait()
        try:
            task = task_of(batch.payload)
            await asyncio.sleep(self._pause())
            there = await (self._arrived(batch) if loads is None else loads)
            if there:
                try:
                    self._bytes.verify(task)
                    self._bytes.write(task)
                except BadBytes:
                    self.spoilt.add(batch.number)
                    self._bytes.spoil(task)
        except Exception as error:
            self.failures[batch.number] = error
            self.loads[batch.number] = batch.loads
        gate.open()

    async def _arrived(self, batch: EngineBatch) -> bool:
        """Whether the batch's loads have arrived. If not, the head is told, and takes nothing of the batch for
        computed."""
        try:
            await self._face.layer(batch, self._face.layers - 1)
        except (CopyFailed, RankFailure):
            return False
        return True

    def _pause(self) -> float:
        return self._random.random() * self._lag
