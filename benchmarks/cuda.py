"""A GPU, measured: ``python -m benchmarks.cuda [PART ...]``.

It answers what only a GPU can tell of the CUDA device, and prints which settings the figures speak for: what each path
copies by size, number and direction of pieces; how long it takes to wake a coroutine; and what loads, backups and an
engine do to each other. All parts together take less than two minutes, 4 GiB on the GPU and 6 GiB on the host. The
exit status is 2 where there is no GPU or no cupy; a sentence says so then.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asynccache.cli.output import Tell, debugging, first_line
from asynccache.cli.output import size as spelled
from asynccache.errors import AsyncCacheError, ConfigError
from benchmarks import cuda_copies, cuda_engine
from benchmarks.cuda_copies import Figures, RawCalls
from benchmarks.parsing import gpu
from benchmarks.tables import Chart, Row, bench

PARTS = {
    "pieces": "scattered pieces of 4 KiB to 2 MiB, few and many, in each direction, by each way",
    "pages": "pages as 2-D copies, beside batches of rows",
    "queue": "how many calls fit into the driver's queue, and whom a full one blocks",
    "waking": "loads and wake-ups, alone and beside a thread that computes in Python",
    "beside": "products of matrices, and an engine's copy of tokens, beside copies",
    "loads": "loads of 32 layers beside computing, through a cache, by each path",
    "pinning": "pinning 4 GiB beside launches",
}
SETTINGS = {
    "kernel_below": "kernel_below, bytes", "few": "pieces from which on the kernel goes", "blocks": "blocks",
}
LAST_START = 80.0
"""Seconds after which no further part begins, so that two minutes are enough also where copies are slow. A part takes
less than 40."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS), type=_part,
                        help="what to measure (default: all): "
                             + "; ".join(map("{}: {}".format, PARTS, PARTS.values())))  # fmt: skip
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU; settings may follow, as in cuda:0?blocks=4 (default: %(default)s)")


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return name


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure, and return the figures by part.

    Raises:
        ConfigError: there is no GPU here, or it failed while it was measured; the message is one sentence.
    """
    from asynccache.memory.cuda.cupy_driver import find
    from asynccache.memory.cuda.device import open_device

    missing = find().missing
    if missing:
        raise ConfigError(f"there is no GPU to measure: {missing}")
    device = open_device(args.device)
    try:
        return measure(device, args.parts, tell, cuda_copies.raw_calls(device.driver))
    except (AsyncCacheError, MemoryError, RuntimeError) as error:  # all of torch's and cupy's are RuntimeError
        raise ConfigError(f"the GPU could not be measured: {first_line(error)}") from error


def measure(device: Any, parts: Sequence[str], tell: Tell, raw: RawCalls | None = None) -> Figures:
    """Return the figures of ``device``, which is closed at the end, by part. Without ``raw``, calls that the cache does
    not make are not measured. Blocks: loops run only for what needs one, so Ctrl-C ends it at once."""
    from asynccache.memory.cuda.cupy_driver import find

    identity = device.driver.identity()._asdict()
    found: Figures = {"bench": "cuda", "device": identity, "torch": torch.__version__, "torch_cuda": torch.version.cuda,
                      "cupy": find().cupy}  # fmt: skip
    seconds, started = dict[str, float](), time.perf_counter()
    found |= {"seconds": seconds, "left_out": []}
    try:
        device.driver.use_device()
        index = int(device.name.partition(":")[2].partition("?")[0] or 0)
        products = cuda_engine.Products(index, cuda_engine.SIDE)
        memory = cuda_copies.Memory(device.driver)
        for part in parts:
            began = time.perf_counter()
            if began - started > LAST_START:
                found["left_out"].append(part)
                continue
            tell(PARTS[part])
            match part:
                case "pieces":
                    found["large_gb_s"] = cuda_copies.measure_large(memory)
                    found[part] = cuda_copies.measure_pieces(memory, raw, tell)
                    found["settings"] = [cuda_copies.suggested(found[part], towards, device.settings)
                                         for towards in (cuda_copies.OUT, cuda_copies.IN)]  # fmt: skip
                case "pages":
                    found[part] = cuda_copies.measure_pages(memory, raw) if raw is not None else []
                case "queue":
                    found[part] = cuda_engine.measure_queue(memory, index)
                case "waking":
                    found[part] = asyncio.run(cuda_engine.measure_waking(device, tell))
                case "beside":
                    found[part] = cuda_engine.measure_beside(memory, products, tell)
                case "loads":
                    found[part] = asyncio.run(cuda_engine.measure_loads(device, products, tell))
                case "pinning":
                    found[part] = cuda_engine.measure_pinning(device.driver, index)
            seconds[part] = round(time.perf_counter() - began, 1)
        memory.close()
    finally:
        asyncio.run(device.aclose())
    return found


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield a table for each part, and last the settings that the figures speak for."""
    name = figures["device"]["name"]
    if figures["left_out"]:
        yield Chart("There was no time to measure; run by itself what has no figure here", ("",), [
            Row(part, [None]) for part in figures["left_out"]
        ])  # fmt: skip
    if "pieces" in figures:
        yield Chart(f"{name}, one large copy: GB/s", ("",), [
            Row(direction, [rate]) for direction, rate in figures["large_gb_s"].items()
        ])  # fmt: skip
        for direction, count in dict.fromkeys((row["direction"], row["pieces"]) for row in figures["pieces"]):
            rows = [row for row in figures["pieces"] if (row["direction"], row["pieces"]) == (direction, count)]
            ways = list(dict.fromkeys(way for row in rows for way in row["gb_s"]))
            yield Chart(f"{direction}, {count} pieces in a call: GB/s", ways, [
                Row(spelled(row["width"]), [row["gb_s"].get(way) for way in ways]) for row in rows
            ])  # fmt: skip
    if figures.get("pages"):
        columns = ("2d_gb_s", "rows_gb_s", "2d_call_us", "rows_call_us")
        yield Chart("Pages of 32 layers as 2-D copies and as batches of rows: GB/s, and µs of the call for a page",
                    ("2-D", "rows", "2-D, µs", "rows, µs"),
                    [Row(f"{row['direction']}, rows of {spelled(row['row'])}", [row[name] for name in columns])
                     for row in figures["pages"]])  # fmt: skip
    if "queue" in figures:
        columns = ("fit", "entries", "counted", "longest_launch_ms")
        yield Chart("How many calls fit behind a busy stream; entries of its queue that one takes, and that we count; "
                    "ms that another thread's launch took at most", ("fit", "takes", "counted", "launch"),
                    [Row(f"{row['call']}, {row['pieces']} pieces of {spelled(row['width'])}",
                         [row[name] for name in columns]) for row in figures["queue"]])  # fmt: skip
    if "waking" in figures:
        columns = ("load_p50_ms", "load_max_ms", "wake_p50_us", "wake_p99_us")
        yield Chart("A load of 32 layers, ms, and a wake-up, µs, beside a thread that computes",
                    ("load p50", "max", "wake p50", "p99"),
                    [Row(f"{row['pages']} pages of {spelled(row['width'])}, {row['beside']}", [row[n] for n in columns])
                     for row in figures["waking"]], list(cuda_engine.told_of_waking(figures["waking"])))  # fmt: skip
    if "beside" in figures:
        columns = ("gb_s", "product_ms", "token_copy_p50_us", "token_copy_p99_us")
        yield Chart("Beside copies: their GB/s, ms of a product of matrices, µs of a copy of tokens to the host",
                    ("GB/s", "product", "tokens p50", "p99"),
                    [Row(row["copies"], [row[name] for name in columns]) for row in figures["beside"]])  # fmt: skip
    if "loads" in figures:
        yield Chart("Loads of 32 layers beside computing: ms; how much longer both together take than the longer one; "
                    "µs of wait_layer", ("load", "compute", "both", "ratio", "wait p50", "max"), [
            Row(f"{row['pages']} × {spelled(row['width'])}, {row['path']}",
                [*(row[name] * 1e3 for name in ("load_s", "compute_s", "together_s")), row["ratio"],
                 row["wait_layer_p50_us"], row["wait_layer_max_us"]]) for row in figures["loads"]
        ])  # fmt: skip
    if "pinning" in figures:
        row = figures["pinning"]
        yield Chart(f"Pinning {spelled(row['bytes'])}", ("",), [
            Row("touch and pin, s", [row["pin_s"]]), Row("unpin, s", [row["unpin_s"]]),
            Row("another thread's launch took at most, ms", [row["longest_launch_ms"]]),
        ])  # fmt: skip
    if "settings" in figures:
        yield Chart("Settings, and what these figures would set", ("set", "measured"), [
            Row(f"{one['direction']}: {what}", [one[name]["set"], one[name]["measured"]])
            for one in figures["settings"] for name, what in SETTINGS.items()
        ], [f"{sentence}." for sentence in cuda_copies.sentences(figures["pieces"])])  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run it; return the exit status: 0, 2 if there is nothing to measure, 130 if somebody interrupted it."""
    try:
        return bench(sys.modules[__name__], list(argv), prog="python -m benchmarks.cuda")
    except AsyncCacheError as error:
        if debugging():
            traceback.print_exc()
        sys.stderr.write(f"benchmarks.cuda: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
