"""Keys: runs of int32 tokens as ``bytes``, compared by memcmp, counted in whole pages; names of namespaces."""

from __future__ import annotations

from asynccache.checks import integer, text

TOKEN_BYTES = 4
HASH_BYTES = 32


class Adapter(str):
    """An ``extra_key`` that is a LoRA adapter's: text like any other, with what KV events call the adapter.

    ``lora_name``: the key itself, unless another is given. Nothing but the events looks at ``lora_name`` and
    ``lora_id``: pages are found by the key alone, so two adapters with one key share them.
    """

    __slots__ = ("lora_id", "lora_name")
    lora_id: int | None
    lora_name: str

    def __new__(cls, key: str, lora_name: str | None = None, lora_id: int | None = None) -> Adapter:
        key = text("key", key)
        made = super().__new__(cls, key)
        made.lora_name = key if lora_name is None else text("lora_name", lora_name)
        made.lora_id = None if lora_id is None else integer("lora_id", lora_id, 0, 2**63 - 1)
        return made

    def __repr__(self) -> str:
        return f"Adapter({str(self)!r}, lora_name={self.lora_name!r}, lora_id={self.lora_id})"


def common_pages(key: bytes, at: int, stop: int, other: bytes, page_bytes: int) -> int:
    """How many whole pages ``key[at:stop]`` and ``other`` have in common from their starts."""
    low, high = 0, min(stop - at, len(other)) // page_bytes
    if key.startswith(other[: high * page_bytes], at):
        return high
    while low + 1 < high:  # the first ``low`` are common, the first ``high`` are not
        middle = (low + high) // 2
        if key.startswith(other[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle
    return low
