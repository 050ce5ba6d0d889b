"""The counters of a run. Only prompt tokens count as hits, each token once, and only of prompts that became complete.

Law: the counters need no more memory however long the run lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asynccache.cli.engine import Verdict
from asynccache.cli.meter import Samples
from asynccache.cli.request import BLOCK_TOKENS, RunRequest

_SHOWN = 5


@dataclass(slots=True)
class Tally:
    """Counters of one run.

    requests: those that have arrived; served, cancelled, failed: how many of them ended in this way. entered_again:
    leases taken again after a failed load. cut_short: outputs that the cache had no room for. tokens: prompt tokens of
    all requests whose prompt is complete; device, host, storage: those that hit, by tier. blocks, blocks_hit,
    blocks_shared: full blocks of a trace; those that hit; those that earlier prompts have as well. verified,
    mismatches: pages that were read back, and those that were wrong. waits: seconds from asking for a lease until its
    pages were on the device. first_token, first_token_without: seconds to the first token with the cache and, by the
    same model, without it. slowdown: how many times as long the engine's work took because the machine was busy.
    problems: sentences for the reader; any of them makes the run fail.
    """

    requests: int = 0
    served: int = 0
    cancelled: int = 0
    failed: int = 0
    entered_again: int = 0
    cut_short: int = 0
    tokens: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    output_tokens: int = 0
    blocks: int = 0
    blocks_hit: int = 0
    blocks_shared: int = 0
    verified: int = 0
    mismatches: int = 0
    waits: Samples = field(default_factory=Samples)
    first_token: Samples = field(default_factory=Samples)
    first_token_without: Samples = field(default_factory=Samples)
    slowdown: float = 1.0
    problems: list[str] = field(default_factory=list)

    def hit(self) -> int:
        """Prompt tokens that the cache had, so that they were not computed."""
        return self.device + self.host + self.storage

    def ratio(self) -> float:
        """The hit ratio; see ``text.HIT_RATIO``."""
        return self.hit() / self.tokens if self.tokens else 0.0

    def prompt(
        self, request: RunRequest, cached: int, hits: tuple[int, int, int], wait: float, rate: float, slowdown: float
    ) -> None:  # fmt: skip
        """Count a prompt whose KV is complete.

        ``cached`` of its tokens came from the cache (``hits``: from device, host and storage) after ``wait`` seconds.
        The time for the others is modelled: ``rate`` tokens a second, times the ``slowdown`` by other work of the
        machine. The time without the cache has the same slowdown, because it would be the same machine.
        """
        self.tokens += request.length
        self.device += hits[0]
        self.host += hits[1]
        self.storage += hits[2]
        self.blocks += request.length // BLOCK_TOKENS
        self.blocks_hit += cached // BLOCK_TOKENS
        self.blocks_shared += request.shared_blocks
        self.waits.append(wait)
        self.slowdown = slowdown
        self.first_token.append(wait + (request.length - cached) / rate * slowdown)
        self.first_token_without.append(request.length / rate * slowdown)

    def verdict(self, request: RunRequest, verdict: Verdict) -> None:
        """Count pages of a request that were read back; wrong ones make a problem."""
        self.verified += verdict.pages
        if verdict.wrong:
            self.mismatches += verdict.wrong
            self.problem(f"request {request.number}: {verdict.wrong} of {verdict.pages} pages are wrong: "
                         f"{'; '.join(verdict.what[:2])}")

    def problem(self, sentence: str) -> None:
        """Note a sentence about something that was wrong. The first five are kept, then "and more"."""
        if len(self.problems) < _SHOWN:
            self.problems.append(sentence)
        elif len(self.problems) == _SHOWN:
            self.problems.append("and more")
