"""``asynccache bench store [URL]``: what a storage backend costs, checksums and bookkeeping included.

Every page goes through ``CheckedStore``, as in the runtime, from and into page-aligned host memory. Beside each figure
stands what the machine does without us in the same minute: one memcpy, and bare pwritev and preadv of the same batches.
CPU is the process's, user and system, all threads; the kernel's own writeback is not in it. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from asynccache.errors import ConfigError
from asynccache.storage import (
    RECORD_SCHEMA,
    CheckedStore,
    PageKey,
    Result,
    StoreLayout,
    open_store,
    parse_size,
    parse_url,
)

POOL = "bench"
BATCH_BYTES = 8 << 20
BATCH_PAGES = 128
PAGE_SIZES = "64KiB,256KiB,2MiB"

Progress = Callable[[str], None]
Figures = dict[str, Any]


@dataclass(slots=True)
class Meter:
    """Wall and CPU time of one pass, and how long each call took."""

    pages: int
    page_bytes: int
    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is inside."""
        cpu, wall = _cpu(), time.perf_counter()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, _cpu() - cpu

    def figures(self, *, moves: bool = True) -> Figures:
        """The pass in numbers; ``moves``: pages went from one place to another."""
        calls = sorted(self.latencies)
        found = {
            "pages_per_s": round(self.pages / self.wall),
            "cpu_us_per_page": round(self.cpu / self.pages * 1e6, 2),
            "p50_ms": round(calls[len(calls) // 2] * 1e3, 3),
            "p99_ms": round(calls[min(len(calls) - 1, len(calls) * 99 // 100)] * 1e3, 3),
        }
        return {"gb_per_s": round(self.pages * self.page_bytes / self.wall / 1e9, 3), **found} if moves else found


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved: keys, where the pages come from, where they go to, and how they are dealt out to calls."""

    page_bytes: int
    keys: list[PageKey]
    source: list[memoryview]
    target: list[memoryview]
    batch: int

    def batches(self, order: Sequence[int]) -> list[list[int]]:
        """``order`` cut into calls."""
        return [list(order[at : at + self.batch]) for at in range(0, len(order), self.batch)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the store (default: a file store in a temporary folder)")
    parser.add_argument("--page-sizes", default=PAGE_SIZES, metavar="SIZES", help=f"default: {PAGE_SIZES}")
    parser.add_argument("--bytes", default="256MiB", metavar="SIZE", help="moved per pass (default: 256MiB)")
    parser.add_argument("--concurrency", type=int, default=2, metavar="N", help="calls at a time (default: 2)")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="passes; the best is shown (default: 2)")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")


def run(args: argparse.Namespace, progress: Progress = lambda text: None) -> Figures:
    """Measure, and return the figures as a dict that JSON can hold. ``progress`` is told what is going on.

    Raises:
        ConfigError: an option is unusable. Unavailable: the store cannot be opened.
    """
    sizes = [parse_size("--page-sizes", text) for text in args.page_sizes.split(",")]
    total = parse_size("--bytes", args.bytes)
    for name, value in (("--concurrency", args.concurrency), ("--repeat", args.repeat), ("--page-sizes", min(sizes))):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if total < max(sizes):
        raise ConfigError(f"--bytes={args.bytes!r} is less than one page of {max(sizes)} bytes")
    if args.url is not None:
        return _measured(args, args.url, sizes, total, progress)
    with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
        return _measured(args, f"file:{folder}/store?capacity={4 * total + (1 << 30)}", sizes, total, progress)


def _measured(args: argparse.Namespace, url: str, sizes: Sequence[int], total: int, progress: Progress) -> Figures:
    results = []
    for size in sizes:
        load = _load(size, total)
        progress(f"{size >> 10} KiB pages: reference")
        figures: Figures = {"page_bytes": size, "pages": len(load.keys), "pages_per_call": load.batch}
        figures["raw"] = _raw(url, load)
        for mode, options in _modes(url).items():
            progress(f"{size >> 10} KiB pages: {mode}")
            figures[mode] = _with_loop(args.loop, _store_passes(url, options, load, args))
        results.append(figures)
    settings = {"url": url, "concurrency": args.concurrency, "repeat": args.repeat, "loop": args.loop, "bytes": total}
    return {"bench": "store", "settings": settings, "cores": os.cpu_count(), "sizes": results}


def _with_loop(name: str, main: Awaitable[Figures]) -> Figures:
    async def awaited() -> Figures:
        return await main

    if name == "asyncio":
        return asyncio.run(awaited())
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(awaited())


def _modes(url: str) -> dict[str, dict[str, str]]:
    """A file store is measured buffered and direct, any other as it is."""
    parsed = parse_url(url)
    if parsed.scheme != "file" or "direct" in parsed.options:
        return {"store": {}}
    return {"buffered": {"direct": "off"}, "direct": {"direct": "auto"}}


def _load(size: int, total: int) -> Load:
    pages, rng = total // size, Random(size)
    keys = [PageKey(POOL, rng.randbytes(32)) for _ in range(pages)]
    source, target = _pages(pages, size), _pages(pages, size)
    pattern = np.frombuffer(rng.randbytes(1 << 20), np.uint8)
    for i, page in enumerate(source):
        view = np.frombuffer(page, np.uint8)
        view[:] = np.resize(pattern, size)
        view[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)[: view[:8].size]
    return Load(size, keys, source, target, max(1, min(BATCH_PAGES, BATCH_BYTES // size)))


def _pages(count: int, size: int) -> list[memoryview]:
    """Touched, page-aligned memory in pages."""
    memory = memoryview(mmap.mmap(-1, count * size))
    np.frombuffer(memory, np.uint8)[:] = 1
    return [memory[at : at + size] for at in range(0, count * size, size)]


async def _store_passes(url: str, options: dict[str, str], load: Load, args: argparse.Namespace) -> Figures:
    layout = StoreLayout({POOL: load.page_bytes}, RECORD_SCHEMA)
    store = await open_store(url, layout, options=options, timeout=600.0)
    if store is None:
        raise ConfigError(f"storage={url!r} is no store to measure")
    try:
        passes = [await _one_pass(store, load, args.concurrency) for _ in range(args.repeat)]
        stats = {name: value for name, value in store.stats().items() if name in ("direct", "errors", "corrupt_pages")}
        await store.clear()
    finally:
        await store.aclose()
    return {**_best(passes), "stats": stats}


async def _one_pass(store: CheckedStore, load: Load, concurrency: int) -> Figures:
    await store.clear()
    in_order = list(range(len(load.keys)))
    shuffled = Random(1).sample(in_order, len(in_order))

    async def put(which: list[int]) -> list[Result]:
        return await store.put([load.keys[i] for i in which], [load.source[i] for i in which])

    async def get(which: list[int]) -> list[Result]:
        return await store.get([load.keys[i] for i in which], [load.target[i] for i in which])

    async def exists(which: list[int]) -> list[Result]:
        return await store.exists([load.keys[i] for i in which])

    figures = {"put": (await _drive(put, load, in_order, concurrency)).figures()}
    began = time.perf_counter()
    await store.flush()
    figures["put"]["flush_ms"] = round((time.perf_counter() - began) * 1e3, 1)
    figures["get"] = (await _drive(get, load, in_order, concurrency)).figures()
    figures["get_shuffled"] = (await _drive(get, load, shuffled, concurrency)).figures()
    figures["exists"] = (await _drive(exists, load, in_order, concurrency)).figures(moves=False)
    pairs = zip(load.source, load.target, strict=True)
    wrong = sum(not np.array_equal(_array(source), _array(target)) for source, target in pairs)
    return {**figures, "mismatches": wrong}


async def _drive(
    call: Callable[[list[int]], Awaitable[list[Result]]], load: Load, order: Sequence[int], concurrency: int
) -> Meter:
    """Make all calls, ``concurrency`` at a time."""
    meter, batches = Meter(len(order), load.page_bytes), iter(load.batches(order))

    async def worker() -> None:
        for batch in batches:
            began = time.perf_counter()
            results = await call(batch)
            meter.latencies.append(time.perf_counter() - began)
            if results.count(Result.HIT) < len(batch):
                raise RuntimeError(f"the store failed {len(batch) - results.count(Result.HIT)} of {len(batch)} pages")

    with meter.running():
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return meter


def _raw(url: str, load: Load) -> Figures:
    """One thread, no store: a memcpy of every page, and bare system calls on a preallocated file beside the store."""
    figures = {"memcpy": _memcpy(load)}
    parsed = parse_url(url)
    if parsed.scheme == "file":
        folder = Path(parsed.path).parent
        if shutil.disk_usage(folder).free > 2 * load.page_bytes * len(load.keys):
            figures |= _raw_file(folder, load)
    return figures


def _array(page: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(page, np.uint8)


def _memcpy(load: Load) -> Figures:
    meter = Meter(len(load.keys), load.page_bytes)
    pairs = [(_array(target), _array(source)) for source, target in zip(load.source, load.target, strict=True)]
    with meter.running():
        for target, source in pairs:
            began = time.perf_counter()
            np.copyto(target, source)
            meter.latencies.append(time.perf_counter() - began)
    return meter.figures()


def _raw_file(folder: Path, load: Load) -> Figures:
    size = load.page_bytes * len(load.keys)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return {
            "pwritev": _raw_pass(os.pwritev, file.fileno(), load, load.source),
            "pwritev_again": _raw_pass(os.pwritev, file.fileno(), load, load.source),
            "preadv": _raw_pass(os.preadv, file.fileno(), load, load.target),
        }


def _raw_pass(move: Callable[[int, Any, int], int], fd: int, load: Load, pages: Sequence[memoryview]) -> Figures:
    meter = Meter(len(pages), load.page_bytes)
    with meter.running():
        for batch in load.batches(range(len(pages))):
            began = time.perf_counter()
            move(fd, [pages[i] for i in batch], batch[0] * load.page_bytes)
            meter.latencies.append(time.perf_counter() - began)
    return meter.figures()


def _best(passes: Sequence[Figures]) -> Figures:
    """Per operation the pass that took the least CPU; mismatches of all passes."""
    best = {
        name: min((one[name] for one in passes), key=lambda figures: figures["cpu_us_per_page"])
        for name in ("put", "get", "get_shuffled", "exists")
    }
    return {**best, "mismatches": sum(one["mismatches"] for one in passes)}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
