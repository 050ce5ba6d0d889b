"""What keys are made of, runs of int32 tokens as ``bytes``, and the names of namespaces."""

from __future__ import annotations

from typing import Final

from asynccache.checks import integer, text

TOKEN_BYTES: Final = 4
HASH_BYTES: Final = 32


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
