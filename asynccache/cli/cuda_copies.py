"""Bandwidth of page copies: every size and number of fragments, both ways, as a share of one large pinned copy.

Law: the reference is measured in the same run, before and after, and both by the device's clock; a figure is the best
of some rounds, since whatever disturbs only makes it slower; fragments are scattered, so nothing is merged that a real
cache could not merge. Beside each stands what a thread sees that submits the batch and waits for it, with planning,
submission and wake-up in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from asynccache.cli.cuda_clock import best, device_seconds, ended, one_copy
from asynccache.memory.cuda.calibration import Bench, forced
from asynccache.memory.cuda.driver import Towards
from asynccache.memory.cuda.paths import Chooser, Path
from asynccache.memory.cuda.rows import Rows, Runs
from asynccache.memory.cuda.submission import shape_of

WIDTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
COUNTS = (64, 512, 4096, 50_000)
BOTH_WIDTHS = (64 << 10, 2 << 20)
PLUG = 60e9
"""Bytes of plug for each second that a batch took a thread: more than a bus moves in that time."""
WAYS = {Towards.OUT: (Path.DMA, Path.PITCHED, Path.STAGED, Path.KERNEL),
        Towards.IN: (Path.DMA, Path.PITCHED, Path.KERNEL)}

Figures = dict[str, Any]


def reference(bench: Bench, towards: Towards, rounds: int) -> float:
    """Bytes a second of one large copy, the best there is."""
    copy = one_copy(bench, towards, bench.size)

    def submit() -> Any:
        bench.stream.call(copy)
        return bench.stream.record()

    return bench.size / best(lambda: device_seconds(bench, submit), rounds)


def measure(bench: Bench, chooser: Chooser, rounds: int, *, every_path: bool) -> Figures:
    """All of it."""
    before = {towards: reference(bench, towards, rounds) for towards in WAYS}
    rows = [row for towards in WAYS for row in _table(bench, towards, chooser, rounds, every_path)]
    after = {towards: reference(bench, towards, rounds) for towards in WAYS}
    large = {towards: max(before[towards], after[towards]) for towards in WAYS}
    for row in rows:
        one = large[Towards(row["direction"])]
        row |= {"ratio": round(row["bytes_per_s"] / one, 3), "ratio_to_a_thread": round(row["to_a_thread"] / one, 3)}
    return {
        "reference_gb_s": {towards.value: round(rate / 1e9, 2) for towards, rate in large.items()},
        "buffer_bytes": bench.size,
        "fragments": rows,
        "both_directions": [both(bench, chooser, width, rounds) for width in BOTH_WIDTHS],
    }


def _table(
    bench: Bench, towards: Towards, chooser: Chooser, rounds: int, every_path: bool
) -> Iterator[Figures]:
    for width in WIDTHS:
        for count in COUNTS:
            yield _row(bench, towards, width, count, "chosen", chooser, rounds)
            for path in WAYS[towards] if every_path else ():
                yield _row(bench, towards, width, count, path.value, forced(towards, path, chooser.settings.blocks),
                           rounds)  # fmt: skip


def _row(
    bench: Bench, towards: Towards, width: int, count: int, name: str, chooser: Chooser, rounds: int
) -> Figures:
    rows = fragments(bench, towards, Path(name) if name != "chosen" else Path.DMA, width, count)
    seen = best(lambda: bench.seconds(rows, chooser), rounds)
    plug = one_copy(bench, towards, max(1, min(bench.size, int(seen * PLUG))))
    taken = best(lambda: device_seconds(bench, partial(bench.submit, rows, chooser), plug), rounds)
    return {"direction": towards.value, "width": width, "count": rows.pieces, "way": name,
            "path": path_of(chooser, rows).value, "bytes_per_s": round(rows.size / taken),
            "to_a_thread": round(rows.size / seen), "wraps": rows.size > bench.size}  # fmt: skip


def fragments(bench: Bench, towards: Towards, path: Path, width: int, count: int) -> Rows:
    """So many scattered fragments (neighbours, for the pitched path). Those for which the buffers are too small begin
    again at their start."""
    rows = bench.rows(towards, path, width, count)
    pages = max(1, count // len(rows.bases))
    return rows._replace(dst_ids=np.resize(rows.dst_ids, pages), src_ids=np.resize(rows.src_ids, pages))


def path_of(chooser: Chooser, rows: Rows) -> Path:
    """The path that these rows go by."""
    return chooser.choose(shape_of(rows, Runs.of(rows)))


def both(bench: Bench, chooser: Chooser, width: int, rounds: int) -> Figures:
    """A stream each way, at the same time, in buffers of their own."""
    out, inward = bench.stream, bench.another()
    half = bench.size // width // 2
    ways: Sequence[tuple[Any, Any]] = (
        (bench.rows(Towards.OUT, Path.DMA, width, half), out),
        (_upper(bench, bench.rows(Towards.IN, Path.DMA, width, half)), inward),
    )
    taken = best(lambda: _together(bench, ways, chooser), rounds)
    size = sum(rows.size for rows, _ in ways)
    return {"width": width, "gb_s": round(size / taken / 1e9, 2)}


def _upper(bench: Bench, rows: Any) -> Any:
    """The same in the other half of the host's buffer and in the other buffer of the device."""
    shift = bench.device[1].data_ptr() - bench.device[0].data_ptr(), bench.size // 2
    return rows._replace(bases=tuple((dst + shift[0], src + shift[1]) for dst, src in rows.bases))


def _together(bench: Bench, ways: Sequence[tuple[Any, Any]], chooser: Chooser) -> float:
    began = time.perf_counter()
    for event in [bench.submit(rows, chooser, stream) for rows, stream in ways]:
        ended(event)
    return time.perf_counter() - began
