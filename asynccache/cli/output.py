"""Writes reports, to a file or standard output, shows progress, and writes numbers and errors as text for people.
Imports neither torch nor the cache.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from asynccache.errors import ConfigError

Tell = Callable[[str], None]

QUIET_FOR = 2.0
EVERY = 0.5


def debugging() -> bool:
    """Return whether tracebacks are to be printed: ``ASYNCCACHE_DEBUG`` in the environment, which ``--debug`` sets."""
    return os.environ.get("ASYNCCACHE_DEBUG", "0") not in ("", "0")


def check_writable(path: str, option: str = "--json") -> None:
    """Find out before a run whether its report can be written to ``path``; the file is made if it does not exist.

    Raises:
        ConfigError: it cannot be written.
    """
    if path != "-":
        write(path, "", option, "a")
    elif option != "--json":  # standard output is for the summary or the JSON
        raise ConfigError(f"{option}=-: the page goes to a file only, for example {option} run.html")


def answer(report: Mapping[str, Any] | Sequence[Any], text: str | None, path: str | None) -> None:
    """Print ``text`` (None: nothing), and write ``report`` as JSON to ``path`` if there is one. With "-" the JSON is
    printed in the text's place. Blocking.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path != "-" and text is not None:
        print(text)
    if path is not None and path != "-":
        write(path, json.dumps(report, indent=2) + "\n")
    elif path is not None:
        print(json.dumps(report, indent=2), flush=True)


def write(path: str, text: str, option: str = "--json", mode: str = "w") -> None:
    """Write ``text`` to the file ``path``, which ``option`` named. Blocking.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Tell]:
    """Show on ``stream`` (default: standard error) how far a command has come, as long as this lasts: nothing for the
    first two seconds, then one line that is written over again on a terminal and erased at the end, and elsewhere a new
    line every few seconds. Yields what is to be called with a line as often as there is news."""
    out, ended, lines, shown = stream or sys.stderr, threading.Event(), [""], [""]
    again = out.isatty()

    def tell(line: str) -> None:
        lines[0] = line

    def show() -> None:
        wait = QUIET_FOR
        while not ended.wait(wait):
            if (line := lines[0]) != shown[0]:
                shown[0] = line
                out.write(f"\r{line}\x1b[K" if again else f"{line}\n")
                out.flush()
            wait = EVERY if again else 10 * EVERY

    thread = threading.Thread(target=show, name="asynccache-progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
        if again and shown[0]:
            out.write("\r\x1b[K")
            out.flush()


HIT_RATIO = "prompt tokens that the cache had / all prompt tokens"
"""The definition of every hit ratio in reports, JSON and plans; it is printed beside the figure. Blocks and pages are
counted, but no ratio is made of them."""

ARROWS = {"backup_host": "L1→L2", "load_back": "L2→L1", "backup_storage": "L2→L3", "prefetch": "L3→L2"}
"""From which tier to which each stage moves pages."""

BUSY = 1.2
"""The summary and the page mention that other work of the machine slows prefill down, if it does by this factor or
more."""

TIER_NAMES = {"device": "L1 device", "host": "L2 host", "storage": "L3 storage"}

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """A number of bytes: ``1536`` is ``1.5 KiB``. At most three digits."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{_digits(count)} {_UNITS[unit]}"


def milliseconds(value: float) -> str:
    """A time in milliseconds: ``0.04 ms``, ``1.2 ms``, ``310 ms``, ``2.1 s``."""
    return f"{_digits(value / 1e3)} s" if value >= 999.5 else f"{_digits(value)} ms"


def number(value: float) -> str:
    """A count: ``1234567`` is ``1,234,567``."""
    return f"{value:,.0f}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "out of memory" for an error without one, as a ``MemoryError`` is."""
    return (str(error).splitlines() or ["out of memory"])[0]


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole``: ``61.2 %``; 0 if ``whole`` is 0."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def bar(share: float, width: int) -> str:
    """A bar for a ``share`` from 0 to 1, at most ``width`` columns long, in steps of an eighth of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def _digits(value: float) -> str:
    if value >= 99.95 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def pages_verified(report: Mapping[str, Any]) -> str:
    """The number of pages of a run that were compared with what they must hold."""
    return f"{number(report['verify']['pages'])} pages verified" if report["settings"]["verify"] else "no page verified"
