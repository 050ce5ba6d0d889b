"""Numbers and errors as text for people. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIT_RATIO = "prompt tokens that the cache had / all prompt tokens"
"""The definition of every hit ratio in reports, JSON and plans; it is printed beside the figure. Blocks and pages are
counted, but no ratio is made of them."""

ARROWS = {"backup_host": "L1→L2", "load_back": "L2→L1", "backup_storage": "L2→L3", "prefetch": "L3→L2"}
"""From which tier to which each stage moves pages."""

BUSY = 1.2
"""The slowdown of prefill by other work of the machine from which on the summary and the page mention it."""

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
