"""Copies beside computing: what they cost a stream of bf16 products, and how well a layer-wise load hides behind one.

Needs torch with CUDA. Products are timed by the device; copies run from before their first to after their last, or the
round is done again with more of them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from asynccache.cli.cuda_clock import best, ended, middle
from asynccache.cli.cuda_waking import Pages
from asynccache.memory.cuda.calibration import Bench, forced
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver import Towards
from asynccache.memory.cuda.paths import Chooser, Path
from asynccache.memory.cuda.rows import Rows

SIDE, SMALL_SIDE = 4096, 2048
PRODUCTS = 200
LAYERS = 32
WIDTH, FRAGMENTS = 64 << 10, 8192
TRIES = 6
WAYS = [(Towards.OUT, Path.DMA), (Towards.OUT, Path.STAGED), (Towards.OUT, Path.KERNEL), (Towards.IN, Path.DMA),
        (Towards.IN, Path.KERNEL)]

Figures = dict[str, Any]


class Products:
    """An endless supply of bf16 products on a stream of their own."""

    def __init__(self, index: int, side: int) -> None:
        self.stream = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._a, self._b = (torch.randn(side, side, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(index)

    def put(self, count: int) -> None:
        """Enqueue so many."""
        with torch.cuda.stream(self.stream):  # and nothing is awaited in here
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)

    def seconds(self, count: int) -> float:
        """Device time of so many."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self.stream)
        self.put(count)
        end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def slow_down(bench: Bench, index: int, rounds: int, blocks: int) -> Figures:
    """How much longer the products take while fragments of 64 KiB are copied all the time, by way and path."""
    products = Products(index, SIDE)
    products.seconds(PRODUCTS)
    alone = middle([products.seconds(PRODUCTS) for _ in range(rounds)])
    beside = [_beside(bench, towards, path, products, alone, rounds, blocks) for towards, path in WAYS]
    return {"products": PRODUCTS, "side": SIDE, "alone_s": round(alone, 6), "beside": beside}


def _beside(
    bench: Bench, towards: Towards, path: Path, products: Products, alone: float, rounds: int, blocks: int
) -> Figures:
    rows, chooser = bench.rows(towards, path, WIDTH, FRAGMENTS), forced(towards, path, blocks)
    batches = int(1.5 * alone / bench.seconds(rows, chooser)) + 3
    taken: list[float] = []
    for _ in range(TRIES):
        while len(taken) < rounds and (one := _covered(bench, rows, chooser, products, batches)) is not None:
            taken.append(one)
        batches *= 2
    slower = round(middle(taken) / alone - 1, 4) if len(taken) == rounds else None
    return {"direction": towards.value, "path": path.value, "slower_by": slower}


def _covered(bench: Bench, rows: Rows, chooser: Chooser, products: Products, batches: int) -> float | None:
    """Seconds of the products while so many batches are copied; ``None`` if these ended before the products."""
    events = [bench.submit(rows, chooser) for _ in range(batches)]
    ended(events[0])  # so the copies run, and the submitter is ahead of them
    taken = products.seconds(PRODUCTS)
    early = events[-1].done()
    ended(events[-1])
    return None if early else taken


def layer_wise(device: CudaDevice, index: int, rounds: int, *, page: int = 2 << 20, pages: int = 512) -> Figures:
    """A load of ``LAYERS`` layers, and as long a computation in which each layer waits for its own."""
    held, stream = Pages(device, pages, page, LAYERS), device.stream("layers")
    products = Products(index, SMALL_SIDE)
    load = partial(_load, device, stream, held)
    load()
    alone = best(load, rounds)
    each, compute = as_long(products, alone, LAYERS, rounds)
    together = best(partial(_overlapped, device, stream, held, products, each), rounds)
    return overlap(LAYERS, alone, compute, together)


def as_long(products: Products, seconds: float, layers: int, rounds: int) -> tuple[int, float]:
    """How many products in each layer take as long as a load, and how long they do."""
    products.seconds(64)
    one = best(lambda: products.seconds(64), rounds) / 64
    each = max(1, round(seconds / layers / one))
    return each, best(lambda: products.seconds(each * layers), rounds)


def overlap(layers: int, load: float, compute: float, together: float) -> Figures:
    """Seconds, and what is made of them."""
    return {"layers": layers, "load_s": round(load, 6), "compute_s": round(compute, 6),
            "together_s": round(together, 6), "ratio": round(together / max(load, compute), 3)}  # fmt: skip


def _load(device: CudaDevice, stream: Any, held: Pages) -> float:
    copies = held.batch(held.spec.device_pages)
    began = time.perf_counter()
    ended(device.host_to_device(stream, copies, LAYERS)[-1])
    return time.perf_counter() - began


def _overlapped(device: CudaDevice, stream: Any, held: Pages, products: Products, each: int) -> float:
    engine: Any = device.engine_stream(products.stream)
    copies = held.batch(held.spec.device_pages)
    began = time.perf_counter()
    for layer in device.host_to_device(stream, copies, LAYERS):
        engine.wait_event(layer)
        products.put(each)
    engine.record().block()
    return time.perf_counter() - began
