"""The display of a run: a live panel on a terminal or a line every few seconds anywhere else, and a summary at its end.

Panel and lines go to standard error, so that standard output is left to ``--json -``. The panel is drawn in a thread,
from a ``Screen``, because the loop's lateness is being measured and drawing must not add to it. ``Watch`` makes the
screens, and changes nothing. The summary is made from the report alone, so it says nothing that the JSON does not say.
Both are drawn by rich, in 80 columns.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.serving import RequestRunner
from asynccache.cli.tally import Tally
from asynccache.cli.text import ARROWS, BUSY, TIER_NAMES, bar, milliseconds, number, percent, size
from asynccache.cli.workloads import BLOCK_TOKENS
from asynccache.errors import ConfigError
from asynccache.extras import install

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from asynccache.runtime.cache import AsyncCache

_PANEL_EVERY, _LINE_EVERY = 1.0, 5.0
_WIDTH = 80
_TOLD = ("requests", "", "hits", "verified", "lag")
"""The rows of a screen that a line of text shows as well."""
_FEW_HITS = 0.2
"""The hit ratio below which the summary says that there was little to save."""
_QUEUED = 0.9
"""The requests served per second, as a share of those that arrive, below which the summary says that they queue."""


class Screen(NamedTuple):
    """A run at one moment, as texts. ``progress``: the share of the run that is done, None if it is not known.
    ``rows``: name and text of each line, none of which needs more than 40 columns."""

    title: str
    clock: str
    progress: float | None
    rows: tuple[tuple[str, str], ...]
    note: str = ""


class Watch:
    """Makes the screens of one run. ``note``: a line that the display shows below them."""

    def __init__(
        self, settings: RunSettings, runner: RequestRunner, meter: Meter, cache: AsyncCache
    ) -> None:
        self.note = ""
        self._settings = settings
        self._runner = runner
        self._meter = meter
        self._cache = cache
        self._duration = settings.admits_for
        self._last: tuple[float, dict[str, int]] = (time.monotonic(), {})

    def take(self) -> Screen:
        """The screen of the run as it is now."""
        tally, runner, elapsed = self._runner.tally, self._runner, self._meter.elapsed()
        lag = spread(self._meter.recent(), 1e3)
        return Screen(
            title(self._settings), clock(elapsed, self._duration),
            progress(elapsed, self._duration, tally.requests, runner.total),
            (*requests(tally, runner.running, elapsed), *self._tiers(), *self._rates(),
             ("verified", verified(tally, self._settings.verify)),
             ("lag", f"p99 {milliseconds(lag.p99)} · max {milliseconds(lag.max)}"), ("memory", size(peak_rss()))),
            self.note,
        )  # fmt: skip

    def _tiers(self) -> Iterator[tuple[str, str]]:
        """A row for each tier: the share of its pages that is in use."""
        statistics = self._cache.statistics()
        rooms = [(name, shelf.capacity - shelf.free, shelf.capacity) for name, shelf in
                 (("L1", statistics.device["full"]), ("L2", statistics.host["full"]))]  # fmt: skip
        stored = statistics.storage
        rooms.append(("L3", int(stored.get("bytes", 0)), int(stored.get("capacity_bytes", 0))))
        return ((name, f"{bar(used / room, 10):<10} {100 * used / room:3.0f} %") for name, used, room in rooms if room)

    def _rates(self) -> Iterator[tuple[str, str]]:
        """A row for each stage: its bytes per second since the last screen."""
        now, moved = time.monotonic(), {name: s.bytes for name, s in self._cache.statistics().stages.items()}
        (before, last), self._last = self._last, (now, moved)
        seconds = max(now - before, 1e-3) * (1 << 20)
        return ((ARROWS.get(name, name), f"{(count - last.get(name, 0)) / seconds:.1f} MiB/s")
                for name, count in moved.items())  # fmt: skip


def requests(tally: Tally, running: int, elapsed: float) -> Iterator[tuple[str, str]]:
    """The rows of what was served, how fast, and how much of it was found in the cache."""
    yield "requests", f"{number(tally.served)} served · {running} running"
    ended = ((tally.cancelled, "cancelled"), (tally.failed, "failed"))
    rate = tally.served / elapsed if elapsed else 0.0
    yield "", f"{rate:.0f}/s" + "".join(f" · {number(count)} {name}" for count, name in ended if count)
    yield "hits", f"{percent(tally.hit(), tally.tokens)} of tokens"


def verified(tally: Tally, verify: bool) -> str:
    """The number of pages that were compared with what they must hold, and whether all were right."""
    wrong = f"{number(tally.mismatches)} WRONG" if tally.mismatches else "all right"
    return f"{number(tally.verified)}, {wrong}" if verify else "nothing is verified"


def pages_verified(report: Mapping[str, Any]) -> str:
    """The number of pages that were compared with what they must hold, as text."""
    return f"{number(report['verify']['pages'])} pages verified" if report["settings"]["verify"] else "no page verified"


def title(settings: RunSettings) -> str:
    """The headline of a run: command, workload or trace, components and page size."""
    what = settings.workload if settings.trace is None else settings.trace.rsplit("/", 1)[-1]
    ranks = f" · tp {settings.tp} cp {settings.cp} pp {settings.pp}" if settings.ranks > 1 else ""
    return f"{settings.command} {what} · {','.join(settings.components)} · pages of {settings.page_size}{ranks}"


def clock(elapsed: float, duration: float | None) -> str:
    """For how long the run has been going, and for how long it will go if that is known."""
    return f"{elapsed:.0f} s" if duration is None else f"{elapsed:.0f} of {duration:.0f} s"


def progress(elapsed: float, duration: float | None, given: int, total: int | None) -> float | None:
    """The share of a run that is done, 0 to 1; None if neither duration nor number of requests is known."""
    shares = [] if duration is None else [elapsed / duration]
    if total:
        shares.append(given / total)
    return min(1.0, max(shares)) if shares else None


def console(quiet: bool, stream: TextIO | None = None) -> Console | None:
    """Return the console that the run is shown on: on ``stream`` (default: standard error), or None if ``quiet``.

    Raises:
        ConfigError: rich is not installed.
    """
    if quiet:
        return None
    try:
        import rich.live
        import rich.table
        import rich.text  # noqa: F401  imported now, because later the loop's lateness is measured
        from rich.console import Console
    except ImportError:
        raise ConfigError(f"the display and the summary need rich: {install('cli')}, or use --quiet") from None
    return Console(file=stream or sys.stderr)


async def show(on: Console | None, take: Callable[[], Screen], every: float | None = None) -> None:
    """Show screens until cancelled: a panel that is redrawn in place on a terminal, which is erased at the end, so that
    the summary takes its place; else a line every few seconds, for logs. ``on``: see ``console``; None: show none.
    ``every``: seconds from one screen to the next."""
    if on is None:
        return
    if not on.is_terminal:
        while True:
            await asyncio.sleep(_LINE_EVERY if every is None else every)
            on.file.write(line(take()) + "\n")
            on.file.flush()
    from rich.live import Live

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
    from rich.text import Text

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


def summary(report: Mapping[str, Any], file: TextIO) -> None:
    """Print the summary of a run on one screen of 80 columns: the verdict, where hits came from, and what it cost."""
    from rich.console import Console
    from rich.text import Text

    out = Console(file=file, width=_WIDTH, highlight=False, emoji=False)
    sections = (_verdict, _hits, _times, _moves, _facts, _ranks)
    for part in chain.from_iterable(section(report) for section in sections):
        out.print(part, soft_wrap=isinstance(part, Text))


def _said(*parts: str | tuple[str, str]) -> Text:
    from rich.text import Text

    return Text.assemble(*parts)


def _table(*columns: str) -> Table:
    from rich.table import Table

    found = Table(box=None, expand=True, padding=(0, 0, 0, 1), header_style="dim")
    for i, column in enumerate(columns):
        found.add_column(column, justify="right" if i else "left", no_wrap=True)
    return found


def _elapsed(report: Mapping[str, Any]) -> float:
    """The seconds of the run, to divide by."""
    return report["elapsed_s"] or 1.0


def _verdict(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _said((report["command"], "bold"), " ", ("OK", "green") if report["ok"] else ("NOT OK", "red"),
                ", interrupted" if report["interrupted"] else "",
                f": {number(report['served'])} requests in {report['elapsed_s']:.1f} s "
                f"({report['served'] / _elapsed(report):.1f}/s), ",
                pages_verified(report))
    for problem in report["problems"]:
        yield _said(("  ✗ ", "red"), problem)


def _hits(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    total, hit = report["tokens"]["total"], report["tokens"]["hit"]
    hits = sum(hit.values())
    yield _said((f"\nHits: {percent(hits, total)} of {number(total)} prompt tokens", "bold"))
    for name, tokens in (*((name, hit[key]) for key, name in TIER_NAMES.items()), ("computed", total - hits)):
        share = bar(tokens / total if total else 0.0, 40)
        yield _said(f"  {name:<11}{percent(tokens, total):>8}{number(tokens):>15}  {share}".rstrip())
    if "per_hit" in report:
        moved = report["per_hit"]
        yield _said(f"  For each token that hits: {moved['written_to_host']:.2f} written to the host, "
                    f"{moved['loaded_from_host']:.2f} loaded from it")
    if "blocks" in report:
        blocks = report["blocks"]
        yield _said(f"  {number(blocks['hit'])} of {number(blocks['total'])} blocks of {BLOCK_TOKENS} tokens; the "
                    f"trace implies {number(blocks['shared'])}: {percent(blocks['shared'] * BLOCK_TOKENS, total)}")


def _times(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.padding import Padding

    total, hits = report["tokens"]["total"], sum(report["tokens"]["hit"].values())
    rate, slowdown = number(report["settings"]["prefill_tokens_per_s"]), report["prefill_slowdown"]
    yield _said((f"\nTime to first token: wait for pages + prefill at {rate} tokens/s (modelled)", "bold"))
    mean, without, wait = report["ttft_mean_ms"], report["ttft_without_cache_mean_ms"], report["wait_mean_ms"]
    times = _table("", "mean", "p50", "p99", "max", "")
    for name, average, key in (("with cache", mean, "ttft_ms"), ("without cache", without, "ttft_without_cache_ms"),
                               ("wait for pages", wait, "wait_ms")):
        sooner = f"{without / mean:.1f} times sooner" if key == "ttft_ms" and without > mean > 0 else ""
        spread_ = report[key]
        times.add_row(name, *map(milliseconds, (average, spread_["p50"], spread_["p99"], spread_["max"])), sooner)
    yield Padding(times, (0, 0, 0, 1))
    if slowdown >= BUSY:
        yield _said(f"  This machine is busy: 1 s of the engine's CPU time took {slowdown:.1f} s. Prefill is\n"
                    "  modelled as that much slower, with the cache and without it.")
    if mean > without:                                 # the reasons why the cache cost more than it saved
        yield _said(f"  It came later with the cache: hits saved {milliseconds(without - mean + wait)} of computing on "
                    f"average,\n  but requests waited {milliseconds(wait)}.")
        arrived, served = report["settings"].get("rate", 0.0), report["served"] / _elapsed(report)
        if served < _QUEUED * arrived:
            yield _said(f"  Requests queued: {arrived:g} arrived per second, and {served:.1f} were served.")
        if hits < _FEW_HITS * total:
            yield _said(f"  Only {percent(hits, total)} of the prompt tokens were hits, so there was little to save.")
        ran = [(stage["latency_ms"]["p50"], stage["latency_ms"]["p99"], name)
               for name, stage in report["stages"].items() if name in ("load_back", "prefetch") and stage["ops"]]
        if ran:
            p50, p99, slowest = max(ran)
            yield _said(f"  The slowest way of pages to the device: {slowest}, p50 {milliseconds(p50)}, "
                        f"p99 {milliseconds(p99)}.")


def _moves(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    yield _said(("\nMoved", "bold"))
    moves = _table("", "", "ops", "tokens", "bytes", "rate", "p50", "p99")
    for name, stage in report["stages"].items():
        latency = [milliseconds(stage["latency_ms"][q]).replace(" ", "") if stage["ops"] else "-"
                   for q in ("p50", "p99")]
        moves.add_row(name, ARROWS.get(name, ""), number(stage["ops"]), number(stage["tokens"]), size(stage["bytes"]),
                      f"{size(stage['bytes'] / _elapsed(report))}/s", *latency)
        if stage["errors"]:
            moves.add_row("", "", Text(f"{number(stage['errors'])} errors", "red"))
    yield Padding(moves, (0, 0, 0, 1))


def _facts(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.table import Table

    lag, leaks = report["loop_lag_ms"], report["leaks"]
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    facts.add_row("requests", f"{number(report['requests'])} arrived · {number(report['cancelled'])} cancelled · "
                  f"{number(report['failed'])} failed\n"
                  f"{number(report['entered_again'])} taken up again after a failed load")
    evicted = " · ".join(f"{name} {number(pages)}" for name, pages in report["evicted"].items())
    facts.add_row("evicted", f"{evicted or 'nothing'} · lost for good {number(report['lost_pages'])}")
    facts.add_row("left behind", ", ".join(f"{number(count)} {name.replace('_', ' ')}"
                                           for name, count in leaks.items() if count) or "nothing")
    facts.add_row("loop lag", " · ".join(f"{name} {milliseconds(lag[key])}" for name, key in
                                         (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max")))
                  + f"\nwaiting for a core: p99.9 {milliseconds(report['run_queue_ms']['p999'])}")
    facts.add_row("processes" if "ranks" in report else "process",
                  f"{report['cpu_s']:.1f} s of CPU · {size(report['rss_bytes'])} of memory at most")
    yield ""
    yield facts


def _ranks(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.padding import Padding

    if "ranks" not in report:
        return
    shape = report["topology"]
    yield _said((f"\nRanks: tp {shape['tp']} · cp {shape['cp']} · pp {shape['pp']}", "bold"))
    lost, ranks = list[str](), _table("", "pages verified", "wrong", "batches", "lag p99", "CPU")
    for rank in report["ranks"]:
        name, verify = f"rank {rank['rank']} ({rank['tp']} {rank['cp']} {rank['pp']})", rank.get("verify")
        if verify is None:
            lost.append(f"  {name}: {rank['lost'] or 'ended without a report'}")
            continue
        ranks.add_row(name, number(verify["pages"]), number(verify["mismatches"]), number(rank["batches"]),
                      milliseconds(rank["loop_lag_ms"]["p99"]), f"{rank['cpu_s']:.1f} s")
    yield Padding(ranks, (0, 0, 0, 1))
    for sentence in lost:
        yield _said((sentence, "red"))
