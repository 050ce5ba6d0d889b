"""The chunks of a vLLM request that a hint is about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from asynccache_vllm.namespace import GROUP_BYTES

MOST_FOLLOWED = 1 << 17


class Successors:
    """Knows after which chunks requests have gone on differently, which is where a conversation's own text begins: the
    same rule as in asynccache's tree. It remembers the last ``most`` chunks."""

    def __init__(self, most: int = MOST_FOLLOWED) -> None:
        self._most = most
        self._next: OrderedDict[bytes, bytes | None] = OrderedDict()  # None: several

    def __len__(self) -> int:
        return len(self._next)

    def note(self, keys: Sequence[bytes]) -> None:
        """Note a request with the chunks ``keys``, of one group and in their order."""
        following = self._next
        for key, after in pairwise(keys):
            known = following.setdefault(key, after)
            if known is not None and known != after:
                following[key] = None
            following.move_to_end(key)
        while len(following) > self._most:
            following.popitem(last=False)

    def private(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of ``keys`` that come after the last fork."""
        forks = [at for at, key in enumerate(keys) if self._next.get(key, key) is None]
        return keys[forks[-1] + 1 :] if forks else keys


def in_order(positions: Mapping[bytes, int]) -> list[list[tuple[bytes, int]]]:
    """Return the chunks of a request with the token that each ends at, in their order, those of each group together."""
    groups: dict[bytes, list[tuple[bytes, int]]] = {}
    for key, end in positions.items():
        groups.setdefault(bytes(key[-GROUP_BYTES:]), []).append((key, end))
    return [sorted(group, key=lambda one: one[1]) for group in groups.values()]


def keys_of(hashes: Iterable[bytes], groups: int) -> list[bytes]:
    """Return the keys of chunks with these hashes, in every one of ``groups`` groups."""
    return [one + group.to_bytes(GROUP_BYTES, "big") for one in hashes for group in range(groups)]
