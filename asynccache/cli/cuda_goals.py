"""What the CUDA device is meant to reach, and whether it did: one line for each figure.

Pure. A figure that could not be taken counts as missed, with the reason in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Figures = Mapping[str, Any]

SHARE = {4 << 10: 0.6, 16 << 10: 0.85, 64 << 10: 0.95, 256 << 10: 0.95, 2 << 20: 0.95}
"""Of the best large copy, by width of the fragments."""
BOTH, ONE = 80.0, 50.0
"""GB/s both ways at once, where one way makes ``ONE``."""
SLOWER = {"dma": 0.03, "kernel": 0.08, "staged": 0.08}
WAKE_P50_US, WAKE_P99_US, LOOP_US_EACH = 80.0, 300.0, 5.0
OFF_LOOP_US, ON_LOOP_US = 1000.0, 50.0
LAYER_WISE = 1.1


class Goal(NamedTuple):
    """``value`` beside its ``limit``."""

    figure: str
    value: float | None
    sense: str
    limit: float

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.sense == "at least" else self.value <= self.limit

    def report(self) -> dict[str, Any]:
        return {"figure": self.figure, "value": self.value, "goal": f"{self.sense} {self.limit:g}", "met": self.met}


def at_least(figure: str, value: float | None, limit: float) -> Goal:
    return Goal(figure, value, "at least", limit)


def at_most(figure: str, value: float | None, limit: float) -> Goal:
    return Goal(figure, value, "at most", limit)


def goals(figures: Figures) -> list[Goal]:
    """Every goal, in the order in which they are told."""
    return [*_copies(figures["copies"]), *_compute(figures["compute"]), *_waking(figures["waking"]),
            *_submitting(figures["waking"]["submitting"]), *_layers(figures)]  # fmt: skip


def _copies(copies: Figures) -> Iterator[Goal]:
    for row in copies["fragments"]:
        if row["way"] == "chosen":
            name = f"{row['direction']}, {row['count']} fragments of {row['width'] >> 10} KiB: share of one large copy"
            yield at_least(name, row["ratio"], SHARE.get(row["width"], 0.0))
    one = min(copies["reference_gb_s"].values())
    for row in copies["both_directions"]:
        yield at_least(f"both directions, fragments of {row['width'] >> 10} KiB: GB/s", row["gb_s"],
                       round(BOTH * min(1.0, one / ONE), 2))  # fmt: skip


def _compute(compute: Figures) -> Iterator[Goal]:
    for row in compute["slow_down"]["beside"]:
        yield at_most(f"bf16 products beside copies {row['direction']} by {row['path']}: slower by", row["slower_by"],
                      SLOWER[row["path"]])  # fmt: skip


def _waking(waking: Figures) -> Iterator[Goal]:
    yield at_most("event to coroutine, p50: µs", waking["wake_up"]["p50_us"], WAKE_P50_US)
    yield at_most("event to coroutine, p99: µs", waking["wake_up"]["p99_us"], WAKE_P99_US)
    flight = waking["in_flight"]
    yield at_most(f"{flight['transfers']} in flight, loop time each: µs", flight["loop_us_each"], LOOP_US_EACH)


def _submitting(rows: Sequence[Figures]) -> Iterator[Goal]:
    for row in rows:
        name = f"submitting {row['pages']} pages, {row['way']}"
        yield at_most(f"{name}: µs on the loop", row["on_loop_us"], ON_LOOP_US)
        if row["way"] != "chosen":
            yield at_most(f"{name}: µs off the loop", row["off_loop_us"], OFF_LOOP_US)


def _layers(figures: Figures) -> Iterator[Goal]:
    for where, row in (("by the device", figures["compute"]["layer_wise"]), ("by leases", figures["leases"])):
        yield at_most(f"load of {row['layers']} layers beside computing, {where}: share of the longer of the two",
                      row["ratio"], LAYER_WISE)  # fmt: skip
