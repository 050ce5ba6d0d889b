"""``asynccache bench cuda``: every figure of the CUDA device, with its goal, in one run.

Copies as a share of the best large pinned copy of the same run; what they cost a computation beside them; how soon a
coroutine goes on; what submitting costs; how well a load hides behind computing. Needs a GPU, and says so without one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from asynccache.cli import cuda_copies, cuda_waking
from asynccache.errors import ConfigError

Figures = dict[str, Any]

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N", help="which GPU (default: %(default)s)")
    parser.add_argument("--buffer", type=float, default=4.0, metavar="GIB",
                        help="size of the buffers on either side; what does not fit is left out (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of which the best counts (%(default)s)")
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="of wake-ups (default: %(default)s)")
    parser.add_argument("--every-path", action="store_true", help="measure each path, not only the chosen one")
    parser.add_argument("--quiet", action="store_true", help="print no table")


def run(args: argparse.Namespace) -> Figures:
    """Measure, print the figures, return them.

    Raises:
        ConfigError: there is no GPU here; the message is one sentence.
    """
    from asynccache.memory.cuda.cupy_driver import find
    from asynccache.memory.cuda.device import open_device

    missing = find().missing
    if missing:
        raise ConfigError(f"bench cuda: there is no GPU to measure: {missing}")
    device = open_device(args.device)
    figures = measure(device, args, compute=_computing)
    if not args.quiet:
        print(told(figures), file=sys.stderr)
    return figures


def measure(device: Any, args: argparse.Namespace, compute: Callable[..., Figures]) -> Figures:
    """The figures of ``device``, which is closed at the end."""
    from asynccache.memory.cuda.calibration import Bench

    driver, chooser = device.driver, device.chooser
    found: Figures = {"bench": "cuda", "device": driver.identity()._asdict()}
    with closing(Bench(driver, int(args.buffer * GIB))) as bench:
        found["copies"] = cuda_copies.measure(bench, chooser, args.rounds, every_path=args.every_path)
        found["compute"] = compute(device, bench, args.rounds)
    found["waking"] = asyncio.run(_waking(device, args.samples))
    found["costs"] = [{"direction": towards.value, "path": path.value, "piece_us": round(cost.piece * 1e6, 4),
                       "gb_s": round(1e-9 / cost.byte, 2)}
                      for (towards, path), cost in chooser.costs.items()]  # fmt: skip
    return found


def _computing(device: Any, bench: Any, rounds: int) -> Figures:
    from asynccache.cli import cuda_compute

    index = int(device.name.partition(":")[2])
    return {"slow_down": cuda_compute.slow_down(bench, index, rounds, device.settings.blocks),
            "layer_wise": cuda_compute.layer_wise(device, index, rounds)}


async def _waking(device: Any, samples: int) -> Figures:
    try:
        return await cuda_waking.measure(device, samples)
    finally:
        await device.aclose()


def told(figures: Figures) -> str:
    """For a person."""
    copies, waking = figures["copies"], figures["waking"]
    lines = [f"{figures['device']['name']}: large copies, GB/s: {copies['reference_gb_s']}"]
    lines += [
        f"{row['direction']:<15} {row['width'] >> 10:>5} KiB × {row['count']:>6}  {row['way']:<8} by {row['path']:<8} "
        f"{row['bytes_per_s'] / 1e9:6.2f} GB/s  {row['ratio']:.3f}" + (f"  (goal {row['goal']})" if row["goal"] else "")
        for row in copies["fragments"]
    ]
    lines += [f"both directions, {row['width'] >> 10} KiB: {row['gb_s']} GB/s (goal {row['goal']})"
              for row in copies["both_directions"]]  # fmt: skip
    lines += [f"{part}: {values}" for part, values in (*figures["compute"].items(), *waking.items())]
    return "\n".join(lines)
