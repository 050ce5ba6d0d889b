"""How an engine and the cache slow each other on one GPU, for ``python -m benchmarks.cuda``: the time to wake a
coroutine, alone and beside a thread that computes in Python; loads beside computing; what copies cost products of
matrices and an engine's small copy of tokens; pinning beside launches."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from msgspec import structs

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.meter import spread
from asynccache.cli.output import Tell
from asynccache.cli.output import size as spelled
from asynccache.config import PoolSpec
from asynccache.core.plan import Move
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import Spans
from asynccache.memory.cuda.pinned import pinned_tensor
from asynccache.memory.device import CopyDirection
from asynccache.memory.mover import Mover
from benchmarks.cuda_copies import BLOCKS, OUT, Figures, Memory, Pieces

LAYERS, SIDE = 32, 4096
"""Layers of a load; rows and columns of the matrices of a product. A product takes long enough that a load's time is
filled with some hundred of them: the launch queue, of about a thousand entries, never fills."""
PAGE_TOKENS = 16
LOADS = ((4 << 10, 512), (16 << 10, 64), (16 << 10, 512), (64 << 10, 512))
"""Bytes that a page has in a layer, and pages of a prompt."""
PATHS = {"engines": 0, "kernel": 1 << 62}
"""For each path the thresholds, in bytes, that force it."""
ROUNDS, SAMPLES, WAKES = 5, 20, 1000
PRODUCTS, TOKEN_COPIES, TOKENS, PIECES = 200, 300, 2048, 440
"""Products that are timed beside copies; copies of tokens to the host; bytes of one; pieces of a call that copies
meanwhile."""
PINNED = 4 << 30
BUSY, BLOCKED = 0.5, 0.02
"""Seconds for which a stream is busy while its queue is filled; a call that takes longer than ``BLOCKED`` has found
it full."""
CALLS = (("a copy", 32 << 10, 1), ("a batch", 32 << 10, 64), ("a batch", 4 << 10, 512), ("a launch", 16 << 10, 440))
"""What fills the queue: bytes of a piece, and pieces. The first takes one entry."""


def forced(device: CudaDevice, path: str) -> CudaDevice:
    """Return the GPU of ``device`` as one that goes by this path alone (``PATHS``)."""
    thresholds = {one.name: PATHS[path] for one in structs.fields(device.settings) if one.name.endswith("_below")}
    return CudaDevice(device.driver, device.name, settings=structs.replace(device.settings, **thresholds))


class Products:
    """Products of two bf16 matrices with ``side`` rows and columns, on a stream of their own."""

    def __init__(self, index: int, side: int) -> None:
        self.stream: Any = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._a, self._b = (torch.randn(side, side, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(index)

    def handle(self, driver: CupyDriver) -> Any:
        """Return the stream as ``driver`` names it."""
        return driver.stream_from(self.stream.cuda_stream)

    def put(self, count: int) -> None:
        """Enqueue ``count`` products. Returns at once."""
        with torch.cuda.stream(self.stream):  # nothing may be awaited in here
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)

    def seconds(self, count: int) -> float:
        """Return the seconds that the device takes for ``count`` products. Blocks until they are done."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self.stream)
        self.put(count)
        end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class _Thread:
    """Calls ``_turn`` in a thread of its own, again and again, from before the ``with`` begins until it ends. The end
    raises what the thread raised."""

    def __enter__(self) -> Self:
        self._stop, self._began = threading.Event(), threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self._running = self._executor.submit(self._run)
        self._began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._executor.shutdown()
        self._running.result()

    def _run(self) -> None:
        try:
            self._turn()  # the first one warms up
        finally:
            self._began.set()
        while not self._stop.is_set():
            self._turn()

    def _turn(self) -> None:
        raise NotImplementedError


class Launches(_Thread):
    """A thread that launches something small twice in a millisecond. ``longest_ms``: what one launch took at most."""

    def __init__(self, index: int) -> None:
        self._products = Products(index, 32)
        self.longest_ms = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self.longest_ms = 0.0
        return self

    def _turn(self) -> None:
        time.sleep(0.0005)
        began = time.perf_counter()
        self._products.put(1)
        self.longest_ms = max(self.longest_ms, round((time.perf_counter() - began) * 1e3, 3))


