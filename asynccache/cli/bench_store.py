"""``asynccache bench store [URL]``: compares a store with a raw client of the same server in the same run.

Every round measures the raw client, the store without checksums (``off``) and the store with them (``on``). Each round
begins with another of the three, so that a busy machine slows all of them alike. Figures are medians over the rounds; a
ratio is computed within each round. As in the runtime, pages go through ``CheckedStore``, from and to page-aligned,
registered host memory. CPU time is that of all threads of this process, user and system; the work of a server and of
the kernel's writeback is not in it.

Every pass uses new keys and deletes them at its end, so what else is in the store stays. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np

from asynccache.cli.bench_raw import MeasuredClient, OpenRaw, copy, page_memory, raw_client
from asynccache.cli.charts import Chart, Row
from asynccache.cli.machine import loop_factory
from asynccache.cli.meter import spread
from asynccache.cli.options import LOOPS
from asynccache.cli.output import Tell
from asynccache.cli.parsing import integer
from asynccache.cli.text import size as shown
from asynccache.errors import BackendError, ConfigError
from asynccache.storage import (
    RECORD_SCHEMA,
    CheckedStore,
    Collectable,
    PageKey,
    Record,
    Result,
    StoreLayout,
    backend_class,
    parse_size,
    parse_url,
    take_options,
)
from asynccache.storage.checked import header_of

POOL = "bench"
BATCH_BYTES = 8 << 20
BATCH_PAGES = 128
PAGE_SIZES = "64KiB,256KiB,2MiB"
RAW, OFF, ON = "raw", "off", "on"
TIMEOUT = 600.0

Figures = dict[str, Any]
_T = TypeVar("_T")


@dataclass(slots=True)
class PassMeter:
    """The time that one pass took. ``latencies``: seconds of each call; ``wall``: seconds of the whole pass; ``cpu``:
    CPU seconds of all threads of this process meanwhile; ``flush``: seconds from the end of the pass until the
    pages were durable."""

    pages: int
    page_bytes: int
    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    flush: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the pass, that is, the code that runs inside of the ``with`` block."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu

    @contextmanager
    def call(self) -> Iterator[None]:
        """Measure one call, that is, the code that runs inside of the ``with`` block."""
        began = time.perf_counter()
        yield
        self.latencies.append(time.perf_counter() - began)


def summary(passes: Sequence[PassMeter], *, moves: bool = True) -> dict[str, Any]:
    """Medians over the passes, and percentiles over the calls of all passes. ``moves``: the calls moved pages, so that
    there is a bandwidth."""
    calls = [latency for one in passes for latency in one.latencies]

    def middle(figure: Callable[[PassMeter], float], digits: int) -> float:
        return round(median(map(figure, passes)), digits)

    found: dict[str, Any] = {
        "pages_per_s": middle(lambda one: one.pages / one.wall, 0),
        "calls_per_s": middle(lambda one: len(one.latencies) / one.wall, 1),
        "cpu_us_per_page": middle(lambda one: one.cpu / one.pages * 1e6, 2),
        "calls": len(calls),
        **{f"{name}_ms": round(value, 3) for name, value in spread(calls, 1e3)._asdict().items() if name != "max"},
    }
    if any(one.flush for one in passes):
        found["flush_ms"] = middle(lambda one: one.flush * 1e3, 1)
    rate = {"gb_per_s": middle(lambda one: one.pages * one.page_bytes / one.wall / 1e9, 3)}
    return {**rate, **found} if moves else found


class PageSet(NamedTuple):
    """The pages of a measurement. ``source``: the buffers that are written; ``target``: the buffers that are read into;
    both lie in ``memory``. ``batch``: pages in one call."""

    page_bytes: int
    memory: memoryview
    source: list[memoryview]
    target: list[memoryview]
    batch: int

    @classmethod
    def made(cls, size: int, total: int, batch: int | None) -> Self:
        """Pages of ``size`` bytes, ``total`` bytes together, all different."""
        pages, rng = total // size, Random(size)
        memory = page_memory(2 * pages, size)
        both = [memory[at : at + size] for at in range(0, 2 * pages * size, size)]
        pattern = np.frombuffer(rng.randbytes(1 << 20), np.uint8)
        for i, page in enumerate(both[:pages]):
            view = np.frombuffer(page, np.uint8)
            view[:] = np.resize(pattern, size)
            view[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)[: view[:8].size]
        return cls(size, memory, both[:pages], both[pages:], batch or max(1, min(BATCH_PAGES, BATCH_BYTES // size)))

    def meter(self) -> PassMeter:
        return PassMeter(len(self.source), self.page_bytes)

    def mismatches(self) -> int:
        """The number of pages that were not read back as they were put."""
        return sum(not np.array_equal(np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8))
                   for source, target in zip(self.source, self.target, strict=True))

    def reference(self, act: Callable[[memoryview, memoryview], object]) -> Figures:
        """The figures of one thread that calls ``act(source, target)`` for each page."""
        meter = self.meter()
        with meter.running():
            for source, target in zip(self.source, self.target, strict=True):
                with meter.call():
                    act(source, target)
        return summary([meter])


class Switched(CheckedStore):
    """A ``CheckedStore`` whose checksums can be turned off by ``checks``; everything else works as usual."""

    checks = True

    async def _in_batches(
        self, work: Callable[[Sequence[PageKey], Sequence[Record]], _T], keys: Sequence[PageKey],
        records: Sequence[Record],
    ) -> list[_T]:  # fmt: skip
        if self.checks:
            return await super()._in_batches(work, keys, records)
        return cast("list[_T]", [[True] * len(keys)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the store (default: a file store in a temporary folder)")
    parser.add_argument("--page-sizes", default=PAGE_SIZES, metavar="SIZES",
                        help=f"sizes of a page, each measured by itself (default: {PAGE_SIZES})")
    parser.add_argument("--bytes", default="128MiB", metavar="SIZE", help="bytes moved in a pass (default: 128MiB)")
    parser.add_argument("--batch", type=integer(1), metavar="N",
                        help="pages in a call (default: as many as 8 MiB hold, at most 128)")
    parser.add_argument("--concurrency", type=integer(1), default=2, metavar="N", help="calls at a time (default: 2)")
    parser.add_argument("--repeat", type=integer(1), default=3, metavar="N",
                        help="rounds; medians over them are shown (default: 3)")
    parser.add_argument("--verify", choices=("on", "off", "both"), default="both",
                        help="measure with checksums, without them, or both (default)")
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="event loop (default: uvloop)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure, and return the figures as a dict that JSON can hold.

    Raises:
        ConfigError: an option is unusable.
        BackendError: the store cannot be opened, or fails.
    """
    sizes = [parse_size("--page-sizes", text) for text in args.page_sizes.split(",")]
    total = parse_size("--bytes", args.bytes)
    if min(sizes) < 1:
        raise ConfigError(f"--page-sizes={args.page_sizes}: must be at least 1")
    if total < max(sizes):
        raise ConfigError(f"--bytes={args.bytes!r} is less than one page of {max(sizes)} bytes")
    if args.url is not None:
        return _measured(args, args.url, sizes, total, tell)
    with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
        url = f"file:{folder}/store?capacity={4 * total + (1 << 30)}"
        return _measured(args, url, sizes, total, tell)


