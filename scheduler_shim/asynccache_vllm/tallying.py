"""What the tier counts: for vLLM's metrics, and for lines in its log that come seldom enough to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asynccache.storage import Result

LOOKUPS = "vllm:kv_offload_asynccache_lookups"
LOADED = "vllm:kv_offload_asynccache_loaded_chunks"
STORED = "vllm:kv_offload_asynccache_stored_chunks"

DESCRIPTIONS: Mapping[str, str] = {
    LOOKUPS: "Chunks that asynccache's stores were asked for, by what they answered: hit, miss or failed (no answer in "
    "time, or none at all).",
    LOADED: "Chunks that were to be read from asynccache's stores, by what became of them: hit, miss (gone since they "
    "were asked for), corrupt (they did not verify and were deleted) or failed.",
    STORED: "Chunks that were to be written to asynccache's stores, by what became of them: hit (they are there), "
    "failed, or dropped (the stores are slower than what is to be stored).",
}
"""By the metric's name. The one label of each is ``result``."""

DROPPED = "dropped"
SUMMARY_EVERY = 60.0
COMPLAINT_EVERY = 10.0


class Tally:
    """Counts since the last time that somebody took them, once for metrics and once for the log."""

    def __init__(self, now: float) -> None:
        self._metrics: Counter[tuple[str, str]] = Counter()
        self._summary: Counter[tuple[str, str]] = Counter()
        self._complaint: Counter[tuple[str, str]] = Counter()
        self._summed = now
        self._complained = now - COMPLAINT_EVERY

    def __repr__(self) -> str:
        return f"Tally({dict(self._summary)})"

    def add(self, metric: str, results: Iterable[Result | str]) -> None:
        """Count each of ``results``."""
        for result, count in Counter(results).items():
            name = result if isinstance(result, str) else result.name.lower()
            for counter in (self._metrics, self._summary):
                counter[metric, name] += count
            if name not in ("hit", "miss"):
                self._complaint[metric, name] += count

    def take(self) -> dict[tuple[str, str], int]:
        """What was counted since the last call, by metric and result."""
        taken, self._metrics = dict(self._metrics), Counter()
        return taken

    def complaint(self, now: float) -> str:
        """What failed since the last complaint, as a part of a sentence; empty if nothing did, or if it is too soon."""
        if not self._complaint or now - self._complained < COMPLAINT_EVERY:
            return ""
        counts, self._complaint, self._complained = self._complaint, Counter(), now
        return _told(counts)

    def summary(self, now: float) -> str:
        """All that was counted since the last summary; empty if nothing was, or if it is too soon."""
        if not self._summary or now - self._summed < SUMMARY_EVERY:
            return ""
        return self.rest(now)

    def rest(self, now: float) -> str:
        """As ``summary``, never too soon."""
        counts, seconds = self._summary, now - self._summed
        self._summary, self._summed = Counter(), now
        return f"in {seconds:.0f} s: {_told(counts)}" if counts else ""


_VERBS = {LOOKUPS: "looked up", LOADED: "loaded", STORED: "stored"}


def _told(counts: Mapping[tuple[str, str], int]) -> str:
    parts = []
    for metric, verb in _VERBS.items():
        found = {result: count for (name, result), count in counts.items() if name == metric}
        if found:
            parts.append(f"{verb} " + ", ".join(f"{count} {result}" for result, count in sorted(found.items())))
    return "; ".join(parts)
