"""``asynccache bench store [URL]``: what a store costs beside a raw client of the same server in the same run.

Every round measures the raw client, then the store without checksums (``off``), then with them (``on``), each round
beginning with another of them: a busy machine is busy for all. Figures are medians of the rounds, ratios of a round's
own figures. Pages come from and go to page-aligned, registered host memory through ``CheckedStore``, as in the runtime.
CPU is the process's, user and system, all threads; what a server or the kernel's writeback does is not in it.

Keys are new for every pass and deleted after it: what else is in the store stays. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from asynccache.cli.bench_meter import Meter, summary
from asynccache.cli.bench_raw import OpenRaw, copy, page_memory, raw_client
from asynccache.cli.bench_store_text import table
from asynccache.cli.progress import Progress
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
from asynccache.storage.records import header_of

__all__ = ["add_arguments", "run", "table"]

POOL = "bench"
BATCH_BYTES = 8 << 20
BATCH_PAGES = 128
PAGE_SIZES = "64KiB,256KiB,2MiB"
RAW, OFF, ON = "raw", "off", "on"
TIMEOUT = 600.0

Tell = Callable[[str], None]
Figures = dict[str, Any]
_T = TypeVar("_T")


class Load(NamedTuple):
    """What is moved: where the pages come from, where they go to, and how they are dealt out to calls."""

    page_bytes: int
    memory: memoryview
    source: list[memoryview]
    target: list[memoryview]
    batch: int

    @property
    def pages(self) -> int:
        return len(self.source)

    def batches(self, order: Sequence[int]) -> list[list[int]]:
        """``order`` cut into calls."""
        return [list(order[at : at + self.batch]) for at in range(0, len(order), self.batch)]

    def mismatches(self) -> int:
        """Pages that did not come back as they went."""
        return sum(not np.array_equal(np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8))
                   for source, target in zip(self.source, self.target, strict=True))


class Plan(NamedTuple):
    """One store, with ``options`` added to its URL, measured with one load."""

    url: str
    options: dict[str, str]
    load: Load
    variants: list[str]
    raw: OpenRaw | None
    rounds: int
    concurrency: int


class Switched(CheckedStore):
    """A ``CheckedStore`` whose checksums can be turned off; all else it does is done."""

    checks = True

    async def _in_batches(
        self, work: Callable[[Sequence[PageKey], Sequence[Record]], _T], keys: Sequence[PageKey],
        records: Sequence[Record],
    ) -> list[_T]:  # fmt: skip
        if self.checks:
            return await super()._in_batches(work, keys, records)
        return cast("list[_T]", [[True] * len(keys)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the store (default: a file store in a temporary folder)")
    parser.add_argument("--page-sizes", default=PAGE_SIZES, metavar="SIZES", help=f"default: {PAGE_SIZES}")
    parser.add_argument("--bytes", default="128MiB", metavar="SIZE", help="moved per pass (default: 128MiB)")
    parser.add_argument("--batch", type=int, metavar="N", help="pages per call (default: up to 8 MiB, at most 128)")
    parser.add_argument("--concurrency", type=int, default=2, metavar="N", help="calls at a time (default: 2)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds; medians are shown (default: 3)")
    parser.add_argument("--verify", choices=("on", "off", "both"), default="both",
                        help="with checksums, without, or one after the other (default)")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--json", metavar="PATH|-", help="the figures as JSON, to a file or (-) instead of the table")


def run(args: argparse.Namespace, tell: Tell | None = None) -> Figures:
    """Measure, and return the figures as a dict that JSON can hold. ``tell`` hears how far it is; else whoever waits
    at standard error does.

    Raises:
        ConfigError: an option is unusable. BackendError: the store cannot be opened, or fails.
    """
    sizes = [parse_size("--page-sizes", text) for text in args.page_sizes.split(",")]
    total = parse_size("--bytes", args.bytes)
    batch = 1 if args.batch is None else args.batch
    for name, value in (("--concurrency", args.concurrency), ("--repeat", args.repeat), ("--page-sizes", min(sizes)),
                        ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if total < max(sizes):
        raise ConfigError(f"--bytes={args.bytes!r} is less than one page of {max(sizes)} bytes")
    progress = Progress(sys.stderr)
    try:
        if args.url is not None:
            return _measured(args, args.url, sizes, total, tell or progress.tell)
        with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
            url = f"file:{folder}/store?capacity={4 * total + (1 << 30)}"
            return _measured(args, url, sizes, total, tell or progress.tell)
    finally:
        progress.end()


def _measured(args: argparse.Namespace, url: str, sizes: Sequence[int], total: int, tell: Tell) -> Figures:
    results = []
    for size in sizes:
        load = _load(size, total, args.batch)
        figures: Figures = {"page_bytes": size, "pages": load.pages, "pages_per_call": load.batch,
                            "raw": {"memcpy": _memcpy(load), "checksum": _checksum(load)}}
        for mode, options in _modes(url).items():
            plan = _plan(args, url, options, load, mode == "direct" and size % 4096 == 0)
            figures[mode] = _with_loop(args.loop, _rounds(plan, tell))
            _compare(figures[mode], figures["raw"]["checksum"]["cpu_us_per_page"])
        results.append(figures)
    settings = {"url": str(parse_url(url)), "concurrency": args.concurrency, "rounds": args.repeat, "loop": args.loop,
                "bytes": total, "verify": args.verify}
    return {"bench": "store", "settings": settings, "cores": os.cpu_count(), "sizes": results}


def _plan(args: argparse.Namespace, url: str, options: dict[str, str], load: Load, direct: bool) -> Plan:
    raw = raw_client(url, direct, load.page_bytes * load.pages)
    variants = [OFF, ON] if args.verify == "both" else [args.verify]
    return Plan(url, options, load, variants if raw is None else [RAW, *variants], raw, args.repeat, args.concurrency)


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


def _load(size: int, total: int, batch: int | None) -> Load:
    pages, rng = total // size, Random(size)
    memory = page_memory(2 * pages, size)
    both = [memory[at : at + size] for at in range(0, 2 * pages * size, size)]
    source, target = both[:pages], both[pages:]
    pattern = np.frombuffer(rng.randbytes(1 << 20), np.uint8)
    for i, page in enumerate(source):
        view = np.frombuffer(page, np.uint8)
        view[:] = np.resize(pattern, size)
        view[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)[: view[:8].size]
    return Load(size, memory, source, target, batch or max(1, min(BATCH_PAGES, BATCH_BYTES // size)))


def _memcpy(load: Load) -> Figures:
    """One thread copies every page."""
    meter = Meter(load.pages, load.page_bytes)
    with meter.running():
        for source, target in zip(load.source, load.target, strict=True):
            with meter.call():
                copy(target, source)
    return summary([meter])


def _checksum(load: Load) -> Figures:
    """One thread makes every page's header."""
    meter, key = Meter(load.pages, load.page_bytes), bytes(32)
    with meter.running():
        for source in load.source:
            with meter.call():
                header_of(key, source)
    return summary([meter])


