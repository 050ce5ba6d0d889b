"""``asynccache bench cuda``: every figure of the CUDA device, with its goal, in one run.

Copies as a share of one large pinned copy of the same run, by either path; what they cost a computation beside them;
how soon a coroutine goes on; what submitting costs; how well a load hides behind computing. Needs a GPU, and says so
without one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from asynccache.cli.devices import gpu
from asynccache.cli.parsing import POSITIVE, integer
from asynccache.cli.text import first_line
from asynccache.errors import ConfigError

Figures = dict[str, Any]

SHARE = {4 << 10: 0.6, 16 << 10: 0.85, 64 << 10: 0.95, 256 << 10: 0.95, 2 << 20: 0.95}
"""The share of the rate of one large copy that copies in pieces must reach, by the width of a piece in bytes."""
BOTH_WIDTHS = (64 << 10, 2 << 20)
BOTH, ONE = 80.0, 50.0
"""The goal for both directions at once is ``BOTH`` GB/s, where one direction alone reaches ``ONE``."""
SLOWER = {"dma": 0.03, "kernel": 0.08}
WAKE_P50_US, WAKE_P99_US, LOOP_US_EACH = 80.0, 300.0, 5.0
OFF_LOOP_US, ON_LOOP_US = 1000.0, 50.0
LAYER_WISE = 1.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU, and with which settings (default: %(default)s)")
    parser.add_argument("--buffer", type=POSITIVE, default=1.0, metavar="GIB",
                        help="what is copied at a time, and the pools on either side (default: %(default)s)")
    parser.add_argument("--rounds", type=integer(1), default=5, metavar="N",
                        help="of which the best counts (default: %(default)s)")
    parser.add_argument("--samples", type=integer(1), default=1000, metavar="N",
                        help="of wake-ups (default: %(default)s)")


def run(args: argparse.Namespace) -> Figures:
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
        return asyncio.run(measure(device, args))
    except (DriverError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise ConfigError(f"bench cuda: the GPU could not be measured: {first_line(error)}") from error


async def measure(device: Any, args: argparse.Namespace) -> Figures:
    """Return the figures of ``device``, which is closed at the end. Cancelling closes it as well."""
    from asynccache.cli import cuda_compute, cuda_copies, cuda_leases, cuda_waking
    from asynccache.memory.cuda.cupy_driver import find

    index, size = int(device.name.partition(":")[2]), int(args.buffer * (1 << 30))
    software = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cupy": find().cupy}
    found: Figures = {"bench": "cuda", "device": device.driver.identity()._asdict(), "software": software}
    try:
        async with cuda_copies.by_path(device) as ways:
            found["copies"] = cuda_copies.measure(device, ways, size, args.rounds)
            found["both_directions"] = [cuda_copies.both(device, size, width, args.rounds) for width in BOTH_WIDTHS]
            found["slow_down"] = cuda_compute.slow_down(ways, index, args.rounds)
        found["waking"] = await cuda_waking.measure(device, args.samples)
        found["leases"] = await cuda_leases.layer_wise(device, index, args.rounds)
    finally:
        await device.aclose()
    reached = list(goals(found))
    return found | {"goals": [goal.report() for goal in reached], "met": sum(goal.met for goal in reached),
                    "missed": sum(not goal.met for goal in reached)}  # fmt: skip


class Goal(NamedTuple):
    """A figure beside its goal. ``value`` None: the figure could not be taken, which counts as missed. ``least``: the
    limit is the least that the value may be, and not the most."""

    figure: str
    value: float | None
    limit: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.value is not None and (self.value >= self.limit if self.least else self.value <= self.limit)

    def report(self) -> dict[str, Any]:
        goal = f"at {'least' if self.least else 'most'} {self.limit:g}"
        return {"figure": self.figure, "value": self.value, "goal": goal, "met": self.met}


def goals(figures: Figures) -> Iterator[Goal]:
    """Yield every goal, in the order in which the table has them."""
    copies, waking, leases = figures["copies"], figures["waking"], figures["leases"]
    for row in copies["pieces"]:
        name = f"{row['direction']}, pieces of {row['width'] >> 10} KiB: share of one large copy"
        yield Goal(name, row["share"], SHARE.get(row["width"], 0.0), least=True)
    limit = round(BOTH * min(1.0, min(copies["large_gb_s"].values()) / ONE), 2)
    for row in figures["both_directions"]:
        name = f"both directions, pieces of {row['width'] >> 10} KiB: GB/s"
        yield Goal(name, row["gb_s"], limit, least=True)
    for row in figures["slow_down"]["beside"]:
        name = f"bf16 products beside copies {row['direction']} by {row['path']}: slower by"
        yield Goal(name, row["slower_by"], SLOWER[row["path"]])
    yield Goal("call to coroutine, p50: µs", waking["wake_up"]["p50_us"], WAKE_P50_US)
    yield Goal("call to coroutine, p99: µs", waking["wake_up"]["p99_us"], WAKE_P99_US)
    flight = waking["in_flight"]
    yield Goal(f"{flight['transfers']} in flight, loop time each: µs", flight["loop_us_each"], LOOP_US_EACH)
    for row in waking["submitting"]:
        name = f"submitting {row['pages']} pages, {row['way']}"
        yield Goal(f"{name}: µs on the loop", row["on_loop_us"], ON_LOOP_US)
        yield Goal(f"{name}: µs off the loop", row["off_loop_us"], OFF_LOOP_US)
    name = f"load of {leases['layers']} layers beside computing: share of the longer of the two"
    yield Goal(name, leases["ratio"], LAYER_WISE)


def table(figures: Figures) -> str:
    """Return the figures as lines for people."""
    return "\n".join(_told(figures))


def _told(figures: Figures) -> Iterator[str]:
    from asynccache.cli.cuda_copies import told as copies

    yield figures["device"]["name"]
    yield from copies(figures["copies"])
    yield "wait_layer in the caller's thread, µs: p50 {wait_layer_p50_us}, max {wait_layer_max_us}".format(
        **figures["leases"])  # fmt: skip
    for goal in figures["goals"]:
        yield f"{'met   ' if goal['met'] else 'MISSED'}  {goal['figure']}: {goal['value']} ({goal['goal']})"
    yield f"{figures['met']} goals met, {figures['missed']} missed"
