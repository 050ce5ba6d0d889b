"""The display of a run: a live panel on a terminal or a line every few seconds anywhere else, and a summary at its end.

Panel and lines go to standard error, so that standard output is left to ``--json -``. The panel is drawn in a thread,
from a ``Screen``, because the loop's lateness is being measured and drawing must not add to it. ``Watch`` makes the
screens, and changes nothing. The summary is made from the report alone, so it says nothing that the JSON does not say.
Both are drawn by rich, in 80 columns; so a run that is to be quiet does not import this module.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.output import ARROWS, BUSY, TIER_NAMES, bar, milliseconds, number, pages_verified, percent, size
from asynccache.cli.report import Tally, ceiling
from asynccache.cli.service import RequestRunner

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lookups import LookupStats

_PANEL_EVERY, _LINE_EVERY = 1.0, 5.0
_WIDTH = 80
_TOLD = ("requests", "", "hits", "verified", "lag")
"""The rows of a screen that a line of text shows as well."""
_FEW_HITS = 0.2
"""The hit ratio below which the summary says that there was little to save."""
_QUEUED = 0.9
"""If fewer requests than this share of those that arrive are served per second, the summary says that they queue."""


class Screen(NamedTuple):
    """A run at one moment, as texts."""

    title: str
    clock: str
    progress: float | None
    """The share of the run that is done, None if it is not known."""
    rows: tuple[tuple[str, str], ...]
    """Name and text of each line, none of which needs more than 40 columns."""
    note: str = ""


class Watch:
    """Makes the screens of one run."""

    def __init__(self, settings: RunSettings, runner: RequestRunner, meter: Meter, cache: AsyncCache) -> None:
        self.note = ""
        """A line that the display shows below the rows."""
        self._settings = settings
        self._runner = runner
        self._meter = meter
        self._cache = cache
        self._last: tuple[float, dict[str, int]] = (time.monotonic(), {})

    def take(self) -> Screen:
        """The screen of the run as it is now."""
        settings, runner, elapsed, duration = (
            self._settings, self._runner, self._meter.elapsed(), self._settings.admits_for)  # fmt: skip
        what = settings.workload if settings.trace is None else settings.trace.rsplit("/", 1)[-1]
        ranks = f" · tp {settings.tp} cp {settings.cp} pp {settings.pp}" if settings.ranks > 1 else ""
        shares = [elapsed / duration] if duration else []
        shares += [runner.tally.requests / runner.total] if runner.total else []
        statistics, now = self._cache.statistics(), time.monotonic()
        stored, rooms = statistics.storage, [
            (name, shelf.capacity - shelf.free, shelf.capacity)
            for name, shelf in (("L1", statistics.device["full"]), ("L2", statistics.host["full"]))]
        rooms.append(("L3", int(stored.get("bytes", 0)), int(stored.get("capacity_bytes", 0))))
        moved = {name: stage.bytes for name, stage in statistics.stages.items()}
        (before, last), self._last = self._last, (now, moved)
        mebibytes = max(now - before, 1e-3) * (1 << 20)
        lag = spread(self._meter.recent, 1e3)
        return Screen(
            f"{settings.command} {what} · {','.join(settings.components)} · pages of {settings.page_size}{ranks}",
            f"{elapsed:.0f} s" if duration is None else f"{elapsed:.0f} of {duration:.0f} s",
            min(1.0, max(shares)) if shares else None,
            (*counts(runner.tally, settings.verify, runner.running, elapsed, statistics.lookups),
             *((name, f"{bar(used / room, 10):<10} {100 * used / room:3.0f} %") for name, used, room in rooms if room),
             *((ARROWS.get(name, name), f"{(count - last.get(name, 0)) / mebibytes:.1f} MiB/s")
               for name, count in moved.items()),
             ("lag", f"p99 {milliseconds(lag.p99)} · max {milliseconds(lag.max)}"), ("memory", size(peak_rss()))),
            self.note,
        )  # fmt: skip


def counts(
    tally: Tally, verify: bool, running: int, elapsed: float, lookups: LookupStats
) -> Iterator[tuple[str, str]]:
    """The rows of what was served, how fast, how much of it was found in the cache, beside the most that a cache of any
    size would have found, and whether it was right."""
    yield "requests", f"{number(tally.served)} served · {running} running"
    ended = ((tally.cancelled, "cancelled"), (tally.failed, "failed"))
    rate = tally.served / elapsed if elapsed else 0.0
    yield "", f"{rate:.0f}/s" + "".join(f" · {number(count)} {name}" for count, name in ended if count)
    most = percent(ceiling(lookups, tally.tokens, tally.hit()), tally.tokens)
    yield "hits", f"{percent(tally.hit(), tally.tokens)} of tokens, ≤ {most}"
    wrong = f"{number(tally.mismatches)} WRONG" if tally.mismatches else "all right"
    yield "verified", f"{number(tally.verified)}, {wrong}" if verify else "nothing is verified"


async def show(on: Console, take: Callable[[], Screen], every: float | None = None) -> None:
    """Show screens until cancelled: a panel that is redrawn in place on a terminal, which is erased at the end, so that
    the summary takes its place; else a line every few seconds, for logs. ``every``: seconds from one screen to the
    next."""
    if not on.is_terminal:
        while True:
            await asyncio.sleep(_LINE_EVERY if every is None else every)
            on.file.write(line(take()) + "\n")
            on.file.flush()
    loop, drawing = asyncio.get_running_loop(), None
    with Live(console=on, auto_refresh=False, transient=True) as live:
        try:
            while True:
                now = panel(take(), on.width)
                drawing = loop.run_in_executor(None, lambda now=now: live.update(now, refresh=True))  # type: ignore[misc]
                await drawing
                await asyncio.sleep(_PANEL_EVERY if every is None else every)
        finally:
            if drawing is not None and not drawing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([drawing])


def line(now: Screen) -> str:
    """A screen as one line of text."""
    share = "" if now.progress is None else f" {100 * now.progress:3.0f} %"
    return f"{now.clock}{share} · " + " · ".join(f"{name} {text}".strip() for name, text in now.rows if name in _TOLD)


def panel(now: Screen, width: int = _WIDTH) -> Text:
    """A screen as a block of at most ``width`` columns and never more than 80."""
    width = min(width, _WIDTH)
    room = max(0, width - len(now.clock) - 1)
    cut = now.title if len(now.title) <= room else f"{now.title[: max(0, room - 1)]}…"
    column = max(len(name) for name, _ in now.rows) + 2
    parts = (
        (f"{cut:<{room}} ", "bold"), (now.clock, ""),
        *([("\n" + bar(now.progress, width), "green")] if now.progress is not None else []),
        *(part for name, text in now.rows for part in ((f"\n{name:<{column}}", "dim"), (text, ""))),
        *((f"\n{part}", "yellow") for part in textwrap.wrap(now.note, width)),
    )
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def summary(report: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print the summary of a run on one screen of 80 columns, to ``file`` (default: standard output): the verdict,
    where hits came from, and what it cost."""
    out = Console(file=file or sys.stdout, width=_WIDTH, highlight=False, emoji=False)

    def say(*parts: str | tuple[str, str]) -> None:
        out.print(Text.assemble(*parts), soft_wrap=True)

    def table(rows: list[tuple[str | Text, ...]], *columns: str) -> None:
        found = Table(box=None, expand=True, padding=(0, 0, 0, 1), header_style="dim")
        for i, column in enumerate(columns):
            found.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            found.add_row(*row)
        out.print(Padding(found, (0, 0, 0, 1)))

    elapsed = report["elapsed_s"] or 1.0
    say((report["command"], "bold"), " ", ("OK", "green") if report["ok"] else ("NOT OK", "red"),
        ", interrupted" if report["interrupted"] else "",
        f": {number(report['served'])} requests in {report['elapsed_s']:.1f} s ({report['served'] / elapsed:.1f}/s), ",
        pages_verified(report))
    settings = report["settings"]
    rooms = " · ".join(f"{name} {number(room) if isinstance(room, int) else room}"
                       for name, room in (("L1", settings["device_tokens"]), ("L2", settings["host_tokens"])) if room)
    say(f"  {rooms} tokens, in pages of {settings['page_size']}; {size(settings['bytes_per_token'])} a token")
    stores = settings["storage"] or ()
    for url in (stores,) if isinstance(stores, str) else stores:
        say(f"  L3 {url}" if len(url) <= _WIDTH - 5 else f"  L3 {url[: _WIDTH - 6]}…")
    for problem in report["problems"]:
        say(("  ✗ ", "red"), problem)
    for text in _hits(report):
        say(text)
    times, notes = _times(report)
    say((f"\nTime to first token: wait + prefill at {number(report['settings']['prefill_tokens_per_s'])} "
         "tokens/s (modelled)", "bold"))
    table(times, "", "mean", "p50", "p99", "max", "")
    for text in notes:
        say(text)
    say(("\nMoved", "bold"))
    moves: list[tuple[str | Text, ...]] = []
    for name, stage in report["stages"].items():
        latency = [milliseconds(stage["latency_ms"][q]).replace(" ", "") if stage["ops"] else "-"
                   for q in ("p50", "p99")]
        moves.append((name, ARROWS.get(name, ""), number(stage["ops"]), number(stage["tokens"]), size(stage["bytes"]),
                      f"{size(stage['bytes'] / elapsed)}/s", *latency))
        if stage["errors"]:
            moves.append(("", "", Text(f"{number(stage['errors'])} errors", "red")))
    table(moves, "", "", "ops", "tokens", "bytes", "rate", "p50", "p99")
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    for fact in _facts(report):
        facts.add_row(*fact)
    out.print("", facts, sep="\n")
    if "ranks" in report:
        shape, lost, ranks = report["topology"], list[str](), list[tuple[str | Text, ...]]()
        say((f"\nRanks: tp {shape['tp']} · cp {shape['cp']} · pp {shape['pp']}", "bold"))
        for rank in report["ranks"]:
            name, verify = f"rank {rank['rank']} ({rank['tp']} {rank['cp']} {rank['pp']})", rank.get("verify")
            if verify is None:
                lost.append(f"  {name}: {rank['lost'] or 'ended without a report'}")
                continue
            ranks.append((name, number(verify["pages"]), number(verify["mismatches"]), number(rank["batches"]),
                          milliseconds(rank["loop_lag_ms"]["p99"]), f"{rank['cpu_s']:.1f} s"))
        table(ranks, "", "pages verified", "wrong", "batches", "lag p99", "CPU")
        for sentence in lost:
            say((sentence, "red"))


