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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

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
    if args.action == "ls" and args.json is not None:
        with _json_lines(args.json) as write:
            report = _performed(args, lambda page: write({**page._asdict(), "key": page.key.hex()}))
            write({"total": {name: report[name] for name in ("pages", "bytes", "more")}})
        return 0
    now = time.time()
    report = _performed(args, lambda page: print(line(page, now)))
    answer(report, text(report), args.json)
    return 0 if report["ok"] else 1


def _performed(args: argparse.Namespace, show: Show) -> Report:
    progress = Progress(sys.stderr)
    try:
        return asyncio.run(perform(args, show, progress.tell))
    finally:
        progress.end()


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


@contextmanager
def _json_lines(path: str) -> Iterator[Callable[[object], None]]:
    """Yield a function that writes a value as a line of JSON to the file ``path``, or for ``-`` to standard output."""
    if path == "-":
        yield lambda value: print(json.dumps(value))
        return
    with open(path, "w", encoding="utf-8") as file:
        yield lambda value: print(json.dumps(value), file=file)


# the actions


class StoreAction(NamedTuple):
    """An open store and what to do with it. ``options``: the parsed command line. ``show`` is called with every page of
    a list, ``tell`` with a line that says how far the action has come."""

    store: CheckedStore
    options: argparse.Namespace
    show: Show
    tell: Tell

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """The store's pages in batches.

        Raises:
            ConfigError: this kind of store cannot list its pages.
        """
        backend = self.store.backend
        if not isinstance(backend, Listable):
            raise ConfigError(f"storage={self.options.shown!r}: this kind of store cannot list its pages")
        return in_time(backend.listing(), self.options.timeout)


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
        report = await _ACTIONS[options.action](StoreAction(store, options, show, tell))
    finally:
        await store.aclose()
    return {"command": options.action, "url": options.shown, **report}


async def _list(action: StoreAction) -> Report:
    pages = total = 0
    limit = action.options.limit
    async for batch in action.listing():
        for page in batch:
            if pages == limit:
                return {"pages": pages, "bytes": total, "more": True, "ok": True}
            action.show(page)
            pages, total = pages + 1, total + page.size - HEADER_BYTES
    return {"pages": pages, "bytes": total, "more": False, "ok": True}


async def _stat(action: StoreAction) -> Report:
    store = action.store
    report: Report = {"probe": await _probe(store), "breaker": store.breaker.state.name.lower()}
    if isinstance(store.backend, Listable):
        report |= await _census(action)
    stats = {name: value for name, value in store.backend.stats().items() if name not in ("pages", "bytes")}
    if "pages" not in report:
        known = store.backend.stats()
        report |= {"pages": known["pages"], "bytes": known["bytes"]}
    return {**report, "stats": stats, "ok": report["probe"]["failed"] == 0}


async def _probe(store: CheckedStore) -> Report:
    """Ask a few times for a page that is not there. Returns how long the answers took, and how many failed."""
    took, failed = [], 0
    for _ in range(PROBES):
        began = time.perf_counter()
        failed += await store.exists([PageKey("", os.urandom(KEY_BYTES))]) == [Result.FAILED]
        took.append(round((time.perf_counter() - began) * 1e3, 3))
    return {"median_ms": median(took), "worst_ms": max(took), "failed": failed}


async def _census(action: StoreAction) -> Report:
    """Count the pages by size and by age."""
    now, sizes, ages = time.time(), Counter[int](), Counter[str]()
    async for batch in action.listing():
        for page in batch:
            sizes[page.size - HEADER_BYTES] += 1
            ages[age_class(now - page.written if page.written else None)] += 1
        action.tell(f"{number(sizes.total())} pages listed")
    return {
        "pages": sizes.total(),
        "bytes": sum(length * count for length, count in sizes.items()),
        "by_page_size": [{"page_bytes": length, "pages": sizes[length]} for length in sorted(sizes)],
        "by_age": {name: ages[name] for name in (*AGES, OLDER, UNKNOWN) if ages[name]},
    }


def age_class(seconds: float | None) -> str:
    """The name of the first class of ``AGES`` that a page of this age is below; None: its age is not known."""
    if seconds is None:
        return UNKNOWN
    return next((name for name, limit in AGES.items() if seconds < limit), OLDER)


async def _verify(action: StoreAction) -> Report:
    began, store, options = time.monotonic(), action.store, action.options
    if isinstance(store.backend, Scrubbable):
        total = sum(part.pages * part.page_bytes for part in store.backend.parts())
        found = await store.scrub(options.rate, lambda done: action.tell(_so_far(done, total)))
    elif isinstance(store.backend, Listable):
        found = await _verify_listed(action)
    else:
        raise ConfigError(f"storage={options.shown!r}: its pages cannot be listed, so none can be verified")
    return {**found._asdict(), "elapsed_s": round(time.monotonic() - began, 3), "ok": not (found.bad or found.unread)}


