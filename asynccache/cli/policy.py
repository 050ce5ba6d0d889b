"""The hits of a cache under an eviction policy, computed by the core itself, beside those of LRU and of the optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from asynccache.cli.curve import BlockPath, HitCurve
from asynccache.cli.optimum import next_uses, optimum
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.core.cache import CacheCore, Grant, LeaseRequest, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.errors import InvariantViolation

_SPACE = bytes(32)
_UNSLICED = 1 << 30


def compared(
    paths: Sequence[BlockPath], found: HitCurve, sizes: Sequence[int], eviction: str, times: Sequence[float]
) -> Iterator[dict[str, int]]:
    """For each of ``sizes``: how many lookups ``lru``, the ``policy`` in use and the ``optimum`` answer, in blocks.

    ``found``: the curve of the same requests, which LRU's figures are from, also where LRU is the policy in use.
    ``times``: the seconds at which the requests come.
    """
    uses = next_uses(paths)
    for size in sizes:
        lru = found.found(size)
        evicts = size < found.blocks and eviction != "lru"
        policy = policy_hits(paths, size, eviction, times) if evicts else lru
        yield {"lru": lru, "policy": policy, "optimum": optimum(paths, uses, size)}


def policy_hits(paths: Sequence[BlockPath], capacity: int, eviction: str, times: Sequence[float]) -> int:
    """The number of lookups that a device of ``capacity`` blocks answers under the policy named ``eviction``.
    ``times``: the seconds at which the requests come, ascending.

    The requests go through a core one at a time, at these times, with one page for each block, no host tier, no store
    and no hints. No byte is moved. So the answer is that of the policy's own code, with what it learns on the way.
    Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds while the request runs. A
    request whose path is longer than the cache only looks up what is there and leaves nothing.
    """
    if capacity < 1:
        return 0
    core = CacheCore(CoreConfig(
        page_size=BLOCK_TOKENS, components=(ComponentSlots(ComponentKind.FULL, capacity),), eviction=eviction,
        slice_steps=_UNSLICED,
    ))  # fmt: skip
    hits = 0
    for path, at in zip(paths, times, strict=True):
        core.at(at)
        hits += _serve(core, path, capacity)
    return hits


def _serve(core: CacheCore, path: BlockPath, capacity: int) -> int:
    """Serve the request with this path; returns how many of its lookups were answered."""
    key, length = np.repeat(np.asarray(path, dtype=np.int32), BLOCK_TOKENS).tobytes(), len(path) * BLOCK_TOKENS
    if len(path) > capacity:
        return core.match(_SPACE, key).device // BLOCK_TOKENS
    answer = core.lease(LeaseRequest(_SPACE, key, length, length, length))
    if not isinstance(answer, Grant):
        raise InvariantViolation(f"a device of {capacity} blocks that nobody else uses has no room for {len(path)}")
    lease = answer.lease
    cached = lease.cached // BLOCK_TOKENS
    if isinstance(core.commit(lease, key, b""), Wait):
        raise InvariantViolation("pages are on their way, and there is nowhere that they could come from")
    core.release(lease)
    return cached
