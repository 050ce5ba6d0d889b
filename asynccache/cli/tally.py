"""What a run counts. Only prompt tokens count as hits, once each, and only for requests that were served.

Law: what a run counts needs no more memory the longer it runs, once ``Paths`` is full.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from asynccache.cli.curve import Request as Path
from asynccache.cli.engine import Verdict
from asynccache.cli.meter import Samples
from asynccache.cli.pattern import Values
from asynccache.cli.request import BLOCK_TOKENS, Request

_SHOWN = 5


class Paths:
    """What requests looked up and left behind, page by page, in their order: of the first ones, until these have
    ``limit`` pages of 8 bytes each. ``tokens``: of their prompts, also beyond the last whole page. Iterating yields a
    ``Path`` for each request."""

    LIMIT = 1 << 21

    def __init__(self, limit: int = LIMIT) -> None:
        self.tokens = 0
        self._limit = limit
        self._pages = array("Q")
        self._ends = array("q")
        self._prompts = array("q")

    def __repr__(self) -> str:
        return f"Paths({len(self)} requests, {len(self._pages)} pages)"

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Path]:
        start = 0
        for end, prompt in zip(self._ends, self._prompts, strict=True):
            yield Path(self._pages[start:end], prompt)
            start = end

    def add(self, values: Values, prompt: int, tokens: int) -> None:
        """A request with a prompt of ``tokens`` tokens looked up the first ``prompt`` pages of ``values`` and left them
        all."""
        if len(self._pages) < self._limit:
            self.tokens += tokens
            self._pages.frombytes(values.tobytes())
            self._ends.append(len(self._pages))
            self._prompts.append(prompt)

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
    waits: Samples = field(default_factory=Samples)
    first_token: Samples = field(default_factory=Samples)
    first_token_without: Samples = field(default_factory=Samples)
    slowdown: float = 1.0
    paths: Paths = field(default_factory=Paths)
    problems: list[str] = field(default_factory=list)

    def hit(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device + self.host + self.storage

    def ratio(self) -> float:
        """The hit ratio; see ``text.HIT_RATIO``."""
        return self.hit() / self.tokens if self.tokens else 0.0

    def prompt(
        self, request: Request, cached: int, hits: tuple[int, int, int], wait: float, rate: float, slowdown: float
    ) -> None:  # fmt: skip
        """A prompt's KV is complete: ``cached`` tokens came from the cache after ``wait`` seconds, the others are
        computed at ``rate`` tokens a second, on a machine that makes the engine's work ``slowdown`` times as long. With
        and without the cache it is the same machine: what else it has to do makes both slow."""
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

    def path(self, values: Values, prompt: int, end: int, tokens: int) -> None:
        """A request with a prompt of ``tokens`` tokens looked up ``prompt`` pages and left ``end``."""
        self.paths.add(values[:end], prompt, tokens)

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
