"""The cost of ``Pages`` beyond the asynchronous stores below it: ``python benchmarks/pages.py [URL]``.

Both move the same pages through the same kind of store, each with an event loop in a thread of its own. They take turns
in one process, so that other work of the machine slows both alike; the medians over the rounds are printed. The
asynchronous path calls ``TieredStore`` with keys and views that were made before. ``Pages`` makes its keys and views
for each call, hands them to its thread, and waits for the future. CPU time is that of all threads of the process, user
and system, in µs for each page; ``own`` is the difference of the two figures of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from asynccache.storage import RECORD_SCHEMA, PageKey, Pages, Result, StoreLayout, parse_size
from asynccache.storage.attachment import open_all
from asynccache.storage.tiers import TieredStore

VERBS = ("exists", "put", "get")
GOAL = 3.0


class PageLoad:
    """The pages that are moved: ``pages`` of them in each call, and ``calls`` calls in a round. Each round has new
    keys."""

    def __init__(self, pages: int, page_bytes: int, calls: int) -> None:
        self.pages, self.page_bytes, self.calls = pages, page_bytes, calls
        self.memory = mmap.mmap(-1, pages * page_bytes)
        self.slots = range(pages)
        self._round = 0

    def fresh(self) -> list[list[bytes]]:
        """The keys of the next round, call by call."""
        self._round += 1
        return [[b"%16d%8d%8d" % (self._round, call, page) for page in self.slots] for call in range(self.calls)]

    def cpu(self, act: Callable[[], None]) -> float:
        """Run ``act``, one operation for all pages of a round; returns µs of CPU time for each page."""
        began = time.process_time()
        act()
        return (time.process_time() - began) / self.calls / self.pages * 1e6


def by_pages(pages: Pages, load: PageLoad) -> dict[str, float]:
    """Run a round through ``Pages``; returns µs of CPU time for each page, by operation."""
    keys = load.fresh()

    def exists() -> None:
        for some in keys:
            _insist(pages.exists(some).result())

    def put() -> None:
        for some in keys:
            _insist(pages.put(some, load.slots).result())

    def get() -> None:
        for some in keys:
            _insist(pages.get(some, load.slots).result())

    put_cpu = load.cpu(put)
    return {"exists": load.cpu(exists), "put": put_cpu, "get": load.cpu(get)}


def by_stores(runner: asyncio.Runner, store: TieredStore, load: PageLoad) -> dict[str, float]:
    """Run a round through the asynchronous stores; returns µs of CPU time for each page, by operation."""
    keys = [[PageKey("pages", key) for key in some] for some in load.fresh()]

    async def exists() -> None:
        for some in keys:
            _insist(await store.exists(some))

    async def put() -> None:
        for some in keys:
            _insist(await store.put(some, views))

    async def get() -> None:
        for some in keys:
            _insist(await store.get(some, views))

    with memoryview(load.memory) as whole:
        views = [whole[at * load.page_bytes : (at + 1) * load.page_bytes] for at in load.slots]
        put_cpu = load.cpu(lambda: runner.run(put()))
        exists_cpu = load.cpu(lambda: runner.run(exists()))
        return {"exists": exists_cpu, "put": put_cpu, "get": load.cpu(lambda: runner.run(get()))}


def measure(url: str | None, load: PageLoad, rounds: int) -> list[tuple[str, float, float, float]]:
    """For each operation: µs of CPU time for each page of the stores, of ``Pages``, and the difference. The first round
    warms up and is not counted."""
    stores: dict[str, list[float]] = {verb: [] for verb in VERBS}
    pages: dict[str, list[float]] = {verb: [] for verb in VERBS}
    store, layout = TieredStore(), StoreLayout({"pages": load.page_bytes}, RECORD_SCHEMA)
    url = url or f"memory:?capacity={load.calls * load.pages * (load.page_bytes + 64)}"
    with (Pages.open(url, load.memory, load.page_bytes, "benchmark") as sync, ThreadPoolExecutor(1) as thread,
          asyncio.Runner() as runner):  # fmt: skip
        thread.submit(runner.run, open_all(store, [url], layout, {})).result()
        try:
            for _ in range(rounds + 1):
                for verb, cpu in thread.submit(by_stores, runner, store, load).result().items():
                    stores[verb].append(cpu)
                for verb, cpu in by_pages(sync, load).items():
                    pages[verb].append(cpu)
        finally:
            thread.submit(runner.run, store.aclose()).result()
    return [_row(verb, stores[verb][1:], pages[verb][1:]) for verb in VERBS]


def _row(verb: str, stores: Sequence[float], pages: Sequence[float]) -> tuple[str, float, float, float]:
    own = [mine - theirs for mine, theirs in zip(pages, stores, strict=True)]
    return verb, statistics.median(stores), statistics.median(pages), statistics.median(own)


def _insist(results: Sequence[Result]) -> None:
    if results.count(Result.HIT) != len(results):
        raise SystemExit(f"the store failed for {len(results) - results.count(Result.HIT)} of {len(results)} pages")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a store that can be opened twice at a time (default: memory)")
    parser.add_argument("--pages", type=int, default=64, metavar="N", help="pages in a call (default: 64)")
    parser.add_argument("--page-bytes", default="4KiB", metavar="SIZE", help="size of a page (default: 4KiB)")
    parser.add_argument("--calls", type=int, default=50, metavar="N", help="calls in a round (default: 50)")
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="rounds that are counted (default: 25)")
    args = parser.parse_args(arguments)
    load = PageLoad(args.pages, parse_size("--page-bytes", args.page_bytes), args.calls)
    lines = [f"{args.pages} pages of {load.page_bytes} bytes in a call; µs of CPU for each page; goal: own <= {GOAL}",
             f"{'':8}{'stores':>10}{'Pages':>10}{'own':>10}"]  # fmt: skip
    for verb, stores, pages, own in measure(args.url, load, args.rounds):
        lines.append(f"{verb:8}{stores:10.2f}{pages:10.2f}{own:10.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
