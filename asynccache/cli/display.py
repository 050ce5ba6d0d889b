"""The display of a run while it lasts: a live panel on a terminal, or a line every few seconds anywhere else.

Everything goes to standard error, so that standard output is left to ``--json -``. The panel is drawn in a thread, from
a ``Screen``, because the loop's lateness is being measured and drawing must not add to it. ``Watch`` makes the screens,
and changes nothing.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.runner import RequestRunner
from asynccache.cli.tally import Tally
from asynccache.cli.text import ARROWS, bar, milliseconds, number, percent, size
from asynccache.errors import ConfigError
from asynccache.extras import install

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from asynccache.runtime.cache import AsyncCache

_PANEL_EVERY, _LINE_EVERY = 1.0, 5.0
_WIDTH = 80
_TOLD = ("requests", "", "hits", "verified", "lag")
"""The rows of a screen that a line of text shows as well."""


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
        self, settings: RunSettings, runner: RequestRunner, meter: Meter, cache: AsyncCache, duration: float | None
    ) -> None:
        self.note = ""
        self._settings = settings
        self._runner = runner
        self._meter = meter
        self._cache = cache
        self._duration = duration
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
    """Shows screens until it is cancelled; may return earlier if it shows none."""

    async def show(self, take: Callable[[], Screen]) -> None: ...


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
        import rich.text  # noqa: F401  imported now, because later the loop's lateness is measured
        from rich.console import Console
    except ImportError:
        raise ConfigError(f"the live display needs rich: {install('cli')}, or use --quiet") from None
    return Panel(Console(file=stream))


class Silence:
    """Shows nothing."""

    async def show(self, take: Callable[[], Screen]) -> None:
        """Return at once."""


class Lines:
    """Shows one line every few seconds, for logs."""

    def __init__(self, stream: TextIO, every: float = _LINE_EVERY) -> None:
        self._stream = stream
        self._every = every

    async def show(self, take: Callable[[], Screen]) -> None:
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

    async def show(self, take: Callable[[], Screen]) -> None:
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


def _draw(live: Live, now: Screen, width: int) -> None:
    live.update(panel(now, width), refresh=True)


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
    parts: Iterable[tuple[str, str]] = (
        (f"{cut:<{room}} ", "bold"), (now.clock, ""),
        *([("\n" + bar(now.progress, width), "green")] if now.progress is not None else []),
        *(part for name, text in now.rows for part in ((f"\n{name:<{column}}", "dim"), (text, ""))),
        *((f"\n{part}", "yellow") for part in textwrap.wrap(now.note, width)),
    )
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