async def _verify_listed(action: StoreAction) -> Scrubbed:
    began, done = time.monotonic(), Scrubbed()
    backend: Any = action.store.backend
    async for found in scrub_listed(backend, _in_a_thread, action.options.timeout):
        done = done.plus(found)
        action.tell(_so_far(done, None))
        if action.options.rate is not None:
            await asyncio.sleep(pause(done.bytes, action.options.rate, time.monotonic() - began))
    return done


async def _in_a_thread(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    return await asyncio.to_thread(verify, keys, records)


def _so_far(done: Scrubbed, total: int | None) -> str:
    of = "" if total is None else f"{percent(done.bytes, total)} · "
    whole = "" if total is None else f" of {size(total)}"
    return f"{of}{size(done.bytes)}{whole} · {number(done.pages)} pages, {number(done.bad)} damaged"


async def _collect(action: StoreAction) -> Report:
    backend, older_than = action.store.backend, action.options.older_than
    if not isinstance(backend, Collectable):
        raise ConfigError(f"storage={action.options.shown!r}: this kind of store has nothing that gc could remove")
    began = time.monotonic()
    if action.options.dry_run:
        assert older_than is not None
        found = await _count_older(action, time.time() - older_than)
    else:
        action.tell("collecting")
        async with within(WHOLE_TIMEOUT, "gc was not finished; what it has removed stays removed"):
            found = (await backend.collect(older_than))._asdict()
    return {**found, "dry_run": action.options.dry_run, "elapsed_s": round(time.monotonic() - began, 3), "ok": True}


async def _count_older(action: StoreAction, until: float) -> Report:
    pages = total = unknown = 0
    async for batch in action.listing():
        old = [page.size for page in batch if 0 < page.written < until]
        pages, total = pages + len(old), total + sum(old)
        unknown += sum(not page.written for page in batch)
    return {"pages": pages, "waste": 0, "size": total, "unknown": unknown}


async def _clear(action: StoreAction) -> Report:
    began = time.monotonic()
    action.tell("clearing")
    await action.store.clear()
    return {"elapsed_s": round(time.monotonic() - began, 3), "ok": True}


_ACTIONS = {"ls": _list, "stat": _stat, "verify": _verify, "gc": _collect, "clear": _clear}


# the reports as text of at most 80 columns


def text(report: Report) -> str:
    """The report of any action as text."""
    makers = {"ls": _listed, "stat": _counted, "verify": _verified, "gc": _collected, "clear": _cleared}
    return "\n".join(makers[report["command"]](report))


def line(page: Stored, now: float) -> str:
    """The line of one page in a list: key, size of its payload, age. ``now``: the present time, as ``time.time()``."""
    return f"{page.key.hex()} {size(page.size - HEADER_BYTES):>8} {age(now - page.written) if page.written else '?':>5}"


def age(seconds: float) -> str:
    """An age in its largest whole unit: ``7 s``, ``12 m``, ``3 h``, ``14 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _listed(report: Report) -> list[str]:
    more = "; there are more" if report["more"] else ""
    return [f"{number(report['pages'])} pages, {size(report['bytes'])}{more}"]


def _counted(report: Report) -> list[str]:
    stats = report["stats"]
    told = ("disk_bytes", "segments", "capacity_bytes")
    on_disk = ("; {} of {} in {} segments".format(size(stats["disk_bytes"]), size(stats["capacity_bytes"]),
                                                  number(stats["segments"]))
               if stats.keys() >= set(told) else "")
    lines = [f"{report['url']}: {number(report['pages'])} pages, {size(report['bytes'])}{on_disk}"]
    lines += [f"  {number(one['pages'])} pages of {size(one['page_bytes'])}" for one in report.get("by_page_size", ())]
    ages = [f"{number(count)} {_younger(name)}" for name, count in report.get("by_age", {}).items()]
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


def _younger(name: str) -> str:
    return name if name in ("older", "unknown") else f"below {name}"


def _verified(report: Report) -> list[str]:
    rate = report["bytes"] / report["elapsed_s"] if report["elapsed_s"] else 0.0
    head = "OK" if report["ok"] else "NOT OK"
    lines = [f"{head}: {number(report['pages'])} pages, {size(report['bytes'])} in {report['elapsed_s']:.1f} s "
             f"({size(rate)}/s)"]
    if report["bad"]:
        lines.append(f"  {number(report['bad'])} damaged pages were dropped")
    if report["unread"]:
        lines.append(f"  {number(report['unread'])} pages could not be read")
    return lines


def _collected(report: Report) -> list[str]:
    if report["dry_run"]:
        unknown = f"; the age of {number(report['unknown'])} pages is not known" if report["unknown"] else ""
        return [f"{number(report['pages'])} pages are that old: {size(report['size'])}; nothing was removed{unknown}"]
    return [f"{number(report['pages'])} old pages and {number(report['waste'])} pieces of waste removed, "
            f"{size(report['size'])} freed"]


def _cleared(report: Report) -> list[str]:
    return [f"{report['url']} is empty"]
