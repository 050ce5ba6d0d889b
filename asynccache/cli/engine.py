"""The stand-in for an inference engine: it writes and reads KV on the device, where a real engine would.

The stand-in writes the bytes that ``Pattern`` defines, and to read means to compare the pages with those bytes. The
work is done in a thread, in calls that release the GIL; on the loop's thread such a call would have to wait until it
gets the GIL back. So a request's work is in flight while its task waits, and the work goes on when that task is
cancelled. The request then names the work's event when it releases its lease, as a real engine names the event of a
kernel on a stream.

An ``Engine`` does the work of requests: the ``StandInEngine`` of this process, or in ``ranks`` an engine that sends it
to the processes of several ranks.

The bytes that stand in for KV are a function of the tokens up to the end of a page, of the pool and of the layer. A
page's *value* is 64 bits that depend on the namespace and on every token from the first of the prompt to the last of
the page. This chain is the tool's own and not the cache's, so a fault in the cache's hashing shows as wrong bytes. Word
w of a page in a pool's layer is ``value ^ salt[pool, layer][w]``, with salts drawn at random. So a page in the wrong
slot, layer or pool, a page that is copied by half, and stale bytes all differ from what is expected. It costs one
operation per 8 bytes.

``make_device`` and ``faulty_stores`` make what an engine is given by a run's options: a device, and the faults of
``--faults``. torch and cupy are only imported when a device is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asynccache.cli.meter import run_delay
from asynccache.cli.workloads import Tokens
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind
from asynccache.memory.device import Event, parse_device
from asynccache.storage import ParsedUrl, StorageBackend, StoreLayout, attachment
from asynccache.testing.faulty_backend import FaultyBackend

if TYPE_CHECKING:
    import torch

    from asynccache.memory.cpu import CpuDevice
    from asynccache.memory.cuda.device import CudaDevice
    from asynccache.memory.host_copies import Faults
    from asynccache.memory.signals import HostGate


CALL_BYTES = 1 << 20
"""The bytes of a layer that one call of torch fills or compares at most, unless a single page has more."""
ENOUGH_CPU = 0.01
"""Seconds of CPU time that the batches must have taken before ``slowdown`` is computed from them."""

Ids = npt.NDArray[np.int32]


class Layers(Protocol):
    """The layers of one pool on the device."""

    def layer(self, i: int) -> torch.Tensor: ...


class PageRun(NamedTuple):
    """Pages of one component that follow each other in one sequence."""

    component: ComponentKind
    ids: Ids
    """Each page's slot on the device; -1: the lease has no page there."""
    values: Values
    """The 64 bits that define the bytes of each page (``Pattern``)."""
    first: int
    """The position of the first page in its sequence, in pages; for messages."""


class Comparison(NamedTuple):
    """The result of a comparison."""

    pages: int
    """How many pages were compared."""
    wrong: int
    """How many of the pages are missing or hold other bytes."""
    what: tuple[str, ...] = ()
    """The first few wrong pages, described."""


NOTHING = Comparison(0, 0)


class BegunBatch(NamedTuple):
    """A batch that an engine has begun: pages to fill or to verify."""

    work: object
    """What the cache is to be told: the event that fires when the batch has ended, or the batch's number."""
    verdict: Callable[[], Coroutine[Any, Any, Comparison]]
    """Returns the result when the batch has ended; cancelling it leaves the batch running."""


class Engine(Protocol):
    """An engine, which fills and verifies pages in the order in which it is asked to. ``slowdown``: how many times as
    long its work takes because the machine is busy; 1.0 on an idle machine."""

    @property
    def slowdown(self) -> float: ...

    def begin(self, pieces: Sequence[PageRun], *, verifies: bool) -> BegunBatch:
        """Begin to compare these pages with what they must hold or, if ``verifies`` is False, to fill them."""
        ...

    def close(self) -> None:
        """Wait for the batches in flight, and take no more. Blocking."""
        ...


