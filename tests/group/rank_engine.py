"""The engine of one rank in a simulated world, and the bytes that it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.config import POOL_NAME, CacheConfig
from asynccache.core.settings import ComponentKind
from asynccache.errors import CopyFailed, RankFailure
from asynccache.runtime.lease import Lease
from asynccache.worker import EngineBatch, RankPlace, RankWorker
from tests.simulated.device import SimulatedDevice, SimulatedGate
from tests.simulated.world import WrongBytes

# The bytes that an engine writes on one rank, and must find there when it reads. Every rank has bytes of its own,
# except in replicated pools. The bytes of a page are a function of everything up to the page's end.


BAD = 0xEE
"""The byte that a failed batch leaves in its pages, and a batch that has read such a page in its own."""


class BadBytes(WrongBytes):
    """A page that was read is one of a batch that failed."""


class Task(NamedTuple):
    """A batch's payload. ``tables``: page tables by component. ``cached``: tokens that must be there already; the
    pages of ``text`` from there on are written. ``state``: the slot that holds the state at ``cached``, or -1.
    ``checkpoint``: the slot to write the state of all of ``text`` to, or -1. ``unable``: the ranks whose engines
    fail at it."""

    space: str | None
    text: list[int]
    tables: dict[str, list[int]]
    cached: int
    state: int
    checkpoint: int
    unable: Sequence[int] = ()

    def payload(self) -> bytes:
        return json.dumps(self).encode()


def task_of(payload: bytes) -> Task:
    return Task(*json.loads(payload))


def task_for(lease: Lease, space: str | None, text: list[int], names: Sequence[str], *, first: bool = True) -> Task:
    """The payload for ``lease``: the engine is to compute ``text`` from the cached end on."""
    states = [int(state) for state in lease.states]
    tables = {name: lease.page_table(name).tolist() for name in names if name != "mamba"}
    end = lease.cached if first else 0
    return Task(space, text, tables, end, states[0] if states and end else -1, states[-1] if len(states) > 1 else -1)


class EngineBytes:
    """The pages of one worker at ``place``. ``verified``: how many were compared."""

    def __init__(self, pools: Mapping[str, Any], config: CacheConfig, place: RankPlace) -> None:
        self.verified = 0
        self._place = place
        self._page = config.page_size
        self._pools = {spec.name: spec for spec in config.pools() if spec.bytes_per_page}
        self._window = max(component.window for component in config.core().components)
        self._rows: dict[str, list[npt.NDArray[np.uint8]]] = {
            name: [pools[name].layer(layer).numpy() for layer in range(spec.layers)]
            for name, spec in self._pools.items()
        }
        self._parts: dict[str, bytes] = {}
        for name, spec in self._pools.items():
            dims = [number for dim, number in (("tp", place.tp), ("cp", place.cp)) if dim not in spec.replicated]
            self._parts[name] = f"{name}/{dims}".encode()

    def verify(self, task: Task) -> None:
        """Check everything that an engine reads which goes on at ``task.cached``."""
        whole, start = task.cached // self._page, max(0, task.cached - self._window) // self._page
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                if task.state >= 0:
                    self._check(name, task.state, self._content(task, whole - 1), "state")
                continue
            table = task.tables[POOL_NAME[spec.component]]
            for i in range(start if spec.component is ComponentKind.SWA else 0, whole):
                self._check(name, table[i], self._content(task, i), f"page {i}")

    def write(self, task: Task) -> None:
        """Write the pages of ``task.text`` beyond the cached ones, and the checkpoint."""
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                if task.checkpoint >= 0 and task.text and len(task.text) % self._page == 0:
                    self._put(name, task.checkpoint, self._content(task, len(task.text) // self._page - 1))
                continue
            table = task.tables[POOL_NAME[spec.component]]
            for i in range(task.cached // self._page, -(-len(task.text) // self._page)):
                if table[i] >= 0:
                    self._put(name, table[i], self._content(task, i))

    def spoil(self, task: Task) -> None:
        """Write ``BAD`` to whatever ``write`` would write to."""
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                slots = [task.checkpoint] if task.text and len(task.text) % self._page == 0 else []
            else:
                first, end = task.cached // self._page, -(-len(task.text) // self._page)
                slots = task.tables[POOL_NAME[spec.component]][first:end]
            for slot in slots:
                for rows in self._rows[name] if slot >= 0 else ():
                    rows[slot][:] = BAD

    def _content(self, task: Task, page: int) -> bytes:
        return f"{task.space}{task.text[: (page + 1) * self._page]}".encode()

    def _expected(self, pool: str, layer: int, content: bytes, size: int) -> bytes:
        seed = _seed(content, self._parts[pool])
        turn = self._pools[pool].model_layers[layer] % len(seed)
        return ((seed[turn:] + seed[:turn]) * (size // len(seed) + 1))[:size]

    def _put(self, pool: str, slot: int, content: bytes) -> None:
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot]
            row[:] = np.frombuffer(self._expected(pool, layer, content, len(row)), np.uint8)

    def _check(self, pool: str, slot: int, content: bytes, what: str) -> None:
        self.verified += 1
        if slot < 0:
            raise WrongBytes(f"{pool} {what} has no slot")
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot].tobytes()
            if row == bytes([BAD]) * len(row):
                raise BadBytes(f"{self._place}: {pool} {what}, slot {slot}, layer {layer} is of a failed batch")
            if row != self._expected(pool, layer, content, len(row)):
                raise WrongBytes(f"{self._place}: {pool} {what}, slot {slot}, layer {layer}: {row[:8].hex()}")


@lru_cache(1 << 14)
def _seed(content: bytes, part: bytes) -> bytes:
    return sha256(content + part).digest()


# The engine of one rank in a simulated world: batches in the order in which the head sent them, on one stream.
#
# As on a GPU, the host runs ahead of the stream. It ends a batch by an event before the work is done, or, if it is
# slow, some time later, or without an event when the work is over. The stream does the work in order: it waits for the
# batch's loads (the host has asked for them at once, or asks now), takes its time, reads what is called cached and
# writes the rest. So a copy or another request that does not wait for the event finds the page as it was, and a page
# that is given away too early is found overwritten.


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
