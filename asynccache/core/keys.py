"""The sizes of tokens and hashes, and ``Adapter``: the ``namespace`` of a LoRA adapter.

A key is a run of tokens in one ``bytes``: each token is a little-endian int32.
"""

from __future__ import annotations

from typing import Final

from asynccache.checks import integer, text

TOKEN_BYTES: Final = 4
HASH_BYTES: Final = 32


class Adapter(str):
    """The ``namespace`` of a LoRA adapter: a str like any other, which also has the name and number under which KV
    events tell of the adapter.

    ``lora_name`` is the text itself, unless another name is given. ``lora_id`` is the adapter's number, or None. Only
    events look at these two: adapters that are equal as text share their pages.
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