class StandInEngine:
    """Owns the thread that fills and compares pages, batch by batch, as kernels run on one stream. One per cache, to be
    closed with it.

    ``specs``: the cache's pools; ``pools``: their layers by the pool's name; ``gate`` makes an event that can be fired
    by hand.
    """

    def __init__(self, specs: Sequence[PoolSpec], pools: Mapping[str, Layers], gate: Callable[[], HostGate]) -> None:
        self._gate = gate
        self._thread = ThreadPoolExecutor(1, "engine")
        self._pools: dict[ComponentKind, list[_Pool]] = {kind: [] for kind in ComponentKind}
        for spec in specs:
            if spec.bytes_per_page:
                self._pools[spec.component].append(_Pool(spec, pools[spec.name]))
        self._queued = self._cpu = 0.0

    @property
    def slowdown(self) -> float:
        """The factor by which a busy machine made the batches take longer: (CPU time + time waiting for a core) / CPU
        time, over all batches so far.

        1.0 until the batches have taken ``ENOUGH_CPU``, where the kernel does not count the wait, and where the pages
        are on a GPU, which a busy machine does not slow down.
        """
        if self._cpu < ENOUGH_CPU or any(pool.is_cuda for pools in self._pools.values() for pool in pools):
            return 1.0
        return 1.0 + self._queued / self._cpu

    def close(self) -> None:
        self._thread.shutdown()

    def begin(self, pieces: Sequence[PageRun], *, verifies: bool) -> BegunBatch:
        future, event = self.submit(lambda: self.perform(pieces, verifies=verifies))
        return BegunBatch(event, lambda: _result(future))

    def submit(self, batch: Callable[[], Comparison]) -> tuple[Future[Comparison], Event]:
        """Queue ``batch``. Returns its future and an event that fires when the batch has ended, failed, or been dropped
        before it began: from then on no thread touches its pages."""
        def timed() -> Comparison:
            cpu, queued = time.thread_time(), run_delay()
            try:
                return batch()
            finally:
                self._cpu += time.thread_time() - cpu
                self._queued += run_delay() - queued

        gate, future = self._gate(), self._thread.submit(timed)
        future.add_done_callback(lambda _: gate.open())
        return future, gate

    def perform(self, pieces: Sequence[PageRun], *, verifies: bool) -> Comparison:
        """Verify or fill these pages, in every pool of their components. Blocking."""
        if verifies:
            return self.verify(pieces)
        self.write(pieces)
        return NOTHING

    def write(self, pieces: Sequence[PageRun]) -> None:
        """Fill the pages of ``pieces``. Blocking."""
        for piece in pieces:
            for pool in self._pools[piece.component]:
                pool.write(piece)

    def verify(self, pieces: Sequence[PageRun]) -> Comparison:
        """Compare the pages of ``pieces`` with what they must hold. Blocking."""
        pages, what, wrong = 0, list[str](), 0
        for piece in pieces:
            for pool in self._pools[piece.component]:
                found = pool.verify(piece)
                pages, wrong = pages + len(piece.ids), wrong + len(found)
                what += found[:3]
        return Comparison(pages, wrong, tuple(what))


async def _result(future: Future[Comparison]) -> Comparison:
    return await asyncio.wrap_future(future)


class _Pool:
    """One pool, with the pattern of each of its layers, which is different for each rank's share, since another rank's
    bytes are wrong bytes."""

    def __init__(self, spec: PoolSpec, layers: Layers) -> None:
        self.name = spec.name
        part = spec.name if spec.shard == "replicated" else f"{spec.name}/{spec.shard}"
        found = [layers.layer(i) for i in range(spec.layers)]
        self._patterns = [Pattern(part, number, layer) for number, layer in zip(spec.model_layers, found, strict=True)]
        self._slice = max(1, CALL_BYTES // (spec.bytes_per_page // spec.layers))
        self._device = found[0].device
        self.is_cuda = found[0].is_cuda

    def write(self, piece: PageRun) -> None:
        for ids, values, _ in self._slices(piece):
            for pattern in self._patterns:
                pattern.write(ids, values)
        if self.is_cuda:  # the event that fires after this call says that the pages are written
            import torch

            torch.cuda.current_stream(self._device).synchronize()

    def verify(self, piece: PageRun) -> list[str]:
        """One line for each wrong page; of several wrong layers of a page the first is named."""
        wrong = {piece.first + int(i): "has no slot" for i in np.flatnonzero(piece.ids < 0)}
        present = piece.ids >= 0
        positions = piece.first + np.flatnonzero(present)
        held = PageRun(piece.component, piece.ids[present], piece.values[present], 0)
        for ids, values, start in self._slices(held):
            for index, pattern in enumerate(self._patterns):
                for i in pattern.mismatches(ids, values):
                    wrong.setdefault(int(positions[start + i]), f"in slot {int(ids[i])} differs from layer {index} on")
        return [f"{self.name} page {position} {what}" for position, what in sorted(wrong.items())]

    def _slices(self, piece: PageRun) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        import torch

        ids = torch.from_numpy(piece.ids.astype(np.int64)).to(self._device)
        values = torch.from_numpy(piece.values.view(np.int64)).to(self._device)
        return [(ids[i : i + self._slice], values[i : i + self._slice], i) for i in range(0, len(ids), self._slice)]


Values = npt.NDArray[np.uint64]

_U64 = np.uint64
_A, _B, _C = _U64(0x9E3779B97F4A7C15), _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)


