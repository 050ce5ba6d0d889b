"""Keys: runs of int32 tokens as ``bytes``, compared by memcmp, counted in whole pages."""

from __future__ import annotations

TOKEN_BYTES = 4
HASH_BYTES = 32


def common_pages(key: bytes, at: int, stop: int, other: bytes, page_bytes: int) -> int:
    """How many whole pages ``key[at:stop]`` and ``other`` have in common from their starts."""
    low, high = 0, min(stop - at, len(other)) // page_bytes
    if key.startswith(other[: high * page_bytes], at):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if key.startswith(other[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle
    if low < high and key.startswith(other[low * page_bytes : high * page_bytes], at + low * page_bytes):
        return high
    return low
