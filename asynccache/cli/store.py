"""``asynccache store ls|stat|verify|gc|clear URL``: shows what a store holds, verifies its pages, and removes pages.

The answer goes to standard output, as text or JSON. Progress goes to standard error if an action takes longer than two
seconds. There is a coroutine for each action, which works on an open store and returns its report. The store is opened
without any pool, so opening it changes nothing in it. Every answer of the store has a deadline. A listing as a whole
has no deadline, but each of its batches has one. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, cast

from asynccache.cli.output import Progress, Tell, answer, check_writable
from asynccache.cli.parsing import POSITIVE, integer
from asynccache.cli.text import milliseconds, number, percent, size
from asynccache.errors import ConfigError
from asynccache.storage import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Collectable,
    Listable,
    PageKey,
    Record,
    Result,
    Scrubbable,
    Scrubbed,
    Stored,
    StoreLayout,
    open_store,
    parse_size,
    parse_url,
)
from asynccache.storage.checked import verify
from asynccache.storage.scrub import in_time, pause, scrub_listed, within

ACTIONS = {
    "ls": "list every page's key, size and age",
    "stat": "say how much is stored, how old it is, and whether the store answers",
    "verify": "read every stored page, drop and count the damaged ones",
    "gc": "remove what cannot be used any more, and pages older than --older-than",
    "clear": "remove every page",
}
TIMEOUT = 30.0
PROBES = 5
WHOLE_TIMEOUT = 3600.0
AGES = {"an hour": 3600.0, "a day": 86400.0, "a week": 7 * 86400.0, "30 days": 30 * 86400.0}
OLDER, UNKNOWN = "older", "unknown"

Report = dict[str, Any]
Show = Callable[[Stored], None]
WIDTH = 80
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all actions to ``parser``."""
    parser.add_argument("action", choices=list(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("url", metavar="URL", help="the store, for example file:/var/kv")
    parser.add_argument("--limit", type=integer(1), metavar="N", help="ls: list at most N pages")
    parser.add_argument("--rate", metavar="SIZE", help="verify: read at most so many bytes per second, as in 100MiB")
    parser.add_argument("--older-than", metavar="AGE",
                        help="gc: also remove pages that were written longer ago than this, as in 7d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="gc: count the old pages and remove nothing")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask for confirmation")
    parser.add_argument("--timeout", type=POSITIVE, default=TIMEOUT, metavar="SECONDS",
                        help="give up when the store does not answer for so long (default: 30; gc and clear have an "
                             "hour, because they do not report how far they have come)")
    parser.add_argument("--json", metavar="PATH|-",
                        help="write the answer as JSON to a file, or to standard output (-) instead of the text; for "
                             "ls one line for each page, and the total as the last line")


def execute(args: argparse.Namespace) -> int:
    """Run the action and print its answer. Returns the exit status: 1 if anything was damaged or could not be read, or
    if the action was not confirmed.

    Raises:
        ConfigError: an option is unusable, or this kind of store cannot do the action.
        BackendError: the store cannot be opened or read.
    """
    _check(args)
    if args.json is not None:
        check_writable(args.json)
    if args.action == "clear" and not (args.yes or _is_meant(args.shown)):
        return 1
    as_lines, progress, now = args.action == "ls" and args.json is not None, Progress(sys.stderr), time.time()
    with open(args.json, "w", encoding="utf-8") if as_lines and args.json != "-" else nullcontext(sys.stdout) as file:
        def show(page: Stored) -> None:
            print(json.dumps({**page._asdict(), "key": page.key.hex()}) if as_lines else line(page, now), file=file)

        try:
            report = asyncio.run(perform(args, show, progress.tell))
        finally:
            progress.end()
        if as_lines:
            print(json.dumps({"total": {name: report[name] for name in ("pages", "bytes", "more")}}), file=file)
            return 0
    answer(report, text(report), args.json)
    return 0 if report["ok"] else 1


def _check(args: argparse.Namespace) -> None:
    """Replace the texts of ``--rate`` and ``--older-than`` by bytes per second and seconds, and add ``shown``, the URL
    without its secrets.

    Raises:
        ConfigError: an option is unusable, or belongs to another action.
    """
    of = {"limit": "ls", "rate": "verify", "older_than": "gc", "dry_run": "gc", "yes": "clear"}
    for option, action in of.items():
        if getattr(args, option) and args.action != action:
            raise ConfigError(f"--{option.replace('_', '-')} is for asynccache store {action}")
    if args.rate is not None:
        text, args.rate = args.rate, parse_size("--rate", args.rate)
        if args.rate < 1:
            raise ConfigError(f"--rate={text!r} must be at least one byte a second")
    if args.older_than is not None:
        args.older_than = duration("--older-than", args.older_than)
    elif args.dry_run:
        raise ConfigError("--dry-run counts the pages that --older-than would remove: say how old, as in 7d")
    args.shown = str(parse_url(args.url))


def duration(name: str, text: str) -> float:
    """The seconds that ``text`` says: a number and ``s``, ``m``, ``h``, ``d`` or ``w``.

    Raises:
        ConfigError: ``text`` is no duration; the message begins with ``name``.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}={text!r} is no duration; write for example 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _is_meant(url: str) -> bool:
    """Ask at the terminal whether the store is to be cleared.

    Raises:
        ConfigError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError("clear removes every page: give --yes, because there is no terminal to ask at")
    print(f"Remove every page of {url}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# the actions


async def perform(options: argparse.Namespace, show: Show, tell: Tell) -> Report:
    """Open the store, run the action and close the store; returns the report. Cancelling also closes the store.

    Raises:
        ConfigError: the URL names no store, or this kind of store cannot do the action.
        BackendError: the store cannot be opened, or fails.
    """
    at_once = options.action in ("gc", "clear")
    timeout = max(options.timeout, WHOLE_TIMEOUT) if at_once else options.timeout
    async with within(options.timeout, f"storage={options.shown!r} could not be opened"):
        store = await open_store(options.url, StoreLayout({}, RECORD_SCHEMA), timeout=timeout)
    if store is None:
        raise ConfigError(f"storage={options.shown!r} is no store")
    try:
        match options.action:
            case "ls":
                report = await _list(store, options, show)
            case "stat":
                report = await _stat(store, options, tell)
            case "verify":
                report = await _verify(store, options, tell)
            case "gc":
                report = await _collect(store, options, tell)
            case _:
                began = time.monotonic()
                tell("clearing")
                await store.clear()
                report = {"elapsed_s": round(time.monotonic() - began, 3), "ok": True}
    finally:
        await store.aclose()
    return {"command": options.action, "url": options.shown, **report}


def _listing(store: CheckedStore, options: argparse.Namespace) -> AsyncIterator[Sequence[Stored]]:
    """The store's pages in batches.

    Raises:
        ConfigError: this kind of store cannot list its pages.
    """
    if not isinstance(store.backend, Listable):
        raise ConfigError(f"storage={options.shown!r}: this kind of store cannot list its pages")
    return in_time(store.backend.listing(), options.timeout)


async def _list(store: CheckedStore, options: argparse.Namespace, show: Show) -> Report:
    pages = total = 0
    async for batch in _listing(store, options):
        for page in batch:
            if pages == options.limit:
                return {"pages": pages, "bytes": total, "more": True, "ok": True}
            show(page)
            pages, total = pages + 1, total + page.size - HEADER_BYTES
    return {"pages": pages, "bytes": total, "more": False, "ok": True}


async def _stat(store: CheckedStore, options: argparse.Namespace, tell: Tell) -> Report:
    """Ask a few times for a page that is not there, and count the pages by size and by age if they can be listed."""
    took, failed = [], 0
    for _ in range(PROBES):
        began = time.perf_counter()
        failed += await store.exists([PageKey("", os.urandom(KEY_BYTES))]) == [Result.FAILED]
        took.append(round((time.perf_counter() - began) * 1e3, 3))
    report: Report = {"probe": {"median_ms": median(took), "worst_ms": max(took), "failed": failed},
                      "breaker": store.breaker.state.name.lower()}  # fmt: skip
    if isinstance(store.backend, Listable):
        now, sizes, ages = time.time(), Counter[int](), Counter[str]()
        async for batch in _listing(store, options):
            for page in batch:
                sizes[page.size - HEADER_BYTES] += 1
                ages[age_class(now - page.written if page.written else None)] += 1
            tell(f"{number(sizes.total())} pages listed")
        report |= {
            "pages": sizes.total(),
            "bytes": sum(length * count for length, count in sizes.items()),
            "by_page_size": [{"page_bytes": length, "pages": sizes[length]} for length in sorted(sizes)],
            "by_age": {name: ages[name] for name in (*AGES, OLDER, UNKNOWN) if ages[name]},
        }
    stats = dict(store.backend.stats())
    counted = {name: stats.pop(name, 0) for name in ("pages", "bytes")}
    return {**report, **({} if "pages" in report else counted), "stats": stats, "ok": not failed}


def age_class(seconds: float | None) -> str:
    """The name of the first class of ``AGES`` that a page of this age is below; None: its age is not known."""
    if seconds is None:
        return UNKNOWN
    return next((name for name, limit in AGES.items() if seconds < limit), OLDER)


async def _verify(store: CheckedStore, options: argparse.Namespace, tell: Tell) -> Report:
    """Let the store read its pages in its own order if it can, and read every listed page otherwise."""
    began, backend = time.monotonic(), store.backend
    if isinstance(backend, Scrubbable):
        total = sum(part.pages * part.page_bytes for part in backend.parts())
        found = await store.scrub(options.rate, lambda done: tell(
            f"{percent(done.bytes, total)} · {size(done.bytes)} of {size(total)} · {_seen(done)}"))
    elif isinstance(backend, Listable):
        async def verified(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
            return await asyncio.to_thread(verify, keys, records)

        found, readable = Scrubbed(), cast("Any", backend)
        async for part in scrub_listed(readable, verified, options.timeout):
            found = found.plus(part)
            tell(f"{size(found.bytes)} · {_seen(found)}")
            if options.rate is not None:
                await asyncio.sleep(pause(found.bytes, options.rate, time.monotonic() - began))
    else:
        raise ConfigError(f"storage={options.shown!r}: its pages cannot be listed, so none can be verified")
    return {**found._asdict(), "elapsed_s": round(time.monotonic() - began, 3), "ok": not (found.bad or found.unread)}


def _seen(done: Scrubbed) -> str:
    return f"{number(done.pages)} pages, {number(done.bad)} damaged"


async def _collect(store: CheckedStore, options: argparse.Namespace, tell: Tell) -> Report:
    if not isinstance(store.backend, Collectable):
        raise ConfigError(f"storage={options.shown!r}: this kind of store has nothing that gc could remove")
    began, found = time.monotonic(), {"pages": 0, "waste": 0, "size": 0, "unknown": 0}
    if options.dry_run:
        until = time.time() - options.older_than
        async for batch in _listing(store, options):
            old = [page.size for page in batch if 0 < page.written < until]
            found["pages"] += len(old)
            found["size"] += sum(old)
            found["unknown"] += sum(not page.written for page in batch)
    else:
        tell("collecting")
        async with within(WHOLE_TIMEOUT, "gc was not finished; what it has removed stays removed"):
            found = (await store.backend.collect(options.older_than))._asdict()
    return {**found, "dry_run": options.dry_run, "elapsed_s": round(time.monotonic() - began, 3), "ok": True}


# the reports as text of at most 80 columns


def text(report: Report) -> str:
    """The report of any action as text."""
    match report["command"]:
        case "ls":
            more = "; there are more" if report["more"] else ""
            return f"{number(report['pages'])} pages, {size(report['bytes'])}{more}"
        case "stat":
            return "\n".join(_counted(report))
        case "verify":
            rate = report["bytes"] / report["elapsed_s"] if report["elapsed_s"] else 0.0
            lines = [f"{'OK' if report['ok'] else 'NOT OK'}: {number(report['pages'])} pages, {size(report['bytes'])} "
                     f"in {report['elapsed_s']:.1f} s ({size(rate)}/s)"]
            lines += [f"  {number(report['bad'])} damaged pages were dropped"] if report["bad"] else []
            lines += [f"  {number(report['unread'])} pages could not be read"] if report["unread"] else []
            return "\n".join(lines)
        case "gc" if report["dry_run"]:
            unknown = f"; the age of {number(report['unknown'])} pages is not known" if report["unknown"] else ""
            return f"{number(report['pages'])} pages are that old: {size(report['size'])}; nothing was removed{unknown}"
        case "gc":
            return (f"{number(report['pages'])} old pages and {number(report['waste'])} pieces of waste removed, "
                    f"{size(report['size'])} freed")
        case _:
            return f"{report['url']} is empty"


def line(page: Stored, now: float) -> str:
    """The line of one page in a list: key, size of its payload, age. ``now``: the present time, as ``time.time()``."""
    return f"{page.key.hex()} {size(page.size - HEADER_BYTES):>8} {age(now - page.written) if page.written else '?':>5}"


def age(seconds: float) -> str:
    """An age in its largest whole unit: ``7 s``, ``12 m``, ``3 h``, ``14 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _counted(report: Report) -> list[str]:
    stats = report["stats"]
    told = ("disk_bytes", "segments", "capacity_bytes")
    on_disk = ("; {} of {} in {} segments".format(size(stats["disk_bytes"]), size(stats["capacity_bytes"]),
                                                  number(stats["segments"]))
               if stats.keys() >= set(told) else "")
    lines = [f"{report['url']}: {number(report['pages'])} pages, {size(report['bytes'])}{on_disk}"]
    lines += [f"  {number(one['pages'])} pages of {size(one['page_bytes'])}" for one in report.get("by_page_size", ())]
    ages = [f"{number(count)} {name if name in (OLDER, UNKNOWN) else f'below {name}'}"
            for name, count in report.get("by_age", {}).items()]
    if ages:
        lines += textwrap.wrap("by age: " + ", ".join(ages), WIDTH, initial_indent="  ", subsequent_indent="    ")
    probe = report["probe"]
    answer = (f"it answers in {milliseconds(probe['median_ms'])}, at worst {milliseconds(probe['worst_ms'])}"
              if not probe["failed"] else f"NOT OK: it failed to answer {probe['failed']} of the questions")
    lines.append(f"  {answer}; breaker {report['breaker']}")
    counts = [_count(name, value) for name, value in stats.items() if value and not (on_disk and name in told)]
    if counts:
        lines += textwrap.wrap(" · ".join(counts), WIDTH, initial_indent="  ", subsequent_indent="  ",
                               break_on_hyphens=False)
    return lines


def _count(name: str, value: float) -> str:
    for end, write in (("_bytes", size), ("_ms", milliseconds)):
        if name.endswith(end):
            return f"{name.removesuffix(end)} {write(value)}"
    return f"{name} {value:,.5g}"
