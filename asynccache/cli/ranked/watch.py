"""Looks at a run of several ranks from outside: snapshots for the display, out of what ranks say of themselves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from asynccache.cli.display import Snapshot
from asynccache.cli.meter import Meter
from asynccache.cli.options import Settings
from asynccache.cli.ranked.conductor import Conductor
from asynccache.cli.ranked.messages import Pulse
from asynccache.cli.watch import SHORT, clock, progress, title

_NOTHING = Pulse((0, 0, 0), 0, (0, 0, 0), 0, 0, (), {}, (0.0, 0.0), 0)


class RankedWatch:
    """``note`` is shown under the snapshots."""

    def __init__(self, settings: Settings, conductor: Conductor, meter: Meter, duration: float | None) -> None:
        self.note = ""
        self._settings = settings
        self._conductor = conductor
        self._meter = meter
        self._duration = duration
        self._last: tuple[float, Counter[str]] = (time.monotonic(), Counter())

    def take(self) -> Snapshot:
        """The run as it is now: requests of the first rank, pages of all."""
        conductor, elapsed = self._conductor, self._meter.elapsed()
        pulses = [pulse for _, pulse in sorted(conductor.pulses.items())]
        first = pulses[0] if pulses else _NOTHING
        served, cancelled, failed = first.counts
        settings = self._settings
        done, total = conductor.given, conductor.total
        if settings.steps is not None:
            done, total = conductor.compared.ticks, settings.steps
        shape = f"{title(settings)} · tp {settings.tp} cp {settings.cp} pp {settings.pp}"
        return Snapshot(
            title=shape, clock=clock(elapsed, self._duration),
            progress=progress(elapsed, self._duration, done, total),
            served=served, running=len(conductor.running), cancelled=cancelled, failed=failed,
            rate=served / elapsed if elapsed else 0.0, tokens=first.tokens, hits=first.hits,
            verified=sum(pulse.verified for pulse in pulses), mismatches=sum(pulse.mismatches for pulse in pulses),
            tiers=first.tiers, stages=self._rates(pulses),
            lag=(max((p.lag[0] for p in pulses), default=0.0), max((p.lag[1] for p in pulses), default=0.0)),
            memory=sum(pulse.memory for pulse in pulses), note=self.note,
        )

    def _rates(self, pulses: Sequence[Pulse]) -> tuple[tuple[str, float], ...]:
        """Bytes per second of all ranks since the last look."""
        now, moved = time.monotonic(), Counter[str]()
        for pulse in pulses:
            moved.update(pulse.moved)
        before, last = self._last
        self._last = now, moved
        seconds = max(now - before, 1e-3)
        return tuple((SHORT.get(name, name), (count - last[name]) / seconds) for name, count in moved.items())
