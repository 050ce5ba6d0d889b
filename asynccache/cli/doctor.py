"""``asynccache doctor``: which core runs, whether a CUDA device can be used here, how fast that is, and what the cache
will use.

Law: the command never fails because something is missing. Without a GPU it says so in a sentence, and says what the
cache does then. With a GPU it measures, in some seconds, how fast the copy engines and the kernel copy, and how long it
takes to wake a coroutine.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path as FilePath
from textwrap import wrap
from typing import Any

import msgspec

from asynccache import compiled
from asynccache.cli.parsing import gpu
from asynccache.cli.text import first_line
from asynccache.cli.text import size as spelled
from asynccache.errors import AsyncCacheError
from asynccache.extras import BRINGS, install

Report = dict[str, Any]

SMALL_BUFFER = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--device", default="cuda:0", type=gpu, metavar="cuda:N",
                        help="which GPU (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH|-", nargs="?", const="-",
                        help="as JSON, to a file or (-) instead of text")


def execute(args: argparse.Namespace) -> int:
    """Examine this machine and print the report. Return the exit status: 0, also if there is no GPU; 1 if there is one
    that cannot be used."""
    from asynccache.cli.output import answer, check_writable

    if args.json is not None:
        check_writable(args.json)
    report = examine(args.device)
    answer(report, "\n".join(told(report)), args.json)
    return 1 if report.get("error") else 0


def examine(name: str) -> Report:
    """Return the report on this machine, and on the GPU called ``name`` if one can be used. Otherwise ``missing`` says
    why not."""
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
    """Return the result of ``measured`` for the GPU called ``name``; or the entry ``error``, which says why it cannot
    be used."""
    from asynccache.memory.cuda.device import open_device

    try:
        return asyncio.run(measured(open_device(name)))
    except (AsyncCacheError, MemoryError) as error:
        return {"error": first_line(error)}


async def measured(device: Any) -> Report:
    """Return the properties and the speed of ``device``, and close it. If this is cancelled, copies are left in flight,
    which end by themselves."""
    from asynccache.cli.cuda_copies import by_path, measure, wake_up

    identity = device.driver.identity()
    try:
        async with by_path(device) as devices:
            copies = measure(device, devices, SMALL_BUFFER, 3)
        waking = await wake_up(device, 200)
    finally:
        await device.aclose()
    return {"device": {**identity._asdict(), "numa_node": numa_node(identity.bus)}, "copies": copies,
            "wake_up": waking, "settings": msgspec.structs.asdict(device.settings)}  # fmt: skip


def nvrtc() -> Report:
    """Return whether NVRTC compiles the copy kernel here (for an H100, which need not be there): its size in bytes, or
    why it does not."""
    from asynccache.memory.cuda.kernels import compile_for

    try:
        return {"compiles": True, "bytes": len(compile_for((9, 0)))}
    except Exception as error:  # whatever a broken installation raises
        return {"compiles": False, "why": str(error).split("\n")[0]}


def limits() -> Report:
    """Return how many bytes may be pinned: by the shell's limits (``memlock``, ``memlock_hard``; None: no limit), and
    by what memory there is on this machine and in the control group (``available_bytes``)."""
    from asynccache.memory.pools import available_memory

    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return {"memlock": soft, "memlock_hard": hard, "available_bytes": available_memory()}


def numa_node(bus: str) -> int | None:
    """Return the NUMA node that the device at the PCI address ``bus`` hangs at; None if the system does not know."""
    try:
        node = int(FilePath(f"/sys/bus/pci/devices/{bus.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# for a person


def told(report: Report) -> Iterator[str]:
    """Yield the report in lines for a person."""
    yield from _software(report)
    if report["missing"]:
        yield from wrap(f"No GPU can be used here: {report['missing']}.", 79, break_on_hyphens=False)
        yield 'The cache runs on device="cpu": pages in host memory, threads as'
        yield "streams. That is complete and tested."
    elif report.get("error"):
        yield f"There is a GPU, and it cannot be used: {report['error']}"
    else:
        yield from _hardware(report)


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
    """Yield sentences on the driver that the CUDA versions of cupy and torch need, and on what to install if these
    versions differ. A driver serves programs for its own version of CUDA and for older ones; within one major version,
    for newer ones, too."""
    majors = {int(version.split(".")[0]) for version in versions}
    if majors:
        yield f"          a driver for CUDA {max(majors)} or newer is needed: nvidia-smi shows which one is installed"
    if len(majors) > 1:
        extra = f"cuda{versions[1][:2]}"
        brings = install(extra) if extra in BRINGS else f"a build of cupy for CUDA {versions[1]}"
        yield f"          cupy and torch are for different versions: {brings} brings torch's"


def _hardware(report: Report) -> Iterator[str]:
    from asynccache.cli.cuda_copies import told

    device, wake = report["device"], report["wake_up"]
    node = device["numa_node"]
    yield (f"device    {device['name']}, {spelled(device['total'])}, bus {device['bus']}, NUMA node "
           f"{'unknown' if node is None else node}")  # fmt: skip
    yield f"copies    {'many in one call' if device['batches'] else 'one call each: this driver has no batches'}"
    yield from (f"          {line}" for line in told(report["copies"]))
    yield f"wake-up   p50 {wake['p50_us']} µs, p99 {wake['p99_us']} µs to wake a coroutine"
    if node is not None:
        yield f"Host pools are fastest on the device's own node: start under numactl --preferred={node}."