def _hits(report: Mapping[str, Any]) -> Iterator[str | tuple[str, str]]:
    total, hit = report["tokens"]["total"], report["tokens"]["hit"]
    hits = sum(hit.values())
    yield f"\nHits: {percent(hits, total)} of {number(total)} prompt tokens", "bold"
    for name, tokens in (*((name, hit[key]) for key, name in TIER_NAMES.items()), ("computed", total - hits)):
        share = bar(tokens / total if total else 0.0, 40)
        yield f"  {name:<11}{percent(tokens, total):>8}{number(tokens):>15}  {share}".rstrip()
    if "per_hit" in report:
        moved = report["per_hit"]
        yield (f"  For each token that hits: {moved['written_to_host']:.2f} written to the host, "
               f"{moved['loaded_from_host']:.2f} loaded from it")
    if "ceiling" in report:
        yield f"  No cache, however large, would have had more than about {percent(report['ceiling'], 1)} of them"
    if "blocks" in report:
        blocks, block = report["blocks"], report["block_size"]
        yield f"  {number(blocks['hit'])} of {number(blocks['total'])} blocks of {block} tokens ({report['format']})"
        yield (f"  One request at a time, the trace implies {number(blocks['shared'])}: "
               f"{percent(blocks['shared'] * block, total)}")


