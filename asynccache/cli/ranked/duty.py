"""What the command tells a rank at its start, and what the rank says at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynccache.cli.meter import Spread

_NOTHING = Spread(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Duty:
    """What the command tells a rank. ``topology``: how many ranks there are by tp, cp and pp. ``faults``: the share of
    copies and of stores' calls that have faults; see ``asynccache.cli.faulty``. ``delay``: for how many seconds at most
    the rank waits before each batch."""

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
    """What a rank says at its end. ``verified``, ``mismatches``: pages. ``tasks``: tasks that are left over. ``cpu``:
    seconds; ``memory``: bytes; ``lag``, ``run_queue``: milliseconds. ``failure``: what ended the rank too early."""

    verified: int = 0
    mismatches: int = 0
    batches: int = 0
    tasks: int = 0
    cpu: float = 0.0
    memory: int = 0
    lag: Spread = _NOTHING
    run_queue: Spread = _NOTHING
    failure: dict[str, Any] | None = field(default=None)