def page_values(tokens: Tokens, page_size: int, namespace: str | None = None) -> Values:
    """The value of each whole page of ``tokens``, in ``namespace``."""
    pages = len(tokens) // page_size
    words = tokens[: pages * page_size].astype(_U64)
    words += np.arange(1, len(words) + 1, dtype=_U64) * _A
    words ^= words >> _U64(31)
    words *= _B
    sums: Values = words.reshape(pages, page_size).sum(axis=1, dtype=_U64).cumsum(dtype=_U64)
    if namespace is not None:
        sums += _U64(int.from_bytes(hashlib.blake2b(namespace.encode(), digest_size=8).digest(), "little"))
    sums ^= sums >> _U64(29)
    sums *= _C
    sums ^= sums >> _U64(32)
    return sums


class Pattern:
    """Writes and compares the bytes of one layer of one pool. ``layer``: uint8, shape ``[pages, page_bytes]``."""

    def __init__(self, pool: str, number: int, layer: torch.Tensor) -> None:
        import torch  # here, because the head of several ranks has no device and needs no torch

        self._torch = torch
        self._bytes = layer.shape[1]
        seed = hashlib.blake2b(f"{pool}/{number}".encode(), digest_size=8).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little")))
        low, high = -(1 << 63), (1 << 63) - 1
        salt = rng.integers(low, high, size=-(-self._bytes // 8), dtype=np.int64, endpoint=True)
        self._salt = torch.from_numpy(salt).to(layer.device)
        # As 64-bit words if its pages are whole words, because gathering single bytes is ten times slower.
        self._layer = layer if self._bytes % 8 else layer.view(torch.int64)

    def write(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Write the bytes that ``values[i]`` stands for to page ``pages[i]``."""
        self._layer.index_copy_(0, pages, self._expand(values))

    def mismatches(self, pages: torch.Tensor, values: torch.Tensor) -> Sequence[int]:
        """The positions i at which page ``pages[i]`` does not hold the bytes that ``values[i]`` stands for."""
        found, expected = self._layer.index_select(0, pages), self._expand(values)
        if self._torch.equal(found, expected):
            return ()
        wrong: list[int] = (found != expected).any(dim=1).nonzero().flatten().tolist()
        return wrong

    def _expand(self, values: torch.Tensor) -> torch.Tensor:
        rows = self._torch.bitwise_xor(values[:, None], self._salt[None, :])
        return rows.view(self._torch.uint8)[:, : self._bytes] if self._bytes % 8 else rows


def make_device(name: str, faults: Faults) -> CpuDevice | CudaDevice:
    """A new device with these faults, which the caller closes.

    Raises:
        ConfigError: there is no such GPU, or what it needs is not installed.
    """
    if parse_device(name).kind == "cpu":
        from asynccache.memory.cpu import CpuDevice

        return CpuDevice(faults=faults)
    from asynccache.memory.cuda.device import open_device

    return open_device(name, faults=faults)


def device_faults(share: float, seed: int) -> Faults:
    """Faults for a device: of all copies, ``share / 2`` are delayed and ``share / 4`` fail."""
    from asynccache.memory.host_copies import Faults  # here, because it imports torch

    return Faults(seed=seed, delayed=share / 2, failing=share / 4)


@contextmanager
def faulty_stores(share: float, seed: int) -> Iterator[None]:
    """Give faults to all stores that are opened while this lasts. ``share``: of their calls, see ``FaultyBackend``; 0:
    no faults. The first store draws its faults with ``seed``, and each further one with the next number."""
    known, seeds = attachment.backend_class, iter(range(seed, seed + (1 << 30)))
    if share:
        attachment.backend_class = lambda scheme: _Faulty(known(scheme), share, next(seeds))
    try:
        yield
    finally:
        attachment.backend_class = known


class _Faulty:
    """Stands for a backend class, and gives faults to every backend that it opens."""

    def __init__(self, kind: attachment.BackendClass, share: float, seed: int) -> None:
        self._kind = kind
        self._share = share
        self._seed = seed

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """Open a backend as the class does. Cancelling is as for the class."""
        return FaultyBackend(await self._kind.open(url, layout), self._share, self._seed)
