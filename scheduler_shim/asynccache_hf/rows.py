"""Rows of one batch in one call of ``generate``: transformers' own cache of several requests, filled from their pages.

Equally many tokens of these rows must be cached, since a batch has one length. No two of them should share pages that
are not cached yet, since each would compute these. The rows of a call are chosen before any lease is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from asynccache import AsyncCache, CacheFull, Lease, LoadFailed, PrefetchHandle
from asynccache_hf.ahead import findable, numbers
from asynccache_hf.layout import Layout
from asynccache_hf.paged import FilledCache
from asynccache_hf.parts import KeysAndValues


def can_be_together(layout: Layout) -> bool:
    """Return True if all that the model keeps is keys and values by token: those of several rows are one tensor."""
    return all(isinstance(part, KeysAndValues) for layer in layout.layers for part in layer.parts)


def calls_for(texts: Sequence[list[int]], cached: Sequence[int], page_size: int) -> list[list[int]]:
    """Return the calls to make, in order, each as the indices of the ``texts`` that are its rows. ``cached[i]``: how
    many tokens of ``texts[i]`` are cached. The texts of one call have one length, equally many cached tokens, and share
    no page beyond these. The pages that a call computes are taken to be cached for the calls after it; evictions in
    between may make that wrong.
    """
    marks, most = [numbers(text, page_size) for text in texts], [findable(text, page_size) for text in texts]
    pages = [length // page_size for length in cached]
    computed: set[int] = set()
    left, calls = list(range(len(texts))), []
    while left:
        for i in left:
            while pages[i] < most[i] and marks[i][pages[i]] in computed:
                pages[i] += 1
        first, call, beyond = left[0], [], set()
        for i in left:
            if (len(texts[i]), pages[i]) == (len(texts[first]), pages[first]):
                mark = marks[i][pages[i]] if pages[i] < most[i] else None
                if mark is None or mark not in beyond:
                    beyond.add(mark)
                    call.append(i)
        for i in call:
            computed.update(marks[i])
        calls.append(call)
        left = sorted({*left}.difference(call))
    return calls


async def prefetch_all(
    cache: AsyncCache, texts: Sequence[list[int]], extra_key: str | bytes | None
) -> list[PrefetchHandle]:  # fmt: skip
    """Begin to prefetch each of ``texts``, and return the handles. The caller must cancel them in the end."""
    return [cache.prefetch(tokens, extra_key) for tokens in texts]


async def cached_lengths(
    cache: AsyncCache, texts: Sequence[list[int]], handles: Sequence[PrefetchHandle], extra_key: str | bytes | None
) -> list[int]:
    """Return how many tokens of each text are cached, when all prefetches have ended. No lease is taken, and no hit is
    counted."""
    for handle in handles:
        await handle
    return [(await cache.match(text[:-1], extra_key)).host for text in texts]


async def cancel_all(handles: Sequence[PrefetchHandle]) -> None:
    for handle in handles:
        handle.cancel()


async def lease_rows(
    cache: AsyncCache, texts: Sequence[list[int]], handles: Sequence[PrefetchHandle], new_tokens: int,
    extra_key: str | bytes | None,
) -> list[Lease]:  # fmt: skip
    """Return leases of the first of ``texts``: of as many as have room now and have equally many cached tokens, all of
    which are on the device. Return no lease if a load failed. Only leases that need not wait are taken, because waiting
    for room while holding leases could last for ever. Cancelling gives all leases back."""
    leases: list[Lease] = []
    loaded = False
    try:
        with suppress(CacheFull):
            for tokens, handle in zip(texts, handles, strict=True):
                lease = cache.lease(tokens, new_tokens=new_tokens, extra_key=extra_key, prefetch=handle, wait=False,
                                    shorter=False)  # fmt: skip
                leases.append(await lease.__aenter__())
                if lease.cached != leases[0].cached:
                    await release_all([leases.pop()])
                    break
        with suppress(LoadFailed):
            for lease in leases:
                await lease.loaded()
            loaded = True
    finally:
        if not loaded:
            await release_all(leases)
    return leases if loaded else []


async def release_all(leases: Sequence[Lease]) -> None:
    for lease in leases:
        await lease.__aexit__(None, None, None)


class BatchCache:
    """One cache of transformers' (``cache``) for several requests that all begin at the same position."""

    def __init__(self, opened: Sequence[FilledCache]) -> None:
        """``opened``: the filled cache of each request. The first one becomes the cache of all."""
        self._opened = opened
        self.cache = opened[0].cache
        if opened[0].start:
            for layers in zip(*(each.layers for each in opened), strict=True):
                first, alike = layers[0], layers[0].values is layers[0].keys
                first.keys = torch.cat([layer.keys for layer in layers])
                first.values = first.keys if alike else torch.cat([layer.values for layer in layers])

    def save(self, stop: int) -> None:
        """Write the data that was added, up to token ``stop``, to the pages of each request."""
        heard = self._opened[0].heard
        for row, each in enumerate(self._opened):
            each.save(stop, [[_of_row(call, row) for call in calls] for calls in heard])


def _of_row(call: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    return tuple(each[row : row + 1] if isinstance(each, torch.Tensor) else each for each in call)
