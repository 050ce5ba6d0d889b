"""``asynccache store verify URL`` and ``asynccache store stat URL``: look at a store that nobody uses at the moment.

Progress goes to standard error and only if it takes longer than two seconds; a person's answer or the JSON to standard
output. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

from asynccache.cli.output import check_writable, dump
from asynccache.cli.text import number, percent, size
from asynccache.errors import ConfigError
from asynccache.storage import (
    RECORD_SCHEMA,
    CheckedStore,
    Part,
    Scrubbable,
    Scrubbed,
    StoreLayout,
    open_store,
    parse_size,
)

QUIET_FOR = 2.0
EVERY = 0.5

ACTIONS = {
    "verify": "read every stored page; drop, and count, what is damaged",
    "stat": "how much is stored, without reading it",
}

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both actions."""
    parser.add_argument("action", choices=list(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("url", metavar="URL", help="the store, for example file:/var/kv")
    parser.add_argument("--rate", metavar="SIZE", help="verify: read at most so much a second, for example 100MiB")
    parser.add_argument("--json", metavar="PATH|-", help="the answer as JSON, to a file or (-) instead of the text")


def execute(args: argparse.Namespace) -> int:
    """Do it and say what came out; the exit status: 1 if anything was damaged or could not be read.

    Raises:
        ConfigError: an option is unusable, or this kind of store cannot be looked at. BackendError: it cannot be opened
        or read.
    """
    rate = None if args.rate is None else parse_size("--rate", args.rate)
    if rate is not None and rate < 1:
        raise ConfigError(f"--rate={args.rate!r} must be at least one byte a second")
    if args.json is not None:
        check_writable(args.json)
    report = asyncio.run(_verify(args.url, rate) if args.action == "verify" else _stat(args.url))
    if args.json != "-":
        print(text(report))
    if args.json is not None:
        dump(report, args.json)
    return 0 if report["ok"] else 1


async def _verify(url: str, rate: float | None) -> Report:
    began = time.monotonic()

    async def work(store: CheckedStore, parts: list[Part]) -> Report:
        progress = Progress(sys.stderr, sum(part.pages * part.page_bytes for part in parts))
        try:
            found = await store.scrub(rate, progress.tell)
        finally:
            progress.end()
        return {**found._asdict(), "ok": not (found.bad or found.unread)}

    return {"command": "verify", "url": url, **await _with_store(url, work),
            "elapsed_s": round(time.monotonic() - began, 3)}


async def _stat(url: str) -> Report:
    async def work(store: CheckedStore, parts: list[Part]) -> Report:
        pages: Counter[int] = Counter()
        for part in parts:
            pages[part.page_bytes] += part.pages
        by_size = [{"page_bytes": page_bytes, "pages": pages[page_bytes]} for page_bytes in sorted(pages)]
        stats = store.stats()
        shown = {name: stats[name] for name in ("pages", "bytes", "disk_bytes", "segments", "open_ms") if name in stats}
        return {**shown, "by_page_size": by_size, "ok": True}

    return {"command": "stat", "url": url, **await _with_store(url, work)}


async def _with_store(url: str, work: Callable[[CheckedStore, list[Part]], Awaitable[Report]]) -> Report:
    """Open the store without pools, so that it stays as it is, and close it again come what may."""
    store = await open_store(url, StoreLayout({}, RECORD_SCHEMA))
    if store is None:
        raise ConfigError(f"storage={url!r} is no store")
    try:
        if not isinstance(store.backend, Scrubbable):
            raise ConfigError(f"storage={url!r}: this kind of store keeps nothing that could be looked at")
        return await work(store, store.backend.parts())
    finally:
        await store.aclose()


class Progress:
    """How far it has come: one line that is written again on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._total = total
        self._clock = clock
        self._again = stream.isatty()
        self._next = clock() + QUIET_FOR
        self._shown = False

    def tell(self, done: Scrubbed) -> None:
        """Show it, if it is time to."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (EVERY if self._again else 10 * EVERY)
        self._shown = True
        line = (f"{percent(done.bytes, self._total)} · {size(done.bytes)} of {size(self._total)} · "
                f"{number(done.pages)} pages, {number(done.bad)} damaged")
        self._stream.write(f"\r{line}\x1b[K" if self._again else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave no half line behind."""
        if self._shown and self._again:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def text(report: Report) -> str:
    """The report for a person."""
    if report["command"] == "stat":
        sizes = [f"  {number(one['pages'])} pages of {size(one['page_bytes'])}" for one in report["by_page_size"]]
        head = f"{report['url']}: {number(report['pages'])} pages, {size(report['bytes'])}"
        return "\n".join([f"{head}; {size(report['disk_bytes'])} in {number(report['segments'])} segments", *sizes])
    rate = report["bytes"] / report["elapsed_s"] if report["elapsed_s"] else 0.0
    head = "OK" if report["ok"] else "NOT OK"
    lines = [f"{head}: {number(report['pages'])} pages, {size(report['bytes'])} in {report['elapsed_s']:.1f} s "
             f"({size(rate)}/s)"]
    if report["bad"]:
        lines.append(f"  {number(report['bad'])} damaged pages were dropped")
    if report["unread"]:
        lines.append(f"  {number(report['unread'])} pages could not be read")
    return "\n".join(lines)
