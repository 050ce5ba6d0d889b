"""``asynccache bench cuda``: every figure of the CUDA device, with its goal, in one run.

Copies as a share of the best large pinned copy of the same run; what they cost a computation beside them; how soon a
coroutine goes on; what submitting costs; how well a load hides behind computing. Needs a GPU, and says so without one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import closing
from typing import Any

import torch

from asynccache.cli import cuda_copies, cuda_goals, cuda_waking
from asynccache.cli.cuda_why import gpu
from asynccache.cli.text import first_line
from asynccache.errors import ConfigError

Figures = dict[str, Any]

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU (default: %(default)s)")
    parser.add_argument("--buffer", type=float, default=4.0, metavar="GIB",
                        help="of the buffers on either side; what is larger goes round them again (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of which the best counts (%(default)s)")
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="of wake-ups (default: %(default)s)")
    parser.add_argument("--every-path", action="store_true", help="measure each path, not only the chosen one")
    parser.add_argument("--quiet", action="store_true", help="print no table")


def run(args: argparse.Namespace) -> Figures:
    """Measure, print the figures, return them.

    Raises:
        ConfigError: there is no GPU here, or it gave up; the message is one sentence.
    """
    from asynccache.memory.cuda.cupy_driver import find
    from asynccache.memory.cuda.device import open_device
    from asynccache.memory.cuda.driver import DriverError

    missing = find().missing
    if missing:
        raise ConfigError(f"bench cuda: there is no GPU to measure: {missing}")
    device = open_device(args.device)
    try:
        figures = measure(device, args)
    except (DriverError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise ConfigError(f"bench cuda: the GPU could not be measured: {first_line(error)}") from error
    if not args.quiet:
        print(told(figures), file=sys.stderr)
    return figures


def measure(device: Any, args: argparse.Namespace) -> Figures:
    """The figures of ``device``, which is closed at the end. Everything that torch has to compute is in it."""
    from asynccache.cli import cuda_compute
    from asynccache.memory.cuda.calibration import Bench

    driver, chooser, index = device.driver, device.chooser, int(device.name.partition(":")[2])
    found: Figures = {"bench": "cuda", "device": driver.identity()._asdict(), "software": _software()}
    with closing(Bench(driver, int(args.buffer * GIB))) as bench:
        found["copies"] = cuda_copies.measure(bench, chooser, args.rounds, every_path=args.every_path)
        found["compute"] = {"slow_down": cuda_compute.slow_down(bench, index, args.rounds, device.settings.blocks)}
    found["compute"]["layer_wise"] = cuda_compute.layer_wise(device, index, args.rounds)
    found |= asyncio.run(_on_a_loop(device, index, args))
    found["costs"] = [{"direction": towards.value, "path": path.value, **cost._asdict()}
                      for (towards, path), cost in chooser.costs.items()]  # fmt: skip
    reached = cuda_goals.goals(found)
    return found | {"goals": [goal.report() for goal in reached], "met": sum(goal.met for goal in reached),
                    "missed": sum(not goal.met for goal in reached)}  # fmt: skip


def _software() -> Figures:
    from asynccache.memory.cuda.cupy_driver import find

    return {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cupy": find().cupy}


async def _on_a_loop(device: Any, index: int, args: argparse.Namespace) -> Figures:
    from asynccache.cli import cuda_leases

    try:
        return {"waking": await cuda_waking.measure(device, args.samples),
                "leases": await cuda_leases.layer_wise(device, index, args.rounds)}  # fmt: skip
    finally:
        await device.aclose()


def told(figures: Figures) -> str:
    """For a person."""
    copies, leases = figures["copies"], figures["leases"]
    lines = [f"{figures['device']['name']}: one large copy, GB/s: {copies['reference_gb_s']}"]
    lines += [
        f"{row['direction']:<15} {row['width'] >> 10:>5} KiB × {row['count']:>6}  {row['way']:<8} by {row['path']:<8} "
        f"{row['bytes_per_s'] / 1e9:6.2f} GB/s  {row['ratio']:.3f}  (to a thread {row['ratio_to_a_thread']:.3f})"
        for row in copies["fragments"]
    ]
    lines.append(f"wait_layer in the caller's thread: {leases['wait_layer']}")
    lines += [f"{'met   ' if goal['met'] else 'MISSED'}  {goal['figure']}: {goal['value']} ({goal['goal']})"
              for goal in figures["goals"]]  # fmt: skip
    lines.append(f"{figures['met']} goals met, {figures['missed']} missed")
    return "\n".join(lines)
