"""Numbers and errors as a person reads them. Pure functions."""

from __future__ import annotations

HIT_RATIO = "prompt tokens that the cache had / all prompt tokens"
"""What every hit ratio is, in reports, JSON and plans: said beside the figure. Blocks and pages are only counted."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``1536`` is ``1.5 KiB``: three digits at most."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{_digits(count)} {_UNITS[unit]}"


def milliseconds(value: float) -> str:
    """``0.04 ms``, ``1.2 ms``, ``310 ms``, ``2.1 s``."""
    return f"{_digits(value / 1e3)} s" if value >= 999.5 else f"{_digits(value)} ms"


def number(value: float) -> str:
    """``1234567`` is ``1,234,567``."""
    return f"{value:,.0f}"


def first_line(error: BaseException) -> str:
    """Of what torch or a driver says in many; a ``MemoryError`` says nothing."""
    return (str(error).splitlines() or ["out of memory"])[0]


def percent(part: float, whole: float) -> str:
    """``61.2 %``; of nothing it is 0."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def bar(share: float, width: int) -> str:
    """A bar of at most ``width`` columns, in eighths."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def _digits(value: float) -> str:
    if value >= 99.95 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
