"""The display of a run while it lasts: a live panel on a terminal, or a line every few seconds anywhere else.

Everything goes to standard error, so that standard output is left to ``--json -``. The panel is drawn in a thread, from
a snapshot, because the loop's lateness is being measured and drawing must not add to it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from asynccache.cli.text import bar, milliseconds, number, percent, size
from asynccache.errors import ConfigError
from asynccache.extras import install

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_PANEL_EVERY, _LINE_EVERY = 1.0, 5.0
_WIDTH = 80


class Snapshot(NamedTuple):
    """A run at one moment.

    title, clock, note: texts, see ``watch``. progress: the share of the run that is done, None if it is not known.
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
