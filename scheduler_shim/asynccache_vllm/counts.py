"""The tier's counters: for vLLM's metrics, and for the log, which has a summary a minute at most, and complaints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asynccache.storage import Result

LOOKUPS = "vllm:kv_offload_asynccache_lookups"
LOADED = "vllm:kv_offload_asynccache_loaded_chunks"
STORED = "vllm:kv_offload_asynccache_stored_chunks"
HINTS = "vllm:kv_offload_asynccache_hints"
HINTED = "vllm:kv_offload_asynccache_hinted_chunks"

DESCRIPTIONS: Mapping[str, str] = {
    LOOKUPS: "Chunks that asynccache's stores were asked for, by the answer: hit, miss, or failed (no answer, or none "
    "in time).",
    LOADED: "Chunks that were to be read from asynccache's stores, by the result: hit, miss (gone since the look-up), "
    "corrupt (the chunk did not verify and was deleted), or failed.",
    STORED: "Chunks that were to be written to asynccache's stores, by the result: hit (the chunk is stored), failed, "
    "dropped (chunks came faster than the stores could write), or skipped (a hint said so).",
    HINTS: "Actions in requests' kv_hints: prefetch, keep, ended, skip_store, unknown (of another name or version), or "
    "malformed.",
    HINTED: "Chunks that the stores were told of because of a hint, by the answer: hit (done), miss (the store does "
    "not have it, or may not keep more), failed, or unheard (no store takes hints).",
}
"""The description of each metric, by its name. Each metric has one label, ``result``."""

DROPPED, SKIPPED, UNHEARD = "dropped", "skipped", "unheard"
SUMMARY_EVERY = 60.0
COMPLAINT_EVERY = 10.0
"""Seconds between two summaries, and between two complaints, at least."""


class ChunkCounts:
    """Counts chunks by metric and result. Metrics, summaries and complaints each have counts of their own, which begin
    again at 0 when they are taken. ``now``: the present time in seconds, by any clock."""

    def __init__(self, now: float) -> None:
        self._metrics: Counter[tuple[str, str]] = Counter()
        self._summary: Counter[tuple[str, str]] = Counter()
        self._complaint: Counter[tuple[str, str]] = Counter()
        self._summed = now
        self._complained = now - COMPLAINT_EVERY

    def add(self, metric: str, results: Iterable[Result | str]) -> None:
        """Count each of ``results``."""
        for result, count in Counter(results).items():
            name = result if isinstance(result, str) else result.name.lower()
            for counter in (self._metrics, self._summary):
                counter[metric, name] += count
            if metric not in (HINTS, HINTED) and name not in ("hit", "miss", SKIPPED):
                self._complaint[metric, name] += count

    def take(self) -> dict[tuple[str, str], int]:
        """The counts since the last call, by metric and result, for vLLM's metrics."""
        taken, self._metrics = dict(self._metrics), Counter()
        return taken

    def complaint(self, now: float) -> str:
        """Return the failures since the last complaint, as text for the log; empty if nothing failed, or if the last
        complaint was less than ``COMPLAINT_EVERY`` seconds ago."""
        if not self._complaint or now - self._complained < COMPLAINT_EVERY:
            return ""
        counts, self._complaint, self._complained = self._complaint, Counter(), now
        return _told(counts)

    def summary(self, now: float) -> str:
        """All counts since the last summary, as text for the log; empty if there are none, or if the last summary was
        less than ``SUMMARY_EVERY`` seconds ago."""
        if not self._summary or now - self._summed < SUMMARY_EVERY:
            return ""
        return self.rest(now)

    def rest(self, now: float) -> str:
        """All counts since the last summary, however long ago that was; empty if there are none."""
        counts, seconds = self._summary, now - self._summed
        self._summary, self._summed = Counter(), now
        return f"in {seconds:.0f} s: {_told(counts)}" if counts else ""


_VERBS = {LOOKUPS: "looked up", LOADED: "loaded", STORED: "stored", HINTS: "heard", HINTED: "hinted"}


def _told(counts: Mapping[tuple[str, str], int]) -> str:
    parts = []
    for metric, verb in _VERBS.items():
        found = {result: count for (name, result), count in counts.items() if name == metric}
        if found:
            parts.append(f"{verb} " + ", ".join(f"{count} {result}" for result, count in sorted(found.items())))
    return "; ".join(parts)
