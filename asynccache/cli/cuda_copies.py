"""Bandwidth of page copies: every size and number of fragments, both ways, as a share of one large pinned copy.

Law: the reference is measured in the same run, before and after; a figure is the best of some rounds, since whatever
disturbs only makes it slower; fragments are scattered, so nothing is merged that a real cache could not merge.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from asynccache.memory.cuda.calibration import Bench, forced
from asynccache.memory.cuda.driver import Spans, Towards
from asynccache.memory.cuda.paths import Chooser, Path
from asynccache.memory.cuda.rows import Runs
from asynccache.memory.cuda.submission import shape_of

WIDTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
COUNTS = (64, 512, 4096, 50_000)
GOALS = {4 << 10: 0.6, 16 << 10: 0.85, 64 << 10: 0.95, 256 << 10: 0.95, 2 << 20: 0.95}
GOAL_BOTH = 80.0
"""GB/s in both directions at once, where one direction makes 50."""
WAYS = {Towards.OUT: (Path.DMA, Path.PITCHED, Path.STAGED, Path.KERNEL),
        Towards.IN: (Path.DMA, Path.PITCHED, Path.KERNEL)}

Figures = dict[str, Any]


def reference(bench: Bench, towards: Towards, rounds: int) -> float:
    """Bytes a second of one large copy, the best there is."""
    host, device = bench.host.data_ptr(), bench.device[0].data_ptr()
    dst, src = (host, device) if towards is Towards.OUT else (device, host)
    spans = Spans(*(np.array([n], np.uint64) for n in (dst, src, bench.size)))
    handle, driver = bench.stream.handle, bench.driver
    best = min(_timed(bench, lambda: driver.copy(handle, towards, spans)) for _ in range(rounds))
    return bench.size / best


def _timed(bench: Bench, submit: Any) -> float:
    began = time.perf_counter()
    bench.stream.call(submit)
    bench.stream.record().block()
    return time.perf_counter() - began


def measure(bench: Bench, chooser: Chooser, rounds: int, *, every_path: bool) -> Figures:
    """All of it."""
    before = {towards: reference(bench, towards, rounds) for towards in WAYS}
    rows = [row for towards in WAYS for row in _table(bench, towards, chooser, rounds, every_path)]
    after = {towards: reference(bench, towards, rounds) for towards in WAYS}
    best = {towards: max(before[towards], after[towards]) for towards in WAYS}
    for row in rows:
        row["ratio"] = round(row["bytes_per_s"] / best[Towards(row["direction"])], 3)
    return {
        "reference_gb_s": {towards.value: round(rate / 1e9, 2) for towards, rate in best.items()},
        "fragments": rows,
        "both_directions": [both(bench, chooser, width, rounds) for width in (64 << 10, 2 << 20)],
    }


def _table(
    bench: Bench, towards: Towards, chooser: Chooser, rounds: int, every_path: bool
) -> Iterator[Figures]:
    for width in WIDTHS:
        for count in COUNTS:
            if width * count > bench.size:
                continue
            yield _row(bench, towards, width, count, "chosen", chooser, rounds)
            for path in WAYS[towards] if every_path else ():
                yield _row(bench, towards, width, count, path.value, forced(towards, path, chooser.settings.blocks),
                           rounds)  # fmt: skip


def _row(
    bench: Bench, towards: Towards, width: int, count: int, name: str, chooser: Chooser, rounds: int
) -> Figures:
    rows = bench.rows(towards, Path.PITCHED if name == Path.PITCHED.value else Path.DMA, width, count)
    path = chooser.choose(shape_of(rows, Runs.of(rows)))
    rate = rows.size / min(bench.seconds(rows, chooser) for _ in range(rounds))
    return {"direction": towards.value, "width": width, "count": rows.pieces, "way": name, "path": path.value,
            "bytes_per_s": round(rate), "goal": GOALS[width] if name == "chosen" else None}  # fmt: skip


def both(bench: Bench, chooser: Chooser, width: int, rounds: int) -> Figures:
    """A stream each way, at the same time, in buffers of their own."""
    out, inward = bench.stream, bench.another()
    half = bench.size // width // 2
    ways: Sequence[tuple[Any, Any]] = (
        (bench.rows(Towards.OUT, Path.DMA, width, half), out),
        (_upper(bench, bench.rows(Towards.IN, Path.DMA, width, half)), inward),
    )
    best = min(_together(bench, ways, chooser) for _ in range(rounds))
    size = sum(rows.size for rows, _ in ways)
    return {"width": width, "gb_s": round(size / best / 1e9, 2), "goal": GOAL_BOTH}


def _upper(bench: Bench, rows: Any) -> Any:
    """The same in the other half of the host's buffer and in the other buffer of the device."""
    shift = bench.device[1].data_ptr() - bench.device[0].data_ptr(), bench.size // 2
    return rows._replace(bases=tuple((dst + shift[0], src + shift[1]) for dst, src in rows.bases))


def _together(bench: Bench, ways: Sequence[tuple[Any, Any]], chooser: Chooser) -> float:
    began = time.perf_counter()
    events = [bench.submit(rows, chooser, stream) for rows, stream in ways]
    for event in events:
        event.block()
    return time.perf_counter() - began
