"""``asynccache doctor``: what this machine has for a cache: Python, torch, extras, the core, memory, the disk, a GPU.

The command never fails because something is missing. Without torch it says how to install it. Without a GPU it
says so in a sentence, and says what the cache does then. With a GPU it copies pages by each path, compares every byte,
and tells the rates and how long it takes to wake a coroutine. That takes some seconds.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path as FilePath
from textwrap import wrap
from typing import Annotated, Any

from msgspec import structs

from asynccache import compiled
from asynccache.cli.engine_doctor import Engine, examine_engine
from asynccache.cli.engine_doctor import told as findings_told
from asynccache.cli.options import CommandOptions, Json, option, parsed_device
from asynccache.cli.output import answer, first_line, progress
from asynccache.cli.output import size as spelled
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.extras import BRINGS, install, installed, without_torch
from asynccache.settings import parse_size

Report = dict[str, Any]

LAYERS, PAGES, WIDTH = 32, 128, 16 << 10
"""The pages that are copied; bytes that each has in a layer."""
ROUNDS, WAKE_UPS = 3, 200
NAMED, COLUMNS = 10, 80
_NAME = re.compile(r"[A-Za-z0-9._-]+")


NAMES = {"engines": "the copy engines", "kernel": "the kernel"}


def _gpu(name: str, text: str) -> str:
    if not parsed_device(name, text).startswith("cuda"):
        raise ConfigError(f"{name}={text} is no GPU")
    return text


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``doctor``."""

    device: Annotated[str, option("cuda:N", "which GPU", parse=_gpu)] = "cuda:0"
    engine: Annotated[Engine | None, option(
        "NAME", "say instead what is wrong before this engine's server starts; run it in the server's Python")] = None
    storage: Annotated[tuple[str, ...], option(
        "URL", "with --engine: a store that the server will use; may be given several times", several=True)] = ()
    host: Annotated[int | None, option("SIZE", "with --engine: its host memory", parse=parse_size)] = None
    folder: Annotated[str, option("DIR", "where a file store would be, to look at its disk")] = "."
    json: Json = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine is None and (self.storage or self.host is not None):
            raise ConfigError(f"--{'storage' if self.storage else 'host'} needs --engine")


def execute(options: Options) -> int:
    """Examine this machine and print the report. Return the exit status: 0, also if there is no GPU; 1 if there is one
    that cannot be used, or if something is wrong for an engine."""
    if options.engine is not None:
        with progress() as tell:
            findings = examine_engine(options.engine, options.storage, options.host, tell)
        answer(findings, "\n".join(findings_told(findings)), options.json)
        return 1 if findings["error"] else 0
    report = examine(options.device, options.folder)
    answer(report, "\n".join(told(report)), options.json)
    return 1 if report.get("error") else 0