class Copies(_Thread):
    """A thread that copies without end: four calls at a time. ``calls``: how many there were."""

    def __init__(self, driver: CupyDriver, stream: Any, call: Callable[[], object]) -> None:
        self._driver, self._stream, self._call = driver, stream, call
        self.calls = 0

    def _run(self) -> None:
        self._driver.use_device()
        super()._run()

    def _turn(self) -> None:
        for _ in range(4):
            self._call()
        self._driver.stream_synchronize(self._stream)
        self.calls += 4


class _Python(_Thread):
    """A thread that computes in Python, and so takes the GIL whenever it can."""

    def _turn(self) -> None:
        sum(range(1000))


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Have a thread that computes in Python let others go on after this time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# the driver's queue


def measure_queue(memory: Memory, index: int) -> list[Figures]:
    """Return for each kind of call how many fit behind a stream that is kept busy, before one blocks (``fit``; None if
    none did); how many entries of the queue one takes, beside a single copy, which takes one; how many the cache counts
    for it; and how long another thread's launch took at most meanwhile."""
    driver, rows, event = memory.driver, list[Figures](), memory.driver.event_create()
    products = Products(index, 2 * SIDE)  # few launches keep the device busy: their own queue must not fill
    each = products.seconds(8) / 8
    busy = min(500, math.ceil(BUSY / each))
    for kind, width, count in CALLS:
        pieces = Pieces(memory, OUT, width, count)
        call = partial(pieces.by_kernel, 4) if kind == "a launch" else pieces.by_engines
        counted, fit = call(), None
        driver.stream_synchronize(memory.stream)
        with Launches(index) as launches:
            products.put(busy)
            driver.event_record(event, products.handle(driver))
            driver.stream_wait_event(memory.stream, event)
            ends, number = time.perf_counter() + 0.8 * busy * each, 0
            while fit is None and (began := time.perf_counter()) < ends:
                call()
                fit = number if time.perf_counter() - began > BLOCKED else None
                number += 1
        driver.stream_synchronize(memory.stream)
        rows.append({"call": kind, "pieces": pieces.count, "width": width, "fit": fit, "counted": counted,
                     "longest_launch_ms": launches.longest_ms})  # fmt: skip
    driver.event_destroy(event)
    single = rows[0]["fit"]
    return [{**row, "entries": round(single / row["fit"], 1) if single and row["fit"] else None} for row in rows]


# the GIL


async def measure_waking(device: CudaDevice, tell: Tell) -> list[Figures]:
    """Return how long a load of 32 layers takes from the call until the coroutine that awaits it goes on, and a wake-up
    by an event on an idle stream: alone, beside a thread that computes in Python (5 ms is the interval in which threads
    switch), and beside one while they switch every half millisecond. Cancelling leaves copies in flight, which end by
    themselves."""
    rows = []
    for width, pages in ((64 << 10, 64), (8 << 10, 64)):
        for beside, interval in (("nothing", 0.005), ("Python", 0.005), ("Python, 0.5 ms", 0.0005)):
            tell(f"wake-ups beside {beside}")
            with switching(interval):
                if beside == "nothing":
                    loads, wakes = await _loads_and_wakes(device, width, pages, WAKES)
                else:
                    with _Python():
                        loads, wakes = await _loads_and_wakes(device, width, pages, SAMPLES)
            load, wake = spread(loads, 1e3), spread(wakes, 1e6)
            rows.append({"beside": beside, "width": width, "pages": pages, "load_p50_ms": round(load.p50, 3),
                         "load_max_ms": round(load.max, 3), "wake_p50_us": round(wake.p50, 1),
                         "wake_p99_us": round(wake.p99, 1)})  # fmt: skip
    return rows


def told_of_waking(rows: Sequence[Figures]) -> Iterator[str]:
    """Yield what the figures say of the interval in which threads switch."""
    for usual, often in zip(rows[1::3], rows[2::3], strict=True):
        yield (f"beside Python, {usual['pages']} pages of {spelled(usual['width'])} load "
               f"{usual['load_p50_ms'] / often['load_p50_ms']:.1f} times as fast after "
               "sys.setswitchinterval(0.0005).")  # fmt: skip


