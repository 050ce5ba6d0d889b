"""Batches of page copies between arrays in host memory, and the faults that a test can ask for.

This is for devices whose memory is host memory; the checks of page ids are for others, too. A batch is a list of steps
(a load has one for each layer). A step is a list of ``ArrayCopy``, and each of these has pieces: index lists of 256 KiB
or runs of up to 1 MiB, which one numpy call copies without the GIL. This module neither sleeps nor starts threads:
pauses are yielded to the thread that runs the batch.

Faults are late, torn and failing copies, drawn from one seed. The faults of a batch are drawn when it is submitted, so
the same calls in the same order meet the same faults, however the threads behind them run.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asynccache.errors import ConfigError, InvariantViolation, forget_frames
from asynccache.memory.device import CopyDirection
from asynccache.memory.pools import Bytes, DevicePool, HostPool, PageCopy

Ids = npt.NDArray[np.intp]
Piece = tuple[Ids | slice, Ids | slice]

GATHER_BYTES = 256 << 10
"""Bytes that one numpy call copies by an index list: they pass through a temporary, which should stay in a CPU core's
own cache."""
DIRECT_BYTES = 256 << 10
"""Bytes that make a run of neighbours worth a call of its own, which needs no temporary. Shorter runs go by index
lists."""
RUN_BYTES = 1 << 20
"""Bytes of the longest run: longer ones are cut, so that no call keeps its thread for much longer than 0.2 ms."""


class CheckedCopy(NamedTuple):
    """A PageCopy whose ids were checked and converted to the type of integer that was asked for. Nobody changes these
    arrays."""

    device: DevicePool
    host: HostPool | None
    src: Ids
    dst: Ids


class ArrayCopy(NamedTuple):
    """A copy between two arrays: ``dst[i] = src[j]`` for every piece ``(i, j)``."""

    dst: Bytes
    src: Bytes
    pieces: Sequence[Piece]


Step = Sequence[ArrayCopy]


class Hitch(NamedTuple):
    """The faults of one step: pauses (seconds) before it and between its two halves."""

    before: float
    between: float
    fails: bool
    """True if an error takes the place of the second half."""


class InjectedFault(Exception):
    """A device was told to fail this copy."""


class Fires(Protocol):
    """An event as seen by the thread that runs the batch."""

    def fire(self, error: Exception | None) -> None:
        """Note that the work has ended, with ``error`` or well. Firing twice does nothing."""
        ...


def checked(
    copies: Sequence[PageCopy], towards: CopyDirection, ids: type[np.signedinteger[Any]] = np.intp
) -> list[CheckedCopy]:
    """Check the page ids of ``copies``, and return those that have any, as integers of the kind ``ids``.

    Raises:
        InvariantViolation: an id lies outside its pool, or a copy has not as many ``src`` as ``dst``.
    """
    into_host, from_host = towards is CopyDirection.OUT, towards is CopyDirection.IN
    some = (copy for copy in copies if len(copy.src) or len(copy.dst))
    return [_checked(c, _pages(c, from_host), _pages(c, into_host), ids) for c in some]


def _pages(copy: PageCopy, host: bool) -> int:
    return copy.device.spec.host_pages if host else copy.device.spec.device_pages


def _checked(copy: PageCopy, src_pages: int, dst_pages: int, kind: type[np.signedinteger[Any]]) -> CheckedCopy:
    for ids, pages in ((copy.src, src_pages), (copy.dst, dst_pages)):
        # As unsigned numbers negative ids are huge: one pass finds both kinds of error.
        if len(ids) and int(ids.view(np.uint32).max()) >= pages:
            raise InvariantViolation(f"{copy.device!r}: a page id lies outside 0..{pages - 1}")
    if len(copy.src) != len(copy.dst):
        raise InvariantViolation(f"{copy.device!r}: {len(copy.src)} pages cannot be copied to {len(copy.dst)}")
    return CheckedCopy(copy.device, copy.host, _kept(copy.src, kind), _kept(copy.dst, kind))


def _kept(ids: npt.NDArray[np.int32], kind: type[np.signedinteger[Any]]) -> Ids:
    """Return ``ids`` in an array that nobody changes. Those that nobody can write to, such as a plan's, need no
    copy."""
    return ids.astype(kind, copy=ids.flags.writeable)


def whole_step(parts: Sequence[CheckedCopy], towards: CopyDirection) -> Iterator[Step]:
    """Yield one step with all layers of every part, for copies that go out of the device or within it."""
    out = towards is CopyDirection.OUT
    yield [t for part in parts for t in _whole_pages(part, _host(part).array if out else None)]


def layer_steps(parts: Sequence[CheckedCopy], layers: int) -> Iterator[Step]:
    """Yield a step for each layer of the model, host to device, with the layers of every pool that belong to it."""
    pieces = [cut(p.src, p.dst, p.device.spec.bytes_per_page // p.device.spec.layers) for p in parts]
    for layer in range(layers):
        yield [
            ArrayCopy(part.device.arrays[i], _host(part).array[:, i], at)
            for part, at in zip(parts, pieces, strict=True)
            for i, belongs in enumerate(part.device.spec.model_layers)
            if belongs == layer
        ]


def _host(part: CheckedCopy) -> HostPool:
    if part.host is None:
        raise InvariantViolation(f"{part.device!r} has no host pool to copy from or to")
    return part.host


def _whole_pages(part: CheckedCopy, host: Bytes | None) -> list[ArrayCopy]:
    """Return the copies of device pages to ``host``, or to other device pages (None): one ``ArrayCopy`` if the layers
    lie in one block, else one for each layer."""
    spec, stacked = part.device.spec, part.device.stacked
    if stacked is not None:
        at = cut(part.src, part.dst, spec.bytes_per_page)
        return [ArrayCopy(stacked if host is None else host, stacked, at)]
    at = cut(part.src, part.dst, spec.bytes_per_page // spec.layers)
    arrays = part.device.arrays
    return [ArrayCopy(a if host is None else host[:, i], a, at) for i, a in enumerate(arrays)]


def cut(src: Ids, dst: Ids, row_bytes: int) -> list[Piece]:
    """Return pieces that together copy every row once: long runs of neighbours as slices, the rest as index lists."""
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    edges = np.concatenate(([0], ends, [len(src)]))
    long = np.diff(edges) * row_bytes >= DIRECT_BYTES
    if not long.any():
        return _gathers(src, dst, row_bytes)
    scattered = np.repeat(~long, np.diff(edges))
    runs = [run for run, is_long in zip(pairwise(edges.tolist()), long.tolist(), strict=True) if is_long]
    slices = [piece for a, b in runs for piece in _slices(int(src[a]), int(dst[a]), b - a, row_bytes)]
    return slices + _gathers(src[scattered], dst[scattered], row_bytes)


def _gathers(src: Ids, dst: Ids, row_bytes: int) -> list[Piece]:
    rows = max(1, GATHER_BYTES // row_bytes)
    return [(dst[i : i + rows], src[i : i + rows]) for i in range(0, len(src), rows)]


def _slices(src: int, dst: int, count: int, row_bytes: int) -> list[Piece]:
    rows = max(1, RUN_BYTES // row_bytes)
    starts = range(0, count, rows)
    sizes = [min(rows, count - i) for i in starts]
    return [(slice(dst + i, dst + i + n), slice(src + i, src + i + n)) for i, n in zip(starts, sizes, strict=True)]


def perform(
    steps: Iterable[Step], hitches: Mapping[int, Hitch], events: Sequence[Fires]
) -> Generator[float, None, Exception | None]:
    """Run a batch, yielding each pause in seconds. If there are ``events``, ``events[i]`` fires after step ``i``.
    Returns None, or the error that ended the batch: nothing more is moved then, and the events that are left report
    it."""
    try:
        for i, step in enumerate(steps):
            hitch = hitches.get(i)
            if hitch is None:
                move(step)
            else:
                yield from _move_torn(step, hitch)
            if events:
                events[i].fire(None)
    except Exception as error:
        forget_frames(error)
        for event in events:
            event.fire(error)
        return error
    return None


def _move_torn(step: Step, hitch: Hitch) -> Iterator[float]:
    """Move a step in two halves with a pause between them. A reader that does not wait for the event finds half of
    every page."""
    yield hitch.before
    move([_columns(t, slice(None, t.dst.shape[-1] // 2)) for t in step])
    yield hitch.between
    if hitch.fails:
        raise InjectedFault("an injected fault")
    move([_columns(t, slice(t.dst.shape[-1] // 2, None)) for t in step])


def _columns(transfer: ArrayCopy, columns: slice) -> ArrayCopy:
    return ArrayCopy(transfer.dst[..., columns], transfer.src[..., columns], transfer.pieces)


def move(step: Step) -> None:
    """Copy everything in the step."""
    for dst, src, pieces in step:
        for to, of in pieces:
            dst[to] = src[of]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a device, and how often they occur."""

    seed: int = 0
    delayed: float = 0.0
    failing: float = 0.0
    """Like ``delayed``, a share of all batches, 0 to 1. A delayed batch pauses in the middle of one step, for a
    time drawn from the range ``delay`` (seconds): half of every page is there before the pause, and half comes after
    it. A failing batch stops in the middle of a step."""
    delay: tuple[float, float] = (0.001, 0.050)
    fail_at: frozenset[int] = frozenset()
    """Numbers of batches that fail, too, counted from 0 in the order in which they were submitted to the device."""

    def __post_init__(self) -> None:
        for name in ("delayed", "failing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"faults: {name}={getattr(self, name)!r} must lie between 0 and 1")
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ConfigError(f"faults: delay={self.delay!r} must be a range of seconds")


class Fates:
    """Draws the faults of each batch. Thread-safe: batches may be submitted from any thread."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = Random(faults.seed)
        self._lock = threading.Lock()
        self._count = 0

    def draw(self, steps: int) -> Mapping[int, Hitch]:
        """Return what goes wrong in the next batch of ``steps`` steps: mostly nothing, or a hitch, by the number of its
        step."""
        faults = self._faults
        with self._lock:
            number, self._count = self._count, self._count + 1
            delayed = self._random.random() < faults.delayed
            fails = self._random.random() < faults.failing or number in faults.fail_at
            if not (delayed or fails):
                return {}
            pause = self._random.uniform(*faults.delay) if delayed else 0.0
            return {self._random.randrange(steps): Hitch(0.0, pause, fails)}
