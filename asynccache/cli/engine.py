"""The stand-in for an inference engine: it reads and writes KV where a real one would, on the device.

Writing follows ``pattern``; reading compares with it. All of it is done in threads, in calls that let go of the GIL (on
the loop's thread such a call would wait to get it back), so a request's work is truly in flight while its task waits,
and goes on when that task is cancelled: whoever releases the lease then passes the work's event, as for a kernel on a
stream.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asynccache.cli.meter import run_delay
from asynccache.cli.pattern import Pattern, Values
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind
from asynccache.memory.device import Event

if TYPE_CHECKING:
    import torch

CALL_BYTES = 1 << 20
THREADS = 2
TELLING = 0.01
"""Seconds of CPU time after which the engine's own pace says something of the machine."""

Ids = npt.NDArray[np.int32]


class Layers(Protocol):
    """A pool on the device."""

    def layer(self, i: int) -> torch.Tensor: ...


class Gate(Event, Protocol):
    """An event of the device that whoever holds it fires, from any thread."""

    def open(self) -> None: ...


class Piece(NamedTuple):
    """Pages of one component: ``first`` is the position of the first in its sequence, for messages."""

    component: ComponentKind
    ids: Ids
    values: Values
    first: int


class Verdict(NamedTuple):
    """``wrong``: pages that are missing or hold other bytes; ``what`` describes the first few."""

    pages: int
    wrong: int
    what: tuple[str, ...] = ()


class Engine:
    """Owns the threads and the patterns. One per cache, closed with it. ``threads`` 1: jobs run in order, like kernels
    on a stream."""

    def __init__(
        self, specs: Sequence[PoolSpec], pools: Mapping[str, Layers], gate: Callable[[], Gate], threads: int = THREADS
    ) -> None:
        self._gate = gate
        self._threads = ThreadPoolExecutor(threads, "engine")
        self._pools: dict[ComponentKind, list[_Pool]] = {kind: [] for kind in ComponentKind}
        for spec in specs:
            if spec.bytes_per_page:
                self._pools[spec.component].append(_Pool(spec, pools[spec.name]))
        self._count = threading.Lock()
        self._queued = self._cpu = 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long a busy machine has made its jobs so far: the CPU time that they took and the time that
        they waited for a core, over the former. 1.0 before that can be told, where the kernel does not count it, and
        where the pages are a GPU's, which a busy machine does not make slower."""
        if self._cpu < TELLING or any(pool.is_cuda for pools in self._pools.values() for pool in pools):
            return 1.0
        return 1.0 + self._queued / self._cpu

    def lane(self) -> Lane:
        """For one request."""
        return Lane(self)

    def close(self) -> None:
        """Wait for the work in flight."""
        self._threads.shutdown()

    def submit(self, job: Callable[[], None]) -> tuple[Future[None], Event]:
        """Start a job; the event fires when the threads have let go of its pages, also if it never begins."""
        gate = self._gate()
        future = self._threads.submit(self._timed, job)
        future.add_done_callback(lambda _: gate.open())
        return future, gate

    def _timed(self, job: Callable[[], None]) -> None:
        cpu, queued = time.thread_time(), run_delay()
        try:
            job()
        finally:
            cpu, queued = time.thread_time() - cpu, run_delay() - queued
            with self._count:
                self._cpu += cpu
                self._queued += queued

    def write(self, pieces: Sequence[Piece]) -> None:
        """Blocking."""
        for piece in pieces:
            for pool in self._pools[piece.component]:
                pool.write(piece)

    def verify(self, pieces: Sequence[Piece]) -> Verdict:
        """Blocking."""
        pages, wrong, what = 0, 0, []
        for piece in pieces:
            for pool in self._pools[piece.component]:
                found = pool.verify(piece)
                pages += len(piece.ids)
                wrong += len(found)
                what += found[:3]
        return Verdict(pages, wrong, tuple(what))


class Lane:
    """The work of one request, one job at a time. ``work`` ends with the last one, for whoever gives the pages back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.work: Event | None = None

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Have these pages filled; nobody waits, and what goes wrong shows in the bytes."""
        if any(len(piece.ids) for piece in pieces):
            _, self.work = self._engine.submit(lambda: self._engine.write(pieces))

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Fill these pages. Cancelling leaves the job running: ``work`` tells when it is over."""
        await self._run(pieces, lambda: self._engine.write(pieces))

    async def verify(self, pieces: Sequence[Piece]) -> Verdict:
        """Compare these pages with what they must hold. Cancelling is as for ``write``."""
        verdicts = [Verdict(0, 0)]
        await self._run(pieces, lambda: verdicts.append(self._engine.verify(pieces)))
        return verdicts[-1]

    async def _run(self, pieces: Sequence[Piece], job: Callable[[], None]) -> None:
        if not any(len(piece.ids) for piece in pieces):
            return
        future, self.work = self._engine.submit(job)
        await asyncio.wrap_future(future)


def _part(spec: PoolSpec) -> str:
    """What sets a pool's bytes apart: those of another rank are wrong."""
    return spec.name if spec.shard == "replicated" else f"{spec.name}/{spec.shard}"


class _Pool:
    """One pool with a pattern per layer."""

    def __init__(self, spec: PoolSpec, layers: Layers) -> None:
        self.name = spec.name
        self._layers = [layers.layer(i) for i in range(spec.layers)]
        size = spec.bytes_per_page // spec.layers
        self._patterns = [
            Pattern(_part(spec), number, size, layer.device)
            for number, layer in zip(spec.model_layers, self._layers, strict=True)
        ]
        self._slice = max(1, CALL_BYTES // size)
        self.is_cuda = self._layers[0].is_cuda

    def write(self, piece: Piece) -> None:
        for ids, values, _ in self._slices(piece):
            for layer, pattern in zip(self._layers, self._patterns, strict=True):
                pattern.write(layer, ids, values)
        if self.is_cuda:  # whoever opens the event says that it is written
            import torch

            torch.cuda.current_stream(self._layers[0].device).synchronize()

    def verify(self, piece: Piece) -> list[str]:
        """One line for each page that is wrong, however many of its layers are."""
        wrong = {piece.first + int(i): "has no slot" for i in np.flatnonzero(piece.ids < 0)}
        present = piece.ids >= 0
        positions = piece.first + np.flatnonzero(present)
        held = Piece(piece.component, piece.ids[present], piece.values[present], 0)
        for ids, values, start in self._slices(held):
            for index, (layer, pattern) in enumerate(zip(self._layers, self._patterns, strict=True)):
                for i in pattern.mismatches(layer, ids, values):
                    wrong.setdefault(int(positions[start + i]), f"in slot {int(ids[i])} differs from layer {index} on")
        return [f"{self.name} page {position} {what}" for position, what in sorted(wrong.items())]

    def _slices(self, piece: Piece) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        import torch

        device = self._layers[0].device
        ids = torch.from_numpy(piece.ids.astype(np.int64)).to(device)
        values = torch.from_numpy(piece.values.view(np.int64)).to(device)
        step = self._slice
        return [(ids[i:i + step], values[i:i + step], i) for i in range(0, len(ids), step)]