async def _loads_and_wakes(device: CudaDevice, width: int, pages: int, wakes: int) -> tuple[list[float], list[float]]:
    spec = PoolSpec(name="bench", component=ComponentKind.FULL, bytes_per_page=LAYERS * width, layers=LAYERS,
                    device_pages=pages, host_pages=pages, hit_policy=HitPolicy.ALL_PAGES)  # fmt: skip
    own = CudaDevice(device.driver, device.name, settings=device.settings)
    try:
        mover, stream = Mover(own, [spec]), own.stream("wake-up")
        ids = np.random.default_rng(2).permutation(pages).astype("<i4").tobytes()
        loaded, woken = list[float](), list[float]()
        for number in range(SAMPLES + 1):
            began = time.perf_counter()
            await mover.load([Move(0, ids, ids)]).done.wait()
            if number:  # the first one warms up
                loaded.append(time.perf_counter() - began)
        for _ in range(wakes):
            began = time.perf_counter()
            await stream.record().wait()
            woken.append(time.perf_counter() - began)
        return loaded, woken
    finally:
        await own.aclose()


# products and small copies beside copies


def measure_beside(memory: Memory, products: Products, tell: Tell) -> list[Figures]:
    """Return what goes on beside copies of each kind: the milliseconds of a product, the microseconds of a copy of
    tokens to the host, and the rate of the copies in GB/s meanwhile."""
    driver = memory.driver
    tokens, here = driver.device_tensor((TOKENS,)), pinned_tensor(driver, (TOKENS,))
    one = Spans(*(np.array([number], np.uint64) for number in (here.data_ptr(), tokens.data_ptr(), TOKENS)))
    ways: list[tuple[str, Callable[[], object] | None, int]] = [("nothing", None, 0)]
    for towards in (CopyDirection.OUT, CopyDirection.IN):
        for width in (16 << 10, 64 << 10):
            some = Pieces(memory, towards, width, PIECES)
            name = f"{towards.value}, {spelled(width)}"
            ways.append((f"{name}: engines", some.by_engines, some.bytes))
            if width == 16 << 10:
                ways += [(f"{name}: kernel {blocks}", partial(some.by_kernel, blocks), some.bytes)
                         for blocks in BLOCKS]
    rows = []
    for name, call, size in ways:
        tell(f"products beside copies {name}")
        products.seconds(8)
        if call is None:
            rows.append({"copies": name, "gb_s": None, **_products_and_tokens(driver, products, one)})
            continue
        with Copies(driver, memory.stream, call) as copies:
            before, began = copies.calls, time.perf_counter()
            found = _products_and_tokens(driver, products, one)
            rate = (copies.calls - before) * size / (time.perf_counter() - began) / 1e9
        rows.append({"copies": name, "gb_s": round(rate, 2), **found})
    return rows


def _products_and_tokens(driver: CupyDriver, products: Products, tokens: Spans) -> Figures:
    stream, late = products.handle(driver), list[float]()
    seconds = products.seconds(PRODUCTS)
    for _ in range(TOKEN_COPIES):
        began = time.perf_counter()
        driver.copy(stream, CopyDirection.OUT, tokens)
        driver.stream_synchronize(stream)
        late.append(time.perf_counter() - began)
    found = spread(late, 1e6)
    return {"product_ms": round(seconds / PRODUCTS * 1e3, 4), "token_copy_p50_us": round(found.p50, 1),
            "token_copy_p99_us": round(found.p99, 1)}  # fmt: skip


def measure_pinning(driver: CupyDriver, index: int) -> Figures:
    """Return the seconds to touch and pin ``PINNED`` bytes and to unpin them, and how long another thread's launch took
    at most meanwhile."""
    with Launches(index) as launches:
        began = time.perf_counter()
        memory = pinned_tensor(driver, (PINNED,))
        pinned = time.perf_counter() - began
        del memory
        unpinned = time.perf_counter() - began - pinned
    return {"bytes": PINNED, "pin_s": round(pinned, 3), "unpin_s": round(unpinned, 3),
            "longest_launch_ms": launches.longest_ms}  # fmt: skip


