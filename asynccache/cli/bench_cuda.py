"""``asynccache bench cuda``: how fast a GPU copies pages, how soon it wakes a coroutine, and how well loads hide.

Copies are measured by the copy engines and by the kernel, beside one large pinned copy. How well a load hides behind
computing is measured as an engine has it: through a cache, a lease and ``wait_layer``. Needs a GPU, and says so without
one.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from typing import Any

import torch

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli import cuda_copies
from asynccache.cli.charts import Chart, Row
from asynccache.cli.meter import spread
from asynccache.cli.output import Tell
from asynccache.cli.parsing import gpu
from asynccache.cli.text import first_line
from asynccache.cli.text import size as spelled
from asynccache.errors import ConfigError

Figures = dict[str, Any]

BUFFER = 1 << 30
"""Bytes of the pool on the device and of that on the host. One measured copy moves all of them."""
ROUNDS, SAMPLES = 5, 1000
LAYERS, SIDE = 32, 2048
PAGES, PAGE_TOKENS, PAGE_BYTES = 512, 16, 2 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU; settings may follow, as in cuda:0?blocks=16 (default: %(default)s)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure and return the figures.

    Raises:
        ConfigError: there is no GPU here, or the GPU failed while it was measured; the message is one sentence.
    """
    from asynccache.memory.cuda.cupy_driver import find
    from asynccache.memory.cuda.device import open_device
    from asynccache.memory.cuda.driver_protocol import DriverError

    missing = find().missing
    if missing:
        raise ConfigError(f"bench cuda: there is no GPU to measure: {missing}")
    device = open_device(args.device)
    try:
        return asyncio.run(measure(device, tell))
    except (DriverError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise ConfigError(f"bench cuda: the GPU could not be measured: {first_line(error)}") from error


async def measure(device: Any, tell: Tell) -> Figures:
    """Return the figures of ``device``, which is closed at the end. Cancelling closes it as well."""
    from asynccache.memory.cuda.cupy_driver import find

    software = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cupy": find().cupy}
    found: Figures = {"bench": "cuda", "device": device.driver.identity()._asdict(), "software": software}
    try:
        async with cuda_copies.by_path(device) as devices:
            tell("copies")
            found["copies"] = cuda_copies.measure(device, devices, BUFFER, ROUNDS)
        tell("wake-ups")
        found["wake_up"] = await cuda_copies.wake_up(device, SAMPLES)
        tell("loads beside computing")
        found["leases"] = await layer_wise(device)
    finally:
        await device.aclose()
    return found


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


async def layer_wise(device: Any) -> Figures:
    """Measure a load of all layers, a computation that takes as long, and both together, where the computation of each
    layer waits for the layer's load. Two prompts take turns on a device that holds one of them, so each lease finds all
    of its prompt on the host. The time begins before the lease and ends with the last layer's computation. Returns the
    figures, in seconds unless a name says otherwise. Cancelling it closes the cache; what is in flight ends by
    itself."""
    products = Products(int(device.name.partition(":")[2]), SIDE)
    full = Full(bytes_per_token=PAGE_BYTES // PAGE_TOKENS, layers=LAYERS, device_tokens=(PAGES + 8) * PAGE_TOKENS,
                host_tokens=(2 * PAGES + 8) * PAGE_TOKENS)  # fmt: skip
    config = CacheConfig(model="bench", components=(full,), page_size=PAGE_TOKENS, device=device.name)
    async with AsyncCache(config, device=device) as cache:
        prompts = _TwoPrompts(cache, device, products)
        for _ in range(4):  # both are computed, backed up and pushed out, then loaded: all is warm
            await prompts.serve(0)
        load = min([await prompts.serve(0) for _ in range(ROUNDS)])
        one = min(products.seconds(64) for _ in range(ROUNDS)) / 64
        each = max(1, round(load / LAYERS / one))
        compute = min(products.seconds(each * LAYERS) for _ in range(ROUNDS))
        prompts.waits.clear()
        together = min([await prompts.serve(each) for _ in range(ROUNDS)])
    waits = spread(prompts.waits, 1e6)
    return {"layers": LAYERS, "load_s": round(load, 6), "compute_s": round(compute, 6),
            "together_s": round(together, 6), "ratio": round(together / max(load, compute), 3),
            "tokens": min(prompts.loaded), "wait_layer_p50_us": round(waits.p50, 2),
            "wait_layer_max_us": round(waits.max, 2)}  # fmt: skip


class _TwoPrompts:
    """Two prompts that are served by turns. ``waits``: how many seconds each ``wait_layer`` kept the caller.
    ``loaded``: how many tokens each of the last two leases had from the host."""

    def __init__(self, cache: AsyncCache, device: Any, products: Products) -> None:
        self._cache = cache
        self._products = products
        self._engine: Any = device.engine_stream(products.stream)
        self._tokens = [[side * 1_000_000 + i for i in range(PAGES * PAGE_TOKENS + 1)] for side in range(2)]
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


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield the rates of copies, with the other figures below them."""
    copies, wake, leases = figures["copies"], figures["wake_up"], figures["leases"]
    rows = [Row(f"{row['direction']}, pieces of {spelled(row['width'])}", [row["dma_gb_s"], row["kernel_gb_s"]])
            for row in copies["pieces"]]
    whole = [Row(f"{direction}, one large copy", [rate, None]) for direction, rate in copies["large_gb_s"].items()]
    yield Chart(f"How fast pages are copied: GB/s, {figures['device']['name']}", ("copy engines", "kernel"),
                [*whole, *rows], [
        cuda_copies.threshold(copies),
        f"to wake a coroutine, µs: p50 {wake['p50_us']}, p99 {wake['p99_us']}",
        f"a load of {leases['layers']} layers takes {leases['load_s'] * 1e3:.2f} ms, computing "
        f"{leases['compute_s'] * 1e3:.2f} ms, both together {leases['together_s'] * 1e3:.2f} ms: {leases['ratio']} of "
        "the longer",
        f"wait_layer in the caller's thread, µs: p50 {leases['wait_layer_p50_us']}, max {leases['wait_layer_max_us']}",
    ])  # fmt: skip
