"""What the device tier alone would find at a given size under the policy in use: by asking the core itself.

The core is served one request at a time, at the time that the trace says, with a page for each block, no host and no
store, and moves no byte: so what is found is what the policy's own code finds, whatever it learns on the way. Hints of
ended conversations are not given.
Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds for as long as it runs, and a
request whose path is longer than the cache only looks up what is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asynccache.cli.curve import Request
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.core.cache import Ask, CacheCore, Grant, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.errors import InvariantViolation

_SPACE = bytes(32)
_UNSLICED = 1 << 30


def found(requests: Sequence[Request], capacity: int, eviction: str, times: Sequence[float]) -> int:
    """Lookups that a device of ``capacity`` blocks answers under ``eviction``, by name. ``times``: seconds at which the
    requests come, ascending."""
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


def _serve(core: CacheCore, request: Request, capacity: int) -> int:
    """The lookups of one request that are answered."""
    path, looked_up = request
    key, length = np.repeat(np.asarray(path, dtype=np.int32), BLOCK_TOKENS).tobytes(), len(path) * BLOCK_TOKENS
    if len(path) > capacity:
        return min(core.match(_SPACE, key).device // BLOCK_TOKENS, looked_up)
    answer = core.lease(Ask(_SPACE, key, looked_up * BLOCK_TOKENS, length, length))
    if not isinstance(answer, Grant):
        raise InvariantViolation(f"a device of {capacity} blocks that nobody else uses has no room for {len(path)}")
    lease = answer.lease
    cached = lease.cached // BLOCK_TOKENS
    if isinstance(core.commit(lease, key, b""), Wait):
        raise InvariantViolation("pages are on their way, and there is nowhere that they could come from")
    core.release(lease)
    return cached
