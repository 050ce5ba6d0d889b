"""What copies cost a computation that runs beside them: a stream of products of bf16 matrices.

It needs torch with CUDA. The device itself times the products. The copies begin before the first product and must end
after the last one; where they end earlier, the round is done again with more copies.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from asynccache.cli.cuda_copies import Pages, Ways, ended
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver_protocol import CopyDirection

SIDE = 4096
PRODUCTS = 200
WIDTH, SIZE = 64 << 10, 512 << 20
TRIES = 6

Figures = dict[str, Any]


class Products:
    """Products of two bf16 matrices with ``side`` rows and columns, on a stream of their own."""

    def __init__(self, index: int, side: int) -> None:
        self.stream = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._a, self._b = (torch.randn(side, side, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(index)

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


def slow_down(ways: Ways, index: int, rounds: int) -> Figures:
    """Return by how much longer the products take while pieces of 64 KiB are copied all the time, for each direction
    and path."""
    products = Products(index, SIDE)
    products.seconds(PRODUCTS)
    alone = median([products.seconds(PRODUCTS) for _ in range(rounds)])
    beside = [
        {"direction": towards.value, "path": path, "slower_by": _beside(device, towards, products, alone, rounds)}
        for towards in (CopyDirection.OUT, CopyDirection.IN) for path, device in ways.items()
    ]  # fmt: skip
    return {"products": PRODUCTS, "side": SIDE, "alone_s": round(alone, 6), "beside": beside}


def _beside(device: CudaDevice, towards: CopyDirection, products: Products, alone: float, rounds: int) -> float | None:
    pages, stream = Pages(device, SIZE, WIDTH), device.stream("beside")
    taken, batches = list[float](), 4
    for _ in range(TRIES):
        while len(taken) < rounds and (one := _covered(device, stream, pages, towards, products, batches)) is not None:
            taken.append(one)
        batches *= 2
    device.release(stream)
    return round(median(taken) / alone - 1, 4) if len(taken) == rounds else None


def _covered(
    device: CudaDevice, stream: Any, pages: Pages, towards: CopyDirection, products: Products, batches: int
) -> float | None:
    """Return the seconds of the products while ``batches`` batches are copied; None if the copies ended first."""
    events = [pages.submit(device, stream, towards, pages.scattered()) for _ in range(batches)]
    ended(events[0])  # so the copies run, and the submitter is ahead of them
    taken = products.seconds(PRODUCTS)
    early = events[-1].done()
    ended(events[-1])
    return None if early else taken
