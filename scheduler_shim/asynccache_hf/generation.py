"""``Generator``: the smallest engine on the cache. Each request has a lease, the model runs in a thread, and the next
token is always the likeliest one.

Law: no page goes back while a forward call may still touch it. A cancellation waits for the call that runs.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from asynccache_shim.model import Batch, Checkpoint, Chunk
from asynccache_shim.request import Tokens, as_tokens
from asynccache_shim.thread import ModelThread, returned

from asynccache import AsyncCache, Hits, Lease, LoadFailed, PrefetchHandle, checks
from asynccache_hf.paged import PagedModel

LOAD_ATTEMPTS = 8
"""The number of leases that one request takes at most: after each failure to copy its cached pages to the device it
takes another one. The scheduler's ``load_attempts`` has the same default. The copies on the host stay, so every lease
finds them again."""


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


async def loaded_lease(
    cache: AsyncCache, tokens: Sequence[int] | Tokens, new_tokens: int, extra_key: str | bytes | None,
    handle: PrefetchHandle | None = None,
) -> Lease:  # fmt: skip
    """Return a granted lease for ``tokens`` and ``new_tokens`` more, whose cached pages are on the device. ``handle``:
    a prefetch of the tokens. Cancelling gives everything back.

    Raises:
        CacheFull: the pages can never be had.
        LoadFailed: cached pages could not be copied to the device, ``LOAD_ATTEMPTS`` times.
    """
    attempts = LOAD_ATTEMPTS
    while True:
        lease = cache.lease(tokens, new_tokens=new_tokens, extra_key=extra_key, prefetch=handle)
        await lease.__aenter__()
        try:
            await lease.loaded()
        except BaseException as error:
            lease.release()
            handle, attempts = None, attempts - 1
            if not attempts or not isinstance(error, LoadFailed):
                raise
        else:
            return lease


class Generator:
    """Greedy generation with ``model`` on ``cache``. ``chunk``: prefill calls end at multiples of so many tokens."""

    def __init__(self, cache: AsyncCache, model: PagedModel, *, chunk: int = 512) -> None:
        self._cache = checks.instance("cache", cache, AsyncCache)
        self._model = model
        self._chunk = checks.integer("chunk", chunk, 1)
        self._ids = count(1)
        self._thread = ModelThread()

    def close(self) -> None:
        """End the thread. Blocks until the calls that were started have returned."""
        self._thread.close(wait=True)

    def generate(
        self, tokens: Sequence[int], new_tokens: int, *, extra_key: str | bytes | None = None
    ) -> Coroutine[Any, Any, Generated]:
        """Generate ``new_tokens`` (1 or more) tokens that follow ``tokens``, and return them. To be awaited. Cancelling
        waits for the forward call that runs, and then gives everything back.

        Raises:
            CacheFull: the pages can never be had.
            LoadFailed: cached pages could not be copied to the device, ``LOAD_ATTEMPTS`` times.
            CacheClosed: the cache is closed.
            ConfigError: an argument is unusable.
        """
        return self._generate(as_tokens(tokens), checks.integer("new_tokens", new_tokens, 1), extra_key)

    async def _generate(self, tokens: Tokens, new_tokens: int, extra_key: str | bytes | None) -> Generated:
        self._model.layout.check_length(len(tokens) + new_tokens - 1)
        lease, request_id = await loaded_lease(self._cache, tokens, new_tokens, extra_key), next(self._ids)
        try:
            return await self._run(lease, request_id, tokens, new_tokens)
        finally:
            lease.release()
            with suppress(RuntimeError):  # ``close`` has ended the thread
                self._thread.start(self._model.forward, Batch((), (request_id,)))

    async def _run(self, lease: Lease, request_id: int, tokens: Tokens, new_tokens: int) -> Generated:
        """Compute the prompt up to each of its stops, publish its whole pages, and then compute token by token."""
        layout, prompt = self._model.layout, len(tokens)
        own = np.concatenate([tokens, np.zeros(new_tokens, np.int32)])
        wanted = due(lease, prompt, layout.page_size) if layout.recurrent else set()
        stops = sorted(at for at in {prompt, *range(0, prompt, self._chunk), *wanted} if at > lease.cached)
        at, saved, logits = lease.cached, None, []
        for stop in [*stops, *range(prompt + 1, prompt + new_tokens)]:
            lease.advance(at)  # pages that the window has left go back
            decoded = layout.recurrent and stop > prompt and stop % layout.page_size == 0
            checkpoint = None
            if (decoded or stop in wanted) and len(lease.states) > 1:
                checkpoint = saved = Checkpoint(stop, int(lease.states[1]))
            last, at = await self._compute(layout.chunk(lease, request_id, own, at, stop, checkpoint)), stop
            if stop >= prompt:
                logits.append(last)
                own[stop] = int(last.argmax())
            if stop <= prompt or stop == prompt + new_tokens - 1:
                await lease.commit(own[:stop], checkpoint=saved)
                lease.adopt()
                saved = None
        return Generated(own[prompt:].tolist(), torch.cat(logits), lease.cached, lease.hits)

    async def _compute(self, chunk: Chunk) -> torch.Tensor:
        """A forward call in the thread. Cancelling it waits for its end."""
        future = self._thread.start(self._model.compute, chunk)
        cancelled = await returned(future)
        if cancelled is not None:
            raise cancelled
        return future.result()