# loads beside computing


async def measure_loads(device: CudaDevice, products: Products, tell: Tell) -> list[Figures]:
    """Return for each kind of prompt (``LOADS``) and each path how long all layers take to load, a computation that
    takes as long, and both together, where the computation of each layer waits for the layer's load.

    This is measured as an engine has it: through a cache, a lease and ``wait_layer``. Two prompts take turns on a
    device that holds one of them, so each lease finds all of its prompt on the host. The time begins before the lease
    and ends with the last layer's computation. Seconds, unless a name says otherwise. Cancelling closes the cache; what
    is in flight ends by itself."""
    rows = []
    for width, pages in LOADS:
        for path in PATHS:
            tell(f"loads of {pages} pages, {spelled(width)} a layer, by the {path}, beside computing")
            own = forced(device, path)
            try:
                found = await _layer_wise(own, products, width, pages)
                rows.append({"width": width, "pages": pages, "path": path, **found})
            finally:
                await own.aclose()
    return rows


async def _layer_wise(device: CudaDevice, products: Products, width: int, pages: int) -> Figures:
    full = Full(bytes_per_token=width * LAYERS // PAGE_TOKENS, layers=LAYERS, device_tokens=(pages + 8) * PAGE_TOKENS,
                host_tokens=(2 * pages + 8) * PAGE_TOKENS)  # fmt: skip
    config = CacheConfig(model="bench", components=(full,), page_size=PAGE_TOKENS, device=device.name)
    async with AsyncCache(config, device=device) as cache:
        prompts = _TwoPrompts(cache, device, products, pages)
        for _ in range(4):  # both are computed, backed up and pushed out, then loaded: all is warm
            await prompts.serve(0)
        load = min([await prompts.serve(0) for _ in range(ROUNDS)])
        one = min(products.seconds(64) for _ in range(ROUNDS)) / 64
        each = max(1, round(load / LAYERS / one))
        compute = min(products.seconds(each * LAYERS) for _ in range(ROUNDS))
        prompts.waits.clear()
        together = min([await prompts.serve(each) for _ in range(ROUNDS)])
    waits = spread(prompts.waits, 1e6)
    return {"load_s": round(load, 6), "compute_s": round(compute, 6), "together_s": round(together, 6),
            "ratio": round(together / max(load, compute), 3), "products": each * LAYERS,
            "tokens": min(prompts.loaded), "wait_layer_p50_us": round(waits.p50, 2),
            "wait_layer_max_us": round(waits.max, 2)}  # fmt: skip


class _TwoPrompts:
    """Two prompts that are served by turns. ``waits``: how many seconds each ``wait_layer`` kept the caller.
    ``loaded``: how many tokens each of the last two leases had from the host."""

    def __init__(self, cache: AsyncCache, device: CudaDevice, products: Products, pages: int) -> None:
        self._cache, self._products = cache, products
        self._engine: Any = device.engine_stream(products.stream)
        self._tokens = [[side * 1_000_000 + i for i in range(pages * PAGE_TOKENS + 1)] for side in range(2)]
        self.waits: list[float] = []
        self.loaded: list[int] = []

    async def serve(self, each: int) -> float:
        """Serve the next prompt with ``each`` products in each layer, which wait for the layer's load; 0: the load
        alone. Returns how many seconds it took, from before the lease to the end of the last layer's products."""
        self._tokens.reverse()
        tokens, began = self._tokens[0], time.perf_counter()
        async with self._cache.lease(tokens) as lease:
            for layer in range(LAYERS):
                called = time.perf_counter()
                lease.wait_layer(self._products.stream, layer)
                self.waits.append(time.perf_counter() - called)
                self._products.put(each)
            await self._engine.record().wait()
            taken = time.perf_counter() - began
            self.loaded = [*self.loaded, lease.hits.host][-2:]
            await lease.commit(tokens)
        return taken
