"""``asynccache doctor``: which core runs, what there is for a CUDA device here, how fast it is, and what will be used.

Law: it never fails for what is missing. Without a GPU it says so in a sentence and what the cache does then; with one
it measures in some seconds what ``device="cuda:0"`` measures when it opens, and the wake-up besides.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path as FilePath
from typing import Any

from asynccache import compiled
from asynccache.cli.cuda_why import SIZES, Choice, gpu
from asynccache.cli.text import first_line
from asynccache.cli.text import size as spelled
from asynccache.errors import AsyncCacheError
from asynccache.extras import BRINGS, install

Report = dict[str, Any]

SMALL_BUFFER = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH|-", nargs="?", const="-",
                        help="as JSON, to a file or (-) instead of text")


def execute(args: argparse.Namespace) -> int:
    """Look, measure, print. 0, also where there is no GPU; 1 where there is one that cannot be used."""
    from asynccache.cli.output import check_writable, dump

    if args.json is not None:
        check_writable(args.json)
    report = examine(args.device)
    if args.json != "-":
        print("\n".join(told(report)))
    if args.json is not None:
        dump(report, args.json)
    return 1 if report.get("error") else 0


def examine(name: str) -> Report:
    """Everything, as far as there is something."""
    from asynccache.memory.cuda.cupy_driver import find

    found = find()
    report: Report = {"command": "doctor", "core": compiled.CORE, "core_why": compiled.WHY or None,
                      "cupy": found.cupy, "cupy_cuda": found.cupy_cuda, "torch_cuda": found.torch_cuda,
                      "driver": found.driver, "devices": found.devices, "missing": found.missing or None,
                      "nvrtc": nvrtc() if found.cupy else None, "limits": limits()}  # fmt: skip
    if not found.missing:
        report |= _examined(name)
    return report


def _examined(name: str) -> Report:
    from asynccache.memory.cuda.device import open_device

    try:
        return measured(open_device(name))
    except (AsyncCacheError, MemoryError) as error:
        return {"error": first_line(error)}


def measured(device: Any) -> Report:
    """What ``device`` is and does; it is closed at the end."""
    from asynccache.cli.cuda_copies import WAYS, reference
    from asynccache.memory.cuda.calibration import Bench

    identity = device.driver.identity()
    with closing(Bench(device.driver, SMALL_BUFFER)) as bench:
        large = {towards.value: round(reference(bench, towards, 5) / 1e9, 2) for towards in WAYS}
        choices = list(_choices(bench, device))
    waking = asyncio.run(_waking(device))
    return {"device": {**identity._asdict(), "numa_node": numa_node(identity.bus)}, "large_gb_s": large,
            "paths": [{**choice._asdict(), "why": choice.why()} for choice in choices],
            "plain": [line for choice in choices for line in choice.told()], "wake_up": waking,
            "settings": _settings(device.settings)}  # fmt: skip


def _choices(bench: Any, device: Any) -> Iterator[Choice]:
    from asynccache.cli.cuda_copies import WAYS, path_of
    from asynccache.memory.cuda.calibration import forced
    from asynccache.memory.cuda.paths import Path

    blocks = device.settings.blocks
    for towards, paths in WAYS.items():
        for name, width in SIZES.items():
            scattered, near = (bench.rows(towards, path, width) for path in (Path.DMA, Path.PITCHED))
            rates = {path.value: _rate(bench, scattered, forced(towards, path, blocks))
                     for path in paths if path is not Path.PITCHED}  # fmt: skip
            best = path_of(device.chooser, near)
            yield Choice(towards.value, name, width, path_of(device.chooser, scattered).value, rates,
                         (best.value, _rate(bench, near, forced(towards, best, blocks))),
                         device.settings.forced(towards) is not None)  # fmt: skip


def _rate(bench: Any, rows: Any, chooser: Any) -> float:
    seconds: float = min(bench.seconds(rows, chooser) for _ in range(3))
    return float(round(rows.size / seconds / 1e9, 2))


async def _waking(device: Any) -> Report:
    from asynccache.cli.cuda_waking import Pages, wake_up

    try:
        return await wake_up(device, device.stream("doctor"), Pages(device, 64, 16 << 10, 4), 200)
    finally:
        await device.aclose()


def _settings(settings: Any) -> Report:
    chosen = {name: getattr(settings, name) for name in ("out", "inward", "within")}
    return {**{name: path.value if path else "measured" for name, path in chosen.items()}, "blocks": settings.blocks,
            "huge_pages": settings.huge_pages, "numa_node": settings.numa_node}  # fmt: skip


def nvrtc() -> Report:
    """Whether the kernel compiles here, for an H100."""
    from asynccache.memory.cuda.kernels import compile_for

    try:
        return {"compiles": True, "bytes": len(compile_for((9, 0)))}
    except Exception as error:  # whatever a broken installation raises
        return {"compiles": False, "why": str(error).split("\n")[0]}


def limits() -> Report:
    """How much memory may be pinned: by the shell's limit, and by the control group's, in which it counts."""
    from asynccache.memory.pools import available_memory

    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return {"memlock": soft, "memlock_hard": hard, "available_bytes": available_memory()}


def numa_node(bus: str) -> int | None:
    """The node that the device hangs at, where the system knows."""
    try:
        node = int(FilePath(f"/sys/bus/pci/devices/{bus.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# for a person


def told(report: Report) -> Iterator[str]:
    """In plain words."""
    yield from _software(report)
    if report["missing"]:
        yield f"No GPU can be used here: {report['missing']}."
        yield 'The cache runs on device="cpu": pages in host memory, threads as streams. That is complete and tested.'
    elif report.get("error"):
        yield f"There is a GPU, and it cannot be used: {report['error']}"
    else:
        yield from _hardware(report)
        yield from _what_will_be_used(report)


def _software(report: Report) -> Iterator[str]:
    from asynccache.memory.cuda.cupy_driver import spelled_version

    cupy_cuda = spelled_version(report["cupy_cuda"]) if report["cupy_cuda"] else None
    yield f"core      {report['core']}{': ' + report['core_why'] if report['core_why'] else ''}"
    yield f"cupy      {report['cupy'] or 'not installed'}{f', for CUDA {cupy_cuda}' if cupy_cuda else ''}"
    yield f"torch     {'for CUDA ' + report['torch_cuda'] if report['torch_cuda'] else 'for the CPU'}"
    yield from _needed([version for version in (cupy_cuda, report["torch_cuda"]) if version])
    version = f"CUDA {spelled_version(report['driver'])}" if report["driver"] else "none"
    yield f"driver    {version}, {report['devices']} GPUs"
    kernel = report["nvrtc"]
    if kernel is not None:
        yield f"NVRTC     {'compiles the copy kernel' if kernel['compiles'] else 'does not work: ' + kernel['why']}"
    limit = report["limits"]
    memlock = "no limit" if limit["memlock"] is None else spelled(limit["memlock"])
    yield f"pinning   ulimit -l: {memlock}; memory that can be had: {spelled(limit['available_bytes'])}"


def _needed(versions: list[str]) -> Iterator[str]:
    """A driver serves programs for its own version of CUDA and older; of one major version, newer ones too."""
    majors = {int(version.split(".")[0]) for version in versions}
    if majors:
        yield f"          a driver for CUDA {max(majors)} or newer is needed: nvidia-smi shows which one is installed"
    if len(majors) > 1:
        extra = f"cuda{versions[1][:2]}"
        brings = install(extra) if extra in BRINGS else f"a build of cupy for CUDA {versions[1]}"
        yield f"          cupy and torch are for different versions: {brings} brings torch's"


def _hardware(report: Report) -> Iterator[str]:
    device, wake = report["device"], report["wake_up"]
    node = "unknown" if device["numa_node"] is None else device["numa_node"]
    yield f"device    {device['name']}, {spelled(device['total'])}, bus {device['bus']}, NUMA node {node}"
    yield f"copies    {'many in one call' if device['batches'] else 'one call each: this driver has no batches'}"
    for direction, rate in report["large_gb_s"].items():
        yield f"          {direction}: {rate} GB/s for one large copy"
    yield f"wake-up   p50 {wake['p50_us']} µs, p99 {wake['p99_us']} µs from the event to the coroutine"


def _what_will_be_used(report: Report) -> Iterator[str]:
    yield from report["plain"]
    yield ("A path is chosen by what it is estimated to take, from costs measured when the device opens; a kernel only "
           "where it wins by a tenth, since it takes multiprocessors from whoever computes.")  # fmt: skip
    if report["device"]["numa_node"] is not None and report["settings"]["numa_node"] is None:
        yield (f"Host pools are not bound to a NUMA node; the device hangs at node {report['device']['numa_node']}: "
               "start under numactl, or set numa_node.")  # fmt: skip
