"""The smallest embedding: a lease around each request, the model in a thread, greedy tokens.

Law: no page goes back while a forward call may still touch it. A cancellation waits for the call that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from asynccache_shim.model import Batch, Checkpoint, Chunk
from asynccache_shim.thread import ModelThread, returned

from asynccache import AsyncCache, Hits, Lease, LoadFailed, checks
from asynccache_hf.paged import PagedModel

_NONE = np.empty(0, np.int32)

LOAD_ATTEMPTS = 8
"""How often what is cached is copied to the device for one request, if that fails: as often as by the scheduler. The
copies on the host stay, so every lease finds them again."""


class Generated(NamedTuple):
    """New tokens, and the logits that each was chosen from. ``cached``: prompt tokens that were not computed."""

    tokens: list[int]
    logits: torch.Tensor
    cached: int
    hits: Hits


def due(lease: Lease, prompt: int, page_size: int) -> set[int]:
    """Return the lengths at which a prefill takes checkpoints of recurrent states: where FULL alone matched, and at the
    last page's end that the same prompt could hit."""
    last = (prompt - 1) // page_size * page_size
    return {at for at in (lease.checkpoint_at, last) if at > lease.cached}


class Generator:
    """Greedy generation with ``model`` on ``cache``. ``chunk``: prefill calls end at its multiples."""

    def __init__(self, cache: AsyncCache, model: PagedModel, *, chunk: int = 512) -> None:
        self._cache = checks.instance("cache", cache, AsyncCache)
        self._model = model
        self._chunk = checks.integer("chunk", chunk, 1)
        self._ids = count(1)
        self._thread = ModelThread()

    def close(self) -> None:
        """Wait for the call that runs."""
        self._thread.close(wait=True)

    async def generate(
        self, tokens: Sequence[int], new_tokens: int, *, extra_key: str | bytes | None = None
    ) -> Generated:
        """``new_tokens`` (1 or more) tokens that follow ``tokens``. Cancelling it waits for the forward call that runs,
        then gives everything back.

        Raises:
            CacheFull: the pages can never be had.
            LoadFailed: cached pages could not be copied to the device, ``LOAD_ATTEMPTS`` times.
            CacheClosed: the cache is closed.
            ConfigError: an argument is unusable.
        """
        new_tokens = checks.integer("new_tokens", new_tokens, 1)
        self._model.layout.check_length(len(tokens) + new_tokens - 1)
        attempt = 1
        while True:
            async with self._cache.lease(tokens, new_tokens=new_tokens, extra_key=extra_key) as lease:
                try:
                    await lease.loaded()
                except LoadFailed:
                    if attempt == LOAD_ATTEMPTS:
                        raise
                    attempt += 1
                    continue
                return await self._run(lease, tokens, new_tokens)

    async def _run(self, lease: Lease, tokens: Sequence[int], new_tokens: int) -> Generated:
        run = _Run(self, lease, next(self._ids), tokens, new_tokens)
        try:
            return await run.all()
        finally:
            self._thread.start(self._model.forward, Batch((), (run.id,)))

    async def compute(self, chunk: Chunk) -> torch.Tensor:
        """A forward call in the thread. Cancelling it waits for its end."""
        future = self._thread.start(self._model.compute, chunk)
        cancelled = await returned(future)
        if cancelled is not None:
            raise cancelled
        return future.result()

    def stops(self, lease: Lease, prompt: int) -> list[int]:
        """Return the lengths at which prefill calls end: at multiples of the chunk, where a checkpoint is due, and at
        the prompt's end."""
        cuts = {prompt, *range(0, prompt, self._chunk), *self.due(lease, prompt)}
        return sorted(cut for cut in cuts if cut > lease.cached)

    def due(self, lease: Lease, prompt: int) -> set[int]:
        """Return the lengths at which a prefill takes checkpoints of recurrent states."""
        return due(lease, prompt, self.page_size) if self.recurrent else set()

    @property
    def windowed(self) -> bool:
        return self._model.layout.window > 0

    @property
    def recurrent(self) -> bool:
        return self._model.layout.recurrent

    @property
    def page_size(self) -> int:
        return self._model.layout.page_size


class _Run:
    """One request under its lease. ``at``: tokens computed so far. ``saved``: the checkpoint not yet committed."""

    def __init__(
        self, generator: Generator, lease: Lease, request_id: int, tokens: Sequence[int], new_tokens: int
    ) -> None:
        self.id = request_id
        self._generator = generator
        self._lease = lease
        self._prompt = len(tokens)
        self._tokens = np.concatenate([np.asarray(tokens, np.int32), np.zeros(new_tokens, np.int32)])
        self._due = generator.due(lease, self._prompt)
        self._at = lease.cached
        self._saved: Checkpoint | None = None

    async def all(self) -> Generated:
        logits = []
        for stop in self._generator.stops(self._lease, self._prompt):
            last = await self._step(stop)
            await self._publish()
        for at in range(self._prompt, len(self._tokens)):
            if at > self._prompt:
                last = await self._step(at)
            logits.append(last)
            self._tokens[at] = int(last.argmax())
        await self._publish()
        made = self._tokens[self._prompt :].tolist()
        return Generated(made, torch.cat(logits), self._lease.cached, self._lease.hits)

    async def _step(self, stop: int) -> torch.Tensor:
        """Compute up to ``stop``; pages that the window has left go back before."""
        lease = self._lease
        lease.advance(self._at)
        swa = lease.page_table("swa") if self._generator.windowed else _NONE
        checkpoint = self._checkpoint(stop)
        logits = await self._generator.compute(
            Chunk(self.id, self._tokens, self._at, stop, lease.pages, swa, lease.states, checkpoint, sample=True)
        )
        self._at, self._saved = stop, checkpoint or self._saved
        return logits

    def _checkpoint(self, stop: int) -> Checkpoint | None:
        """The one to take at ``stop``, if one is due there and a slot is left."""
        whole = stop % self._generator.page_size == 0
        wanted = stop in self._due or (whole and stop > self._prompt and self._generator.recurrent)
        return Checkpoint(stop, int(self._lease.states[1])) if wanted and len(self._lease.states) > 1 else None

    async def _publish(self) -> None:
        """Commit the whole pages, and the state that was saved last."""
        await self._lease.commit(self._tokens[: self._at], checkpoint=self._saved)
        self._lease.adopt()
        self._saved = None
