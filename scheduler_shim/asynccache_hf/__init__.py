"""Causal language models of transformers with their KV in asynccache's pages.

Each name is imported when it is first asked for. It needs the extra ``hf``; without it, asking for a name raises
``ModuleNotFoundError`` with the command that installs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccache_hf.describe import describe
    from asynccache_hf.generation import Generated, Generator
    from asynccache_hf.layout import Layout
    from asynccache_hf.paged import PagedModel
    from asynccache_hf.prefix import Counts, PrefixCache

__all__ = ["Counts", "Generated", "Generator", "Layout", "PagedModel", "PrefixCache", "describe"]

_LAZY = {
    "Generated": "generation", "Generator": "generation", "Layout": "layout", "PagedModel": "paged",
    "PrefixCache": "prefix", "Counts": "prefix", "describe": "describe",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"asynccache_hf.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; pip install 'asynccache[hf]' brings it", name=error.name) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
