"""``asynccache store ls|stat|verify|gc|clear URL``: shows what a store holds, verifies its pages, and removes pages.

The answer goes to standard output, as text or JSON. Progress goes to standard error if an action takes longer than two
seconds. The store is opened without any pool, so opening it changes nothing in it. Every answer of the store has a
deadline. A listing as a whole has no deadline, but each of its batches has one. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Annotated, Any, Literal, cast

from asynccache.cli.options import CommandOptions, Json, Rate, option
from asynccache.cli.output import Tell, answer, milliseconds, number, percent, progress, size
from asynccache.errors import ConfigError
from asynccache.settings import Count
from asynccache.storage import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Collectable,
    Counting,
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
from asynccache.storage.checked import in_time, pause, scrub_listed, verify, within

PROBES = 5
WHOLE_TIMEOUT = 3600.0
AGES = {"an hour": 3600.0, "a day": 86400.0, "a week": 7 * 86400.0, "30 days": 30 * 86400.0}
OLDER, UNKNOWN = "older", "unknown"
WIDTH = 80
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}

Report = dict[str, Any]
Show = Callable[[Stored], None]


def _duration(name: str, text: str) -> float:
    """Return the seconds that ``text`` says: a number and ``s``, ``m``, ``h``, ``d`` or ``w``."""
    if (match := _DURATION.fullmatch(text.strip())) is None:
        raise ConfigError(f"{name}={text!r} is no duration; write for example 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``store``."""

    action: Annotated[Literal["ls", "stat", "verify", "gc", "clear"], option(
        "ls|stat|verify|gc|clear",
        "ls: list every page's key, size and age; stat: say how much is stored, how old it is, and whether the store "
        "answers; verify: read every stored page, drop and count the damaged ones; gc: remove what cannot be used any "
        "more, and pages older than --older-than; clear: remove every page", argument=True)]
    url: Annotated[str, option("URL", "the store, for example file:/var/kv", argument=True)]
    limit: Annotated[Count | None, option("N", "ls: list at most N pages")] = None
    rate: Annotated[Count | None, option(
        "SIZE", "verify: read at most so many bytes per second, as in 100MiB", parse=parse_size)] = None
    """In bytes a second."""
    older_than: Annotated[float | None, option(
        "AGE", "gc: also remove pages that were written longer ago than this, as in 7d or 12h", parse=_duration)] = None
    """In seconds."""
    dry_run: Annotated[bool, option("", "gc: count the old pages and remove nothing", const=True)] = False
    yes: Annotated[bool, option("", "clear: do not ask for confirmation", const=True)] = False
    timeout: Annotated[Rate, option(
        "SECONDS", "give up when the store does not answer for so long; gc and clear have an hour, because they do not "
                   "report how far they have come")] = 30.0
    json: Annotated[Json, option(
        "PATH|-", "print one JSON document in place of the text; with a PATH, write it to that file and print the text "
                  "(ls: a line for each page, of which there may be millions, and the total as the last line)",
        const="-")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        of = {"limit": "ls", "rate": "verify", "older_than": "gc", "dry_run": "gc", "yes": "clear"}
        for name, action in of.items():
            if getattr(self, name) and self.action != action:
                raise ConfigError(f"--{name.replace('_', '-')} is for asynccache store {action}")
        if self.dry_run and self.older_than is None:
            raise ConfigError("--dry-run counts the pages that --older-than would remove: say how old, as in 7d")

    @property
    def shown(self) -> str:
        """The URL without its secrets. Raises ConfigError: it is no URL."""
        return str(parse_url(self.url))


def execute(options: Options) -> int:
    """Run the action and print its answer. Returns the exit status: 1 if anything was damaged or could not be read, or
    if the action was not confirmed.

    Raises:
        ConfigError: this kind of store cannot do the action, or there is no terminal to ask at whether it is meant.
        BackendError: the store cannot be opened or read.
    """
    url = options.shown
    if options.action == "clear" and not options.yes:
        if sys.stdin is None or not sys.stdin.isatty():  # None: it is closed
            raise ConfigError("clear removes every page: give --yes, because there is no terminal to ask at")
        print(f"Remove every page of {url}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    lines, now = options.json if options.action == "ls" else None, time.time()
    with open(lines, "w", encoding="utf-8") if lines not in (None, "-") else nullcontext(sys.stdout) as file:
        def show(page: Stored) -> None:
            if lines is not None:
                text = json.dumps({**page._asdict(), "key": page.key.hex()})
            else:  # the page's key, the size of its payload, its age
                old = age(now - page.written) if page.written else "?"
                text = f"{page.key.hex()} {size(page.size - HEADER_BYTES):>8} {old:>5}"
            print(text, file=file)

        with progress() as tell:
            report = asyncio.run(perform(options, show, tell))
        if lines is not None:
            print(json.dumps({"total": {name: report[name] for name in ("pages", "bytes", "more")}}), file=file)
            return 0
    answer(report, "\n".join(told(report)), options.json)
    return 0 if report["ok"] else 1


async def perform(options: Options, show: Show, tell: Tell) -> Report:
    """Open the store, run the action and close the store; returns the report. Cancelling also closes the store.

    Raises:
        ConfigError: the URL names no store, or this kind of store cannot do the action.
        BackendError: the store cannot be opened, or fails.
    """
    timeout = max(options.timeout, WHOLE_TIMEOUT) if options.action in ("gc", "clear") else options.timeout
    async with within(options.timeout, f"storage={options.shown!r} could not be opened"):
        store = await open_store(options.url, StoreLayout({}, RECORD_SCHEMA), timeout=timeout)
    if store is None:
        raise ConfigError(f"storage={options.shown!r} is no store")
    began, report = time.monotonic(), Report(ok=True)
    try:
        match options.action:
            case "ls":
                report |= {"pages": 0, "bytes": 0, "more": False}
                async for page in _listed(store, options):
                    if report["pages"] == options.limit:
                        report["more"] = True
                        break
                    show(page)
                    report["pages"] += 1
                    report["bytes"] += page.size - HEADER_BYTES
            case "stat":
                report |= await _stat(store, options, tell)
            case "verify":
                found = await _verified(store, options, tell)
                report |= {**found._asdict(), "ok": not (found.bad or found.unread)}
            case "gc":
                report |= {"dry_run": options.dry_run, **await _collect(store, options, tell)}
            case "clear":
                tell("clearing")
                await store.clear()
    finally:
        await store.aclose()
    if options.action not in ("ls", "stat"):
        report["elapsed_s"] = round(time.monotonic() - began, 3)
    return {"command": options.action, "url": options.shown, **report}


async def _listed(store: CheckedStore, options: Options) -> AsyncIterator[Stored]:
    """Yield the store's pages.

    Raises:
        ConfigError: this kind of store cannot list its pages.
    """
    if not isinstance(store.backend, Listable):
        raise ConfigError(f"storage={options.shown!r}: this kind of store cannot list its pages")
    async for batch in in_time(store.backend.listing(), options.timeout):
        for page in batch:
            yield page


async def _stat(store: CheckedStore, options: Options, tell: Tell) -> Report:
    """Ask a few times for a page that is not there, and count the pages by size and by age if they can be listed."""
    took, failed = [], 0
    for _ in range(PROBES):
        began = time.perf_counter()
        failed += await store.exists([PageKey("", os.urandom(KEY_BYTES))]) == [Result.FAILED]
        took.append(round((time.perf_counter() - began) * 1e3, 3))
    stats = dict(store.backend.stats())
    labels: Mapping[str, Mapping[str, int]] = {}
    if isinstance(store.backend, Counting) and not failed:
        counts, labels = await store.backend.server_counts()
        stats |= counts
    report: Report = {
        "probe": {"median_ms": median(took), "worst_ms": max(took), "failed": failed},
        "breaker": store.breaker.state.name.lower(), **{name: stats.pop(name, 0) for name in ("pages", "bytes")},
        "stats": stats, "ok": not failed,
        **({"labels": {name: dict(values) for name, values in labels.items()}} if labels else {}),
    }  # fmt: skip
    if isinstance(store.backend, Listable):
        now, sizes, ages = time.time(), Counter[int](), Counter[str]()
        async for page in _listed(store, options):
            sizes[page.size - HEADER_BYTES] += 1
            ages[age_class(now - page.written if page.written else None)] += 1
            tell(f"{number(sizes.total())} pages listed")
        report |= {
            "pages": sizes.total(), "bytes": sum(length * count for length, count in sizes.items()),
            "by_page_size": [{"page_bytes": length, "pages": sizes[length]} for length in sorted(sizes)],
            "by_age": {name: ages[name] for name in (*AGES, OLDER, UNKNOWN) if ages[name]},
        }  # fmt: skip
    return report


def age_class(seconds: float | None) -> str:
    """The name of the first class of ``AGES`` that a page of this age is below; None: its age is not known."""
    if seconds is None:
        return UNKNOWN
    return next((name for name, limit in AGES.items() if seconds < limit), OLDER)


async def _verified(store: CheckedStore, options: Options, tell: Tell) -> Scrubbed:
    """Let the store read its pages in its own order if it can, and read every listed page otherwise."""
    began, backend, found = time.monotonic(), store.backend, Scrubbed()

    def seen(done: Scrubbed, total: int = 0) -> None:
        of = f"{percent(done.bytes, total)} · {size(done.bytes)} of {size(total)}" if total else size(done.bytes)
        tell(f"{of} · {number(done.pages)} pages, {number(done.bad)} damaged")

    async def verified(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
        return await asyncio.to_thread(verify, keys, records)

    if isinstance(backend, Scrubbable):
        total = sum(part.pages * part.page_bytes for part in backend.parts())
        return await store.scrub(options.rate, lambda done: seen(done, total))
    if not isinstance(backend, Listable):
        raise ConfigError(f"storage={options.shown!r}: its pages cannot be listed, so none can be verified")
    async for part in scrub_listed(cast("Any", backend), verified, options.timeout):
        found = found.plus(part)
        seen(found)
        if options.rate is not None:
            await asyncio.sleep(pause(found.bytes, options.rate, time.monotonic() - began))
    return found


async def _collect(store: CheckedStore, options: Options, tell: Tell) -> Report:
    if not isinstance(store.backend, Collectable):
        raise ConfigError(f"storage={options.shown!r}: this kind of store has nothing that gc could remove")
    if not options.dry_run:
        tell("collecting")
        async with within(WHOLE_TIMEOUT, "gc was not finished; what it has removed stays removed"):
            return (await store.backend.collect(options.older_than))._asdict()
    found, until = {"pages": 0, "waste": 0, "size": 0, "unknown": 0}, time.time() - (options.older_than or 0.0)
    async for page in _listed(store, options):
        old = 0 < page.written < until
        found["pages"] += old
        found["size"] += old * page.size
        found["unknown"] += not page.written
    return found


def told(report: Report) -> Iterator[str]:
    """Yield the report of any action as lines of text."""
    match report["command"]:
        case "ls":
            more = "; there are more" if report["more"] else ""
            yield f"{number(report['pages'])} pages, {size(report['bytes'])}{more}"
        case "stat":
            yield from _counted(report)
        case "verify":
            rate = report["bytes"] / report["elapsed_s"] if report["elapsed_s"] else 0.0
            yield (f"{'OK' if report['ok'] else 'NOT OK'}: {number(report['pages'])} pages, {size(report['bytes'])} "
                   f"in {report['elapsed_s']:.1f} s ({size(rate)}/s)")
            if report["bad"]:
                yield f"  {number(report['bad'])} damaged pages were dropped"
            if report["unread"]:
                yield f"  {number(report['unread'])} pages could not be read"
        case "gc" if report["dry_run"]:
            unknown = f"; the age of {number(report['unknown'])} pages is not known" if report["unknown"] else ""
            yield f"{number(report['pages'])} pages are that old: {size(report['size'])}; nothing was removed{unknown}"
        case "gc":
            yield (f"{number(report['pages'])} old pages and {number(report['waste'])} pieces of waste removed, "
                   f"{size(report['size'])} freed")
        case "clear":
            yield f"{report['url']} is empty"


def age(seconds: float) -> str:
    """An age in its largest whole unit, at most days: ``7 s``, ``12 m``, ``3 h``, ``14 d``."""
    unit = next((unit for unit in "dhm" if seconds >= _UNITS[unit]), "s")
    return f"{max(0.0, seconds) // _UNITS[unit]:.0f} {unit}"


def _counted(report: Report) -> Iterator[str]:
    stats = dict(report["stats"])
    on_disk, told = "", ("disk_bytes", "capacity_bytes", "segments")
    if stats.keys() >= set(told):
        used, room, segments = (stats.pop(name) for name in told)
        on_disk = f"; {size(used)} of {size(room)} in {number(segments)} segments"
    yield f"{report['url']}: {number(report['pages'])} pages, {size(report['bytes'])}{on_disk}"
    for one in report.get("by_page_size", ()):
        yield f"  {number(one['pages'])} pages of {size(one['page_bytes'])}"
    ages = [f"{number(count)} {name if name in (OLDER, UNKNOWN) else f'below {name}'}"
            for name, count in report.get("by_age", {}).items()]
    if ages:
        yield from textwrap.wrap("by age: " + ", ".join(ages), WIDTH, initial_indent="  ", subsequent_indent="    ")
    probe = report["probe"]
    answers = (f"it answers in {milliseconds(probe['median_ms'])}, at worst {milliseconds(probe['worst_ms'])}"
               if not probe["failed"] else f"NOT OK: it failed to answer {probe['failed']} of the questions")
    yield f"  {answers}; breaker {report['breaker']}"
    counts = [f"{name.removesuffix('_bytes')} {size(value)}" if name.endswith("_bytes")
              else f"{name.removesuffix('_ms')} {milliseconds(value)}" if name.endswith("_ms")
              else f"{name} {value:,.5g}" for name, value in stats.items() if value]
    for label, values in report.get("labels", {}).items():
        asked = values.get("hits", 0) + values.get("misses", 0)
        hits = f", {percent(values.get('hits', 0), asked)} of {number(asked)} pages hit" if asked else ""
        if any(values.values()):  # such as not of those who only ask
            yield f"  label {label or '(none)'}: {number(values['pages'])} pages, {size(values['bytes'])}{hits}"
    if counts:
        yield from textwrap.wrap(" · ".join(counts), WIDTH, initial_indent="  ", subsequent_indent="  ",
                                 break_on_hyphens=False)
