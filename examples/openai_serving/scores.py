"""Log-probabilities: those of an answer's tokens, and of the likeliest tokens beside each of them.

They are those of the model's logits, before temperature and ``top_p``, as OpenAI's API says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from asynccache_hf import PagedModel
from asynccache_shim import Batch, Chunk


class Score(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Scores:
    """The scores of one answer's tokens, in their order. ``top``: how many of the likeliest tokens each has."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.all: list[Score] = []

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Add ``token``, which was drawn from ``logits``, ``[vocabulary]``."""
        rows = torch.log_softmax(logits.double(), -1)
        values, tokens = rows.topk(min(self.top, len(rows)))
        likeliest = zip(tokens.tolist(), values.tolist(), strict=True)
        self.all.append(Score(token, float(rows[token]), tuple(likeliest)))


class ScoredModel(PagedModel):
    """A model on pages that keeps the scores of requests. ``scored``: where they go, by the request's number; an entry
    is gone when nobody else has the scores."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.scored: WeakValueDictionary[int, Scores] = WeakValueDictionary()
        self._made: list[torch.Tensor] = []

    def compute_all(self, chunks: Sequence[Chunk], keep: int = 1) -> list[torch.Tensor]:
        self._made = super().compute_all(chunks, keep)
        return self._made

    def forward(self, batch: Batch) -> list[int]:
        tokens = super().forward(batch)
        for chunk, token, logits in zip(batch.chunks, tokens, self._made, strict=True):
            if chunk.sample and (scores := self.scored.get(chunk.request_id)) is not None:
                scores.add(token, logits[-1])
        return tokens