def _measured(args: argparse.Namespace, url: str, sizes: Sequence[int], total: int, tell: Tell) -> Figures:
    results = []
    for size in sizes:
        pages = PageSet.made(size, total, args.batch)
        references = {"memcpy": pages.reference(lambda source, target: copy(target, source)),
                      "checksum": pages.reference(lambda source, target: header_of(bytes(32), source))}
        figures: Figures = {"page_bytes": size, "pages": len(pages.source), "pages_per_call": pages.batch,
                            "raw": references}  # fmt: skip
        for mode, options in _modes(url).items():
            raw = raw_client(url, mode == "direct" and size % 4096 == 0, total)
            with asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner:
                figures[mode] = runner.run(_rounds(args, pages, (url, options), raw, tell))
            _compare(figures[mode], references["checksum"]["cpu_us_per_page"])
        results.append(figures)
    settings = {"url": str(parse_url(url)), "concurrency": args.concurrency, "rounds": args.repeat, "loop": args.loop,
                "bytes": total, "verify": args.verify}
    return {"bench": "store", "settings": settings, "cores": os.cpu_count(), "sizes": results}


def _modes(url: str) -> dict[str, dict[str, str]]:
    """The options to measure with, by name: a file store is measured buffered and direct, any other store as it is."""
    parsed = parse_url(url)
    if parsed.scheme != "file" or "direct" in parsed.options:
        return {"store": {}}
    return {"buffered": {"direct": "off"}, "direct": {"direct": "auto"}}


