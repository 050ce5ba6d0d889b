"""The display of a run while it lasts: a live panel on a terminal, or a line every few seconds anywhere else.

Everything goes to standard error, so that standard output is left to ``--json -``. The panel is drawn in a thread, from
a snapshot, because the loop's lateness is being measured and drawing must not add to it. ``Watch`` takes the snapshots,
and changes nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from asynccache.cli.capacity import storage_bytes
from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.runner import RequestRunner
from asynccache.cli.text import ARROWS, bar, milliseconds, number, percent, size
from asynccache.errors import ConfigError
from asynccache.extras import install

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from asynccache.runtime.cache import AsyncCache

_PANEL_EVERY, _LINE_EVERY = 1.0, 5.0
_WIDTH = 80


class Snapshot(NamedTuple):
    """A run at one moment.

    title, clock, note: texts, see ``Watch``. progress: the share of the run that is done, None if it is not known.
    rate: requests served per second. tokens, hits: prompt tokens, and those that hit on device, host and storage.
    tiers: name and share of the pages in use. stages: name and bytes per second.
    lag: p99 and maximum of the loop's lateness in milliseconds. memory: bytes.
    """

    title: str
    clock: str
    progress: float | None
    served: int
    running: int
    cancelled: int
    failed: int
    rate: float
    tokens: int
    hits: tuple[int, int, int]
    verified: int
    mismatches: int
    tiers: tuple[tuple[str, float], ...]
    stages: tuple[tuple[str, float], ...]
    lag: tuple[float, float]
    memory: int
    note: str


class Watch:
    """Takes snapshots of one run. ``note``: a line that the display shows below them."""

    def __init__(
        self, settings: RunSettings, runner: RequestRunner, meter: Meter, cache: AsyncCache, duration: float | None
    ) -> None:
        self.note = ""
        self._settings = settings
        self._runner = runner
        self._meter = meter
        self._cache = cache
        self._duration = duration
        self._last: tuple[float, dict[str, int]] = (time.monotonic(), {})

    def take(self) -> Snapshot:
        """A snapshot of the run as it is now."""
        tally, runner = self._runner.tally, self._runner
        elapsed = self._meter.elapsed()
        lag = spread(self._meter.recent(), 1e3)
        return Snapshot(
            title=title(self._settings), clock=clock(elapsed, self._duration),
            progress=progress(elapsed, self._duration, tally.requests, runner.total),
            served=tally.served, running=runner.running, cancelled=tally.cancelled, failed=tally.failed,
            rate=tally.served / elapsed if elapsed else 0.0, tokens=tally.tokens,
            hits=(tally.device, tally.host, tally.storage), verified=tally.verified, mismatches=tally.mismatches,
            tiers=self._tiers(), stages=self._rates(), lag=(lag.p99, lag.max), memory=peak_rss(), note=self.note,
        )

    def _tiers(self) -> tuple[tuple[str, float], ...]:
        statistics = self._cache.statistics()
        shelves = [("L1", statistics.device["full"]), ("L2", statistics.host["full"])]
        used = [(name, 1 - s.free / s.capacity) for name, s in shelves if s.capacity]
        room = storage_bytes(self._settings.storage, statistics.storage)
        return (*used, ("L3", statistics.storage.get("bytes", 0) / room)) if room else tuple(used)

    def _rates(self) -> tuple[tuple[str, float], ...]:
        """Bytes per second of each stage since the last snapshot."""
        now, moved = time.monotonic(), {name: s.bytes for name, s in self._cache.statistics().stages.items()}
        before, last = self._last
        self._last = now, moved
        seconds = max(now - before, 1e-3)
        return tuple((ARROWS.get(name, name), (count - last.get(name, 0)) / seconds) for name, count in moved.items())


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


class Display(Protocol):
    """Shows snapshots until it is cancelled."""

    async def show(self, take: Callable[[], Snapshot]) -> None: ...


def choose(quiet: bool, stream: TextIO | None = None) -> Display:
    """The display for ``stream`` (default: standard error): none if ``quiet``, a panel on a terminal, else lines.

    Raises:
        ConfigError: ``stream`` is a terminal and rich is not installed.
    """
    stream = stream or sys.stderr
    if quiet:
        return Silence()
    if not stream.isatty():
        return Lines(stream)
    try:
        import rich.live
        import rich.table
        import rich.text  # noqa: F401  imported now, because later the loop's lateness is measured
        from rich.console import Console
    except ImportError:
        raise ConfigError(f"the live display needs rich: {install('cli')}, or use --quiet") from None
    return Panel(Console(file=stream))


class Silence:
    """Shows nothing."""

    async def show(self, take: Callable[[], Snapshot]) -> None:
        """Return at once."""


class Lines:
    """Shows one line every few seconds, for logs."""

    def __init__(self, stream: TextIO, every: float = _LINE_EVERY) -> None:
        self._stream = stream
        self._every = every

    async def show(self, take: Callable[[], Snapshot]) -> None:
        """Show lines until cancelled."""
        while True:
            await asyncio.sleep(self._every)
            self._stream.write(line(take()) + "\n")
            self._stream.flush()


class Panel:
    """Shows a panel that is redrawn in place."""

    def __init__(self, console: Console, every: float = _PANEL_EVERY) -> None:
        self._console = console
        self._every = every

    async def show(self, take: Callable[[], Snapshot]) -> None:
        """Show the panel until cancelled; then it is erased, and the summary takes its place."""
        from rich.live import Live

        live = Live(console=self._console, auto_refresh=False, transient=True)
        loop = asyncio.get_running_loop()
        drawing: asyncio.Future[None] | None = None
        with live:
            try:
                while True:
                    drawing = loop.run_in_executor(None, _draw, live, take(), self._console.width)
                    await drawing
                    await asyncio.sleep(self._every)
            finally:
                if drawing is not None and not drawing.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([drawing])


def _draw(live: Live, now: Snapshot, width: int) -> None:
    live.update(panel(now, width), refresh=True)


def line(now: Snapshot) -> str:
    """A snapshot as one line of text."""
    share = "" if now.progress is None else f" {100 * now.progress:3.0f} %"
    return (f"{now.clock}{share} · {number(now.served)} served · {now.running} running · {now.rate:.1f}/s · "
            f"hits {percent(sum(now.hits), now.tokens)} of tokens · {number(now.verified)} pages verified · "
            f"{now.mismatches} wrong · lag p99 {milliseconds(now.lag[0])}")


def panel(now: Snapshot, width: int = _WIDTH) -> RenderableType:
    """A snapshot as a block of at most ``width`` columns and never more than 80."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    width = min(width, _WIDTH)
    shown = rows(now)
    head = Table.grid(padding=(0, 1, 0, 0), expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(now.title, style="bold"), Text(now.clock))
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True, min_width=max(len(name) for name, _ in shown))
    body.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in shown:
        body.add_row(Text(name), Text(text))
    parts: list[RenderableType] = [head]
    if now.progress is not None:
        parts.append(Text(bar(now.progress, width), style="green", no_wrap=True))
    parts.append(body)
    if now.note:
        parts.append(Text(now.note, style="yellow"))
    return Group(*parts)


def rows(now: Snapshot) -> list[tuple[str, str]]:
    """Name and text of each line of the panel: one for each tier and stage, so that none needs more than 40 columns."""
    wrong = "all right" if not now.mismatches else f"{number(now.mismatches)} WRONG"
    ended = ((now.cancelled, "cancelled"), (now.failed, "failed"))
    gone = [f"{number(count)} {name}" for count, name in ended if count]
    return [
        ("requests", f"{number(now.served)} served · {now.running} running"),
        ("", f"{now.rate:.0f}/s" + "".join(f" · {text}" for text in gone)),
        ("hits", f"{percent(sum(now.hits), now.tokens)} of tokens"),
        *((name, f"{bar(share, 10):<10} {100 * share:3.0f} %") for name, share in now.tiers),
        *((name, f"{rate / (1 << 20):.1f} MiB/s") for name, rate in now.stages),
        ("verified", f"{number(now.verified)}, {wrong}"),
        ("lag", f"p99 {milliseconds(now.lag[0])} · max {milliseconds(now.lag[1])}"),
        ("memory", size(now.memory)),
    ]
