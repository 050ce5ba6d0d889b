"""A CUDA driver without a GPU: streams are queues, one thread is the device, and an edge between streams that is
missing is reported.

Law: it behaves as badly as a real driver may. Between streams there is no order but by events, and the thread picks
which stream goes on by a seed; a copy comes in halves; an event that was never recorded reads as complete, one that is
recorded again stands for the later work; an error of the device is sticky; memory that was not pinned cannot be copied
from.
Every thread begins on device 0, and this is device 1; work for a device is refused in a thread that has no context
there. A stream's queue has room for a fixed number of entries, and a call for a full one blocks. To ask for an event
that was recorded in a graph costs the graph. The driver has one lock, which another thread may hold for long.

Besides, a vector clock per stream tells which work is ordered before which, by streams, by events and by what the host
has seen to be complete. Two accesses to a byte, one of them a write, that nothing orders are a ``problem``, whatever
order they happened to run in.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, repeat
from random import Random

import numpy as np
import torch

from asynccache.memory.cuda.cupy_driver import CupyDriver, DeviceIdentity
from asynccache.memory.cuda.kernels import Table
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.device import CopyDirection

Clock = Counter[int]
Piece = tuple[int, int, int]  # dst, src, size
Range = tuple[int, int]
INDEX = 1


@dataclass
class _Event:
    version: int = 0
    done: int = 0
    clock: Clock = field(default_factory=Counter)
    captured: bool = False  # it was recorded last in a stream that is captured


@dataclass
class _Op:
    """Work of one stream. ``units`` does it, a bit at a time; ``ready`` tells whether it may begin."""

    stream: int
    number: int
    clock: Clock
    units: Iterator[None]
    ready: Callable[[], bool]
    entries: int = 1


@dataclass
class _Access:
    stream: int
    number: int
    clock: Clock
    start: np.ndarray
    stop: np.ndarray
    writes: bool


class SimulatedCuda(CupyDriver):
    """``break_at``: the number of the piece of work that meets an illegal address. ``depth``: entries of a stream's
    queue, before a call blocks. ``free``: bytes of device memory; ``pinnable``: bytes that can be pinned."""

    def __init__(
        self, seed: int = 0, *, break_at: int | None = None, depth: int = 1024, free: int = 1 << 33,
        pinnable: int = 1 << 33, batches: bool = True,
    ) -> None:  # fmt: skip
        self.problems: list[str] = []
        self.calls: Counter[str] = Counter()
        self.pinned: dict[int, int] = {}
        self.held: set[int] = set()
        self.captured: set[int] = set()  # streams whose work goes into a graph
        self.lost: list[str] = []  # what has cost a graph
        self.registers = True
        self.deepest = 0  # entries that were in one queue
        self.blocks: list[int] = []  # of each launch
        self._random = Random(seed)
        self._break_at, self._depth = break_at, depth
        self._free, self._pinnable, self.batches = free, pinnable, batches
        self._state = threading.Condition()
        self._streams: dict[int, deque[_Op]] = {}
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, _Event] = {}
        self._seen: Clock = Counter()  # what the host knows to be complete
        self._accesses: list[_Access] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._broken: DriverError | None = None
        self._refusals: list[tuple[str, int | None, Iterator[Exception | None]]] = []
        self._current = threading.local()
        self._next = 0x1000
        self._done = 0
        self._closed = False
        self._paused = False
        self._unlocked = threading.Event()
        self._unlocked.set()
        self._thread = threading.Thread(target=self._run, name="simulated-gpu", daemon=True)
        self._thread.start()

    # for tests

    def pause(self) -> None:
        """The device does nothing from now on."""
        with self._state:
            self._paused = True

    def resume(self) -> None:
        """It goes on."""
        with self._state:
            self._paused = False
            self.held.clear()
            self._state.notify_all()

    def hold(self, stream: int) -> None:
        """Nothing of ``stream`` happens until ``resume``."""
        with self._state:
            self.held.add(stream)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Somebody holds the driver's lock in this context: he pins memory, or loads a module. No call returns."""
        self._unlocked.clear()
        try:
            yield
        finally:
            self._unlocked.set()

    def use_stream(self, stream: int | None) -> None:
        """``stream`` is torch's current stream of this thread."""
        self._current.stream = stream

    def refuse(
        self, call: str, code: int = 901, *, stream: int | None = None, after: int = 0, times: int = 1,
        error: Exception | None = None,
    ) -> None:
        """Behind ``after`` such calls (on this stream) ``times`` ones are refused with ``code``, or with ``error``. A
        sticky code is the end of the device."""
        error = error or DriverError(f"{call}: refused ({code})", code)
        with self._state:
            self._refusals.append((call, stream, chain(repeat(None, after), repeat(error, times))))

    def compute(
        self, stream: int, action: Callable[[], object], *, reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """An engine's kernel: ``action``, which touches these contiguous tensors."""
        touched = ([_range(t) for t in reads], [_range(t) for t in writes])

        def units(op: _Op) -> Iterator[None]:
            self._touch(op, *touched)
            yield
            action()

        with self._state:
            self._check()
            self._enqueue(stream, units)

    def await_entries(self, stream: int, entries: int) -> bool:
        """Return when so much of the stream's queue is taken; False if that lasts too long."""
        with self._state:
            return self._state.wait_for(lambda: self._taken(stream) >= entries, 30)

    def _taken(self, stream: int) -> int:
        return sum(op.entries for op in self._streams[stream])

    def pending(self) -> int:
        """Work that is queued on all streams."""
        with self._state:
            return sum(map(len, self._streams.values()))

    def close(self) -> None:
        """End the device's thread."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(30)

    # the protocol

    def identity(self) -> DeviceIdentity:
        return DeviceIdentity("a simulated GPU", (9, 0), 80 << 30, "0000:00:00.0", 13000, self.batches, self.registers)

    def use_device(self) -> None:
        with self._state:
            self._admit("use_device")
        self._current.device = INDEX

    def free_memory(self) -> int:
        with self._state:
            self._admit("free_memory")
        return self._free

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = int(np.prod(shape, dtype=np.int64))
        tensor = torch.frombuffer(bytearray(size + 256), dtype=torch.uint8)
        shift = -tensor.data_ptr() % 256
        self._memory[tensor.data_ptr()] = tensor
        return tensor[shift : shift + size].reshape(shape)

    def host_register(self, address: int, size: int) -> None:
        with self._state:
            self._admit("host_register")
            if not self.registers:
                self.problems.append("memory was registered that the device sees at another address")
            self._pin(address, size)

    def _pin(self, address: int, size: int) -> None:
        if sum(self.pinned.values()) + size > self._pinnable:
            raise DriverError("out of memory")
        self.pinned[address] = size

    def host_alloc(self, size: int) -> int:
        with self._state:
            self._admit("host_alloc")
            memory = torch.full((size,), 7, dtype=torch.uint8)
            self._pin(memory.data_ptr(), size)
            self._memory[memory.data_ptr()] = memory
            return memory.data_ptr()

    def host_free(self, address: int) -> None:
        with self._state:
            del self.pinned[address], self._memory[address]

    def host_unregister(self, address: int) -> None:
        with self._state:
            if self.pinned.pop(address, None) is None:
                self.problems.append("memory unpinned that was not pinned")

    def stream_create(self) -> int:
        with self._state:
            self._admit("stream_create")
            handle = self._handle()
            self._streams[handle], self._clocks[handle] = deque(), Counter()
            return handle

    def stream_from(self, pointer: int) -> int:
        return pointer

    def event_from(self, pointer: int) -> int:
        return pointer

    def captures_here(self) -> bool:
        with self._state:
            return getattr(self._current, "stream", None) in self.captured

    def stream_destroy(self, stream: int) -> None:
        with self._state:
            if self._streams.pop(stream):
                self.problems.append("a stream was destroyed with work in it")

    def stream_synchronize(self, stream: int) -> None:
        with self._state:
            self._admit("stream_synchronize", stream, here=True)
            ops = self._streams[stream]
            number, clock = self._clocks[stream][stream], self._clocks[stream].copy()
            while ops and ops[0].number <= number and self._broken is None:
                self._state.wait()
            self._check()
            self._seen |= clock

    def stream_wait_event(self, stream: int, event: int) -> None:
        with self._state:
            self._admit("stream_wait_event", stream)
            state = self._events[event]
            if state.captured and stream not in self.captured:
                self.problems.append("a stream was pulled into a graph by an event of a captured stream")
            self._await_room(stream, 1)
            version = state.version
            self._clocks[stream] |= state.clock
            self._enqueue(stream, lambda op: iter(()), lambda: state.done >= version)

    def is_captured(self, stream: int) -> bool:
        with self._state:
            return stream in self.captured

    def event_create(self) -> int:
        with self._state:
            self._admit("event_create")
            handle = self._handle()
            self._events[handle] = _Event()
            return handle

    def event_destroy(self, event: int) -> None:
        with self._state:
            state = self._events.pop(event)
            if state.done < state.version:
                self.problems.append("an event was destroyed before it happened")

    def event_record(self, event: int, stream: int) -> None:
        with self._state:
            self._admit("event_record", stream)
            state = self._events[event]
            state.captured = stream in self.captured
            state.version += 1
            version = state.version

            def units(op: _Op) -> Iterator[None]:
                yield
                state.done = max(state.done, version)  # and with that it has left the stream's queue

            state.clock = self._enqueue(stream, units).clock

    def event_query(self, event: int) -> bool:
        with self._state:
            self._admit("event_query")
            if self._events[event].captured:
                self.lost.append("an event of it was asked for")
                raise DriverError("operation not permitted on an event last recorded in a capturing stream", 907)
            state = self._events[event]
            if state.done < state.version:
                return False
            self._seen |= state.clock
            return True

    def event_synchronize(self, event: int) -> None:
        with self._state:
            self._admit("event_synchronize", here=True)
            state = self._events[event]
            version, clock = state.version, state.clock
            while state.done < version and self._broken is None:
                self._state.wait()
            self._check()
            self._seen |= clock

    def copy(self, stream: int, towards: CopyDirection, spans: Spans) -> int:
        self.calls["copy"] += 1
        self.calls["spans"] += len(spans.size)
        pieces = list(zip(*(array.tolist() for array in spans), strict=True))
        entries = -(-len(pieces) // 8) if self.batches else len(pieces)
        self._copy(stream, towards, pieces, entries)
        return entries

    def launch(self, stream: int, table: Table, blocks: int) -> int:
        """The parameters are copied before it returns, as those of the real one are."""
        self.calls["launch"] += 1
        self.blocks.append(blocks)
        one = table.copy()
        width, to, of = (int(one[name]) for name in ("width", "dst_pitch", "src_pitch"))
        layers, pages = int(one["layers"]), int(one["pages"])
        if any(number % 16 for number in (width, to, of, *one["dst_bases"].tolist(), *one["src_bases"].tolist())):
            self.problems.append(f"a kernel was launched on rows that are not aligned: {one}")
        bases = zip(one["dst_bases"][:layers].tolist(), one["src_bases"][:layers].tolist(), strict=True)
        ids = list(zip(one["dst_ids"][:pages].tolist(), one["src_ids"][:pages].tolist(), strict=True))
        pieces = [(dst + i * to, src + j * of, width) for dst, src in bases for i, j in ids]
        self._copy(stream, None, pieces, 2)
        return 2

    # inside

    def _copy(self, stream: int, towards: CopyDirection | None, found: list[Piece], entries: int) -> None:
        with self._state:
            self._admit("copy", stream, here=True)

        def units(op: _Op) -> Iterator[None]:
            self._touch(op, [(s, s + n) for _, s, n in found], [(d, d + n) for d, _, n in found])
            if not self._allowed(towards, found):
                return
            for dst, src, size in found:
                half = size // 2
                ctypes.memmove(dst, src, half)
                yield
                ctypes.memmove(dst + half, src + half, size - half)

        with self._state:
            self._await_room(stream, entries)
            self._enqueue(stream, units, entries=entries)

    def _await_room(self, stream: int, entries: int) -> None:
        ops = self._streams[stream]
        if ops and self._taken(stream) + entries > self._depth:
            self.calls["blocked"] += 1
            self._state.notify_all()
        while ops and self._taken(stream) + entries > self._depth and self._broken is None:
            self._state.wait()

    def _enqueue(
        self, stream: int, units: Callable[[_Op], Iterator[None]], ready: Callable[[], bool] = lambda: True,
        entries: int = 1,
    ) -> _Op:  # fmt: skip
        clock = self._clocks[stream]
        clock |= self._seen
        clock[stream] += 1
        op = _Op(stream, clock[stream], clock.copy(), iter(()), ready, entries)
        op.units = units(op)
        self._streams[stream].append(op)
        self.deepest = max(self.deepest, self._taken(stream))
        self._state.notify_all()
        return op

    def _handle(self) -> int:
        self._next += 8
        return self._next

    def _admit(self, call: str, stream: int | None = None, *, here: bool = False) -> None:
        """``here``: the calling thread has to be on this device."""
        if not self._unlocked.is_set():  # the lock of this class is free meanwhile, as the loop's own are
            self._state.release()
            self._unlocked.wait()
            self._state.acquire()
        if here and getattr(self._current, "device", 0) != INDEX:
            self.problems.append(f"{threading.current_thread().name}: {call} from a thread that is on another device")
            raise DriverError("invalid device context", 201)
        self._check()
        for refused, where, errors in self._refusals:
            if refused == call and where in (None, stream) and (error := next(errors, None)):
                if isinstance(error, DriverError) and error.sticky:
                    self._broken = error
                    self._state.notify_all()
                raise copy(error)  # one that is kept keeps the frames that it went through

    def _check(self) -> None:
        if self._broken is not None:
            raise DriverError(str(self._broken), self._broken.code)

    def _run(self) -> None:
        with self._state:
            while not self._closed:
                ready = [] if self._paused or self._broken else self._ready()
                if not ready:
                    self._state.wait()
                    continue
                self._go_on(self._random.choice(ready))
                self._state.notify_all()
                self._state.wait(0)  # whoever waits for the lock may have it

    def _ready(self) -> list[deque[_Op]]:
        return [ops for handle, ops in self._streams.items() if ops and handle not in self.held and ops[0].ready()]

    def _go_on(self, ops: deque[_Op]) -> None:
        """Some units of the first piece of work of this stream."""
        for _ in range(self._random.randrange(1, 64)):
            try:
                next(ops[0].units)
            except StopIteration:
                ops.popleft()
                self._done += 1
                if self._done - 1 == self._break_at:
                    self._broken = DriverError("an illegal memory access was encountered", 700)
                return

    def _allowed(self, towards: CopyDirection | None, pieces: Sequence[Piece]) -> bool:
        before = len(self.problems)
        for dst, src, size in pieces:
            for address, on_host in ((dst, towards is CopyDirection.OUT), (src, towards is CopyDirection.IN)):
                kinds = ((self.pinned.items(),) if on_host else ()) if towards else (self.pinned.items(),)
                known = [*kinds, ((a, t.numel()) for a, t in self._memory.items())] if not on_host else kinds
                if not any(a <= address and address + size <= a + n for kind in known for a, n in kind):
                    self.problems.append(f"a copy {towards and towards.value} touches memory that is not "
                                         f"{'pinned' if on_host else 'on the device'}")  # fmt: skip
        return len(self.problems) == before

    def _touch(self, op: _Op, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        for ranges, writing in ((reads, False), (writes, True)):
            if ranges:
                start, stop = np.array(ranges, np.uint64).T
                self._access(_Access(op.stream, op.number, op.clock, start, stop, writing))

    def _access(self, new: _Access) -> None:
        for old in self._accesses:
            if (old.writes or new.writes) and not _ordered(old, new) and _overlap(old, new):
                self.problems.append(f"a race: work {old.number} of stream {old.stream:x} and work {new.number} of "
                                     f"stream {new.stream:x} touch the same bytes and nothing orders them")  # fmt: skip
        self._accesses.append(new)
        if len(self._accesses) % 64 == 0:
            self._forget()

    def _forget(self) -> None:
        """Accesses that all work to come is ordered behind."""
        clocks = [ops[0].clock if ops else self._seen for ops in self._streams.values()] + [self._seen]
        self._accesses = [a for a in self._accesses if not all(clock[a.stream] >= a.number for clock in clocks)]


def _ordered(a: _Access, b: _Access) -> bool:
    return a.stream == b.stream or b.clock[a.stream] >= a.number or a.clock[b.stream] >= b.number


def _overlap(a: _Access, b: _Access) -> bool:
    if a.start.min() >= b.stop.max() or b.start.min() >= a.stop.max():
        return False
    return bool(((a.start[:, None] < b.stop[None, :]) & (b.start[None, :] < a.stop[:, None])).any())


def _range(tensor: torch.Tensor) -> Range:
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
