"""What the command tells a rank at its start, and what the rank says at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynccache.cli.meter import Spread

_NOTHING = Spread(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Duty:
    """``faults``: share of copies and calls; ``delay``: seconds that it dawdles before a batch, at most."""

    rank: int
    address: str
    topology: tuple[int, int, int]
    device: str
    loop: str | None
    seed: int
    faults: float
    delay: float


@dataclass(slots=True)
class Account:
    """What a rank has to say at its end. ``failure``: what ended it too early."""

    verified: int = 0
    mismatches: int = 0
    batches: int = 0
    tasks: int = 0
    cpu: float = 0.0
    memory: int = 0
    lag: Spread = _NOTHING
    run_queue: Spread = _NOTHING
    failure: dict[str, Any] | None = field(default=None)
