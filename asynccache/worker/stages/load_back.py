"""load_back: host to device, layer by layer, and the private copies (device to device) that follow it.

Law: one batched load per submission, and clones, on a stream of their own, behind the loads they need. A submission is
a plain function, because ``wait_layer`` needs the layer's event at once: it submits what is queued and does not wait
for the worker. A batch that fails fails every load in it: an engine that was ordered behind its layers has seen them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from asynccache.core.plan import Clone, LoadBack, Move, Outcome, Status
from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.worker.inbox import Inbox
from asynccache.worker.stats import Meter


class Layers(Protocol):
    """What a load returns: an event per layer, and one for all of it."""

    @property
    def layers(self) -> Sequence[Event]: ...
    @property
    def done(self) -> Event: ...


class Copier(Protocol):
    """The part of ``Mover`` that this stage uses."""

    def load(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Layers: ...
    def clone(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event: ...


class Copying(NamedTuple):
    """One operation on the device: ``layers[i]`` is done when layer i of it is there, ``done`` when all is."""

    op: int
    layers: Sequence[Event]
    done: Event
    needs: Event | None
    queued: float

    def layer(self, i: int) -> Event:
        """The event of layer ``i``; a private copy arrives as a whole."""
        return self.layers[i] if self.layers else self.done


class Queued(NamedTuple):
    """An effect, the events that it waits for on the device, and when it was queued."""

    effect: LoadBack | Clone
    after: Sequence[Event]
    at: float


class _Line:
    """What waits to be submitted to one stream, and what is on it, in order."""

    def __init__(self) -> None:
        self.inbox: Inbox[Queued] = Inbox()
        self.flying: deque[Copying] = deque()
        self.filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"{len(self.inbox)} queued, {len(self.flying)} on the device"


class LoadBackStage:
    """Queues of ``LoadBack`` and ``Clone`` effects, what is on the device, and the workers that await it: private
    copies, which are short, wait for the loads that they need and for no others."""

    def __init__(
        self,
        mover: Copier,
        post: Callable[[Outcome], None],
        size_of: Callable[[Sequence[Move]], tuple[int, int, int]],
        clock: Callable[[], float],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._mover = mover
        self._post = post
        self._size_of = size_of
        self._clock = clock
        self._fail = fail
        self._loads = _Line()
        self._clones = _Line()
        self._by_op: dict[int, Copying] = {}
        self.meter = Meter()

    def __repr__(self) -> str:
        return f"LoadBackStage(loads {self._loads!r}; clones {self._clones!r}; {self.meter!r})"

    def __len__(self) -> int:
        return len(self._loads.inbox) + len(self._clones.inbox)

    def put(self, effect: LoadBack | Clone, after: Sequence[Event]) -> None:
        """Queue the effect; its outcome is posted exactly once."""
        line = self._clones if isinstance(effect, Clone) else self._loads
        line.inbox.put(Queued(effect, after, self._clock()))
        line.filled.set()

    def copying(self, op: int) -> Copying | None:
        """Where ``op`` stands on the device, submitting what is queued; None once it has ended."""
        self.submit_now()
        return self._by_op.get(op)

    def submit_now(self) -> None:
        """``submit``, or the end of the cache: of a batch that the device refuses the loads are lost. It is told before
        anybody can ask for them, and take them for loads that have ended."""
        try:
            self.submit()
        except BaseException as error:
            self._fail(error)
            raise

    def submit(self) -> None:
        """Hand all that is queued to the device: one batch of loads, then the clones."""
        loads = self._loads.inbox.take()
        if loads:
            self._submit_loads(loads)
        for effect, after, at in self._clones.inbox.take():
            assert isinstance(effect, Clone)
            self._submit_clone(effect, after, at)

    def _submit_loads(self, loads: Sequence[Queued]) -> None:
        moves = [move for queued in loads for move in queued.effect.moves]
        after = list(dict.fromkeys(event for queued in loads for event in queued.after))
        events = self._mover.load(moves, after)
        self.meter.count(len(loads), *self._size_of(moves))
        for effect, _, at in loads:
            self._fly(self._loads, Copying(effect.op, events.layers, events.done, None, at))

    def _submit_clone(self, effect: Clone, after: Sequence[Event], at: float) -> None:
        source = self._by_op.get(effect.after)
        needs = source.done if source is not None else None
        event = self._mover.clone(effect.moves, after if needs is None else (*after, needs))
        self._fly(self._clones, Copying(effect.op, (), event, needs, at))

    def _fly(self, line: _Line, copying: Copying) -> None:
        line.flying.append(copying)
        line.filled.set()
        self._by_op[copying.op] = copying

    async def run(self) -> None:
        """Submit and await, for ever. Cancelling it abandons outcomes, never a buffer in use: the device finishes
        what was submitted."""
        await self._serve(self._loads)

    async def run_clones(self) -> None:
        """As ``run``, for the private copies."""
        await self._serve(self._clones)

    async def _serve(self, line: _Line) -> None:
        while True:
            await self._something(line)
            self.submit_now()
            await self._land(line)

    async def _something(self, line: _Line) -> None:
        """Return when there is something to submit or to await: ``wait_layer`` may have emptied the queue already."""
        while not line.flying and not len(line.inbox):
            line.filled.clear()
            await line.filled.wait()

    async def _land(self, line: _Line) -> None:
        copying = line.flying[0]
        status = await _copied(copying)
        line.flying.popleft()
        del self._by_op[copying.op]
        self.meter.errors += status is Status.FAILED
        self.meter.took(self._clock() - copying.queued)
        self._post(Outcome(copying.op, status))


async def _copied(copying: Copying) -> Status:
    """FAILED also where a clone's source failed to arrive."""
    try:
        await copying.done.wait()
        if copying.needs is not None:
            await copying.needs.wait()
    except CopyFailed:
        return Status.FAILED
    return Status.DONE