async def _open(plan: Plan) -> Switched:
    """As ``open_store`` does, but with checksums that can be turned off."""
    parsed = parse_url(plan.url, plan.options)
    if parsed.scheme == "none":
        raise ConfigError(f"storage={plan.url!r} is no store to measure")
    common, own = take_options(parsed)
    layout = StoreLayout({POOL: plan.load.page_bytes}, RECORD_SCHEMA)
    backend = await backend_class(own.scheme).open(own, layout)
    store = Switched(backend, layout, timeout=TIMEOUT, concurrency=max(common.concurrency, 2 * plan.concurrency))
    store.register(POOL, plan.load.memory)
    return store


async def _rounds(plan: Plan, tell: Tell) -> Figures:
    """All rounds; each variant's figures by operation, and the ratios to the raw client's. Cancelling it closes all."""
    store = await _open(plan)
    wrong = 0
    try:
        without_raw = None if plan.raw is None else await Pass(plan, "raw", tell).refused()
        variants = [variant for variant in plan.variants if without_raw is None or variant != RAW]
        found: dict[str, list[dict[str, Meter]]] = {variant: [] for variant in variants}
        for n in range(plan.rounds):
            for i in range(len(variants)):
                variant = variants[(n + i) % len(variants)]
                pages = f"{shown(plan.load.page_bytes)} pages"
                one = Pass(plan, f"{pages}, round {n + 1} of {plan.rounds}, {variant}", tell)
                found[variant].append(await (one.raw() if variant == RAW else one.ours(store, variant == ON)))
                wrong += plan.load.mismatches()
        stats = {name: value for name, value in store.stats().items() if name in ("direct", "errors", "corrupt_pages")}
    finally:
        await store.aclose()
    figures: Figures = {variant: {op: summary([one[op] for one in passes], moves=op != "exists") for op in passes[0]}
                        for variant, passes in found.items()}
    return {**figures, "ratio": _ratios(found), "stats": stats, "mismatches": wrong, "without_raw": without_raw}


