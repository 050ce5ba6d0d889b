"""Which way a batch is copied: by the copy engines, piece by piece or pitched, or by a kernel.

Pure. The decision is the smallest of some estimates, each a fixed cost, a cost a descriptor, a cost a row and a cost a
byte, which ``calibration`` measures when the device opens. Where nothing was measured, published figures of an H100
hold. The kernel takes multiprocessors from whatever computes, the copy engines do not: it must win by a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.memory.cuda.driver import Towards


class Path(Enum):
    """How bytes get across."""

    DMA = "dma"             # copy engines, one descriptor for each run
    PITCHED = "pitched"     # copy engines, one call for rows at a constant distance
    KERNEL = "kernel"       # the copy kernel, straight from or to pinned memory
    STAGED = "staged"       # the copy kernel into device memory in the host's layout, then the copy engines


class Cost(NamedTuple):
    """Seconds: of a batch, of a descriptor of the copy engines, of a row that a call or a kernel works through itself,
    and of a byte."""

    fixed: float
    piece: float
    row: float
    byte: float

    def of(self, pieces: int, rows: int, size: int) -> float:
        return self.fixed + pieces * self.piece + rows * self.row + size * self.byte


Costs = Mapping[tuple[Towards, Path], Cost]

OUT, IN, WITHIN = Towards

PUBLISHED: Costs = {
    (OUT, Path.DMA): Cost(5e-6, 0.9e-6, 0, 1 / 52e9),
    (OUT, Path.PITCHED): Cost(5e-6, 0.9e-6, 0.3e-6, 1 / 50e9),
    (OUT, Path.STAGED): Cost(20e-6, 0.9e-6, 0.01e-6, 1 / 48e9),
    (OUT, Path.KERNEL): Cost(15e-6, 0, 0.03e-6, 1 / 40e9),
    (IN, Path.DMA): Cost(5e-6, 0.9e-6, 0, 1 / 53e9),
    (IN, Path.PITCHED): Cost(5e-6, 0.9e-6, 0.3e-6, 1 / 51e9),
    (IN, Path.KERNEL): Cost(15e-6, 0, 0.03e-6, 1 / 45e9),
    (WITHIN, Path.DMA): Cost(5e-6, 0.9e-6, 0, 1 / 1.2e12),
    (WITHIN, Path.KERNEL): Cost(15e-6, 0, 0.01e-6, 1 / 1.0e12),
}

MARGIN = 0.9
"""A kernel is chosen where it takes at most this share of what the copy engines take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be chosen by hand. ``out``, ``inward``, ``within``: always this path, where it is possible."""

    out: Path | None = None
    inward: Path | None = None
    within: Path | None = None
    blocks: int = 8
    calibrate: bool = True
    huge_pages: bool = True
    numa_node: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= 1024:
            raise ConfigError(f"blocks={self.blocks} must lie between 1 and 1024")
        for name, towards in (("out", OUT), ("inward", IN), ("within", WITHIN)):
            path = self.forced(towards)
            if path is not None and (towards, path) not in PUBLISHED:
                raise ConfigError(f"{name}={path.value}: there is no such path {towards.value}")

    def forced(self, towards: Towards) -> Path | None:
        """The path that was chosen by hand."""
        return {OUT: self.out, IN: self.inward, WITHIN: self.within}[towards]


def settings_from(options: Mapping[str, str]) -> Settings:
    """Settings as a device's name gives them: ``out=staged``, ``blocks=16``, ``calibrate=no``.

    Raises:
        ConfigError: a value cannot be read; the message names the option.
    """
    return Settings(**{name: _READ[name](name, value) for name, value in options.items()})


def _path(name: str, value: str) -> Path:
    return checks.member(f"device option {name}", value, Path)


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"device option {name}={value!r} must be a number from 0 on")
    return int(value)


def _yes(name: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise ConfigError(f"device option {name}={value!r} must be yes or no")
    return value == "yes"


_READ: Mapping[str, Callable[[str, str], Any]] = {
    "out": _path, "inward": _path, "within": _path, "blocks": _number, "numa_node": _number, "calibrate": _yes,
    "huge_pages": _yes,
}


class Shape(NamedTuple):
    """What the estimates are made of."""

    towards: Towards
    rows: int
    size: int
    aligned: bool
    spans: int          # descriptors, where neighbours are one
    pitched: int        # and where rows at a constant distance are one as well
    staged: int         # of whole host pages, put together on the device; 0: that cannot be

    def counts(self, path: Path) -> tuple[int, int, int]:
        """Descriptors, rows and bytes that this path costs."""
        pieces = {Path.DMA: self.spans, Path.PITCHED: self.pitched, Path.STAGED: self.staged, Path.KERNEL: 0}[path]
        return pieces, 0 if path is Path.DMA else self.rows, self.size


@dataclass(frozen=True, slots=True)
class Chooser:
    """The decision. ``costs`` come from calibration, or are the published ones."""

    settings: Settings = Settings()
    costs: Costs = field(default_factory=lambda: PUBLISHED)

    def choose(self, shape: Shape) -> Path:
        """The path with the least estimate, or the one that was chosen by hand where it is possible."""
        possible = self.possible(shape)
        forced = self.settings.forced(shape.towards)
        if forced is not None:
            return forced if forced in possible else Path.DMA
        return min(possible, key=lambda path: self.estimate(path, shape))

    def possible(self, shape: Shape) -> list[Path]:
        """Those that can do it."""
        return [path for (towards, path) in self.costs if towards is shape.towards and _can(path, shape)]

    def estimate(self, path: Path, shape: Shape) -> float:
        """Seconds, and for a kernel what it must win by."""
        seconds = self.costs[shape.towards, path].of(*shape.counts(path))
        return seconds if path in (Path.DMA, Path.PITCHED) else seconds / MARGIN


def _can(path: Path, shape: Shape) -> bool:
    if path is Path.PITCHED:
        return shape.pitched < shape.spans
    if path is Path.STAGED:
        return shape.aligned and shape.staged > 0
    return path is Path.DMA or shape.aligned
