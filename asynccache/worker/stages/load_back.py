"""load_back: host to device, layer by layer, and the private copies (device to device) that follow it.

Laws:

* A submission is one batched load, and the clones behind it. Clones run on a stream of their own, and each waits for
  the load that it needs.
* A submission is a plain function: ``wait_layer`` needs the event of a layer at once, so it submits what is queued and
  does not wait for the stage's task.
* If a batched load fails, every load in it fails: an engine whose work was ordered behind its layers may have read
  them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from asynccache.core.plan import Move, Status
from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.worker.contract import CopyKind, Work
from asynccache.worker.inbox import Inbox, QueuedWork
from asynccache.worker.stats import StageMeter


class LoadEvents(Protocol):
    """The events of a load: one for each layer, and one for all of it."""

    @property
    def layers(self) -> Sequence[Event]: ...
    @property
    def done(self) -> Event: ...


class LoadCopier(Protocol):
    """The part of ``Mover`` that this stage uses."""

    def load(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> LoadEvents: ...
    def clone(self, moves: Sequence[Move], after: Sequence[Event] = ()) -> Event: ...


class Copying(NamedTuple):
    """Operations that the device copies together. ``layers[i]``: fires when layer i of them is there; empty for a
    private copy. ``done``: fires when all is there. ``needs``: fires when the load that a private copy is made of is
    there; None: it has ended, or there is none. ``queued``: seconds of the stage's clock."""

    ops: Sequence[int]
    layers: Sequence[Event]
    done: Event
    needs: Event | None
    queued: float

    def layer(self, i: int) -> Event:
        """Return the event of layer ``i``. A private copy arrives as a whole."""
        return self.layers[i] if self.layers else self.done


class _Line:
    """The works that wait to be submitted to one stream, and the copies that are on it, both in order."""

    def __init__(self) -> None:
        self.inbox: Inbox[QueuedWork] = Inbox()
        self.flying: deque[Copying] = deque()
        self.filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"{len(self)} queued, {sum(len(copying.ops) for copying in self.flying)} on the device"

    def __len__(self) -> int:
        return sum(len(queued.work.ops) for queued in self.inbox)


class LoadBackStage:
    """The queues of loads and of private copies, and the tasks that await what is on the device. The two have a stream
    each, so that private copies, which are short, wait for the loads that they need and for no others. ``post``: called
    with the outcome of each work. ``clock``: returns seconds. ``fail``: called with what the device raised when it
    refused a copy."""

    def __init__(
        self,
        mover: LoadCopier,
        post: Callable[[Status, Sequence[int]], None],
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
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"LoadBackStage(loads {self._loads!r}; clones {self._clones!r}; {self.meter!r})"

    def __len__(self) -> int:
        return len(self._loads) + len(self._clones)

    def put(self, work: Work, after: Sequence[Event]) -> None:
        """Queue ``work``; its outcome is posted exactly once."""
        line = self._clones if work.kind is CopyKind.CLONE else self._loads
        line.inbox.put(QueuedWork(work, after, self._clock()))
        line.filled.set()

    def copying(self, op: int) -> Copying | None:
        """Submit what is queued, and return the copy that ``op`` is part of; None once ``op`` has ended."""
        self.submit_now()
        return self._by_op.get(op)

    def submit_now(self) -> None:
        """``submit``. If the device refuses a batch, its loads are lost, and that is the end of the cache. ``fail`` is
        called before anybody can ask for these loads and take them for loads that have ended."""
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
        for queued in self._clones.inbox.take():
            self._submit_clones(*queued)

    def _submit_loads(self, loads: Sequence[QueuedWork]) -> None:
        moves = [move for queued in loads for move in queued.work.moves]
        after = list(dict.fromkeys(event for queued in loads for event in queued.after))
        events = self._mover.load(moves, after)
        self.meter.count(sum(len(queued.work.ops) for queued in loads), *self._size_of(moves))
        for work, _, at in loads:
            self._fly(self._loads, Copying(work.ops, events.layers, events.done, None, at))

    def _submit_clones(self, work: Work, after: Sequence[Event], at: float) -> None:
        source = self._by_op.get(work.source)
        needs = source.done if source is not None else None
        event = self._mover.clone(work.moves, after if needs is None else (*after, needs))
        self._fly(self._clones, Copying(work.ops, (), event, needs, at))

    def _fly(self, line: _Line, copying: Copying) -> None:
        line.flying.append(copying)
        line.filled.set()
        self._by_op.update(dict.fromkeys(copying.ops, copying))

    async def run(self) -> None:
        """Submit loads and await them, for ever. Cancelling it abandons outcomes, never a buffer in use: the device
        finishes what was submitted."""
        await self._serve(self._loads)

    async def run_clones(self) -> None:
        """The same as ``run``, for the private copies."""
        await self._serve(self._clones)

    async def _serve(self, line: _Line) -> None:
        while True:
            await self._something(line)
            self.submit_now()
            await self._land(line)

    async def _something(self, line: _Line) -> None:
        """Return when there is something to submit or to await. The queue may be empty even so: ``wait_layer`` has
        submitted what was in it."""
        while not line.flying and not len(line.inbox):
            line.filled.clear()
            await line.filled.wait()

    async def _land(self, line: _Line) -> None:
        copying = line.flying[0]
        status = await _copied(copying)
        line.flying.popleft()
        for op in copying.ops:
            del self._by_op[op]
        if status is Status.FAILED:
            self.meter.errors += len(copying.ops)
        self.meter.took(self._clock() - copying.queued, len(copying.ops))
        self._post(status, copying.ops)


async def _copied(copying: Copying) -> Status:
    """Return how the copy ended, when it has: FAILED also for a private copy of a load that failed."""
    try:
        await copying.done.wait()
        if copying.needs is not None:
            await copying.needs.wait()
    except CopyFailed:
        return Status.FAILED
    return Status.DONE