def examine(name: str, folder: str = ".") -> Report:
    """Return the report on this machine, on the disk of ``folder``, and on the GPU called ``name`` if there is one.
    ``missing`` says why there is none, ``error`` why it cannot be used. ``limits``: how many bytes may be pinned, by
    the shell's limits (``memlock``, ``memlock_hard``; None: no limit) and by what memory there is on this machine and
    in the control group (``available_bytes``; None: not known without torch)."""
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    report: Report = {
        "command": "doctor", "python": platform.python_version(), "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(), "cores": os.cpu_count(), "core": compiled.CORE, "core_why": compiled.WHY or None,
        "torch": installed("torch"), "uvloop": installed("uvloop"),
        "extras": {extra: all(installed(_NAME.findall(one)[0]) for one in brings) for extra, brings in BRINGS.items()},
        "memory": {"bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "huge_bytes": huge_pages()},
        "disk": disk(folder),
        "cupy": None, "cupy_cuda": None, "torch_cuda": None, "driver": None, "devices": 0, "missing": None,
        "nvrtc": None, "limits": {"memlock": soft, "memlock_hard": hard, "available_bytes": None},
    }  # fmt: skip
    try:
        from asynccache.memory.cuda.cupy_driver import find
        from asynccache.memory.cuda.kernels import compile_for
        from asynccache.memory.pools import available_memory
    except ModuleNotFoundError as error:
        return report | {"torch": None, "missing": without_torch(error)}
    found = find()
    report["limits"]["available_bytes"] = available_memory()
    report |= {"cupy": found.cupy, "cupy_cuda": found.cupy_cuda, "torch_cuda": found.torch_cuda,
               "driver": found.driver, "devices": found.devices, "missing": found.missing or None}
    if found.cupy:
        try:
            report["nvrtc"] = {"compiles": True, "bytes": len(compile_for((9, 0)))}  # for an H100, which need not exist
        except Exception as error:  # whatever a broken installation raises
            report["nvrtc"] = {"compiles": False, "why": first_line(error)}
    if not found.missing:
        try:
            report |= asyncio.run(measured(name))
        except (AsyncCacheError, MemoryError) as error:
            report["error"] = first_line(error)
    return report


def huge_pages() -> int:
    """Return the bytes of the huge pages of 2 MiB that are reserved and free, which a host process can use."""
    with suppress(OSError, ValueError):
        return int(FilePath("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()) * (2 << 20)
    return 0


def disk(folder: str) -> Report:
    """Return what a file store in ``folder`` would find: how many bytes it may take (``free_bytes``), of how many, and
    whether files can be read past the page cache (``direct``, O_DIRECT). ``error``: why that cannot be said."""
    found: Report = {"folder": str(FilePath(folder).absolute())}
    try:
        usage = shutil.disk_usage(folder)
        found |= {"bytes": usage.total, "free_bytes": usage.free, "direct": False}
        with tempfile.NamedTemporaryFile(dir=folder, prefix="asynccache-doctor-") as file:
            with suppress(OSError, AttributeError):  # the file system, or the system, has no such thing
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
                found["direct"] = True
    except (OSError, ValueError) as error:
        found["error"] = getattr(error, "strerror", None) or str(error)
    return found


async def measured(name: str) -> Report:
    """Open a device, and return its properties and its speed, and ``error`` if bytes were lost on a path. If this is
    cancelled, copies are left in flight, which end by themselves."""
    from asynccache.cli.meter import spread
    from asynccache.memory.cuda.device import open_device

    device: Any = await asyncio.to_thread(open_device, name)  # in a thread of its own, as a cache does
    identity = device.driver.identity()
    try:
        paths = {path: await _by_path(device, below) for path, below in (("engines", 0), ("kernel", 1 << 62))}
        stream, late = device.stream("wake-up"), list[float]()
        for _ in range(WAKE_UPS):
            began = time.perf_counter()
            await stream.record().wait()
            late.append(time.perf_counter() - began)
    finally:
        await device.aclose()
    wake, lost = spread(late, 1e6), [NAMES[path] for path, found in paths.items() if not found["whole"]]
    error = f"pages that went by {' and '.join(lost)} came back with wrong bytes"
    return {"device": {**identity._asdict(), "numa_node": numa_node(identity.bus)},
            "copies": {"width": WIDTH, "pages": PAGES, "layers": LAYERS, **paths},
            "wake_up": {"p50_us": round(wake.p50, 2), "p99_us": round(wake.p99, 2), "samples": WAKE_UPS},
            "settings": structs.asdict(device.settings)} | ({"error": error} if lost else {})  # fmt: skip


async def _by_path(opened: Any, below: int) -> Report:
    """Copy pages to the GPU that was ``opened`` and back, by the kernel if a piece is shorter than ``below`` bytes.
    Return the rates in GB/s by direction, and whether every byte came back (``whole``)."""
    import numpy as np

    from asynccache.config import PoolSpec
    from asynccache.core.plan import Move
    from asynccache.core.settings import ComponentKind, HitPolicy
    from asynccache.memory.cuda.device import CudaDevice
    from asynccache.memory.mover import Mover

    thresholds = {one.name: below for one in structs.fields(opened.settings) if one.name.endswith("_below")}
    device = CudaDevice(opened.driver, opened.name, settings=structs.replace(opened.settings, **thresholds))
    try:
        mover = Mover(device, [PoolSpec(
            name="doctor", component=ComponentKind.FULL, bytes_per_page=WIDTH * LAYERS, layers=LAYERS,
            device_pages=PAGES, host_pages=2 * PAGES, hit_policy=HitPolicy.ALL_PAGES,
        )])  # fmt: skip
        random, host, taken = np.random.default_rng(1), mover.host_pools["doctor"], {"in": [0.0], "out": [0.0]}
        pages = [random.integers(0, 256, WIDTH * LAYERS, np.uint8).tobytes() for _ in range(PAGES)]
        for i, page in enumerate(pages):
            host.page(i)[:] = page
        there = random.permutation(PAGES).astype("<i4")
        loads = [Move(0, np.arange(PAGES, dtype="<i4").tobytes(), there.tobytes())]
        backups = [Move(0, there.tobytes(), np.arange(2 * PAGES - 1, PAGES - 1, -1, dtype="<i4").tobytes())]
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await mover.load(loads).done.wait()
            taken["in"].append(time.perf_counter() - began)
            began = time.perf_counter()
            await mover.backup(backups).wait()
            taken["out"].append(time.perf_counter() - began)
        size = WIDTH * LAYERS * PAGES
        return {"device to host": round(size / min(taken["out"][1:]) / 1e9, 2),
                "host to device": round(size / min(taken["in"][1:]) / 1e9, 2),
                "whole": all(host.page(2 * PAGES - 1 - i) == page for i, page in enumerate(pages))}  # fmt: skip
    finally:
        await device.aclose()


def numa_node(bus: str) -> int | None:
    """Return the NUMA node that the device at the PCI address ``bus`` hangs at; None if the system does not know."""
    try:
        node = int(FilePath(f"/sys/bus/pci/devices/{bus.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def told(report: Report) -> Iterator[str]:
    """Yield the report in lines of at most 80 columns for a person."""
    for line in (*_lines(report), *_verdict(report)):
        name = line[:NAMED] if line[NAMED - 2 : NAMED] == "  " else ""
        yield from wrap(line[len(name):], COLUMNS, initial_indent=name, subsequent_indent=" " * len(name),
                        break_on_hyphens=False, break_long_words=False)  # fmt: skip


def _lines(report: Report) -> Iterator[str]:
    """Yield what there is, a line each: a name in the first ``NAMED`` columns, and a text of any length."""
    yield (f"python    {report['python']}, uvloop {report['uvloop'] or 'not installed'}; {report['system']}, "
           f"{report['machine']}, {report['cores']} cores")
    yield f"core      {report['core']}{': ' + report['core_why'] if report['core_why'] else ''}"
    limit, disk = report["limits"], report["disk"]
    free = "" if limit["available_bytes"] is None else f", of which {spelled(limit['available_bytes'])} can be had"
    huge = report["memory"]["huge_bytes"]
    hosts = f", and {spelled(huge)} of free huge pages, for asynccache serve --huge" if huge else ""
    yield f"memory    {spelled(report['memory']['bytes'])}{free}{hosts}"
    if "free_bytes" in disk:
        direct = "with" if disk["direct"] else "without"
        yield (f"disk      {spelled(disk['free_bytes'])} free of {spelled(disk['bytes'])}, {direct} O_DIRECT, "
               f"in {disk['folder']}")
    if "error" in disk:
        yield f"disk      {disk['folder']} cannot hold a store: {disk['error']}"
    there = [extra for extra, is_there in report["extras"].items() if is_there]
    yield f"extras    {', '.join(there) or 'none'}"
    for extra, is_there in report["extras"].items():
        if not is_there and not extra.startswith("cuda"):  # what a GPU needs is said below
            yield f"          {extra}: {install(extra)}"
    if report["torch"] is None:
        yield f"torch     {report['missing']}"
        yield "          `plan`, `store`, `config`, `explain`, events and `Pages` work without it."
        return
    built = f"for CUDA {report['torch_cuda']}" if report["torch_cuda"] else "for the CPU"
    yield f"torch     {report['torch']}, {built}"
    yield from _cuda(report)
    memlock = "no limit" if limit["memlock"] is None else spelled(limit["memlock"])
    yield f"pinning   ulimit -l: {memlock}"


def _cuda(report: Report) -> Iterator[str]:
    from asynccache.memory.cuda.cupy_driver import spelled_version

    cupy_cuda = spelled_version(report["cupy_cuda"]) if report["cupy_cuda"] else None
    yield f"cupy      {report['cupy'] or 'not installed'}{f', for CUDA {cupy_cuda}' if cupy_cuda else ''}"
    versions = [one for one in (cupy_cuda, report["torch_cuda"]) if one]
    majors = {int(one.split(".")[0]) for one in versions}
    if majors:  # a driver serves its own version of CUDA and older ones; within a major version, newer ones, too
        yield f"          a driver for CUDA {max(majors)} or newer is needed: nvidia-smi shows which one is installed"
    if len(majors) > 1:
        extra = f"cuda{versions[1][:2]}"
        brings = install(extra) if extra in BRINGS else f"a build of cupy for CUDA {versions[1]}"
        yield f"          cupy and torch are for different versions: {brings} brings torch's"
    driver = f"CUDA {spelled_version(report['driver'])}" if report["driver"] else "none"
    yield f"driver    {driver}, {report['devices']} GPUs"
    kernel = report["nvrtc"]
    if kernel is not None:
        yield f"NVRTC     {'compiles the copy kernel' if kernel['compiles'] else 'does not work: ' + kernel['why']}"


def _verdict(report: Report) -> Iterator[str]:
    """Yield whether a GPU can be used, and how fast it is."""
    if report["torch"] is None:
        return
    if report["missing"]:
        yield f"No GPU can be used here: {report['missing']}."
        yield 'The cache runs on device="cpu": pages in host memory, threads as streams. That is complete and tested.'
        return
    if report.get("error"):
        yield f"There is a GPU, and it cannot be used: {report['error']}"
        return
    device, wake, copies = report["device"], report["wake_up"], report["copies"]
    node = device["numa_node"]
    yield (f"device    {device['name']}, {spelled(device['total'])}, bus {device['bus']}, NUMA node "
           f"{'unknown' if node is None else node}")  # fmt: skip
    yield f"copies    {'many in one call' if device['batches'] else 'one call each: this driver has no batches'}"
    for direction in ("device to host", "host to device"):
        rates = " and ".join(f"{copies[path][direction]} GB/s by {NAMES[path]}" for path in NAMES)
        yield f"          {direction}, pieces of {spelled(copies['width'])}: {rates}"
    yield f"          {copies['pages']} pages of {copies['layers']} layers came back whole by both"
    yield f"settings  {', '.join(f'{name}={value}' for name, value in report['settings'].items())}"
    yield f"wake-up   p50 {wake['p50_us']} µs, p99 {wake['p99_us']} µs to wake a coroutine"
    if node is not None:
        yield f"Host pools are fastest on the device's own node: start under numactl --preferred={node}."