def _times(report: Mapping[str, Any]) -> tuple[list[tuple[str | Text, ...]], list[str]]:
    mean, without, wait, line = (report[f"{key}_mean_ms"] for key in (
        "ttft", "ttft_without_cache", "wait", "line_without_cache"))
    sooner = f"{without / mean:.1f} times sooner" if without > mean > 0 else ""
    rows: list[tuple[str | Text, ...]] = [
        (name, *map(milliseconds, (average, *(report[key][q] for q in ("p50", "p99", "max")))), note)
        for name, average, key, note in (
            ("with cache", mean, "ttft_ms", sooner), ("without cache", without, "ttft_without_cache_ms", ""),
            ("wait with", wait, "wait_ms", "for room and pages"),
            ("wait without", line, "line_without_cache_ms", "for room"))]  # fmt: skip
    notes = []
    if (slowdown := report["prefill_slowdown"]) >= BUSY:
        notes.append(f"  This machine is busy: 1 s of the engine's CPU time took {slowdown:.1f} s. Prefill is\n"
                     "  modelled as that much slower, with the cache and without it.")
    if mean <= without:
        return rows, notes
    saved = milliseconds(without - line - mean + wait)
    notes.append(f"  It came later with the cache: hits saved {saved} of computing on average,\n"
                 f"  but requests waited {milliseconds(wait)}, and {milliseconds(line)} without it.")
    arrived, served = report["settings"].get("rate", 0.0), report["served"] / (report["elapsed_s"] or 1.0)
    if served < _QUEUED * arrived:
        notes.append(f"  Requests queued: {arrived:g} arrived per second, and {served:.1f} were served.")
    total, hits = report["tokens"]["total"], sum(report["tokens"]["hit"].values())
    if hits < _FEW_HITS * total:
        notes.append(f"  Only {percent(hits, total)} of the prompt tokens were hits, so there was little to save.")
    ran = [(stage["latency_ms"]["p50"], stage["latency_ms"]["p99"], name)
           for name, stage in report["stages"].items() if name in ("load_back", "prefetch") and stage["ops"]]
    if ran:
        p50, p99, slowest = max(ran)
        notes.append(f"  The slowest way of pages to the device: {slowest}, p50 {milliseconds(p50)}, "
                     f"p99 {milliseconds(p99)}.")
    return rows, notes


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lag = report["loop_lag_ms"]
    yield "requests", (f"{number(report['requests'])} arrived · {number(report['cancelled'])} cancelled · "
                       f"{number(report['failed'])} failed\n"
                       f"{number(report['entered_again'])} taken up again after a failed load")
    evicted = " · ".join(f"{name} {number(pages)}" for name, pages in report["evicted"].items())
    yield "evicted", f"{evicted or 'nothing'} · lost for good {number(report['lost_pages'])}"
    yield "left behind", ", ".join(f"{number(count)} {name.replace('_', ' ')}"
                                   for name, count in report["leaks"].items() if count) or "nothing"
    spread_ = " · ".join(f"{name} {milliseconds(lag[key])}" for name, key in
                         (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max")))
    yield "loop lag", f"{spread_}\nwaiting for a core: p99.9 {milliseconds(report['run_queue_ms']['p999'])}"
    yield ("processes" if "ranks" in report else "process",
           f"{report['cpu_s']:.1f} s of CPU · {size(report['rss_bytes'])} of memory at most")
