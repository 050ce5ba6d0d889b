"""``asynccache bench store [URL]``: the rates of a store, by size of page.

A round puts new pages, gets them in order and again in random order, looks them up, and deletes them, so what else is
in the store stays. As in the runtime, pages go through ``CheckedStore``, from and to page-aligned, registered host
memory. Figures are medians over the rounds. CPU time is that of all threads of this process, user and system; the work
of a server and of the kernel's writeback is not in it. Imports no torch.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from asynccache import compiled
from asynccache.cli.meter import spread
from asynccache.cli.options import CommandOptions, Concurrency, Json, Loop, Quiet, loop_factory, option
from asynccache.cli.output import Tell, answer, number, progress
from asynccache.cli.output import size as spelled
from asynccache.errors import BackendError, ConfigError
from asynccache.settings import Count, parse_size
from asynccache.settle import each

if TYPE_CHECKING:
    from asynccache.storage import Result

POOL = "bench"
BATCH_BYTES, BATCH_PAGES = 8 << 20, 128
TIMEOUT = 600.0

Figures = dict[str, Any]


def _sizes(name: str, text: str) -> tuple[int, ...]:
    return tuple(parse_size(name, part) for part in text.split(","))


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``bench``."""

    what: Annotated[Literal["store"], option("store", "what to measure: a store", argument=True)]
    url: Annotated[str | None, option("URL", "the store (default: a file store in a temporary folder)",
                                      argument=False)] = None
    page_sizes: Annotated[tuple[Count, ...], option(
        "SIZES", "sizes of a page, each measured by itself", written="64KiB,256KiB,2MiB", parse=_sizes,
    )] = (64 << 10, 256 << 10, 2 << 20)  # fmt: skip
    bytes: Annotated[Count, option("SIZE", "bytes moved in a pass", written="128MiB", parse=parse_size)] = 128 << 20
    batch: Annotated[Count | None, option(
        "N", f"pages in a call (default: as many as 8 MiB hold, at most {BATCH_PAGES})")] = None
    concurrency: Annotated[Concurrency, option("N", "calls at a time")] = 2
    repeat: Annotated[Count, option("N", "rounds; medians over them are shown")] = 3
    loop: Annotated[Loop, option("NAME", "event loop")] = "uvloop"
    json: Json = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.page_sizes or self.bytes < max(self.page_sizes):
            raise ConfigError(f"--bytes={self.bytes} is less than one page of {max(self.page_sizes, default=0)} bytes")


def execute(options: Options) -> int:
    """Measure, and print and write the figures; returns the exit status: 1 if pages came back wrong.

    Raises:
        ConfigError: an option is unusable.
        BackendError: the store cannot be opened, or fails.
    """
    with progress() as tell:
        figures = run(options, (lambda _: None) if options.quiet else tell)
    answer(figures, None if options.quiet else "\n".join(told(figures)), options.json)
    return 1 if any(size["mismatches"] for size in figures["sizes"]) else 0


