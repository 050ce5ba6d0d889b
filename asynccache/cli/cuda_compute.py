"""Copies beside computing: what they cost a stream of bf16 products, and how well a layer-wise load hides behind one.

Needs torch with CUDA. Times are the device's own (timed events), so that nothing of Python is in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asynccache.cli.cuda_waking import Pages
from asynccache.memory.cuda.calibration import Bench, forced
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver import Towards
from asynccache.memory.cuda.paths import Chooser, Path
from asynccache.memory.cuda.rows import Rows

SIDE = 4096
LAYERS = 32
GOALS = {"dma": 0.03, "kernel": 0.08, "layer_wise": 1.1}

Figures = dict[str, Any]


class Products:
    """An endless supply of bf16 products on a stream of their own."""

    def __init__(self, index: int, side: int = SIDE) -> None:
        self.stream = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._a, self._b = (torch.randn(side, side, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(index)

    def put(self, count: int) -> None:
        """Enqueue so many."""
        with torch.cuda.stream(self.stream):  # and nothing is awaited in here
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)

    def seconds(self, count: int, beside: Callable[[], None] = lambda: None) -> float:
        """Device time of so many; ``beside`` is called when they are enqueued."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self.stream)
        self.put(count)
        end.record(self.stream)
        beside()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def slow_down(bench: Bench, index: int, rounds: int, blocks: int) -> Figures:
    """How much longer the products take while fragments of 64 KiB are copied all the time, by way and path."""
    products, count = Products(index), 200
    products.seconds(count)
    alone = min(products.seconds(count) for _ in range(rounds))
    found: Figures = {"alone_s": round(alone, 5)}
    for towards in (Towards.OUT, Towards.IN):
        for path in (Path.DMA, Path.KERNEL) if towards is Towards.IN else (Path.DMA, Path.STAGED, Path.KERNEL):
            rows, chooser = bench.rows(towards, path, 64 << 10), forced(towards, path, blocks)
            copies = int(alone / bench.seconds(rows, chooser)) + 2
            beside = partial(_copies, bench, rows, chooser, copies)
            taken = []
            for _ in range(rounds):
                taken.append(products.seconds(count, beside))
                bench.stream.record().block()
            share = min(taken) / alone - 1
            goal = GOALS["dma" if path is Path.DMA else "kernel"]
            found[f"{towards.value}, {path.value}"] = {"slower_by": round(share, 4), "goal": goal}
    return found


def _copies(bench: Bench, rows: Rows, chooser: Chooser, count: int) -> None:
    for _ in range(count):
        bench.submit(rows, chooser)


def layer_wise(device: CudaDevice, index: int, rounds: int, *, page: int = 2 << 20, pages: int = 512) -> Figures:
    """A load of ``LAYERS`` layers, and as long a computation in which each layer waits for its own."""
    held, stream = Pages(device, pages, page, LAYERS), device.stream("layers")
    products = Products(index)
    engine = device.engine_stream(products.stream)
    device.host_to_device(stream, held.batch(pages), LAYERS)[-1].block()
    load = min(_loads(device, stream, held, pages) for _ in range(rounds))
    products.seconds(8)
    one = products.seconds(64) / 64
    each = max(1, round(load / LAYERS / one))
    compute = min(products.seconds(each * LAYERS) for _ in range(rounds))
    together = min(_overlapped(device, stream, engine, held, products, each) for _ in range(rounds))
    return {"load_s": round(load, 5), "compute_s": round(compute, 5), "together_s": round(together, 5),
            "ratio": round(together / max(load, compute), 3), "goal": GOALS["layer_wise"]}  # fmt: skip


def _loads(device: CudaDevice, stream: Any, held: Pages, pages: int) -> float:
    began = time.perf_counter()
    device.host_to_device(stream, held.batch(pages), LAYERS)[-1].block()
    return time.perf_counter() - began


def _overlapped(device: CudaDevice, stream: Any, engine: Any, held: Pages, products: Products, each: int) -> float:
    copies = held.batch(held.spec.device_pages)
    began = time.perf_counter()
    layers = device.host_to_device(stream, copies, LAYERS)
    for layer in layers:
        engine.wait_event(layer)
        products.put(each)
    engine.record().block()
    return time.perf_counter() - began
