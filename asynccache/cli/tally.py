"""What a run counts. Only prompt tokens count as hits, once each, and only for requests that were served."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from asynccache.cli.curve import Request as Path
from asynccache.cli.engine import Verdict
from asynccache.cli.pattern import Values
from asynccache.cli.request import BLOCK_TOKENS, Request

_SHOWN = 5
_PATH_PAGES = 1 << 21


@dataclass(slots=True)
class Tally:
    """Counters of one run. ``problems`` are sentences for the reader; any of them makes the run fail."""

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
    waits: array[float] = field(default_factory=lambda: array("d"))
    first_token: array[float] = field(default_factory=lambda: array("d"))
    first_token_without: array[float] = field(default_factory=lambda: array("d"))
    paths: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _path_pages: int = 0

    def hit(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device + self.host + self.storage

    def ratio(self) -> float:
        return self.hit() / self.tokens if self.tokens else 0.0

    def prompt(self, request: Request, cached: int, hits: tuple[int, int, int], wait: float, rate: float) -> None:
        """A prompt's KV is complete: ``cached`` tokens came from the cache after ``wait`` seconds."""
        self.tokens += request.length
        self.device += hits[0]
        self.host += hits[1]
        self.storage += hits[2]
        self.blocks += request.length // BLOCK_TOKENS
        self.blocks_hit += cached // BLOCK_TOKENS
        self.blocks_shared += request.shared_blocks
        self.waits.append(wait)
        self.first_token.append(wait + (request.length - cached) / rate)
        self.first_token_without.append(request.length / rate)

    def path(self, values: Values, prompt: int, end: int) -> None:
        """A request looked up ``prompt`` pages and left ``end``. Kept as long as they are not too many."""
        if self._path_pages < _PATH_PAGES:
            self._path_pages += end
            self.paths.append(Path(values[:end].tolist(), prompt))

    def verdict(self, request: Request, verdict: Verdict) -> None:
        """Pages of a request were read back."""
        self.verified += verdict.pages
        if verdict.wrong:
            self.mismatches += verdict.wrong
            self.problem(f"request {request.number}: {verdict.wrong} of {verdict.pages} pages are wrong: "
                         f"{'; '.join(verdict.what[:2])}")

    def problem(self, sentence: str) -> None:
        """Something was wrong. The first few are kept."""
        if len(self.problems) < _SHOWN:
            self.problems.append(sentence)
        elif len(self.problems) == _SHOWN:
            self.problems.append("and more")