def run(options: Options, tell: Tell) -> Figures:
    """Measure all sizes of page, and return the figures as plain values. Raises as ``execute`` does."""
    from asynccache.storage import parse_url

    with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
        url = options.url or f"file:{folder}/store?capacity={4 * options.bytes + (1 << 30)}"
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            measured = [runner.run(_measured(options, url, size, options.bytes // size, tell))
                        for size in options.page_sizes]
    settings = {"url": str(parse_url(url)), "concurrency": options.concurrency, "rounds": options.repeat,
                "loop": options.loop, "bytes": options.bytes}
    return {"command": "bench", "bench": "store", "core": compiled.CORE, "cores": os.cpu_count(), "settings": settings,
            "sizes": measured}


async def _measured(options: Options, url: str, size: int, count: int, tell: Tell) -> Figures:
    """Measure ``count`` pages of ``size`` bytes. Cancelling closes the store; pages that were put may be left in it."""
    import numpy as np

    from asynccache.storage import RECORD_SCHEMA, Collectable, PageKey, Result, StoreLayout, open_store

    batch = options.batch or max(1, min(BATCH_PAGES, BATCH_BYTES // size))
    memory = memoryview(mmap.mmap(-1, 2 * count * size))
    pages = np.frombuffer(memory, np.uint8).reshape(2, count, size)
    pages[0] = np.resize(np.frombuffer(Random(size).randbytes(1 << 20), np.uint8), size)
    pages[0, :, : min(8, size)] = np.arange(count, dtype="<u8").view(np.uint8).reshape(count, 8)[:, : min(8, size)]
    buffers = [memory[at : at + size] for at in range(0, 2 * count * size, size)]
    source, target = buffers[:count], buffers[count:]
    store = await open_store(url, StoreLayout({POOL: size}, RECORD_SCHEMA), timeout=TIMEOUT)
    if store is None:
        raise ConfigError(f"storage={url!r} is no store to measure")
    passes: dict[str, list[tuple[float, float, list[float]]]] = {}
    keys, order, flushes, mismatches = list[PageKey](), range(count), list[float](), 0

    async def drive(op: str, order: Sequence[int], call: Callable[[Sequence[int]], Awaitable[list[Result]]]) -> None:
        """Make the calls for all pages, ``--concurrency`` calls at a time, and note the times that they took."""
        calls, latencies = [order[at : at + batch] for at in range(0, count, batch)], list[float]()

        async def one(which: Sequence[int]) -> None:
            began = time.perf_counter()
            results = await call(which)
            latencies.append(time.perf_counter() - began)
            if failed := len(results) - results.count(Result.HIT):
                why = store.last_error or f"{', '.join(sorted({result.name for result in results}))}, without an error"
                raise BackendError(f"the store failed for {failed} of {len(results)} pages: {why}")
            tell(f"{spelled(size)} pages, round {len(flushes) + (op == 'put')} of {options.repeat}: "
                 f"{op.replace('_', ' ')}, {100 * len(latencies) // len(calls)} %")

        cpu, began = time.process_time(), time.perf_counter()
        await each(calls, one, options.concurrency)
        wall = time.perf_counter() - began
        passes.setdefault(op, []).append((wall, time.process_time() - cpu, latencies))

    try:
        store.register(POOL, memory)
        for _ in range(options.repeat):
            keys[:] = [PageKey(POOL, os.urandom(32)) for _ in order]
            try:
                await drive("put", order, lambda which: store.put([keys[i] for i in which], [source[i] for i in which]))
                began = time.perf_counter()
                await store.flush()
                flushes.append(time.perf_counter() - began)
                for op, of in (("get", order), ("get_shuffled", Random(1).sample(order, count))):
                    pages[1] = 0
                    await drive(op, of, lambda which: store.get([keys[i] for i in which], [target[i] for i in which]))
                    mismatches += int((pages[0] != pages[1]).any(axis=1).sum())
                await drive("exists", order, lambda which: store.exists([keys[i] for i in which]))
            finally:
                for at in range(0, count, BATCH_PAGES):
                    await store.delete(keys[at : at + BATCH_PAGES])
                if isinstance(store.backend, Collectable):
                    await store.backend.collect(None)
        stats = {name: value for name, value in store.stats().items() if name in ("direct", "errors", "corrupt_pages")}
    finally:
        await store.aclose()
    return {"page_bytes": size, "pages": count, "pages_per_call": batch, "mismatches": mismatches, "stats": stats,
            "flush_ms": round(median(flushes) * 1e3, 1),
            **{op: summary(rounds, count, size if op != "exists" else 0) for op, rounds in passes.items()}}


def summary(rounds: Sequence[tuple[float, float, list[float]]], pages: int, page_bytes: int) -> Figures:
    """Medians over the rounds, and percentiles over the calls of all rounds. ``rounds``: the seconds of each, its CPU
    seconds, and the seconds of its calls; ``page_bytes``: bytes that a call moves for a page, 0: none."""
    calls = [latency for _, _, latencies in rounds for latency in latencies]
    wall = median(one[0] for one in rounds)
    return {
        **({"gb_per_s": round(pages * page_bytes / wall / 1e9, 3)} if page_bytes else {}),
        "pages_per_s": round(pages / wall), "cpu_us_per_page": round(median(one[1] for one in rounds) / pages * 1e6, 2),
        "calls": len(calls),
        **{f"{name}_ms": round(value, 3) for name, value in spread(calls, 1e3)._asdict().items() if name != "max"},
    }


def told(figures: Figures) -> Iterator[str]:
    """Yield the figures as tables of at most 80 columns."""
    settings = figures["settings"]
    yield f"{settings['url']}"
    yield (f"{settings['concurrency']} calls at a time, medians of {settings['rounds']} rounds; CPU: µs a page; "
           "p50 ...: ms a call")
    for size in figures["sizes"]:
        yield ""
        yield f"pages of {spelled(size['page_bytes'])}: {number(size['pages'])} pages, {size['pages_per_call']} a call"
        yield f"  {'':<14}{'GB/s':>8}{'pages/s':>12}{'CPU':>10}{'p50':>10}{'p99':>10}{'p99.9':>10}"
        for op in ("put", "get", "get_shuffled", "exists"):
            one = size[op]
            rate = f"{one['gb_per_s']:.2f}" if "gb_per_s" in one else ""
            yield (f"  {op.replace('_', ', '):<14}{rate:>8}{number(one['pages_per_s']):>12}"
                   f"{one['cpu_us_per_page']:>10.1f}"
                   + "".join(f"{one[name]:>10.2f}" for name in ("p50_ms", "p99_ms", "p999_ms")))
        yield f"  durable {size['flush_ms']:.1f} ms after the last put"
        if size["mismatches"]:
            yield f"  NOT OK: {number(size['mismatches'])} pages came back wrong"
    yield ""
    yield f"the {figures['core']} core ran"
