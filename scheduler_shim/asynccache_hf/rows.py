"""Rows of one batch in one call of ``generate``: transformers' own cache of several requests, filled from their pages.

They have to begin at one place, since a batch has one length; and no two of them may share what is not cached yet,
since each would compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asynccache import AsyncCache, CacheFull, Lease, LoadFailed
from asynccache_hf.layout import Layout
from asynccache_hf.paged import Opened
from asynccache_hf.parts import Attention


def can_be_together(layout: Layout) -> bool:
    """Whether all that the model keeps is keys and values by token: of several rows these are one tensor."""
    return all(isinstance(part, Attention) for layer in layout.layers for part in layer.parts)


def shared(texts: Sequence[list[int]], page_size: int) -> int:
    """Tokens, in whole pages, that any two of ``texts`` begin with and that a lease may find. All are of one length."""
    rows = np.asarray(sorted(texts), np.int64)         # so that those which share most stand side by side
    same = np.cumprod(rows[1:, :-1] == rows[:-1, :-1], axis=1).sum(axis=1)
    return int(same.max(initial=0)) // page_size * page_size


async def leased(
    cache: AsyncCache, texts: Sequence[list[int]], new_tokens: int, extra_key: str | bytes | None, page_size: int
) -> list[Lease]:
    """A lease of each, with all that is cached on the device; none, if there is no room for all of them now, or they
    cannot be one batch. Who waited for room with leases in hand could wait for ever. Cancelling it leaves nothing."""
    handles = [cache.prefetch(tokens, extra_key) for tokens in texts]
    leases: list[Lease] = []
    fit = False
    try:
        for handle in handles:
            await handle
        for tokens, handle in zip(texts, handles, strict=True):
            lease = cache.lease(tokens, new_tokens=new_tokens, extra_key=extra_key, prefetch=handle, wait=False)
            leases.append(await lease.__aenter__())
        for lease in leases:
            await lease.loaded()
        begin = {lease.cached for lease in leases}
        fit = len(begin) == 1 and begin.pop() >= shared(texts, page_size)
    except (CacheFull, LoadFailed):
        pass
    finally:
        if not fit:
            await released(leases)
            for handle in handles:
                handle.cancel()
    return leases if fit else []


async def released(leases: Sequence[Lease]) -> None:
    for lease in leases:
        await lease.__aexit__(None, None, None)


class Rows:
    """transformers' cache of several requests (``cache``) that begin at one place."""

    def __init__(self, opened: Sequence[Opened]) -> None:
        """``opened``: of each; the first one's cache becomes that of all."""
        self._opened = opened
        self.cache = opened[0].cache
        if opened[0].start:
            for layers in zip(*(each.layers for each in opened), strict=True):
                first, alike = layers[0], layers[0].values is layers[0].keys
                first.keys = torch.cat([layer.keys for layer in layers])
                first.values = first.keys if alike else torch.cat([layer.values for layer in layers])

    def save(self, stop: int) -> None:
        """Write what was added, up to ``stop`` tokens, to the pages of each."""
        heard = self._opened[0].heard
        for row, each in enumerate(self._opened):
            each.save(stop, [[_of_row(call, row) for call in calls] for calls in heard])


def _of_row(call: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    return tuple(each[row : row + 1] if isinstance(each, torch.Tensor) else each for each in call)