class Pass(NamedTuple):
    """One variant in one round."""

    plan: Plan
    name: str
    tell: Tell

    async def refused(self) -> str | None:
        """Try the raw client once, with one call; why it cannot be used. Cancelling it closes the client."""
        assert self.plan.raw is not None
        load = self.plan.load
        keys = _fresh_keys(len(load.source[: load.batch]))
        try:
            client = await self.plan.raw()
            try:
                await client.put(keys, load.source[: load.batch])
                await client.get(keys, load.target[: load.batch])
            finally:
                await client.aclose()
        except Exception as error:                     # whatever it may be, the store itself can be measured
            return f"{type(error).__name__}: {error}"
        return None

    async def raw(self) -> dict[str, Meter]:
        """Put and get by the raw client. Cancelling it closes the client."""
        assert self.plan.raw is not None
        load, keys = self.plan.load, _fresh_keys(self.plan.load.pages)
        client = await self.plan.raw()
        try:
            async def put(which: list[int]) -> None:
                await client.put([keys[i] for i in which], [load.source[i] for i in which])

            async def get(which: list[int]) -> None:
                await client.get([keys[i] for i in which], [load.target[i] for i in which])

            return {"put": await self._drive("put", put), "get": await self._drive("get", get)}
        finally:
            await client.aclose()

    async def ours(self, store: Switched, checks: bool) -> dict[str, Meter]:
        """All operations of the store. Cancelling it deletes what was put."""
        store.checks = checks
        load, keys = self.plan.load, [PageKey(POOL, key) for key in _fresh_keys(self.plan.load.pages)]

        async def put(which: list[int]) -> None:
            _insist(await store.put([keys[i] for i in which], [load.source[i] for i in which]), store)

        async def get(which: list[int]) -> None:
            _insist(await store.get([keys[i] for i in which], [load.target[i] for i in which]), store)

        async def exists(which: list[int]) -> None:
            _insist(await store.exists([keys[i] for i in which]), store)

        try:
            meters = {"put": await self._drive("put", put)}
            began = time.perf_counter()
            await store.flush()
            meters["put"].flush = time.perf_counter() - began
            meters["get"] = await self._drive("get", get)
            if checks or ON not in self.plan.variants:
                shuffled = Random(1).sample(range(load.pages), load.pages)
                meters["get_shuffled"] = await self._drive("get shuffled", get, shuffled)
                meters["exists"] = await self._drive("exists", exists)
            return meters
        finally:
            await _remove(store, keys, load.batch)

    async def _drive(
        self, name: str, call: Callable[[list[int]], Awaitable[None]], order: Sequence[int] | None = None
    ) -> Meter:
        """Make all calls, as many at a time as planned."""
        load = self.plan.load
        meter = Meter(load.pages, load.page_bytes)
        left = load.batches(range(load.pages) if order is None else order)
        batches = iter(left)

        async def worker() -> None:
            for batch in batches:
                with meter.call():
                    await call(batch)
                self.tell(f"{self.name}: {name}, {100 * len(meter.latencies) // len(left)} %")

        with meter.running():
            await asyncio.gather(*(worker() for _ in range(self.plan.concurrency)))
        return meter


async def _remove(store: CheckedStore, keys: Sequence[PageKey], batch: int) -> None:
    """Leave the store as it was."""
    for at in range(0, len(keys), batch):
        await store.delete(keys[at : at + batch])
    if isinstance(store.backend, Collectable):
        await store.backend.collect(None)


def _fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def _insist(results: Sequence[Result], store: CheckedStore) -> None:
    if failed := len(results) - results.count(Result.HIT):
        raise BackendError(f"the store failed {failed} of {len(results)} pages; it says: {store.last_error!r}")


def _ratios(found: dict[str, list[dict[str, Meter]]]) -> Figures:
    """By variant and operation, the median of what each round's rate is of its raw client's."""
    if RAW not in found:
        return {}
    return {
        variant: {op: round(median(_rates(found[RAW], passes, op)), 3) for op in ("put", "get")}
        for variant, passes in found.items() if variant != RAW
    }


def _rates(raw: list[dict[str, Meter]], ours: list[dict[str, Meter]], op: str) -> list[float]:
    return [theirs[op].wall / own[op].wall for theirs, own in zip(raw, ours, strict=True)]


def _compare(figures: Figures, checksum: float) -> None:
    """Add what our own code costs a page: beside the raw client's, and with checksums beside theirs, too."""
    for variant in (OFF, ON):
        for op in ("put", "get"):
            if RAW in figures and variant in figures:
                beside = figures[RAW][op]["cpu_us_per_page"] + (checksum if variant == ON else 0.0)
                figures[variant][op]["own_us_per_page"] = round(figures[variant][op]["cpu_us_per_page"] - beside, 2)
