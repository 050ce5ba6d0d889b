"""What the device tier alone would find at a given size under the policy in use: by asking the core itself.

The core is served one request at a time, a page for each block, with no host and no store, and moves no byte: so what
is found is what the policy's own code finds, whatever it learns on the way. Hints of ended conversations are not given.
Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds for as long as it runs, and a
request whose path is longer than the cache only looks up what is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from asynccache.cli.curve import Request
from asynccache.core.cache import Ask, CacheCore, Grant, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.errors import InvariantViolation

_SPACE = bytes(32)
_UNSLICED = 1 << 30


def found(requests: Sequence[Request], capacity: int, eviction: str) -> int:
    """Lookups that a device of ``capacity`` blocks answers under ``eviction``, by name."""
    if capacity < 1:
        return 0
    core = CacheCore(CoreConfig(
        page_size=1, components=(ComponentSlots(ComponentKind.FULL, capacity),), eviction=eviction,
        slice_steps=_UNSLICED,
    ))  # fmt: skip
    return sum(_serve(core, request, capacity) for request in requests)


def _serve(core: CacheCore, request: Request, capacity: int) -> int:
    """The lookups of one request that are answered."""
    path, looked_up = request
    key = array("i", path).tobytes()
    if len(path) > capacity:
        return min(core.match(_SPACE, key).device, looked_up)
    answer = core.lease(Ask(_SPACE, key, looked_up, len(path), len(path)))
    if not isinstance(answer, Grant):
        raise InvariantViolation(f"a device of {capacity} blocks that nobody else uses has no room for {len(path)}")
    lease = answer.lease
    cached = lease.cached
    if isinstance(core.commit(lease, key, b""), Wait):
        raise InvariantViolation("pages are on their way, and there is nowhere that they could come from")
    core.release(lease)
    return cached
