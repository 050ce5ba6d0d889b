"""What the head knows of the engine: which batches of its work are not over, and what has to wait for them.

Laws:
* No backup reads a committed page before the batch that the page's commit named is over. A backup may start long after
  the commit (the core defers it), so every backup waits, on the device, for all batches that commits have named.
* A copy into a page waits, on the device, for the batches that some lease named while it had that page, and for no
  other (``fences``). These batches are looked up when the copy is asked for. A batch that is named later does not hold
  the copy up, since the engine may wait for that very copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynccache.config import PoolSpec
from asynccache.core.cache import CacheCore
from asynccache.core.cache import Lease as CoreLease
from asynccache.core.plan import BackupHost, Copy, LoadBack
from asynccache.core.settings import ComponentKind
from asynccache.errors import ConfigError
from asynccache.runtime.fences import Fences, not_over
from asynccache.worker.contract import BatchInFlight, Worker
from asynccache.worker.joining import joined

SWEEP = 64
"""How many batches may be known, beyond twice those that were not over at the last sweep, before the next one. A sweep
forgets the batches that are over."""


class EngineBatches:
    """Mutable state: the fences, and the batches that commits named (``ready``) and that may not be over."""

    def __init__(self, worker: Worker, core: CacheCore, pools: Sequence[PoolSpec]) -> None:
        self.fences = Fences(_slots_of(pools))
        self._worker = worker
        self._core = core
        kinds = {component.kind for component in core.config.components}
        self._tables = sorted(int(kind) for kind in kinds if kind is not ComponentKind.MAMBA)
        self._has_states = ComponentKind.MAMBA in kinds
        self._ready: dict[int, BatchInFlight] = {}
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"EngineBatches({self.fences!r}, {len(self._ready)} batches that commits named)"

    def event(self, name: str, event: object | None) -> object | None:
        """Return the engine's ``event`` as it is now, in the form that ``batch`` takes; None if ``event`` is None.
        ``name``: of the argument whose value it is, for the error's text. From any thread.

        Raises:
            ConfigError: copies cannot wait for the event.
        """
        if event is None:
            return None
        try:
            return self._worker.engine_event(event)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def batch(self, name: str, event: object | None) -> BatchInFlight | None:
        """Return the batch that ends with the engine's ``event``; None if ``event`` is None. ``name`` and errors are as
        for the method ``event``."""
        taken = self.event(name, event)
        return None if taken is None else self._worker.batch(taken)

    def fence(self, lease: CoreLease, *batches: BatchInFlight) -> None:
        """Note that the engine may use the lease's pages until ``batches`` are over. Any copy into these pages that is
        asked for later waits for that, on the device."""
        pending = not_over(*batches)
        if pending:
            slots: dict[int, bytes] = {kind: self._core.pages(lease, kind) for kind in self._tables}
            if self._has_states:
                slots[int(ComponentKind.MAMBA)] = lease.states
            for batch in pending:
                self.fences.add(batch, slots)

    def expect(self, ready: BatchInFlight) -> None:
        """Note that a commit is about to publish pages that the batch ``ready`` writes."""
        if not ready.done():
            self._ready[ready.number] = ready
            if len(self._ready) >= self._sweep_at:  # without a host tier nothing else forgets those that are over
                self._sweep_at = 2 * len(self.pending()) + SWEEP

    def pending(self) -> list[BatchInFlight]:
        """Return the batches that commits named and that are not over, each once. The others are forgotten."""
        alive = not_over(*self._ready.values())
        self._ready = {batch.number: batch for batch in alive}
        return alive

    def begin(self, effects: Sequence[Copy]) -> None:
        """Hand the copies of a plan to the worker, with the batches that each has to wait for."""
        self._worker.perform(joined(effects, self._before))

    def _before(self, effect: Copy) -> Sequence[BatchInFlight]:
        if isinstance(effect, BackupHost):
            return self.pending()
        if not len(self.fences):
            return ()
        if isinstance(effect, LoadBack):
            return self.fences.before((move.component, move.dst) for move in effect.moves)
        return self.fences.before((move.component, slots) for move in effect.moves for slots in (move.src, move.dst))


def _slots_of(pools: Sequence[PoolSpec]) -> Mapping[int, int]:
    slots: dict[int, int] = {}
    for spec in pools:
        slots[int(spec.component)] = max(spec.device_pages, slots.get(int(spec.component), 0))
    return slots