async def _open(url: str, options: dict[str, str], pages: PageSet, concurrency: int) -> Switched:
    """Open the store as ``open_store`` does, but as one whose checksums can be turned off."""
    parsed = parse_url(url, options)
    if parsed.scheme == "none":
        raise ConfigError(f"storage={url!r} is no store to measure")
    common, own = take_options(parsed)
    layout = StoreLayout({POOL: pages.page_bytes}, RECORD_SCHEMA)
    backend = await backend_class(own.scheme).open(own, layout)
    store = Switched(backend, layout, timeout=TIMEOUT, concurrency=max(common.concurrency, 2 * concurrency))
    store.register(POOL, pages.memory)
    return store


async def _rounds(
    args: argparse.Namespace, pages: PageSet, at: tuple[str, dict[str, str]], raw: OpenRaw | None, tell: Tell
) -> Figures:
    """Measure all rounds. ``at``: the store's URL, and options that are added to it; ``raw``: None if there is no raw
    client. Returns each variant's figures by operation, and the ratios to the raw client's rates. Cancelling closes the
    store and the raw client."""
    store = await _open(*at, pages, args.concurrency)
    wrong, variants = 0, [OFF, ON] if args.verify == "both" else [args.verify]
    try:
        without_raw = None if raw is None else await _refused(raw, pages)
        names = variants if raw is None or without_raw is not None else [RAW, *variants]
        found: dict[str, list[dict[str, PassMeter]]] = {name: [] for name in names}
        for n in range(args.repeat):
            for i in range(len(names)):
                name = names[(n + i) % len(names)]
                told = f"{shown(pages.page_bytes)} pages, round {n + 1} of {args.repeat}, {name}"
                if name == RAW and raw is not None:
                    client: Client = await raw()
                else:
                    client = StoreClient(store, checks=name == ON, most=name == variants[-1])
                found[name].append(await Pass(client, pages, args.concurrency, told, tell).measured())
                wrong += pages.mismatches()
        stats = {name: value for name, value in store.stats().items() if name in ("direct", "errors", "corrupt_pages")}
    finally:
        await store.aclose()
    figures: Figures = {name: {op: summary([one[op] for one in passes], moves=op != "exists") for op in passes[0]}
                        for name, passes in found.items()}
    return {**figures, "ratio": _ratios(found), "stats": stats, "mismatches": wrong, "without_raw": without_raw}


async def _refused(raw: OpenRaw, pages: PageSet) -> str | None:
    """Try the raw client with one put and one get. Returns why it cannot be used; None if it can. Cancelling closes the
    client."""
    keys = _fresh_keys(len(pages.source[: pages.batch]))
    try:
        client = await raw()
        try:
            await client.put(keys, pages.source[: pages.batch])
            await client.get(keys, pages.target[: pages.batch])
        finally:
            await client.aclose()
    except Exception as error:                         # whatever fails in the client, the store can still be measured
        return f"{type(error).__name__}: {error}"
    return None


