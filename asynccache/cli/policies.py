"""How many lookups the device tier alone would answer at a given size under an eviction policy: the core itself is run.

The requests go through a core one at a time, at the times of the trace, with one page for each block, no host tier and
no store. No byte is moved. So the answer is that of the policy's own code, with what it learns on the way. No hints
about ended conversations are given.

Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds while the request runs. A request
whose path is longer than the cache only looks up what is there and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asynccache.cli.curve import PagePath
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.core.cache import CacheCore, Grant, LeaseRequest, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.errors import InvariantViolation

_SPACE = bytes(32)
_UNSLICED = 1 << 30


def found(requests: Sequence[PagePath], capacity: int, eviction: str, times: Sequence[float]) -> int:
    """How many lookups a device of ``capacity`` blocks answers under the policy named ``eviction``. ``times``: the
    seconds at which the requests come, ascending."""
    if capacity < 1:
        return 0
    core = CacheCore(CoreConfig(
        page_size=BLOCK_TOKENS, components=(ComponentSlots(ComponentKind.FULL, capacity),), eviction=eviction,
        slice_steps=_UNSLICED,
    ))  # fmt: skip
    hits = 0
    for request, at in zip(requests, times, strict=True):
        core.at(at)
        hits += _serve(core, request, capacity)
    return hits


def _serve(core: CacheCore, request: PagePath, capacity: int) -> int:
    """Serve one request; returns how many of its lookups were answered."""
    path, looked_up = request
    key, length = np.repeat(np.asarray(path, dtype=np.int32), BLOCK_TOKENS).tobytes(), len(path) * BLOCK_TOKENS
    if len(path) > capacity:
        return min(core.match(_SPACE, key).device // BLOCK_TOKENS, looked_up)
    answer = core.lease(LeaseRequest(_SPACE, key, looked_up * BLOCK_TOKENS, length, length))
    if not isinstance(answer, Grant):
        raise InvariantViolation(f"a device of {capacity} blocks that nobody else uses has no room for {len(path)}")
    lease = answer.lease
    cached = lease.cached // BLOCK_TOKENS
    if isinstance(core.commit(lease, key, b""), Wait):
        raise InvariantViolation("pages are on their way, and there is nowhere that they could come from")
    core.release(lease)
    return cached
