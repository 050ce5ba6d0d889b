"""Reads a run's counters: as snapshots for the display, and as figures for the report. It changes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asynccache.cli.capacity import storage_bytes
from asynccache.cli.display import Snapshot
from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.runner import RequestRunner
from asynccache.cli.text import ARROWS
from asynccache.runtime.learning import curves

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.worker.stats import StageStats


class Watch:
    """Takes snapshots of one run. ``note``: a line that the display shows below them."""

    def __init__(
        self, settings: RunSettings, runner: RequestRunner, meter: Meter, cache: AsyncCache, duration: float | None
    ) -> None:
        self.note = ""
        self._settings = settings
        self._runner = runner
        self._meter = meter
        self._cache = cache
        self._duration = duration
        self._last: tuple[float, dict[str, int]] = (time.monotonic(), {})

    def take(self) -> Snapshot:
        """A snapshot of the run as it is now."""
        tally, runner = self._runner.tally, self._runner
        elapsed = self._meter.elapsed()
        lag = spread(self._meter.recent(), 1e3)
        return Snapshot(
            title=title(self._settings), clock=clock(elapsed, self._duration),
            progress=progress(elapsed, self._duration, tally.requests, runner.total),
            served=tally.served, running=runner.running, cancelled=tally.cancelled, failed=tally.failed,
            rate=tally.served / elapsed if elapsed else 0.0, tokens=tally.tokens,
            hits=(tally.device, tally.host, tally.storage), verified=tally.verified, mismatches=tally.mismatches,
            tiers=self._tiers(), stages=self._rates(), lag=(lag.p99, lag.max), memory=peak_rss(), note=self.note,
        )

    def _tiers(self) -> tuple[tuple[str, float], ...]:
        statistics = self._cache.statistics()
        shelves = [("L1", statistics.device["full"]), ("L2", statistics.host["full"])]
        used = [(name, 1 - s.free / s.capacity) for name, s in shelves if s.capacity]
        room = storage_bytes(self._settings.storage, statistics.storage)
        return (*used, ("L3", statistics.storage.get("bytes", 0) / room)) if room else tuple(used)

    def _rates(self) -> tuple[tuple[str, float], ...]:
        """Bytes per second of each stage since the last snapshot."""
        now, moved = time.monotonic(), {name: s.bytes for name, s in self._cache.statistics().stages.items()}
        before, last = self._last
        self._last = now, moved
        seconds = max(now - before, 1e-3)
        return tuple((ARROWS.get(name, name), (count - last.get(name, 0)) / seconds) for name, count in moved.items())


def title(settings: RunSettings) -> str:
    """The headline of a run: command, workload or trace, components and page size."""
    what = settings.workload if settings.trace is None else settings.trace.rsplit("/", 1)[-1]
    ranks = f" · tp {settings.tp} cp {settings.cp} pp {settings.pp}" if settings.ranks > 1 else ""
    return f"{settings.command} {what} · {','.join(settings.components)} · pages of {settings.page_size}{ranks}"


def clock(elapsed: float, duration: float | None) -> str:
    """For how long the run has been going, and for how long it will go if that is known."""
    return f"{elapsed:.0f} s" if duration is None else f"{elapsed:.0f} of {duration:.0f} s"


def progress(elapsed: float, duration: float | None, given: int, total: int | None) -> float | None:
    """The share of a run that is done, 0 to 1; None if neither duration nor number of requests is known."""
    shares = [] if duration is None else [elapsed / duration]
    if total:
        shares.append(given / total)
    return min(1.0, max(shares)) if shares else None


def facts(cache: AsyncCache, page_size: int) -> dict[str, Any]:
    """What the cache counted, as plain values for the report."""
    statistics = cache.statistics()
    core, learned = statistics.core, cache.learned()
    return {
        "stages": {name: _stage(stage, page_size) for name, stage in statistics.stages.items()},
        "evicted": {"device": core.evicted_device, "host": core.evicted_host},
        "lost_pages": core.lost_pages,
        "failed_loads": core.failed_loads,
        "splits": core.splits,
        "nodes": core.nodes,
        "prefetches": dict(statistics.prefetches),
        "storage": dict(statistics.storage),
        "stores": {name: dict(figures) for name, figures in statistics.stores.items()},
        "tiers": {
            "device": {name: shelf._asdict() for name, shelf in statistics.device.items()},
            "host": {name: shelf._asdict() for name, shelf in statistics.host.items()},
        },
        **({} if learned is None else {"learned": curves(cache.config.eviction, learned)}),
    }


def _stage(stage: StageStats, page_size: int) -> dict[str, Any]:
    values: dict[str, Any] = stage._asdict()
    values["tokens"] = stage.full_pages * page_size
    values["latency_ms"] = {name: round(value, 4) for name, value in stage.latency_ms._asdict().items()}
    return values