class StoreClient:
    """The store, called as a raw client is. ``checks``: True to make and verify checksums. ``most``: True to measure
    gets in random order and ``exists`` as well."""

    def __init__(self, store: Switched, *, checks: bool, most: bool) -> None:
        self.store, self.most = store, most
        self._put: list[PageKey] = []
        store.checks = checks

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See ``MeasuredClient``."""
        names = [PageKey(POOL, key) for key in keys]
        self._put += names
        self._insist(await self.store.put(names, values))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """See ``MeasuredClient``."""
        self._insist(await self.store.get([PageKey(POOL, key) for key in keys], into))

    async def exists(self, keys: Sequence[bytes]) -> None:
        """Look the pages up, or raise a BackendError. Cancelling is as for the store."""
        self._insist(await self.store.exists([PageKey(POOL, key) for key in keys]))

    async def aclose(self) -> None:
        """Delete the pages that were put, so that the store is as it was before. Cancelling may leave pages."""
        for at in range(0, len(self._put), BATCH_PAGES):
            await self.store.delete(self._put[at : at + BATCH_PAGES])
        if isinstance(self.store.backend, Collectable):
            await self.store.backend.collect(None)

    def _insist(self, results: Sequence[Result]) -> None:
        if failed := len(results) - results.count(Result.HIT):
            raise BackendError(
                f"the store failed for {failed} of {len(results)} pages; its error: {self.store.last_error!r}")


Client = MeasuredClient | StoreClient


class Pass(NamedTuple):
    """One variant in one round. ``name``: its name in the lines of progress."""

    client: Client
    pages: PageSet
    concurrency: int
    name: str
    tell: Tell

    async def measured(self) -> dict[str, PassMeter]:
        """Measure all operations of the client on new keys, and close it. Cancelling closes it as well."""
        client, source, target = self.client, self.pages.source, self.pages.target
        keys, order = _fresh_keys(len(source)), range(len(source))
        try:
            meters = {"put": await self._drive("put", order, lambda which: client.put(
                [keys[i] for i in which], [source[i] for i in which]))}
            if isinstance(client, StoreClient):
                began = time.perf_counter()
                await client.store.flush()
                meters["put"].flush = time.perf_counter() - began
            get = lambda which: client.get([keys[i] for i in which], [target[i] for i in which])  # noqa: E731
            meters["get"] = await self._drive("get", order, get)
            if isinstance(client, StoreClient) and client.most:
                exists = client.exists
                shuffled = Random(1).sample(order, len(order))
                meters["get_shuffled"] = await self._drive("get shuffled", shuffled, get)
                meters["exists"] = await self._drive("exists", order, lambda which: exists([keys[i] for i in which]))
            return meters
        finally:
            await client.aclose()

    async def _drive(
        self, name: str, order: Sequence[int], call: Callable[[Sequence[int]], Awaitable[None]]
    ) -> PassMeter:
        """Make the calls for all pages, ``concurrency`` calls at a time; returns the times that they took."""
        meter, step = self.pages.meter(), self.pages.batch
        left = [order[at : at + step] for at in range(0, len(order), step)]
        batches = iter(left)

        async def worker() -> None:
            for batch in batches:
                with meter.call():
                    await call(batch)
                self.tell(f"{self.name}: {name}, {100 * len(meter.latencies) // len(left)} %")

        with meter.running():
            await asyncio.gather(*(worker() for _ in range(self.concurrency)))
        return meter


def _fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def _ratios(found: dict[str, list[dict[str, PassMeter]]]) -> Figures:
    """By variant and operation: the median over the rounds of the store's rate divided by the raw client's."""
    if RAW not in found:
        return {}
    return {
        variant: {op: round(median(_rates(found[RAW], passes, op)), 3) for op in ("put", "get")}
        for variant, passes in found.items() if variant != RAW
    }


def _rates(raw: list[dict[str, PassMeter]], ours: list[dict[str, PassMeter]], op: str) -> list[float]:
    return [theirs[op].wall / own[op].wall for theirs, own in zip(raw, ours, strict=True)]


def _compare(figures: Figures, checksum: float) -> None:
    """Add the CPU time that our own code costs for each page: the store's minus the raw client's, and with checksums
    also minus that of the ``checksum`` (µs)."""
    for variant in (OFF, ON):
        for op in ("put", "get"):
            if RAW in figures and variant in figures:
                beside = figures[RAW][op]["cpu_us_per_page"] + (checksum if variant == ON else 0.0)
                figures[variant][op]["own_us_per_page"] = round(figures[variant][op]["cpu_us_per_page"] - beside, 2)


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield a chart for each page size and mode. Rows are of the raw client, and of the store with checksums off and
    on. ``of raw``: the rate divided by the raw client's; ``CPU`` and ``own``: µs a page; p50 to p99.9: ms a call."""
    settings = figures["settings"]
    columns = ("GB/s", "of raw", "pages/s", "CPU", "own", "p50", "p99", "p99.9")
    keys = ("pages_per_s", "cpu_us_per_page", "own_us_per_page", "p50_ms", "p99_ms", "p999_ms")
    for found in figures["sizes"]:
        for mode, one in found.items():
            if mode not in ("store", "buffered", "direct"):
                continue
            rows = [Row(f"{op.replace('_', ', ')}, {variant}",
                        [row.get("gb_per_s"), one["ratio"].get(variant, {}).get(op), *map(row.get, keys)])
                    for op in ("put", "get", "get_shuffled", "exists") for variant in (RAW, OFF, ON)
                    if (row := one.get(variant, {}).get(op))]
            notes = [f"{settings['url']}: {settings['concurrency']} calls at a time, medians of {settings['rounds']} "
                     "rounds; raw client, checksums off and on; CPU, own: µs a page; p50 ...: ms a call",
                     f"a checksum takes {found['raw']['checksum']['cpu_us_per_page']:.1f} µs a page, memcpy moves "
                     f"{found['raw']['memcpy']['gb_per_s']:.2f} GB/s"]
            notes += [f"no raw client: {one['without_raw']}"] if one["without_raw"] else []
            notes += [f"NOT OK: {one['mismatches']} pages came back wrong"] if one["mismatches"] else []
            yield Chart(f"How fast the store is with pages of {shown(found['page_bytes'])}"
                        f"{'' if mode == 'store' else f', {mode}'}: "
                        f"{found['pages']} pages, {found['pages_per_call']} a call",
                        columns, rows, notes)
